"""Checkpoint directories: written aside, complete or not there at all.

    root/step_000004/actor.pt ... flow.pt COMPLETE

All files are written and synced in a directory of another name, the marker COMPLETE (with every file's size and
checksum) last; then one rename makes the checkpoint appear. Older ones are removed only after that. A process killed at
any point leaves the checkpoints that were complete before, and rubbish that the next save removes. One process writes
to a root at a time. A file whose bytes have changed since (a bad disk, a torn copy) is refused when it is read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from docklands.errors import CheckpointError

MARKER = "COMPLETE"
FORMAT = 2
REMOVE = "remove this checkpoint: the one before it is used then"
_STEP = re.compile(r"step_(\d+)")
_WRITING, _REPLACED = ".writing-", ".replaced-"
_BLOCK = 1 << 20  # bytes read at a time

Stamp = dict[str, int]
"""What the marker holds of a file: {"size": bytes, "crc32": of all of them}."""


@dataclass(frozen=True)
class Begun:
    """A checkpoint on its way: `writing` becomes `path` once it is complete; `stamps` of the files that are in it."""

    path: Path
    keep: int
    stamps: dict[str, Stamp]

    @property
    def writing(self) -> Path:
        return writing_of(self.path)


def save(
    root: Path | str, step: int, states: Mapping[str, Mapping[str, Any]], keep: int = 2, files: Sequence[Path] = ()
) -> Path:
    """Write one file per state and return the checkpoint's directory; afterwards `keep` complete ones remain.

    `files`, written and synced by others, are moved into it.

    States hold tensors, numbers, strings, None and containers of them. A checkpoint of the same step is replaced.
    CheckpointError when it cannot be written (disk full, no permission): what was there before is untouched.
    """
    return finish(begin(root, step, states, keep, files), {})


def begin(
    root: Path | str, step: int, states: Mapping[str, Mapping[str, Any]], keep: int = 2, files: Sequence[Path] = ()
) -> Begun:
    """As `save`, but for the end: others write files into its directory `writing` before `finish`."""
    path = Path(root) / f"step_{step:06d}"
    writing = writing_of(path)
    with cleared(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path.parent)
        sweep(path.parent)
        writing.mkdir()
        stamps = {f"{name}.pt": write(writing / f"{name}.pt", state) for name, state in states.items()}
        stamps |= {file.name: stamp(file) for file in files}
        for file in files:
            shutil.move(file, writing / file.name)
    return Begun(path, keep, stamps)


def finish(begun: Begun, stamps: Mapping[str, Stamp]) -> Path:
    """The marker, the name, and the end of older ones. `stamps`: of the files that were written since `begin`."""
    path = begun.path
    with cleared(path):
        write_marker(begun.writing / MARKER, step_of(path), {**begun.stamps, **stamps})
        sync(begun.writing)
        put_in_place(begun.writing, path)
    prune(path.parent, begun.keep, path)
    return path


@contextmanager
def cleared(path: Path) -> Iterator[None]:
    """A disk that refuses is a CheckpointError, and leaves nothing of this checkpoint behind."""
    try:
        yield
    except OSError as error:
        abandon(path)
        raise CheckpointError(
            f"checkpoint of step {step_of(path)} was not written to {path.parent}: {error.strerror or error}",
            "free space or set run.dir to another disk; checkpoints from before are intact",
        ) from error


def abandon(path: Path) -> None:
    """Remove what there is of a checkpoint that is not complete."""
    shutil.rmtree(writing_of(path), ignore_errors=True)
    recover(path.parent)


def writing_of(path: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return path.with_name(f"{_WRITING}{path.name}")


def latest(root: Path | str) -> Path | None:
    """The complete checkpoint of the highest step; None when there is none."""
    found = complete(root)
    return found[-1] if found else None


def complete(root: Path | str) -> list[Path]:
    """All complete checkpoints, by step."""
    root = Path(root)
    if not root.is_dir():
        return []
    stepped_aside = [path for path in leftovers(root, _REPLACED) if not original_of(path).exists()]
    named = [path for path in root.iterdir() if _STEP.fullmatch(path.name)]
    return sorted((path for path in [*named, *stepped_aside] if is_complete(path)), key=step_of)


def is_complete(path: Path | str) -> bool:
    """Whether the marker is there and every file that it lists has the size it lists."""
    try:
        return all((Path(path) / name).stat().st_size == found["size"] for name, found in read_stamps(path).items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_stamps(path: Path | str) -> dict[str, Stamp]:
    """The stamps of a checkpoint's files, as its marker lists them. Raises whatever a damaged marker raises."""
    return json.loads((Path(path) / MARKER).read_text(encoding="utf-8"))["files"]


