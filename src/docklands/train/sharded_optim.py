"""The optimizer over the shards of one rank: what must be summed over which ranks, and a norm that counts once.

Gradients are summed when the update comes, once for all micro-batches, in fp32 and in buckets:
    replicate   over ranks that hold the same parameters and saw other tokens
    tp, etp     whole parameters of which each tensor-parallel rank has a part of the gradient (norms, biases, routers;
                of an adapter, the half that its base is not split along)
    kv          key and value heads that several tensor-parallel ranks hold
    ends        a tied embedding on the first and the last pipeline stage
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from docklands.config.schema import OptimSection
from docklands.errors import NonFinite
from docklands.models.lora import trained_of
from docklands.models.sharded import ShardedModel
from docklands.parallel import fsdp
from docklands.parallel.collectives import all_reduce
from docklands.parallel.mesh import Group
from docklands.train.optim import Optimizer, squares_of

BUCKET = 16_777_216  # elements: 64 MiB in fp32


class ShardedOptimizer(Optimizer):
    """AdamW on this rank's shards. `made`: gradients of an update are at hand, on every rank alike."""

    def __init__(self, model: ShardedModel, section: OptimSection, total_updates: int) -> None:
        super().__init__(trained_of(model.parameters()), section, total_updates)
        self.model = model
        self.mesh = model.mesh
        self.trained = [name for name, p in self.parameters.items() if p.requires_grad]
        self.made = self._reduced = False
        self._shared = {name: list(self._shared_rows(name)) for name in self.trained}
        self._holders = {name: self._count_holders(name) for name in self.trained}

    def local(self, tensor: Tensor) -> Tensor:
        return fsdp.local(tensor)

    def compute_in(self, dtype: torch.dtype) -> None:
        """As there, but for what FSDP shards, which it copies itself: under FSDP, experts that it leaves alone."""
        for name, parameter in self.parameters.items():
            if self.masters[name].dim() >= 2 and parameter.dtype != dtype and fsdp.window(parameter.data) is None:
                parameter.data = self.masters[name].to(dtype)

    def clear(self) -> None:
        super().clear()
        self.made = self._reduced = False

    # --- which ranks ------------------------------------------------------------------------------------------

    def _shared_rows(self, name: str) -> Iterator[tuple[int, int, int]]:
        """(first row, last + 1, copies) of the local tensor that other tensor-parallel ranks hold too: kv heads."""
        window = fsdp.window(self.parameters[name].data)
        low, high = (0, math.inf) if window is None or window[0] != 0 else window[1:]
        for first, last, copies in self.model.slots[name].copies():
            first, last = max(first, low), min(last, high)
            if copies > 1 and first < last:
                yield int(first - low), int(last - low), copies

    def _count_holders(self, name: str) -> int:
        """Ranks of the world that hold the same elements (but for rows in `_shared_rows`)."""
        mesh, slot = self.mesh, self.model.slots[name]
        group = mesh.expert_replicate if slot.is_expert else mesh.replicate
        holders = group.size if group else 1
        axis, size = ("etp", mesh.layout.etp) if slot.is_expert else ("tp", mesh.layout.tp)
        holders *= 1 if any(cut.axis == axis for cut in slot.cuts) else size
        return holders * (2 if self._at_both_ends(name) else 1)

    def _at_both_ends(self, name: str) -> bool:
        tied = any(spec.tied_to for spec in self.model.table)
        return tied and self.mesh.ends is not None and name in ("embed.weight", "head.weight")

    # --- gradients --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over ranks, unless that is done. Call on every rank; one that has none counts as 0."""
        if self._reduced:
            return
        self._reduced = True
        have = self.gradients()
        grads = {
            name: have[name].float() if name in have else torch.zeros_like(self.masters[name]) for name in self.trained
        }
        mesh, slots = self.mesh, self.model.slots
        self._sum([g for n, g in grads.items() if slots[n].is_expert], mesh.expert_replicate)
        self._sum([g for n, g in grads.items() if not slots[n].is_expert], mesh.replicate)
        self._sum([g for n, g in grads.items() if slots[n].partial and not slots[n].is_expert], mesh.tp)
        self._sum([g for n, g in grads.items() if slots[n].partial and slots[n].is_expert], mesh.etp)
        self._sum([grads[n][a:b] for n, rows in self._shared.items() for a, b, _ in rows], self.model.kv)
        if mesh.ends is not None:
            self._sum([g for n, g in grads.items() if self._at_both_ends(n)], mesh.ends)
        for parameter in self.parameters.values():
            parameter.grad = None
        self._sums = grads

    @staticmethod
    def _sum(gradients: Iterable[Tensor], group: Group | None) -> None:
        """In place, over the group, in buckets."""
        if group is None:
            return
        for bucket in buckets(gradients):
            flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]), group)
            at = 0
            for gradient in bucket:
                gradient.copy_(flat[at : at + gradient.numel()].view(gradient.shape))
                at += gradient.numel()

    def norm(self) -> float:
        """Global gradient norm, the same on every rank. NonFinite on every rank when one gradient is not finite."""
        total = torch.zeros((), dtype=torch.float64)
        gradients = self.gradients()
        for name, gradient in gradients.items():
            once = 1.0 / self._holders[name]
            total += once * square(gradient)
            for first, last, copies in self._shared[name]:
                total += (once / copies - once) * square(gradient[first:last])
        if self.mesh.world is not None:
            total = all_reduce(total.to(self.model.device), self.mesh.world)
        if math.isfinite(float(total)):
            return math.sqrt(max(0.0, float(total)))
        for name, gradient in gradients.items():
            bad = int((~torch.isfinite(gradient)).sum())
            if bad:
                raise NonFinite(
                    f"gradient of {name}: {bad} of {gradient.numel()} elements of rank {self.mesh.rank} "
                    f"not finite at update {self.updates + 1}",
                    "the weights are as before this update",
                )
        raise NonFinite(f"a gradient of another rank is not finite at update {self.updates + 1}", "see that rank's log")

    def step(self) -> tuple[float, float]:
        """Sum the gradients, then clip, update, forget them."""
        self.reduce()
        return super().step()


def square(gradient: Tensor) -> Tensor:
    """Sum of squares, fp64 on the CPU."""
    found = squares_of(gradient)
    return torch.stack(found).double().sum().cpu() if found else torch.zeros((), dtype=torch.float64)


def buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors, at most BUCKET elements together (or one larger tensor)."""
    held: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if held and size + gradient.numel() > BUCKET:
            yield held
            held, size = [], 0
        held.append(gradient)
        size += gradient.numel()
    if held:
        yield held
