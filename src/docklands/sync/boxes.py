"""Which elements of a parameter a rank of a layout holds, and where they lie in its local tensor. Arithmetic only.

Legend: none.

The same answer as models.shard and parallel.fsdp give for real tensors (a test holds them against each other), without
torch, for a rank of any cluster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from docklands.models.params import ParamSpec, ParamTable
from docklands.parallel.layout import Layout
from docklands.parallel.tensor import pieces_of

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""First index and last + 1 of each dimension of the whole parameter."""

Segment = tuple[int, int, int]
"""(first index in the local tensor, first in the whole one, how many) along one dimension."""


@dataclass(frozen=True, slots=True)
class Block:
    """A box that lies in one piece in a local tensor, from the index `at` on."""

    box: Box
    at: tuple[int, ...]

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where `box`, which lies in this block, is in the local tensor."""
        pairs = zip(box, self.box, self.at)
        return tuple(slice(low - mine[0] + at, high - mine[0] + at) for (low, high), mine, at in pairs)


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(high - low for low, high in box)


def overlap(a: Box, b: Box) -> Box | None:
    """The elements of both boxes, None without any."""
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return found if all(low < high for low, high in found) else None


def view(tensor: Tensor, blocks: Sequence[Block], box: Box) -> Tensor:
    """The part of a local tensor that is `box`, which lies in one of its blocks."""
    for block in blocks:
        if all(mine[0] <= low and high <= mine[1] for (low, high), mine in zip(box, block.box)):
            return tensor[block.slices(box)]
    raise KeyError(box)


def _segments(spec: ParamSpec, layout: Layout, at: Mapping[str, int]) -> list[list[Segment]]:
    """Tensor and expert parallelism, per dimension."""
    found: list[list[Segment]] = [[(0, 0, size)] for size in spec.shape]

    def cut(dim: int, pieces: Sequence[tuple[int, int]]) -> None:
        local, found[dim] = 0, []
        for start, stop in pieces:
            found[dim].append((local, start, stop - start))
            local += stop - start

    if spec.experts and layout.ep > 1:
        share = spec.experts // layout.ep
        cut(0, [(at["ep"] * share, (at["ep"] + 1) * share)])
    axis, size = ("etp", layout.etp) if spec.experts else ("tp", layout.tp)
    if size > 1 and spec.split_dim is not None:
        parts = (spec.shape[spec.split_dim],) if spec.split == "row" else spec.parts
        pieces = pieces_of(spec.split, parts, spec.unit, at[axis], size)
        cut(spec.split_dim, [(piece.start, piece.stop) for piece in pieces])
    return found


def fsdp_share(spec: ParamSpec, layout: Layout, at: Mapping[str, int]) -> tuple[int, int]:
    """(place, ranks) among those that FSDP shards this parameter over; ranks 1: it does not.

    Dense parameters over the flattened (fsdp, cp), experts over edp; what no gradient trains stays whole (see
    parallel.fsdp and parallel.mesh).
    """
    if layout.fsdp == 1 or spec.keep_fp32:
        return 0, 1
    if spec.experts:
        return at["edp"], layout.edp
    return at["fsdp"] * layout.cp + at["cp"], layout.fsdp * layout.cp


def blocks_of(spec: ParamSpec, layout: Layout, at: Mapping[str, int]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """(blocks, local shape) of a parameter on the rank at these places (`Layout.coords`). No blocks: an empty shard."""
    segments = _segments(spec, layout, at)
    shape = [sum(size for _, _, size in dim) for dim in segments]
    place, ranks = fsdp_share(spec, layout, at)
    if ranks > 1:
        dim = 1 if spec.experts and shape[1] % ranks == 0 else 0
        each = -(-shape[dim] // ranks)  # as torch.chunk: the last ranks may hold less
        first, last = min(shape[dim], each * place), min(shape[dim], each * (place + 1))
        inside = []
        for local, start, size in segments[dim]:
            low, high = max(local, first), min(local + size, last)
            if low < high:
                inside.append((low - first, start + low - local, high - low))
        segments[dim], shape[dim] = inside, last - first
    blocks = [
        Block(tuple((start, start + size) for _, start, size in chosen), tuple(local for local, _, _ in chosen))
        for chosen in itertools.product(*segments)
    ]
    return tuple(blocks), tuple(shape)


def homes_of(table: ParamTable, layout: Layout, num_layers: int) -> dict[str, dict[int, str]]:
    """Stored name -> {pipeline stage: its name there}. A tied head on another stage than its embedding: a second home.

    LayoutError when the layers do not divide.
    """
    ranges = layout.layer_ranges(num_layers)
    last = len(ranges) - 1
    chunk_of = {layer: chunk for chunk, layers in enumerate(ranges) for layer in layers}
    found: dict[str, dict[int, str]] = {spec.name: {} for spec in table.stored()}
    for spec in table:
        chunk = (0 if spec.name.startswith("embed") else last) if spec.layer is None else chunk_of[spec.layer]
        if spec.tied_to is None or last > 0:
            found[spec.tied_to or spec.name][chunk % layout.pp] = spec.name
    return found


def stage_ranks(layout: Layout, stage: int) -> range:
    """The ranks of a pipeline stage."""
    return range(stage * layout.inner_size, (stage + 1) * layout.inner_size)
