"""Checkpoints that every rank writes its part of, and that any layout reads: torch's distributed checkpoint underneath.

    root/step_000004/engines/__0_0.distcp __1_0.distcp ... .metadata   counts.json   flow.pt ...   COMPLETE

What lies on disk are regions of whole parameters (and of their moments), each written by one of the ranks that hold it,
so the layout that wrote leaves no trace. `checkpoint.begin` has made the directory; it appears by one rename, as there.
What one process wrote (`<role>.pt`, whole tensors) is read here too: each rank maps the file and copies its regions.
Torch keeps its index as a pickle: read checkpoints of people you trust only.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from docklands.errors import CheckpointError
from docklands.obs.spans import span
from docklands.train import checkpoint
from docklands.train.engine import TrainEngine
from docklands.train.sharded_state import Regions, counts_of, names_of, put_back, regions_of

FOLDER, COUNTS = "engines", "counts.json"

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # torch's, when one rank writes alone

Group = dist.ProcessGroup | None
Engines = Mapping[str, TrainEngine]
"""By role. All are of one mesh, or of this process alone."""


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


# --- writing ------------------------------------------------------------------------------------------------------


class _Stream(io.BufferedWriter):
    """A file that remembers why a write failed: torch tells that in words of its own."""

    why: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.why = self.why or error
            raise


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Stream(io.FileIO(path, "w")) as stream:
            try:
                yield stream
            except RuntimeError:
                if stream.why is not None:
                    raise stream.why from None
                raise


@dataclass(frozen=True)
class Saving:
    """This rank's part of a checkpoint on its way to the disk. `group`: the ranks that write it; None: this one."""

    begun: checkpoint.Begun
    state: dict[str, Regions]
    counts: dict[str, Any]
    group: Group

    @staticmethod
    def of(begun: checkpoint.Begun, engines: Engines, group: Group, copy: bool = False) -> Saving:
        """copy  of the tensors: training may go on while `write` runs in a thread, `group` being for it alone"""
        state: dict[str, Regions] = {}
        for role, engine in engines.items():
            state |= regions_of(engine, role, copy)
        return Saving(begun, state, {role: counts_of(engine) for role, engine in engines.items()}, group)

    @property
    def bytes(self) -> int:
        """That this rank holds; of what several hold, one writes each region."""
        return sum(regions.local.nbytes for regions in self.state.values())

    def write(self) -> Path:
        """All of it, all ranks together; -> its directory. CheckpointError on every rank when that cannot be done: what
        was there before is untouched, and nothing of this one is left.
        """
        begun, rank = self.begun, 0 if self.group is None else dist.get_rank(self.group)
        step = checkpoint.step_of(begun.path)
        try:
            with span("checkpoint/write", step=step, bytes=self.bytes):
                together(self.group, self._tensors, f"{begun.path} cannot be written")
                stamps: dict[str, checkpoint.Stamp] = {}
                for mine in together(self.group, lambda: self._stamps(rank), f"{begun.path} cannot be read back"):
                    stamps |= mine
                finish = (lambda: checkpoint.finish(begun, stamps)) if rank == 0 else None
                together(self.group, finish, f"{begun.path} cannot be finished")
        except CheckpointError:
            if rank == 0:
                checkpoint.abandon(begun.path)
            raise
        return begun.path

    def _tensors(self) -> None:
        writer = FileSystemWriter(self.begun.writing / FOLDER, single_file_per_rank=True, sync_files=True)
        writer.fs = _Files()
        alone = self.group is None
        dcp_save(self.state, storage_writer=writer, planner=_Save(), process_group=self.group, no_dist=alone)

    def _stamps(self, rank: int) -> dict[str, checkpoint.Stamp]:
        """Of the files that this rank has written."""
        folder = self.begun.writing
        files = sorted((folder / FOLDER).glob(f"__{rank}_*"))
        if rank == 0:
            (folder / COUNTS).write_text(json.dumps(self.counts), encoding="utf-8")
            checkpoint.sync(folder / COUNTS)
            checkpoint.sync(folder / FOLDER)
            files += [folder / COUNTS, folder / FOLDER / ".metadata"]
        return {str(file.relative_to(folder)): checkpoint.stamp(file) for file in files}


