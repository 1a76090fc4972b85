"""Which rank does what: the arithmetic of a parallel layout. No torch, no processes.

Two meshes over the same ranks, last axis fastest:
    dense   (pp, dp, fsdp, cp, tp)   everything but experts
    sparse  (pp, edp, ep, etp)       experts; edp = dp * fsdp * cp * tp / (ep * etp)
so a pipeline stage is one contiguous block of ranks in both, and with etp = tp the two tensor groups are the same.
(The two meshes are those of "MoE Parallel Folding", arXiv 2504.14960.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from docklands.errors import LayoutError

DENSE = ("pp", "dp", "fsdp", "cp", "tp")
SPARSE = ("pp", "edp", "ep", "etp")
NUMBERS = ("dp", "fsdp", "tp", "pp", "vpp", "cp", "ep", "etp")


class ModelSizes(Protocol):
    """What a layout must divide; a ModelConfig has them, and `moe` (experts, expert_size, shared_size) or None."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism.

    dp    replicas that see other rows; gradients are summed
    fsdp  as dp, and parameters, gradients and optimizer state are sharded over it (ZeRO-3)
    tp    tensor parallel: heads, feed-forward columns, vocabulary
    pp    pipeline stages; vpp: model chunks a stage holds (interleaved schedule)
    cp    context parallel: the tokens of a row
    ep    experts; etp: columns of one expert (1, or equal to tp)
    sp    sequence parallel: between tensor-parallel products, ranks hold different tokens
    schedule  of a pipeline: "1f1b" (interleaved with vpp), or "zero_bubble": weight gradients fill its gaps
    context  how cp works: "ulysses" (exchanges heads for tokens) or "ring" (keys and values travel)
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = True
    context: Literal["ulysses", "ring"] = "ulysses"
    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in NUMBERS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise LayoutError(f"layout: {field.name} is {value!r}", "every degree is a whole number from 1")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"layout: vpp {self.vpp} with pp 1", "model chunks interleave between stages: set pp >= 2"
            )
        if self.context not in ("ulysses", "ring"):
            raise LayoutError(f"layout: context is {self.context!r}", "ulysses or ring")
        if self.schedule not in ("1f1b", "zero_bubble"):
            raise LayoutError(f"layout: schedule is {self.schedule!r}", "1f1b or zero_bubble")
        if self.schedule == "zero_bubble" and (self.pp == 1 or self.fsdp > 1):
            raise LayoutError(
                f"layout: zero_bubble with pp {self.pp}, fsdp {self.fsdp}",
                "it wants pp >= 2, and fsdp 1: FSDP sums weight gradients inside the backward pass",
            )
        if self.etp not in (1, self.tp):
            raise LayoutError(f"layout: etp {self.etp} with tp {self.tp}", f"etp is 1 or tp ({self.tp})")
        if self.inner_size % (self.ep * self.etp):
            raise LayoutError(
                f"layout: dp {self.dp} x fsdp {self.fsdp} x cp {self.cp} x tp {self.tp} = {self.inner_size} ranks of a "
                f"stage do not divide by ep {self.ep} x etp {self.etp} = {self.ep * self.etp}",
                "experts are spread over the ranks of one pipeline stage",
            )
        if self.tp > 1 and self.ep > 1 and not self.sp:
            raise LayoutError(
                f"layout: tp {self.tp}, ep {self.ep} without sp",
                "without sequence parallelism every tensor rank would send the same tokens to the experts: set sp",
            )

    # --- sizes ------------------------------------------------------------------------------------------------

    @property
    def inner_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.fsdp * self.cp * self.tp

    @property
    def world_size(self) -> int:
        return self.pp * self.inner_size

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts (before sharding)."""
        return self.inner_size // (self.ep * self.etp)

    @property
    def data(self) -> int:
        """Ranks that see different rows."""
        return self.dp * self.fsdp

    @property
    def stages(self) -> int:
        """Model chunks in all; chunk c of stage p is number c * pp + p along the model."""
        return self.pp * self.vpp

    def _sizes(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in axes)

    # --- ranks ------------------------------------------------------------------------------------------------

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis of both meshes. LayoutError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not among the {self.world_size} of {self}")
        return {**_unflatten(rank, SPARSE, self._sizes(SPARSE)), **_unflatten(rank, DENSE, self._sizes(DENSE))}

    def rank_of(self, **coords: int) -> int:
        """The rank at these positions of the dense mesh; axes left out are 0."""
        rank = 0
        for axis in DENSE:
            at, size = coords.get(axis, 0), getattr(self, axis)
            if not 0 <= at < size:
                raise LayoutError(f"{axis} {at} is not below {size}")
            rank = rank * size + at
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ on these axes only, each in rank order; every rank is in exactly one.

        Axes of one mesh: dense, or sparse (edp, ep, etp).
        """
        mesh = _mesh_of(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = _unflatten(rank, mesh, self._sizes(mesh))
            found.setdefault(tuple(at[axis] for axis in mesh if axis not in axes), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of `rank` among `groups(*axes)`."""
        mesh = _mesh_of(axes)
        sizes = self._sizes(mesh)
        at = _unflatten(rank, mesh, sizes)
        members = [0]
        for axis, size in zip(mesh, sizes):
            positions = range(size) if axis in axes else (at[axis],)
            members = [member * size + position for member in members for position in positions]
        return tuple(members)

    # --- model ------------------------------------------------------------------------------------------------

    def layer_ranges(self, num_layers: int) -> list[range]:
        """Layers of each model chunk, in order. Uneven: the first chunks take one more, but the first of all holds the
        embedding and the last one the head, so those two are the last to take one.
        """
        if num_layers < self.stages:
            raise LayoutError(
                f"layout: pp {self.pp} x vpp {self.vpp} = {self.stages} chunks for {num_layers} layers",
                "every chunk needs a layer",
            )
        base, extra = divmod(num_layers, self.stages)
        order = [*range(1, self.stages - 1), 0, self.stages - 1]
        sizes = [base + (order.index(chunk) < extra) for chunk in range(self.stages)] if extra else [base] * self.stages
        starts = [0, *itertools.accumulate(sizes)]
        return [range(start, start + size) for start, size in zip(starts, sizes)]

    def chunks_of(self, rank: int) -> list[int]:
        """Numbers of the model chunks that a rank holds."""
        return [chunk * self.pp + self.coords(rank)["pp"] for chunk in range(self.vpp)]

    def check_world(self, processes: int) -> None:
        """LayoutError when the number of processes is another."""
        if processes != self.world_size:
            product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in DENSE)
            raise LayoutError(
                f"layout: {product} = {self.world_size} ranks, {processes} processes were started",
                "start as many processes as the layout has ranks",
            )

    def check_model(self, model: ModelSizes) -> None:
        """LayoutError, with the arithmetic, for a model that does not divide."""
        _divides("heads", model.num_heads, "tp", self.tp)
        if model.num_kv_heads % self.tp and self.tp % model.num_kv_heads:
            raise LayoutError(
                f"layout: {model.num_kv_heads} kv heads and tp {self.tp}: neither divides the other",
                "a kv head is split over no ranks, or shared by a whole number of them",
            )
        if self.cp > 1 and self.context == "ulysses":
            heads, kv_heads = model.num_heads // self.tp, max(1, model.num_kv_heads // self.tp)
            if heads % self.cp or (kv_heads % self.cp and self.cp % kv_heads):
                raise LayoutError(
                    f"layout: {heads} heads ({kv_heads} kv heads) of a tensor rank do not divide by cp {self.cp}",
                    "ring attention has no such limit: layout.context: ring",
                )
        _divides("feed-forward columns", model.intermediate_size, "tp", self.tp)
        moe = getattr(model, "moe", None)
        if moe is not None:
            _divides("experts", moe.experts, "ep", self.ep)
            _divides("feed-forward columns of an expert", moe.expert_size, "etp", self.etp)
            _divides("feed-forward columns of the shared expert", moe.shared_size, "tp", self.tp)
            if self.tp > 1 and not self.sp:
                raise LayoutError(
                    f"layout: tp {self.tp} without sp for a model with experts", "set sp: experts need distinct tokens"
                )
        elif self.ep > 1 or self.etp > 1:
            raise LayoutError(f"layout: ep {self.ep}, etp {self.etp}, but the model has no experts", "set them to 1")
        self.layer_ranges(model.num_layers)

    def __str__(self) -> str:
        named = [
            f"{f.name}{getattr(self, f.name)}" for f in fields(self) if f.name in NUMBERS and getattr(self, f.name) > 1
        ]
        return " ".join(named) or "one process"


def _mesh_of(axes: Sequence[str]) -> tuple[str, ...]:
    mesh = DENSE if all(axis in DENSE for axis in axes) else SPARSE
    if any(axis not in mesh for axis in axes):
        raise LayoutError(f"no mesh has the axes {', '.join(axes)}", f"{', '.join(DENSE)} or {', '.join(SPARSE)}")
    return mesh


def _unflatten(rank: int, axes: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for axis, size in zip(reversed(axes), reversed(sizes)):
        rank, found[axis] = divmod(rank, size)
    return found


def _divides(what: str, count: int, axis: str, degree: int) -> None:
    if count % degree:
        raise LayoutError(
            f"layout: {count} {what} do not divide by {axis} {degree} ({count} / {degree} = {count / degree:.2f})",
            f"{axis} may be {', '.join(str(n) for n in _divisors(count, degree))}",
        )


def _divisors(count: int, near: int) -> list[int]:
    """Degrees that would do, up to the next one above."""
    found = [n for n in range(1, count + 1) if count % n == 0]
    return [n for n in found if n <= near] + [n for n in found if n > near][:1]
