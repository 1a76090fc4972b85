"""Checkpoints that every rank writes its part of, and that any layout reads: torch's distributed checkpoint underneath.

    root/step_000004/<name>/__0_0.distcp ... .metadata   counts.json   COMPLETE

What lies on disk are regions of whole parameters (and of their moments), each written by one of the ranks that hold it,
so the layout that wrote leaves no trace. Directories are written aside and appear by one rename, as in checkpoint.py.
`save_async` copies what it writes and returns; a thread of each rank does the rest beside the training.
Torch keeps its index as a pickle: read checkpoints of people you trust only.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from docklands.errors import CheckpointError
from docklands.models.shard import Slices, Slot, Window
from docklands.parallel import fsdp
from docklands.train import checkpoint
from docklands.train.sharded import ShardedEngine

COUNTS = "counts.json"


class Regions:
    """A local tensor as regions of a whole one: what torch's planner calls chunks, any number of them."""

    def __init__(self, slot: Slot, at: dict[str, int], local: Tensor, window: Window | None) -> None:
        self.local = local
        self.shape = torch.Size(slot.spec.shape)
        whole = [(0, size) for size in slot.spec.shape]
        self.regions: dict[torch.Size, tuple[Slices, torch.Size]] = {}
        for ours, theirs in slot.overlaps(at, whole, window):
            offsets, sizes = zip(*((s.start, s.stop - s.start) for s in theirs))
            self.regions[torch.Size(offsets)] = ours, torch.Size(sizes)

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


class _Save(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].at(index)


