"""The part of a model that one rank of a layout holds: which slices of a parameter, and which modules.

Names of parameters stay those of the whole model, so that its table describes both. A stage of a pipeline whose head is
an embedding at the other end holds that once more, as head.weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from docklands.models.adapters import rows_of
from docklands.models.blocks import Block, ColumnLinear, Embedding, Linear, RowLinear
from docklands.models.config import ModelConfig
from docklands.models.lora import Adapters
from docklands.models.model import CausalLM, Trunk
from docklands.models.moe import Moe
from docklands.models.params import ParamSpec, ParamTable
from docklands.parallel.expert import ExpertParallel
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.parallel.tensor import Piece, Split, TensorParallel, pieces_of

PER_HEAD_NORMS = ("q_norm", "k_norm")

Segment = tuple[int, int, int]
"""(first index in the local tensor, first in the whole one, how many) along one dimension."""

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Window:
    """Indices start..stop of one dimension of a local tensor: what FSDP leaves on this rank."""

    dim: int
    start: int
    stop: int

    def of(self, pairs: Sequence[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
        """Those pairs of (ours, theirs) that lie in the window, ours counted from its start."""
        for ours, theirs in pairs:
            first, last = max(ours.start, self.start), min(ours.stop, self.stop)
            if first < last:
                shift = theirs.start - ours.start
                yield slice(first - self.start, last - self.start), slice(first + shift, last + shift)


@dataclass(frozen=True)
class Cut:
    """One dimension that is split over one axis of the mesh ("tp", "ep" or "etp")."""

    dim: int
    axis: str
    size: int
    split: Split
    parts: tuple[int, ...]
    unit: int = 1

    def pieces(self, rank: int) -> list[Piece]:
        """What the rank at this place of the axis holds, in the order of its local tensor."""
        return pieces_of(self.split, self.parts, self.unit, rank, self.size)


@dataclass(frozen=True)
class Slot:
    """A parameter as a layout splits it.

    spec     its entry in the table (the embedding's, for a tied head on another stage)
    cuts     split dimensions
    partial  each tensor-parallel rank's gradient is a part of the sum, though the parameter is whole (of experts: each
             rank that splits them)
    """

    name: str
    spec: ParamSpec
    cuts: tuple[Cut, ...] = ()
    partial: bool = False

    @property
    def is_expert(self) -> bool:
        return self.spec.expert_dim is not None

    def segments(self, at: Mapping[str, int]) -> list[list[Segment]]:
        """For each dimension, where the local indices come from, on the rank at these places of the axes."""
        found = [[(0, 0, size)] for size in self.spec.shape]
        for cut in self.cuts:
            local, found[cut.dim] = 0, []
            for piece in cut.pieces(at[cut.axis]):
                found[cut.dim].append((local, piece.start, len(piece)))
                local += len(piece)
        return found

    def local_shape(self, at: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(sum(size for _, _, size in segments) for segments in self.segments(at))

    def overlaps(
        self, at: Mapping[str, int], region: Sequence[tuple[int, int]], window: Window | None = None
    ) -> Iterator[tuple[Slices, Slices]]:
        """(slices of the local tensor, slices of the region) that are the same elements.

        region  first index and last + 1 of the whole parameter, for each dimension
        window  which part of the local tensor there is (FSDP)
        """
        dims = []
        for segments, (low, high) in zip(self.segments(at), region, strict=True):
            shared = []
            for local, start, size in segments:
                first, last = max(start, low), min(start + size, high)
                if first < last:
                    shared.append((slice(local + first - start, local + last - start), slice(first - low, last - low)))
            dims.append(shared)
        if window is not None:
            dims[window.dim] = list(window.of(dims[window.dim]))
        for chosen in itertools.product(*dims):
            yield tuple(ours for ours, _ in chosen), tuple(theirs for _, theirs in chosen)

    def part_rows(self, at: Mapping[str, int]) -> list[int]:
        """Rows here of each part that the parameter is fused of."""
        dim = len(self.spec.shape) - 2
        cut = next((cut for cut in self.cuts if cut.dim == dim and cut.axis != "ep"), None)
        return list(rows_of(self.spec)) if cut is None else [len(piece) for piece in cut.pieces(at[cut.axis])]

    def copies(self) -> list[tuple[int, int, int]]:
        """(first row, last row + 1, copies) of the local tensor on the tensor axis; copies > 1: shared kv heads."""
        found, at = [], 0
        for cut in self.cuts:
            for piece in cut.pieces(0) if cut.axis == "tp" and cut.dim == 0 else ():
                found.append((at, at + len(piece), piece.copies))
                at += len(piece)
        return found


def slot_of(name: str, spec: ParamSpec, layout: Layout) -> Slot:
    """How a layout splits one parameter. LayoutError when it does not divide."""
    axis, size = ("tp", layout.tp) if not spec.experts else ("etp", layout.etp)
    cuts = [Cut(0, "ep", layout.ep, "column", (spec.experts,))] if spec.experts and layout.ep > 1 else []
    dim = spec.split_dim
    if size > 1 and dim is not None:
        parts = (spec.shape[dim],) if spec.split == "row" else spec.parts
        cuts.append(Cut(dim, axis, size, spec.split, parts, spec.unit))
    whole = size > 1 and dim is None
    apart = not spec.experts and (layout.sp or name.split(".")[-2] in PER_HEAD_NORMS)
    return Slot(name, spec, tuple(cuts), whole and (apart or spec.partial))


def slots_of(table: ParamTable, layout: Layout) -> dict[str, Slot]:
    """All stored parameters of a model in a layout, by name."""
    return {spec.name: slot_of(spec.name, spec, layout) for spec in table.stored()}


def held_by(table: ParamTable, layout: Layout, num_layers: int, rank: int) -> dict[str, Slot]:
    """What a rank holds, by name: pure arithmetic, for plans and ledgers. `Slot.local_shape(layout.coords(rank))`."""
    ranges = layout.layer_ranges(num_layers)
    last = len(ranges) - 1
    found = {}
    for chunk in layout.chunks_of(rank):
        for spec in table:
            home = next((i for i, layers in enumerate(ranges) if spec.layer in layers), None)
            if home is None:
                home = 0 if spec.name.startswith("embed") else last
            if home == chunk and (spec.tied_to is None or last > 0):
                stored = table.by_name(spec.tied_to) if spec.tied_to else spec
                found[spec.name] = slot_of(spec.name, stored, layout)
    return found


def stage_of(kind: type[Trunk], config: ModelConfig, mesh: Mesh, chunk: int) -> tuple[Trunk, dict[str, Slot]]:
    """The model chunk number `chunk` of this rank on device "meta", parameters of local shape, and their slots.

    LayoutError when the model does not divide.
    """
    layout = mesh.layout
    layout.check_model(config)
    with torch.device("meta"):
        model = kind(config)
        ranges = layout.layer_ranges(config.num_layers)
        first, last = chunk == 0, chunk == len(ranges) - 1
        if isinstance(model, CausalLM) and config.tie_embeddings and last and not first:
            model.head = Linear(config.hidden_size, config.vocab_size)
        _keep(model, ranges[chunk], first, last)
        slots = {}
        for name, parameter in list(model.named_parameters()):
            spec = model.table.by_name(name)  # type: ignore[union-attr]
            slot = slot_of(name, model.table.by_name(spec.tied_to) if spec.tied_to else spec, layout)  # type: ignore[union-attr]
            slots[name] = slot
            holder, _, leaf = name.rpartition(".")
            local = nn.Parameter(torch.empty(slot.local_shape(mesh.coords)), parameter.requires_grad)
            setattr(model.get_submodule(holder), leaf, local)
        for module in model.modules():
            if isinstance(module, Adapters):
                _rows_here(model, module, slots, mesh)
    if mesh.tp is not None:
        _connect(model, slots, TensorParallel(mesh.tp, layout.sp))
    for module in model.modules():
        if isinstance(module, Moe) and (mesh.ep or mesh.etp):
            module.parallel = ExpertParallel(mesh.ep, len(module.experts.gate_up), mesh.etp)
    return model, slots


def _rows_here(model: Trunk, adapters: Adapters, slots: Mapping[str, Slot], mesh: Mesh) -> None:
    """Tell a module's adapters how many rows of each projection are here."""
    path = next(name for name, module in model.named_modules() if module is adapters).removesuffix(".lora")
    for matrix in adapters.rows:
        adapters.rows[matrix] = slots[f"{path}.{matrix}"].part_rows(mesh.coords)


