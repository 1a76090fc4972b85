"""The optimizer over the shards of one rank: what must be summed over which ranks, and a norm that counts once.

Gradients are summed when the update comes, once for all micro-batches, in fp32 and in buckets (those of one micro-batch
in 16 bits travel so, between few ranks, and each of them sums in fp32):
    replicate   over ranks that hold the same parameters and saw other tokens
    tp, etp     whole parameters of which each tensor-parallel rank has a part of the gradient (norms, biases, routers;
                of an adapter, the half that its base is not split along)
    kv          key and value heads that several tensor-parallel ranks hold
    ends        a tied embedding on the first and the last pipeline stage
Replicas on one machine may hold state once, and then divide sum and update among them: see common_state.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.config.schema import OptimSection
from docklands.errors import NonFinite
from docklands.models.lora import trained_of
from docklands.models.sharded import ShardedModel
from docklands.parallel import fsdp
from docklands.parallel.collectives import all_reduce
from docklands.parallel.mesh import Group
from docklands.train.common_state import CommonState, total
from docklands.train.optim import Optimizer, Terms, squares_of

BUCKET = 16_777_216  # elements: 64 MiB in fp32
GATHERED = 3
"""Ranks of a group whose 16-bit gradients go from each to each; from 4 on a ring of fp32 sums moves no more bytes."""
Item = TypeVar("Item")


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
        self._common: dict[str, CommonState] = {}
        self._terms: dict[str, Terms] = {}

    def hold_once(self) -> None:
        """Let the replicas of each parameter hold its state once, where they are on one CPU machine. Every rank calls,
        before anything else knows the tensors. Not for state that leaves the device between updates.
        """
        if self.model.device.type != "cpu" or self.resting.lower is not None:
            return
        for group, names in self._replicas():
            mine = [name for name in names if fsdp.window(self.parameters[name].data) is None]
            state = CommonState.of(self, mine, group) if group is not None else None
            if state is not None:
                self._common |= dict.fromkeys(mine, state)

    def _replicas(self) -> list[tuple[Group | None, list[str]]]:
        """Which ranks hold the same of a parameter and have seen other tokens, and the parameters."""
        groups = (self.mesh.expert_replicate, True), (self.mesh.replicate, False)
        expert = {name: self.model.slots[name].is_expert for name in self.trained}
        return [(group, [name for name in self.trained if expert[name] is kind]) for group, kind in groups]

    def share(self, name: str) -> slice:
        state = self._common.get(name)
        return super().share(name) if state is None else state.share(name)

    def local(self, tensor: Tensor) -> Tensor:
        return fsdp.local(tensor)

    def compute_in(self, dtype: torch.dtype) -> None:
        """As there, but for what FSDP shards, which it copies itself: under FSDP, experts that it leaves alone."""
        for name, parameter in self.parameters.items():
            if self.masters[name].dim() >= 2 and parameter.dtype != dtype and fsdp.window(parameter.data) is None:
                parameter.data = self.masters[name].to(dtype)

    def clear(self) -> None:
        super().clear()
        self._terms.clear()
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
        have, grads = self.gradients(), dict[str, Tensor]()
        mesh, slots = self.mesh, self.model.slots
        for group, names in self._replicas():
            for state in dict.fromkeys(self._common[name] for name in names if name in self._common):
                self._terms |= state.terms(have)
            mine = [name for name in names if name not in self._terms]
            grads |= self._exchange(self._short(mine, have, group), have, group)
            rest = [name for name in mine if name not in grads]
            grads |= {n: have[n].float() if n in have else torch.zeros_like(self.masters[n]) for n in rest}
            self._sum([grads[name] for name in rest], group)
        for name in [name for name in self._terms if self._goes_on(name)]:
            grads[name] = total(self._terms.pop(name), self.masters[name].shape)
        grads = {name: grads[name] for name in self.trained if name in grads}  # on every rank in one order
        self._sum([g for n, g in grads.items() if slots[n].partial and not slots[n].is_expert], mesh.tp)
        self._sum([g for n, g in grads.items() if slots[n].partial and slots[n].is_expert], mesh.etp)
        self._sum([grads[n][a:b] for n, rows in self._shared.items() for a, b, _ in rows], self.model.kv)
        if mesh.ends is not None:
            self._sum([g for n, g in grads.items() if self._at_both_ends(n)], mesh.ends)
        for parameter in self.parameters.values():
            parameter.grad = None
        self._sums = grads

    def _goes_on(self, name: str) -> bool:
        """Whether a gradient is to be summed over other ranks than replicas, too."""
        return self.model.slots[name].partial or bool(self._shared[name]) or self._at_both_ends(name)

    def gradients(self) -> dict[str, Tensor]:
        summed = {name: total(terms, self.masters[name].shape) for name, terms in self._terms.items()}
        return {**super().gradients(), **summed}

    def terms(self) -> dict[str, Terms]:
        whole = {name: [gradient.reshape(-1)] for name, gradient in super().gradients().items()}
        return {**whole, **self._terms}

    def _short(self, names: Sequence[str], have: Mapping[str, Tensor], group: Group | None) -> list[str]:
        """Of these gradients, those that go to the other ranks of the group as the backward pass made them, in 16 bits:
        of few ranks, if all of them have it so (several micro-batches have been summed in fp32).
        """
        if group is None or group.size > GATHERED or not names:
            return []
        lengths = [have[name].element_size() if name in have else 4 for name in names]
        widest = torch.tensor(lengths, dtype=torch.int32, device=self.model.device)
        dist.all_reduce(widest, dist.ReduceOp.MAX, group=group.pg)
        return [name for name, size in zip(names, widest.tolist()) if size == 2]

    @staticmethod
    def _exchange(names: Sequence[str], have: Mapping[str, Tensor], group: Group | None) -> dict[str, Tensor]:
        """fp32 sums over the group, in the order of its ranks, of gradients that every rank gets from every other: the
        bits of a sum of fp32 copies. Between two ranks half as many bytes travel, between three three quarters.
        """
        sums: dict[str, Tensor] = {}
        for bucket in buckets(names, lambda name: have[name].numel()):
            assert group is not None
            flat = torch.cat([have[name].reshape(-1) for name in bucket])
            every = [flat if rank == group.rank else torch.empty_like(flat) for rank in range(group.size)]
            lines = [
                dist.P2POp(way, flat if way is dist.isend else every[rank], group.ranks[rank], group=group.pg)
                for rank in range(group.size)
                for way in (dist.isend, dist.irecv)
                if rank != group.rank
            ]
            for line in dist.batch_isend_irecv(lines):
                line.wait()
            at = 0
            for name in bucket:
                sums[name] = total([x[at : at + have[name].numel()] for x in every], have[name].shape)
                at += have[name].numel()
        return sums

    @staticmethod
    def _sum(gradients: Iterable[Tensor], group: Group | None) -> None:
        """In place, over the group, in buckets."""
        if group is None:
            return
        for bucket in buckets(gradients, Tensor.numel):
            flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]), group)
            at = 0
            for gradient in bucket:
                gradient.copy_(flat[at : at + gradient.numel()].view(gradient.shape))
                at += gradient.numel()

    def norm(self) -> float:
        """Global gradient norm, the same on every rank. NonFinite on every rank when one gradient is not finite."""
        squares = torch.zeros((), dtype=torch.float64)
        for name, gradient in super().gradients().items():
            once = 1.0 / self._holders[name]
            squares += once * square([gradient.reshape(-1)])
            for first, last, copies in self._shared[name]:
                squares += (once / copies - once) * square([gradient[first:last].reshape(-1)])
        for name, terms in self._terms.items():
            squares += self._common[name].group.size / self._holders[name] * square(terms, self.share(name))
        if self.mesh.world is not None:
            squares = all_reduce(squares.to(self.model.device), self.mesh.world)
        if math.isfinite(float(squares)):
            return math.sqrt(max(0.0, float(squares)))
        for name, gradient in self.gradients().items():
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
        done = super().step()
        for state in dict.fromkeys(self._common.values()):
            state.memory.meet()
        return done


def square(terms: Terms, share: slice = slice(None)) -> Tensor:
    """Sum of squares of a share of a gradient, fp64 on the CPU."""
    found = squares_of(terms, share)
    return torch.stack(found).double().sum().cpu() if found else torch.zeros((), dtype=torch.float64)


def buckets(items: Iterable[Item], elements: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items, at most BUCKET elements together (or one larger item)."""
    held: list[Item] = []
    size = 0
    for item in items:
        if held and size + elements(item) > BUCKET:
            yield held
            held, size = [], 0
        held.append(item)
        size += elements(item)
    if held:
        yield held