class _Load(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        """Torch's own would first replace what it does not know by what it guesses."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index)


def regions_of(engine: ShardedEngine, copy: bool = False) -> dict[str, Regions]:
    """This rank's weights and moments, by the names of whole parameters. A tied head goes by its embedding's name.

    copy  of the tensors, on the CPU: training may go on
    """
    parameters, masters = engine.sharded.parameters(), engine.masters()
    state: dict[str, Regions] = {}
    for name, slot in engine.sharded.slots.items():
        found = fsdp.window(parameters[name].data)
        window = None if found is None else Window(*found)
        kinds = {"weights": masters[name]}
        if engine.optimizer is not None and parameters[name].requires_grad:
            kinds["exp_avg"], kinds["exp_avg_sq"] = engine.optimizer.moments[name]
        for kind, tensor in kinds.items():
            local = fsdp.local(tensor)
            local = local.detach().to("cpu", copy=True) if copy else local
            state[f"{kind}/{slot.spec.name}"] = Regions(slot, engine.mesh.coords, local, window)
    return state


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way to the disk. `group`: the ranks that write it; None: this process alone."""

    path: Path
    name: str
    keep: int
    state: dict[str, Regions]
    counts: dict[str, Any]
    group: dist.ProcessGroup | None

    def write(self) -> Path:
        """All of it, all ranks together."""
        root, writing = self.path.parent, self.path.parent / f".writing-{self.path.name}"
        first = self.group is None or dist.get_rank(self.group) == 0
        try:
            together(self.group, (lambda: self._prepare(root, writing)) if first else None, f"{root} cannot be written")
            writer = FileSystemWriter(writing / self.name, single_file_per_rank=True, sync_files=True)
            alone = self.group is None
            together(
                self.group,
                lambda: dcp_save(
                    self.state, storage_writer=writer, planner=_Save(), process_group=self.group, no_dist=alone
                ),
                f"{self.path} cannot be written",
            )
            together(self.group, (lambda: self._finish(writing)) if first else None, f"{self.path} cannot be finished")
        except CheckpointError:
            if first:
                shutil.rmtree(writing, ignore_errors=True)
                checkpoint.recover(root)
            raise
        return self.path

    def _prepare(self, root: Path, writing: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.recover(root)
        checkpoint.sweep(root)
        writing.mkdir()

    def _finish(self, writing: Path) -> None:
        (writing / COUNTS).write_text(json.dumps(self.counts), encoding="utf-8")
        files = [file for file in sorted(writing.rglob("*")) if file.is_file()]
        for file in files:
            sync(file)
        stamps = {str(file.relative_to(writing)): checkpoint.stamp(file) for file in files}
        checkpoint.write_marker(writing / checkpoint.MARKER, checkpoint.step_of(self.path), stamps)
        checkpoint.sync_directory(writing)
        checkpoint.put_in_place(writing, self.path)
        checkpoint.prune(self.path.parent, self.keep, self.path)


def save(root: Path | str, step: int, engine: ShardedEngine, name: str = "actor", keep: int = 2) -> Path:
    """Write this checkpoint, all ranks together; afterwards `keep` complete ones remain. -> its directory.

    CheckpointError on every rank when it cannot be written; what was there before is untouched.
    """
    world = engine.mesh.world
    path = Path(root) / f"step_{step:06d}"
    return Saving(path, name, keep, regions_of(engine), counts_of(engine), world and world.pg).write()


def save_async(root: Path | str, step: int, engine: ShardedEngine, name: str = "actor", keep: int = 2) -> Future[Path]:
    """As `save`, of a copy, in a thread: -> what `save` gives or raises, when it is done.

    Call it on every rank, and only after the one before is done.
    """
    path = Path(root) / f"step_{step:06d}"
    group = engine.mesh.background()
    saving = Saving(path, name, keep, regions_of(engine, copy=True), counts_of(engine), group)
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    done = thread.submit(saving.write)
    thread.shutdown(wait=False)  # ends after this one; a process that exits waits for it
    return done


def counts_of(engine: ShardedEngine) -> dict[str, Any]:
    """What is not a tensor."""
    return {"version": engine.version, "optimizer": engine.optimizer and engine.optimizer.counts()}


def load(path: Path | str, engine: ShardedEngine, name: str = "actor") -> None:
    """Take weights, moments and counts from a checkpoint of any layout, all ranks together. CheckpointError."""
    path = Path(path)
    if not checkpoint.is_complete(path):
        raise CheckpointError(f"checkpoint {path} is not complete", "it was cut off while it was written; use another")
    state = regions_of(engine)
    reader = FileSystemReader(path / name)
    group = engine.mesh.world and engine.mesh.world.pg
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    mine = sorted(checkpoint.read_stamps(path))[rank::ranks]  # each rank looks at its share of the files
    together(group, lambda: checkpoint.verify(path, mine), f"{path} cannot be loaded")

    def read() -> None:
        check(reader, state, path)
        dcp_load(state, storage_reader=reader, planner=_Load(), no_dist=True)  # every rank reads what it needs

    together(group, read, f"{path} cannot be loaded")
    counts = json.loads((path / COUNTS).read_text(encoding="utf-8"))
    engine.version = int(counts["version"])
    if engine.optimizer is not None:
        if counts["optimizer"] is None:
            raise CheckpointError("the checkpoint has no optimizer state", "it cannot be resumed from")
        engine.notes = engine.optimizer.load_counts(counts["optimizer"])
        engine.optimizer.round_copies()
        engine.optimizer.clear()


def check(reader: FileSystemReader, state: dict[str, Regions], path: Path) -> None:
    """CheckpointError when a tensor is missing or of another shape."""
    saved = reader.read_metadata().state_dict_metadata
    for name, regions in state.items():
        if name not in saved:
            raise CheckpointError(
                f"checkpoint {path} lacks {name}", "it is of another model, or has no optimizer state"
            )
        found = getattr(saved[name], "size", None)
        if found != regions.shape:
            raise CheckpointError(
                f"checkpoint {path}: {name} has shape {list(found or ())}, needed {list(regions.shape)}",
                "the checkpoint is of another model",
            )
        held = sum(math.prod(chunk.sizes) for chunk in saved[name].chunks)  # type: ignore[union-attr]
        if held != math.prod(regions.shape):
            raise CheckpointError(f"checkpoint {path}: {name} has {held} of {math.prod(regions.shape)} elements")


def together(group: dist.ProcessGroup | None, action: Callable[[], Any] | None, what: str) -> None:
    """Do something, then wait for all ranks; CheckpointError on all of them when one failed."""
    error = ""
    try:
        if action is not None:
            action()
    except CheckpointException as failure:  # one for each rank; all of them say the same here
        rank, (cause, _) = next(iter(failure.failures.items()))
        error = f"{what}: rank {rank}: {type(cause).__name__} {cause}"
    except (OSError, RuntimeError, ValueError, CheckpointError) as failure:
        error = f"{what}: {failure}"
    errors: list[Any] = [error] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(errors, error, group=group)
    for said in errors:
        if said:
            raise CheckpointError(said.splitlines()[0], "checkpoints from before are intact")


def sync(file: Path) -> None:
    """Make a file's bytes durable."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