def _keep(model: Trunk, layers: range, first: bool, last: bool) -> None:
    """Drop what other stages hold."""
    for index in range(len(model.layers)):
        if index not in layers:
            model.layers[index] = None  # type: ignore[assignment]
    gone = ([] if first else ["embed"]) + ([] if last else ["final_norm", "head", "value_head"])
    for name in gone:
        if hasattr(model, name):
            setattr(model, name, None)


def _connect(model: Trunk, slots: Mapping[str, Slot], tp: TensorParallel) -> None:
    """Tell the modules that they hold a part."""
    model.tp = tp
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear | Embedding):
            module.tp = tp
        if isinstance(module, Block):
            module.split_heads(tp.group.size)
    if model.embed is not None:
        model.embed.first_row = first_row(slots["embed.weight"], tp)


def first_row(slot: Slot, tp: TensorParallel) -> int:
    """Of the vocabulary on this rank."""
    return slot.cuts[0].pieces(tp.group.rank)[0].start


def place(slot: Slot, at: Mapping[str, int], whole: Tensor) -> Tensor:
    """The local tensor of the rank at `at`, out of the whole one."""
    local = whole.new_empty(slot.local_shape(at))
    for ours, theirs in slot.overlaps(at, [(0, size) for size in slot.spec.shape]):
        local[ours] = whole[theirs]
    return local


def assemble(slot: Slot, locals_: Sequence[tuple[Mapping[str, int], Tensor]]) -> Tensor:
    """The whole parameter from the local tensors of ranks at these places, which together hold all of it."""
    whole = locals_[0][1].new_empty(slot.spec.shape)
    for at, local in locals_:
        for ours, theirs in slot.overlaps(at, [(0, size) for size in slot.spec.shape]):
            whole[theirs] = local[ours]
    return whole