# --- reading ------------------------------------------------------------------------------------------------------

Found = tuple[dict[str, Any], Callable[[], None]]
"""Of one role, and checked: what is not a tensor, and what reads the tensors."""


def roles_in(path: Path) -> set[str]:
    """Whose state a complete checkpoint holds."""
    stamps = checkpoint.read_stamps(path)
    shards = set(json.loads((path / COUNTS).read_text(encoding="utf-8"))) if COUNTS in stamps else set()
    return shards | {name.removesuffix(".pt") for name in stamps if name.endswith(".pt")} - {"flow"}


def is_whole(path: Path, role: str) -> bool:
    """Whether one process wrote it, as one file."""
    return f"{role}.pt" in checkpoint.read_stamps(path)


def files_of(path: Path, role: str) -> list[str]:
    """Names, in a checkpoint, of the files that hold a role's state. CheckpointError when there are none."""
    if not checkpoint.is_complete(path):
        raise CheckpointError(f"checkpoint {path} is not complete", "it was cut off while it was written; use another")
    if role not in roles_in(path):
        have = ", ".join(sorted(roles_in(path)))
        raise CheckpointError(f"checkpoint {path} has no state {role!r}", f"it has: {have or 'none'}")
    if is_whole(path, role):
        return [f"{role}.pt"]
    return [name for name in checkpoint.read_stamps(path) if name == COUNTS or name.startswith(f"{FOLDER}/")]


def load(path: Path | str, engines: Engines, group: Group = None) -> None:
    """Take weights, moments and counts from a checkpoint of any layout, all ranks of `group` together.

    CheckpointError, on every rank alike; no role is changed when a part of one is missing or of another model.
    """
    path = Path(path)
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    (files, *_) = together(group, lambda: sorted({f for role in engines for f in files_of(path, role)}), str(path))
    mine = files[rank::ranks]  # each rank looks at its share of the files
    together(group, lambda: checkpoint.verify(path, mine), f"{path} cannot be loaded")
    states = {role: regions_of(engine, role) for role, engine in engines.items()}
    found: dict[str, Found] = {}

    def look() -> None:
        for role, engine in engines.items():
            find = _whole if is_whole(path, role) else _shards
            found[role] = find(path, role, engine, states[role])

    together(group, look, f"{path} cannot be loaded")
    for role, engine in engines.items():
        counts, read = found[role]
        together(group, read, f"{path} cannot be loaded")
        put_back(engine, role, states[role])
        engine.version = int(counts["version"])
        if engine.optimizer is not None:
            engine.notes = engine.optimizer.load_counts(counts["optimizer"])
            engine.optimizer.round_copies()
            engine.optimizer.clear()
            engine.routers.forget()


