"""Checkpoint directories: written aside, complete or not there at all.

    root/step_000004/actor.pt ... flow.pt COMPLETE

All files are written and synced in a directory of another name, the marker COMPLETE (with every file's size) last; then
one rename makes the checkpoint appear. Older ones are removed only after that. A process killed at any point leaves the
checkpoints that were complete before, and rubbish that the next save removes. One process writes to a root at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from docklands.errors import CheckpointError

MARKER = "COMPLETE"
FORMAT = 1
_STEP = re.compile(r"step_(\d+)")
_WRITING, _REPLACED = ".writing-", ".replaced-"


def save(root: Path | str, step: int, states: Mapping[str, Mapping[str, Any]], keep: int = 2) -> Path:
    """Write one file per state and return the checkpoint's directory; afterwards `keep` complete ones remain.

    States hold tensors, numbers, strings, None and containers of them. A checkpoint of the same step is replaced.
    CheckpointError when it cannot be written (disk full, no permission): what was there before is untouched.
    """
    root = Path(root)
    path = root / f"step_{step:06d}"
    writing = root / f"{_WRITING}{path.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        recover(root)
        sweep(root)
        writing.mkdir()
        sizes = {f"{name}.pt": write(writing / f"{name}.pt", state) for name, state in states.items()}
        write_marker(writing / MARKER, {"format": FORMAT, "step": step, "files": sizes})
        sync_directory(writing)
        put_in_place(writing, path)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        recover(root)
        raise CheckpointError(
            f"checkpoint of step {step} was not written to {root}: {error.strerror or error}",
            "free space or set run.dir to another disk; checkpoints from before are intact",
        ) from error
    prune(root, keep, path)
    return path


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
    path = Path(path)
    try:
        files = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def step_of(path: Path | str) -> int:
    """The step that a checkpoint directory is named after."""
    match = _STEP.fullmatch(original_of(Path(path)).name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint directory", "they are called step_000004")
    return int(match[1])


def load(path: Path | str, name: str) -> dict[str, Any]:
    """One state of a complete checkpoint, on the CPU. Only data is read, never code.

    CheckpointError when the checkpoint is not complete, lacks the state, or cannot be read.
    """
    path = Path(path)
    if not is_complete(path):
        raise CheckpointError(f"checkpoint {path} is not complete", "it was cut off while it was written; use another")
    file = path / f"{name}.pt"
    if not file.is_file():
        have = ", ".join(sorted(p.stem for p in path.glob("*.pt")))
        raise CheckpointError(f"checkpoint {path} has no state {name!r}", f"it has: {have or 'none'}")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file; all mean the same here
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"cannot read {file}: {first}", "the file is damaged; use another checkpoint") from error


def write(path: Path, state: Mapping[str, Any]) -> int:
    """Write and sync one state; its size in bytes."""
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
        return file.tell()


class _Sink:
    """A file that remembers why a write failed, and swallows everything after it."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        if self.error is None:
            try:
                self.file.flush()
            except OSError as error:
                self.error = error


def write_marker(path: Path, content: dict[str, Any]) -> None:
    """The last file of a checkpoint."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def put_in_place(writing: Path, path: Path) -> None:
    """Give the written directory its name. One of that name steps aside first, and comes back if we die in between."""
    aside = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():
        os.rename(path, aside)
    os.rename(writing, path)
    sync_directory(path.parent)
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


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