def stamp(file: Path) -> Stamp:
    """Size and checksum of a file as it is now. Raises OSError."""
    size = crc = 0
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return {"size": size, "crc32": crc}


def verify(path: Path | str, names: Iterable[str] | None = None) -> None:
    """CheckpointError unless these files (None: all) of a complete checkpoint hold the bytes that were written."""
    path = Path(path)
    if not is_complete(path):
        raise CheckpointError(f"checkpoint {path} is not complete", "it was cut off while it was written; use another")
    stamps = read_stamps(path)
    for name in stamps if names is None else names:
        try:
            intact = stamp(path / name) == stamps[name]
        except OSError as error:
            raise CheckpointError(f"cannot read {path / name}: {error.strerror or error}", REMOVE) from error
        if not intact:
            raise CheckpointError(f"{path / name} is damaged: its bytes are not those that were written", REMOVE)


def step_of(path: Path | str) -> int:
    """The step that a checkpoint directory is named after."""
    match = _STEP.fullmatch(original_of(Path(path)).name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint directory", "they are called step_000004")
    return int(match[1])


def load(path: Path | str, name: str, mapped: bool = False) -> dict[str, Any]:
    """One state of a complete checkpoint, on the CPU. Only data is read, never code.

    mapped  its tensors are of the file as it lies there: read where they are used, and not verified

    CheckpointError when the checkpoint is not complete, lacks the state, is damaged, or cannot be read.
    """
    path = Path(path)
    file = path / f"{name}.pt"
    if is_complete(path) and file.name not in read_stamps(path):
        have = ", ".join(sorted(p.stem for p in path.glob("*.pt")))
        raise CheckpointError(f"checkpoint {path} has no state {name!r}", f"it has: {have or 'none'}")
    if not mapped:
        verify(path, [file.name])
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds for a damaged file; all mean the same here
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"cannot read {file}: {first}", REMOVE) from error


def write(path: Path, state: Mapping[str, Any]) -> Stamp:
    """Write and sync one state."""
    with open(path, "wb") as file:
        sink = _Sink(file)
        try:
            torch.save(dict(state), sink)  # type: ignore[arg-type]
        except RuntimeError:
            if sink.error is None:
                raise
        if sink.error is not None:  # torch's writer reports a failed write in its own words, or not at all
            raise sink.error
        file.flush()
        os.fsync(file.fileno())
        return {"size": sink.size, "crc32": sink.crc}


class _Sink:
    """A file that remembers why a write failed, and swallows everything after it; sums up what it was given."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: OSError | None = None
        self.size = self.crc = 0

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        size = memoryview(data).nbytes
        self.size, self.crc = self.size + size, zlib.crc32(data, self.crc)
        return size

    def flush(self) -> None:
        if self.error is None:
            try:
                self.file.flush()
            except OSError as error:
                self.error = error


def write_marker(path: Path, step: int, stamps: Mapping[str, Stamp]) -> None:
    """The last file of a checkpoint."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "step": step, "files": dict(stamps)}, file)
        file.flush()
        os.fsync(file.fileno())


def put_in_place(writing: Path, path: Path) -> None:
    """Give the written directory its name. One of that name steps aside first, and comes back if we die in between."""
    aside = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():
        os.rename(path, aside)
    os.rename(writing, path)
    sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover(root: Path) -> None:
    """Undo a replacement that was cut off between its two renames."""
    for aside in leftovers(root, _REPLACED):
        if not original_of(aside).exists():
            os.rename(aside, original_of(aside))


def original_of(path: Path) -> Path:
    """The name that a checkpoint had before it stepped aside."""
    return path.with_name(path.name.removeprefix(_REPLACED))


def sweep(root: Path) -> None:
    """Remove what interrupted saves left behind."""
    for prefix in (_WRITING, _REPLACED):
        for path in leftovers(root, prefix):
            shutil.rmtree(path, ignore_errors=True)


def leftovers(root: Path, prefix: str) -> Iterator[Path]:
    """Directories of interrupted saves."""
    return (path for path in sorted(root.iterdir() if root.is_dir() else ()) if path.name.startswith(prefix))


def prune(root: Path, keep: int, newest: Path) -> None:
    """Remove all but the last `keep` complete checkpoints (never `newest`), and those that are not complete."""
    whole = complete(root)
    kept = {newest, *(whole[-keep:] if keep > 0 else whole)}
    for path in list(root.iterdir()):
        if _STEP.fullmatch(path.name) and path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
