"""A model in a layout: the chunks that this rank holds, loaded from where their slices lie, gathered where asked.

Everything here that communicates is called on every rank of the mesh, in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from docklands.errors import DataError
from docklands.models import hf_io
from docklands.models.config import ModelConfig
from docklands.models.fp8 import SCALE, block_of
from docklands.models.hf_write import write_directory
from docklands.models.lora import first_values, merged
from docklands.models.model import CausalLM, Trunk, ValueModel, initial
from docklands.models.params import ParamTable, table_for
from docklands.models.shard import Slices, Slot, Window, assemble, slots_of, stage_of
from docklands.parallel import fsdp
from docklands.parallel.collectives import all_gather
from docklands.parallel.mesh import Mesh

Places = Mapping[str, int]


class ShardedModel:
    """What this rank holds of a model.

    chunks  model chunks in order; one without an interleaved pipeline
    slots   how each parameter that is here is split, by name
    """

    def __init__(
        self, kind: type[Trunk], config: ModelConfig, mesh: Mesh, *, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        """Parameters are fp32 without values; under FSDP forward gathers them in `dtype`. LayoutError."""
        self.kind, self.config, self.mesh = kind, config, mesh
        self.table: ParamTable = table_for(config, value_head=kind is ValueModel)
        self.chunks: list[Trunk] = []
        self.slots: dict[str, Slot] = {}
        for chunk in mesh.layout.chunks_of(mesh.rank):
            model, slots = stage_of(kind, config, mesh, chunk)
            model.float()
            self._fsdp(model, dtype, device)
            self.chunks.append(model.to_empty(device=device) if device != "meta" else model)
            self.slots |= slots
        self._parameters = {name: p for chunk in self.chunks for name, p in chunk.named_parameters()}
        self.kv = mesh.kv_group(config.num_kv_heads)

    def _fsdp(self, model: Trunk, dtype: torch.dtype, device: str) -> None:
        mesh = self.mesh
        if mesh.layout.fsdp == 1:
            return
        model.activation_dtype = dtype
        kind = torch.device(device).type
        kind = "cpu" if kind == "meta" else kind  # FSDP asks the mesh for a current device
        dense = mesh.shard and mesh.shard.device_mesh(kind)
        sparse = mesh.expert_shard and mesh.expert_shard.device_mesh(kind)
        apart: list[nn.Parameter] = []
        for layer in model.layers:
            experts = getattr(getattr(layer, "moe", None), "experts", None)
            if experts is not None and sparse is not None:
                fsdp.shard_module(experts, sparse, dtype, dim=1)
            elif experts is not None:
                apart += experts.parameters()
            if layer is not None and dense is not None:
                fsdp.shard_module(layer, dense, dtype, apart=apart)
        if dense is not None:
            fsdp.shard_module(model, dense, dtype, inner=False, apart=apart)

    # --- parameters -------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        """All that this rank holds, by name."""
        return dict(self._parameters)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters().values())).device

    def reshard(self) -> None:
        """After forward passes without backward: see fsdp.reshard."""
        fsdp.reshard(self.chunks)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """The same first values as those of the whole model in one process."""
        generator = torch.Generator().manual_seed(seed)
        mine = self.parameters()
        self.init_adapters(seed)
        for spec in self.table.stored():
            if spec.adapts:
                continue
            draw = initial(spec.name, spec.shape, self.config, generator)
            for name in (spec.name, *(s.name for s in self.table if s.tied_to == spec.name)):
                if name in mine:
                    self._write(name, mine[name], draw, [(0, size) for size in spec.shape])

    @torch.no_grad()
    def init_adapters(self, seed: int) -> None:
        """The first values that they have in one process."""
        for name, parameter in self.parameters().items():
            spec = self.slots[name].spec
            if spec.adapts:
                self._write(name, parameter, first_values(spec, seed), [(0, size) for size in spec.shape])

    def _write(self, name: str, target: Tensor, source: Any, region: Sequence[tuple[int, int]]) -> None:
        """Copy what this rank holds of a region of a whole parameter into a local tensor. `source`: tensor or file."""
        local = fsdp.local(target)
        for ours, theirs in self._overlaps(name, region):
            local[ours].copy_(source[theirs])

    def _overlaps(self, name: str, region: Sequence[tuple[int, int]]) -> Iterator[tuple[Slices, Slices]]:
        """(slices of the local tensor, of the region) that are the same elements."""
        found = fsdp.window(self._parameters[name].data)
        return self.slots[name].overlaps(self.mesh.coords, region, None if found is None else Window(*found))

    @torch.no_grad()
    def scatter(self, shards: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """Copy this rank's slices of whole tensors (by stored name) into local ones, in place."""
        for name, shard in shards.items():
            spec = self.slots[name].spec
            self._write(name, shard, whole[spec.name], [(0, size) for size in spec.shape])

    @torch.no_grad()
    def load(self, path: str | Path) -> None:
        """From a Hugging Face directory: each rank reads, and checks, its own slices only. Raises DataError."""
        path = Path(path)
        files = hf_io.tensor_files(path)
        index = self.table.hf_index()
        optional = set(itertools.chain(*hf_io.unmodelled(files, self.config)))
        if self.config.tie_embeddings or self.kind is ValueModel:
            optional.add(hf_io.LM_HEAD)
        hf_io._check_names(files, set(index), optional | set(hf_io.VALUE_HEAD if self.kind is ValueModel else ()), path)
        self._block = block_of(hf_io._config_json(path), str(path))
        mine = self.parameters()
        for name, parameter in mine.items():
            if name.startswith("value_head"):
                fsdp.local(parameter).zero_()  # stays so where the directory has no head
        for file in sorted(set(files.values())):
            with safe_open(file, framework="pt") as handle:
                for hf_name in sorted(n for n, where in files.items() if where == file and n in index):
                    self._read(mine, handle, hf_name, index[hf_name], files)

    def _read(
        self, mine: Mapping[str, Tensor], handle: Any, hf_name: str, entry: Any, files: Mapping[str, Path]
    ) -> None:
        spec, shape, start = entry
        names = [n for n in (spec.name, *(s.name for s in self.table if s.tied_to == spec.name)) if n in mine]
        if not names:
            return
        source = handle.get_slice(hf_name)
        found = tuple(source.get_shape())
        if found != shape:
            raise DataError(f"{files[hf_name]}: tensor {hf_name} has shape {found}, config.json says {shape}")
        region = [(start, start + shape[0]), *((0, size) for size in shape[1:])]
        if spec.experts:
            expert, row = divmod(start, spec.shape[1])
            region = [(expert, expert + 1), (row, row + shape[0]), *region[1:]]
        names = [name for name in names if any(True for _ in self._overlaps(name, region))]
        if not names:  # of an expert that is elsewhere
            return
        if self._block is not None and hf_name + SCALE in files:
            ((_, source),) = hf_io.read_tensors(files, [hf_name], self._block)
        if spec.experts:
            source = _OfOneExpert(source)
        source = _Checked(source, files[hf_name], hf_name)
        for name in names:
            self._write(name, mine[name], source, region)

    # --- the whole model --------------------------------------------------------------------------------------

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a tensor shaped like a local parameter (or its gradient), on every rank of its stage."""
        slot = self.slots[name]
        found: list[tuple[Places, Tensor]] = [(self.mesh.coords, fsdp.whole(tensor))]
        for cut in slot.cuts:
            group = getattr(self.mesh, cut.axis)
            found = [piece for at, local in found for piece in self._of_all(slot, local, at, cut.axis, group)]
        return found[0][1] if not slot.cuts else assemble(slot, found)

    @staticmethod
    def _of_all(slot: Slot, local: Tensor, at: Places, axis: str, group: Any) -> list[tuple[Places, Tensor]]:
        places = [{**at, axis: rank} for rank in range(group.size)]
        shapes = [slot.local_shape(place) for place in places]
        counts = [int(torch.Size(shape).numel()) for shape in shapes]
        flat = all_gather(local.reshape(-1), group, counts).split(counts)
        return [(place, piece.view(shape)) for place, piece, shape in zip(places, flat, shapes)]

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every stored parameter on every rank, one at a time. `tensors`: the local ones."""
        mesh = self.mesh
        ranges = mesh.layout.layer_ranges(self.config.num_layers)
        for spec in self.table.stored():
            chunk = 0 if spec.name.startswith("embed") else len(ranges) - 1
            if spec.layer is not None:
                chunk = next(i for i, layers in enumerate(ranges) if spec.layer in layers)
            if mesh.pp is None:
                yield spec.name, self.gather(spec.name, tensors[spec.name])
                continue
            owner = chunk % mesh.layout.pp
            if mesh.coords["pp"] == owner:
                tensor = self.gather(spec.name, tensors[spec.name]).contiguous()
            else:
                alike = (t.dtype for t in tensors.values() if (t.dim() > 1) == (len(spec.shape) > 1))
                tensor = torch.empty(spec.shape, device=self.device, dtype=next(alike))  # 16-bit matrices, fp32 vectors
            dist.broadcast(tensor, mesh.pp.ranks[owner], group=mesh.pp.pg)
            yield spec.name, tensor

    def export(self, path: str | Path, source: str | Path | None = None, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face directory, as hf_io.export does: rank 0 writes while all ranks gather, one parameter at
        a time. CheckpointError on rank 0 when it cannot be written.
        """
        local = {name: parameter.detach() for name, parameter in self.parameters().items()}
        stored = dtype or next(iter(local.values())).dtype
        whole = self.whole(local)
        if self.config.lora is not None:
            whole = merged(whole, self.table, self.config.lora.scale)
        tensors = hf_io.hf_parts(self.table, whole, dtype)
        if self.mesh.rank == 0:
            values, more = hf_io.export_plan(self.config, stored, source, self.kind is ValueModel)
            try:
                write_directory(
                    Path(path), values, itertools.chain(tensors, more), None if source is None else Path(source)
                )
            finally:
                for _ in tensors:  # the others gather to the end
                    pass
        else:
            for _ in tensors:
                pass


class _Checked:
    """A file's slices, each looked at as it is read: a rank checks what it holds."""

    def __init__(self, source: Any, file: Path, name: str) -> None:
        self._source, self._file, self._name = source, file, name

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part = self._source[index]
        hf_io.check_values(part, self._file, self._name)
        return part


class _OfOneExpert:
    """A file's slice [rows, columns] seen as [1, rows, columns]."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._source[index[1:]][None]


def build_sharded(
    config: ModelConfig, mesh: Mesh, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> ShardedModel:
    """A language model with random weights, equal to those of `build` with this seed."""
    model = ShardedModel(CausalLM, config, mesh, dtype=dtype, device=device)
    model.init_weights(seed)
    return model


def load_sharded(
    path: str | Path, mesh: Mesh, *, value: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> ShardedModel:
    """This rank's part of the language (or value) model in a Hugging Face directory. DataError, ConfigError."""
    kind = ValueModel if value else CausalLM
    model = ShardedModel(kind, hf_io.read_config(path), mesh, dtype=dtype, device=device)
    model.load(path)
    return model


__all__ = ["ShardedModel", "build_sharded", "load_sharded", "slots_of"]
