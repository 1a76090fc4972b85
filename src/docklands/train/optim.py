"""AdamW with fp32 masters, its schedule, and the gradient's norm.

Legend: none; parameters are taken flat.

A 16-bit parameter is a copy of an fp32 master that the optimizer owns: the step reads the 16-bit gradient, updates the
master and its moments in fp32, and rounds the copy anew, one cache-sized piece at a time, so that each of them passes
through memory once. An fp32 parameter is its own master.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from docklands.config.schema import OptimSection
from docklands.errors import CheckpointError, NonFinite
from docklands.train.offload import Moments, Pair, lower_tier

Rates = tuple[float, float]
"""Learning rate, weight decay."""

PIECE = 1_048_576  # elements: 4 MiB in fp32

Terms = Sequence[Tensor]
"""Flat tensors that add up to a gradient, in fp32 and in this order."""


def learning_rate(section: OptimSection, updates_done: int, total_updates: int) -> float:
    """The rate of the next update, after `updates_done` optimizer updates (never batches or micro-batches).

    Warm-up is linear, (u + 1) / (warmup + 1), so that no update has rate 0. Then constant, linear or half a cosine down
    to lr * min_lr_fraction, which is reached at `total_updates`.
    """
    warmup, lowest = section.warmup_updates, section.min_lr_fraction
    if updates_done < warmup:
        return section.lr * (updates_done + 1) / (warmup + 1)
    if section.schedule == "constant":
        return section.lr
    progress = min(1.0, (updates_done - warmup) / max(1, total_updates - warmup))
    falling = 1.0 - progress if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.lr * (lowest + (1.0 - lowest) * falling)


def global_norm(gradients: Iterable[Tensor]) -> float:
    """Square root of the sum of squares over all gradients; NaN when one of them is not finite, or the sum overflows.

    Piece by piece: a long fp32 sum of squares is off by 1e-3 at 30 M elements, pieces summed in double are not; and a
    16-bit gradient is widened where the cache holds it.
    """
    squares = [square for gradient in gradients for square in squares_of([gradient.reshape(-1)])]
    numbers = torch.stack(squares).tolist() if squares else []
    return math.sqrt(math.fsum(numbers)) if all(map(math.isfinite, numbers)) else math.nan


def squares_of(terms: Terms, share: slice = slice(None)) -> list[Tensor]:
    """Sum of squares of each piece of a gradient, or of a share of it; fp32 scalars."""
    wide, squares = scratches(terms), []
    for piece in pieces(*share.indices(len(terms[0]))[:2]):
        part = summed(terms, piece, wide)
        squares.append(torch.dot(part, part))
    return squares


def summed(terms: Terms, piece: slice, wide: Sequence[Tensor]) -> Tensor:
    """fp32 sum of a piece of each term, in order; `wide`: `scratches` of them. Of one fp32 term, the piece itself.

    Widened first, where the cache holds it: an operation on two dtypes takes longer.
    """
    if not wide:
        return terms[0][piece]
    size = piece.stop - piece.start
    total = wide[0][:size].copy_(terms[0][piece])
    for term in terms[1:]:
        total.add_(wide[1][:size].copy_(term[piece]))
    return total


def scratches(terms: Terms) -> list[Tensor]:
    """fp32 buffers for `summed`, each of one piece."""
    if len(terms) == 1 and terms[0].dtype == torch.float32:
        return []
    size = min(PIECE, len(terms[0]))
    return [torch.empty(size, dtype=torch.float32, device=terms[0].device) for _ in terms[:2]]


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over named parameters.

    Weight decay applies to matrices only (two dimensions or more, embeddings included): norms and biases do not decay.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], section: OptimSection, total_updates: int) -> None:
        self.section = section
        self.total_updates = total_updates
        self.updates = 0
        self.parameters = dict(parameters)
        self.masters = {name: self.local(p.data) for name, p in self.parameters.items()}
        device = next((m.device for m in self.masters.values()), torch.device("cpu"))
        self.resting = Moments(self.masters, lower_tier(device) if section.offload else None)
        self._sums: dict[str, Tensor] = {}

    def local(self, tensor: Tensor) -> Tensor:
        """What this process holds of a parameter or a gradient: here, all of it."""
        return tensor

    def compute_in(self, dtype: torch.dtype) -> None:
        """Give the matrices a copy in `dtype` to compute with; their fp32 storage stays here, as masters."""
        for name, parameter in self.parameters.items():
            if self.masters[name].dim() >= 2 and parameter.dtype != dtype:
                parameter.data = self.masters[name].to(dtype)

    def hold_once(self) -> None:
        """Let processes that hold the same state on one machine hold it once: here, there are no others."""

    @property
    def moments(self) -> dict[str, Pair]:
        """exp_avg and exp_avg_sq by name, the live ones; what rests elsewhere comes, and stays until the next step."""
        return self.resting.all()

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return learning_rate(self.section, self.updates, self.total_updates)

    # --- gradients --------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """After the backward pass of a micro-batch: several 16-bit gradients are summed in fp32, one stays as it is."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None or parameter.dtype == torch.float32:
                continue
            held = self._sums.get(name)
            self._sums[name] = parameter.grad if held is None else held.float().add_(parameter.grad)
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Of the parameters that have one."""
        own = {name: self.local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        return {**own, **self._sums}

    def terms(self) -> dict[str, Terms]:
        """The same, flat and as they were made."""
        return {name: [gradient.reshape(-1)] for name, gradient in self.gradients().items()}

    def share(self, name: str) -> slice:
        """What this process updates of a parameter, flat: here, all of it."""
        return slice(0, self.masters[name].numel())

    def clear(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def norm(self) -> float:
        """Global gradient norm. NonFinite names the first parameter whose gradient is not finite."""
        gradients = self.gradients()
        total = global_norm(gradients.values())
        if math.isfinite(total):
            return total
        for name, gradient in gradients.items():
            bad = int((~torch.isfinite(gradient)).sum())
            if bad:
                raise NonFinite(
                    f"gradient of {name}: {bad} of {gradient.numel()} elements not finite at update {self.updates + 1}",
                    "the weights are as before this update; lower optim.lr or look at the batch",
                )
        raise NonFinite(f"the gradient norm overflows at update {self.updates + 1}", "lower optim.lr")

    # --- the step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> tuple[float, float]:
        """Clip, update, forget the gradients. -> (gradient norm before clipping, learning rate). Raises NonFinite."""
        norm, lr, clip = self.norm(), self.lr, self.section.grad_clip
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        gradients = self.terms()
        for name, pair in self.resting.each(gradients):
            self._update(name, gradients[name], pair, (factor, lr))
        self.resting.rest()
        self.clear()
        self.updates += 1
        return norm, lr

    def _update(self, name: str, gradient: Terms, moments: Pair, rates: tuple[float, float]) -> None:
        """One parameter, given its gradient, its moments, the clip factor and the learning rate."""
        factor, lr = rates
        master, copy = self.masters[name].view(-1), self.local(self.parameters[name].data).view(-1)
        first, second = (moment.view(-1) for moment in moments)
        decay = self.section.weight_decay if self.masters[name].dim() >= 2 else 0.0
        wide, share = scratches(gradient), self.share(name)
        for piece in pieces(share.start, share.stop):
            grad = summed(gradient, piece, wide)
            if factor < 1.0:
                grad.mul_(factor)  # in place: the gradient is forgotten after the step
            self._adamw([master[piece]], [grad], [first[piece]], [second[piece]], (lr, decay))
            if copy.dtype != master.dtype:
                copy[piece].copy_(master[piece])

    def _adamw(
        self, weight: list[Tensor], grad: list[Tensor], first: list[Tensor], second: list[Tensor], rates: Rates
    ) -> None:
        lr, decay = rates
        adamw(
            weight,
            grad,
            first,
            second,
            [],
            [torch.tensor(float(self.updates), device=weight[0].device)],
            fused=weight[0].device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=self.section.betas[0],
            beta2=self.section.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.section.eps,
            maximize=False,
        )

    # --- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Moments, the number of updates, the settings they were made with. The tensors are the live ones."""
        moments = self.moments
        return {
            **self.counts(),
            "exp_avg": {name: first for name, (first, _) in moments.items()},
            "exp_avg_sq": {name: second for name, (_, second) in moments.items()},
        }

    def check_state(self, state: Any) -> None:
        """CheckpointError when this is not a whole state of this optimizer."""
        if not isinstance(state, Mapping) or "updates" not in state:
            raise CheckpointError("the checkpoint has no optimizer state", "it cannot be resumed from")
        for key in ("exp_avg", "exp_avg_sq"):
            check_named(state.get(key), self.masters, f"optimizer {key}")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take moments and counts; the configured settings win. -> one line for each setting that differs."""
        self.check_state(state)
        for name, (first, second) in self.moments.items():
            first.copy_(state["exp_avg"][name])
            second.copy_(state["exp_avg_sq"][name])
        return self.load_counts(state)

    def counts(self) -> dict[str, Any]:
        """The number of updates, and the settings they were made with: plain data."""
        return {
            "updates": self.updates,
            "total_updates": self.total_updates,
            "settings": self.section.model_dump(mode="json"),
        }

    def load_counts(self, state: Mapping[str, Any]) -> list[str]:
        """Take the number of updates; the configured settings win. -> one line for each setting that differs."""
        self.updates = int(state["updates"])
        saved = dict(state.get("settings", {}))
        if self.section.schedule != "constant":  # which has no horizon
            saved["total_updates"] = state.get("total_updates")
        now = {**self.section.model_dump(mode="json"), "total_updates": self.total_updates}
        return [f"{key}: {saved[key]} -> {now[key]}" for key in now if key in saved and saved[key] != now[key]]

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, Tensor] | None) -> None:
        """Take fp32 weights, and round the compute copies from them."""
        copy_named(weights, self.masters, "weights")
        self.round_copies()

    @torch.no_grad()
    def round_copies(self) -> None:
        """Make the compute copies anew from the masters."""
        for name, parameter in self.parameters.items():
            if parameter.dtype != self.masters[name].dtype:
                parameter.data.copy_(self.masters[name])


def pieces(start: int, stop: int) -> Iterator[slice]:
    """Slices of at most PIECE elements."""
    return (slice(i, min(i + PIECE, stop)) for i in range(start, stop, PIECE))


@torch.no_grad()
def copy_named(source: Mapping[str, Tensor] | None, target: Mapping[str, Tensor], what: str) -> None:
    """Copy tensor by tensor, in place, after `check_named`."""
    check_named(source, target, what)
    for name, tensor in target.items():
        tensor.copy_(source[name])  # type: ignore[index]


def check_named(source: Any, target: Mapping[str, Tensor], what: str) -> None:
    """CheckpointError when a tensor is missing, too many, or of another shape."""
    if not isinstance(source, Mapping):
        raise CheckpointError(f"the checkpoint has no {what}", "it cannot be resumed from; start a new run from it")
    missing = [name for name in target if name not in source]
    extra = [name for name in source if name not in target]
    if missing or extra:
        raise CheckpointError(
            f"{what}: {len(missing)} tensors missing{named(missing)}, {len(extra)} unknown{named(extra)}",
            "the checkpoint is of another model",
        )
    for name, tensor in target.items():
        if source[name].shape != tensor.shape:
            raise CheckpointError(
                f"{what} {name}: shape {list(source[name].shape)} saved, {list(tensor.shape)} needed",
                "the checkpoint is of another model",
            )


def named(names: list[str]) -> str:
    """The first of some names, for an error."""
    return f" (first: {names[0]})" if names else ""
