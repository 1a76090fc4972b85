"""The state of an engine as regions of whole tensors: what this process has of each, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from docklands.models.shard import Slices, Window
from docklands.parallel import fsdp
from docklands.train.engine import TrainEngine
from docklands.train.sharded import ShardedEngine

MOMENTS = ("exp_avg", "exp_avg_sq")


class Regions:
    """A local tensor as regions of a whole one: what torch's planner calls chunks, any number of them.

    regions  offsets in the whole tensor -> (slices of the local one, sizes)
    """

    def __init__(self, local: Tensor, shape: tuple[int, ...], pairs: Iterator[tuple[Slices, Slices]]) -> None:
        """pairs: (slices of the local tensor, of the whole one) that are the same elements."""
        self.local = local
        self.shape = torch.Size(shape)
        self.regions: dict[torch.Size, tuple[Slices, torch.Size]] = {}
        for ours, theirs in pairs:
            offsets, sizes = zip(*((s.start, s.stop - s.start) for s in theirs))
            self.regions[torch.Size(offsets)] = ours, torch.Size(sizes)

    @staticmethod
    def whole(tensor: Tensor) -> Regions:
        """All of a tensor."""
        everything = tuple(slice(0, size) for size in tensor.shape)
        return Regions(tensor, tuple(tensor.shape), iter([(everything, everything)]))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
            for chunk in self.__create_chunk_list__()
            for data in (TensorWriteData(chunk, properties, self.shape),)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, sizes) for offsets, (_, sizes) in self.regions.items()]

    def at(self, index: MetadataIndex) -> Tensor:
        """A view of the region that begins there."""
        assert index.offset is not None
        return self.local[self.regions[index.offset][0]]

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self.shape

    def take(self, whole: Tensor) -> None:
        """Copy the regions out of the whole tensor."""
        for offsets, (ours, sizes) in self.regions.items():
            self.local[ours].copy_(whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))])


def regions_of(engine: TrainEngine, role: str, copy: bool = False) -> dict[str, Regions]:
    """This process's trained weights and their moments by `<role>/weights/<name>`, `<role>/exp_avg/<name>`, ...

    Names are those of whole parameters; a tied head goes by its embedding's.

    copy  of the tensors, on the CPU: training may go on. Moments that rest in a lower tier are copies in any case, made
          one parameter at a time; what is loaded into them goes back by `put_back`
    """
    sharded = engine.sharded if isinstance(engine, ShardedEngine) else None
    parameters = sharded.parameters() if sharded else dict(engine.model.named_parameters())
    state: dict[str, Regions] = {}
    for kind, name, tensor in _tensors(engine, copy):
        local, slot = fsdp.local(tensor).detach(), sharded.slots[name] if sharded else None
        if slot is None:
            state[f"{role}/{kind}/{name}"] = Regions.whole(local)
            continue
        found, shape = fsdp.window(parameters[name].data), slot.spec.shape
        window = None if found is None else Window(*found)
        pairs = slot.overlaps(engine.mesh.coords, [(0, size) for size in shape], window)  # type: ignore[attr-defined]
        state[f"{role}/{kind}/{slot.spec.name}"] = Regions(local, shape, pairs)
    return state


def _tensors(engine: TrainEngine, copy: bool) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, local tensor) of weights and moments; see `regions_of`."""
    for name, master in engine.masters().items():
        yield "weights", name, copied(master) if copy else master
    if engine.optimizer is None:
        return
    resting = engine.optimizer.resting
    for name, pair in resting.each(trained(engine)):
        for kind, moment in zip(MOMENTS, pair, strict=True):
            yield kind, name, copied(moment) if copy or resting.lower is not None else moment
    resting.rest()


def trained(engine: TrainEngine) -> list[str]:
    """Parameters that have moments worth keeping."""
    assert engine.optimizer is not None
    return [name for name in engine.masters() if engine.optimizer.parameters[name].requires_grad]


def copied(tensor: Tensor) -> Tensor:
    """On the CPU."""
    return fsdp.local(tensor).detach().to("cpu", copy=True)


@torch.no_grad()
def put_back(engine: TrainEngine, role: str, state: Mapping[str, Regions]) -> None:
    """After a load into `regions_of`: moments that rest in a lower tier go there, one parameter's at a time."""
    resting = engine.optimizer and engine.optimizer.resting
    if resting is None or resting.lower is None:
        return
    slots = engine.sharded.slots if isinstance(engine, ShardedEngine) else None
    for name, pair in resting.each(trained(engine)):
        stored = slots[name].spec.name if slots else name
        for kind, moment in zip(MOMENTS, pair, strict=True):
            moment.copy_(state[f"{role}/{kind}/{stored}"].local)
    resting.rest()


def names_of(engine: TrainEngine) -> set[str]:
    """Of all stored parameters of the whole model."""
    table = engine.sharded.table if isinstance(engine, ShardedEngine) else engine.model.table
    return {spec.name for spec in table.stored()}  # type: ignore[union-attr]


def counts_of(engine: TrainEngine) -> dict[str, Any]:
    """What is not a tensor: plain data."""
    return {"version": engine.version, "optimizer": engine.optimizer and engine.optimizer.counts()}