def _shards(path: Path, role: str, engine: TrainEngine, state: dict[str, Regions]) -> Found:
    """Every rank reads what it needs."""
    counts = json.loads((path / COUNTS).read_text(encoding="utf-8"))[role]
    reader = FileSystemReader(path / FOLDER)
    index = reader.read_metadata()
    saved = index.state_dict_metadata
    check(path, role, engine, {name: tuple(found.size) for name, found in saved.items()}, state)  # type: ignore[union-attr]
    for name in state:
        held = sum(math.prod(chunk.sizes) for chunk in saved[name].chunks)  # type: ignore[union-attr]
        if held != math.prod(state[name].shape):
            raise CheckpointError(f"checkpoint {path}: {name} has {held} of {math.prod(state[name].shape)} elements")
    planner = _Load()
    planner.set_up_planner(state, index, True)
    reader.set_up_storage_reader(index, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    return counts, lambda: reader.read_data(plan, planner).wait()


def _whole(path: Path, role: str, engine: TrainEngine, state: dict[str, Regions]) -> Found:
    """The same, of what one process wrote."""
    found = checkpoint.load(path, role, mapped=True)
    optimizer = found.pop("optimizer", {})
    kinds = {"weights": found["model"], **{kind: optimizer.pop(kind, {}) for kind in ("exp_avg", "exp_avg_sq")}}
    saved = {f"{role}/{kind}/{name}": tensor for kind, named in kinds.items() for name, tensor in named.items()}
    check(path, role, engine, {name: tuple(tensor.shape) for name, tensor in saved.items()}, state)

    def read() -> None:
        for name, regions in state.items():
            regions.take(saved[name])

    return {"version": found.get("version", 0), "optimizer": optimizer}, read


def check(
    path: Path, role: str, engine: TrainEngine, saved: Mapping[str, tuple[int, ...]], state: Mapping[str, Regions]
) -> None:
    """CheckpointError when a tensor is missing, too many, or of another shape. `saved`: shapes."""
    if engine.optimizer is not None and not any(name.startswith(f"{role}/exp_avg/") for name in saved):
        raise CheckpointError("the checkpoint has no optimizer state", "it cannot be resumed from")
    for name, regions in state.items():
        if name not in saved:
            raise CheckpointError(
                f"checkpoint {path} lacks {name}", "it is of another model, or has no optimizer state"
            )
        if saved[name] != tuple(regions.shape):
            raise CheckpointError(
                f"checkpoint {path}: {name} has shape {list(saved[name])}, needed {list(regions.shape)}",
                "the checkpoint is of another model",
            )
    known = {f"{role}/weights/{name}" for name in names_of(engine)}
    if more := sorted(name for name in saved if name.startswith(f"{role}/weights/") and name not in known):
        raise CheckpointError(
            f"checkpoint {path} has {len(more)} unknown weights (first: {more[0]})", "it is of another model"
        )


def weights(path: Path | str, role: str = "actor") -> Iterator[tuple[str, Tensor]]:
    """(name, whole fp32 tensor) of a role's weights, one at a time: beside it, at most one saved region is held.

    CheckpointError when the checkpoint is not complete, lacks the role, or is damaged.
    """
    path = Path(path)
    checkpoint.verify(path, files_of(path, role))
    if is_whole(path, role):
        yield from checkpoint.load(path, role, mapped=True)["model"].items()
        return
    reader = FileSystemReader(path / FOLDER)
    index = reader.read_metadata()
    for key, saved in index.state_dict_metadata.items():
        if not key.startswith(f"{role}/weights/"):
            continue
        whole = None
        for chunk in saved.chunks:  # type: ignore[union-attr]
            part = _region(reader, index.storage_data[MetadataIndex(key, chunk.offsets)])  # type: ignore[index]
            if chunk.sizes == saved.size:  # type: ignore[union-attr]
                whole = part
            else:
                whole = part.new_empty(saved.size) if whole is None else whole  # type: ignore[union-attr]
                whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes))] = part
            del part  # before the next is read
        if whole is not None:
            yield key.removeprefix(f"{role}/weights/"), whole


def _region(reader: FileSystemReader, where: Any) -> Tensor:
    """One saved region, read from its place in its file."""
    with reader.fs.create_stream(reader.fs.concat_path(reader.path, where.relative_path), "rb") as file:
        return torch.load(reader._slice_file(file, where), map_location="cpu", weights_only=True)


def together(group: Group, action: Callable[[], Any] | None, what: str) -> list[Any]:
    """Do something, then wait for all ranks; -> what it gave on each. CheckpointError on all when one has failed."""
    error, found, hint = "", None, "checkpoints from before are intact"
    try:
        if action is not None:
            found = action()
    except CheckpointException as failure:  # one for each rank; all of them say the same here
        rank, (cause, _) = next(iter(failure.failures.items()))
        error = f"{what}: rank {rank}: {type(cause).__name__} {cause}"
    except CheckpointError as failure:
        error, hint = failure.message, failure.hint
    except (OSError, RuntimeError, ValueError) as failure:
        error = f"{what}: {failure}"
    answers: list[Any] = [(error, hint, found)] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(answers, (error, hint, found), group=group)
    for said, why, _ in answers:
        if said:
            raise CheckpointError(said.splitlines()[0], why)
    return [given for _, _, given in answers]
