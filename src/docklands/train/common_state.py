"""Replicas on one machine hold trained weights and optimizer state once (ZeRO stage 1, arXiv 1910.02054, without its
messages): each sums the gradients of its share of every parameter and updates that, where the others see it.

Legend: none; tensors are taken flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.parallel.common_memory import LINE, CommonMemory, common_memory, room
from docklands.parallel.mesh import Group
from docklands.train.optim import Terms, pieces, scratches, summed

if TYPE_CHECKING:
    from docklands.train.sharded_optim import ShardedOptimizer


class CommonState:
    """Of some parameters of one group of replicas. See `of`.

    memory  where masters, moments and 16-bit copies are, and a place for each rank's gradients
    """

    def __init__(self, memory: CommonMemory, optimizer: ShardedOptimizer, names: Sequence[str]) -> None:
        self.memory, self.group = memory, memory.group
        self._places: dict[str, list[Tensor]] = {}
        first = self.group.rank == 0
        for name in names:
            parameter, master = optimizer.parameters[name], optimizer.masters[name]
            old = [master, *optimizer.resting.all()[name]]
            if parameter.dtype != master.dtype:
                old.append(parameter.data)
            held = [memory.tensor(tensor.shape, tensor.dtype) for tensor in old]
            if first:
                for tensor, source in zip(held, old):
                    tensor.copy_(source)
            optimizer.masters[name] = held[0]
            optimizer.resting.take(name, (held[1], held[2]))
            parameter.data = held[-1] if len(held) == 4 else held[0]
            count = [master.numel()]
            self._places[name] = [memory.tensor(count, torch.float32) for _ in range(self.group.size)]
        memory.meet()

    @classmethod
    def of(cls, optimizer: ShardedOptimizer, names: Sequence[str], group: Group) -> CommonState | None:
        """Move this state of all ranks of the group, which hold the same, to where they hold it once; None, and nothing
        moved, where they are not on one machine. Every rank calls; nobody else may know these tensors yet.
        """
        size = 0
        for name in names:
            parameter, count = optimizer.parameters[name], optimizer.masters[name].numel()
            copied = parameter.dtype != torch.float32
            size += room(4 * count) * (3 + group.size) + (room(parameter.itemsize * count) if copied else 0)
        memory = common_memory(group, size) if names else None
        return None if memory is None else cls(memory, optimizer, names)

    def share(self, name: str) -> slice:
        """What this rank sums and updates of a parameter; begins at whole lines of memory."""
        (count,) = self._places[name][0].shape
        edges = [count * rank // self.group.size // LINE * LINE for rank in range(self.group.size)] + [count]
        return slice(edges[self.group.rank], edges[self.group.rank + 1])

    @torch.no_grad()
    def terms(self, have: Mapping[str, Tensor]) -> dict[str, Terms]:
        """Every rank's gradients, in the order of ranks; one that has none counts as 0. In 16 bits where all ranks have
        them so. To be read before the next call, of which all ranks make as many.
        """
        names = list(self._places)
        lengths = torch.tensor([have[name].itemsize if name in have else 4 for name in names], dtype=torch.int32)
        dist.all_reduce(lengths, dist.ReduceOp.MAX, group=self.group.pg)
        found: dict[str, Terms] = {}
        for name, length in zip(names, lengths.tolist()):
            dtype = have[name].dtype if length == 2 else torch.float32
            terms = [place.view(dtype)[: len(place)] for place in self._places[name]]
            if name in have:
                terms[self.group.rank].copy_(have[name].reshape(-1))
            else:
                terms[self.group.rank].zero_()
            found[name] = terms
        self.memory.meet()
        return found


def total(terms: Terms, shape: Iterable[int]) -> Tensor:
    """The fp32 gradient that the terms add up to."""
    found = torch.empty(tuple(shape), dtype=torch.float32, device=terms[0].device)
    wide = scratches(terms)
    for piece in pieces(0, len(terms[0])):
        found.view(-1)[piece].copy_(summed(terms, piece, wide))
    return found
