"""Tensor parallelism: which slice of a parameter a rank holds, and what happens at the edges of its products.

Legend: T packed tokens, D model, H head dim.

The slices are plain arithmetic: loaders, the optimizer's bookkeeping and resharding plans all ask the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from docklands.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

    from docklands.parallel.mesh import Group

Split = Literal["column", "row", "vocab", "none"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Indices start..stop of the split dimension; `copies`: how many ranks of the tensor group hold exactly these."""

    start: int
    stop: int
    copies: int = 1

    def __len__(self) -> int:
        return self.stop - self.start


def pieces_of(split: Split, parts: Sequence[int], unit: int, rank: int, size: int) -> list[Piece]:
    """What rank `rank` of `size` holds along the split dimension, in the order of its local tensor.

    parts  sizes of the fused parts, each split on its own (q, k, v); they add up to the dimension
    unit   indices that stay together (a head). A part with fewer units than ranks is held by several ranks each.
    LayoutError when units and ranks do not divide. A vocabulary is split unevenly instead, by at most one row.
    """
    total = sum(parts)
    if split == "none" or size == 1:
        return [Piece(0, total, size)]
    if split == "vocab":
        return [Piece(total * rank // size, total * (rank + 1) // size)]
    found, start = [], 0
    for part in parts:
        units, copies = part // unit, 1
        if units < size and size % units == 0:
            copies = size // units
        elif units % size:
            raise LayoutError(f"layout: {units} units of {unit} do not divide by tp {size}", "choose another tp")
        share = part * copies // size
        at = start + (rank // copies) * share
        found.append(Piece(at, at + share, copies))
        start += part
    return found


class TensorParallel:
    """The edges of a pair of products of which the first is split by columns, the second by rows.

    With `sequence`, ranks hold different tokens outside of the pair ([T / tp, D]): entering gathers them, leaving sums
    and splits them again. Without, all hold all tokens: entering does nothing forward, leaving sums.
    """

    def __init__(self, group: Group, sequence: bool = True) -> None:
        from docklands.parallel import collectives

        self.group = group
        self.sequence = sequence
        self._enter = collectives.gather_rows if sequence else collectives.copy_to
        self._leave = collectives.scatter_rows if sequence else collectives.reduce_from

    def enter(self, x: Tensor) -> Tensor:
        """Into the columns' product: [T / tp, D] (or [T, D]) -> [T, D]."""
        return self._enter(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Out of the rows' product: partial [T, D] -> [T / tp, D] (or [T, D])."""
        return self._leave(x, self.group)
