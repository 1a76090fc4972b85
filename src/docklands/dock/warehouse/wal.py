"""An append-only log of a warehouse's changes, and its snapshots: one format for both.

A record is one wire message (wire.py) whose values are all inline:
    head    magic, number of frames, bytes of all frames, crc32 of sizes and frames
    sizes   uint64 per frame
    frames  the bytes
A process that dies while it appends leaves a torn record at the end: reading stops before it, and the log is cut there
when it is opened again. A torn or changed record with good ones after it is damage, not a crash: an error.

A record is with the kernel before its put is acknowledged, so it survives the death of the process. What a crash of the
machine or a power cut leaves is a matter of policy:
    never     what the kernel has written by itself: the last half minute may be lost
    interval  all but the last second: one fsync a second at most, also after the last record
    always    everything that was acknowledged: an fsync a turn, for all puts of that turn (group commit)
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from docklands.errors import CheckpointError, DockError

Fsync = Literal["never", "interval", "always"]
FSYNC_S = 1.0
"""Age in seconds at which a record is brought to disk under `interval`."""
HEAD = struct.Struct("<4sIQI")
MAGIC = b"DKR1"
FRAMES, RECORD = 1 << 17, 1 << 34
VECTORS = 512
"""Buffers of one writev; the kernel allows 1024."""


class Log:
    """A log that is open for appending. Raises DockError when the file cannot be written.

    nbytes  its size
    syncs   how often it was brought to disk
    """

    def __init__(self, path: Path, fsync: Fsync = "never") -> None:
        self.path, self.fsync, self.syncs = path, fsync, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise DockError(f"log {path}: {error.strerror}", "choose another folder for the logs") from None
        self.nbytes = self._file.tell()
        self._since = math.inf

    def append(self, frames: Sequence[Any]) -> None:
        """Hand one record to the kernel."""
        try:
            self.nbytes += write_parts(self._file.fileno(), record(frames))
        except OSError as error:  # nothing is buffered: what was written of it is in the file, and cut off
            os.ftruncate(self._file.fileno(), self.nbytes)  # no torn record with good ones after it
            raise DockError(f"log {self.path}: {error.strerror}", "make room on its disk") from None
        self._since = min(self._since, time.monotonic())

    @property
    def due_s(self) -> float | None:
        """Seconds until `sync` has something to do; None: nothing."""
        if self.fsync == "never" or self._since == math.inf:
            return None
        return max(0.0, self._since + (FSYNC_S if self.fsync == "interval" else 0.0) - time.monotonic())

    def sync(self, now: bool = False) -> None:
        """Bring to disk what the policy wants there by now. now: whatever has been appended, unless it is `never`."""
        due = self.due_s
        if due is not None and (now or due <= 0.0):
            os.fsync(self._file.fileno())
            self.syncs += 1
            self._since = math.inf

    def replace(self, records: Iterable[Sequence[Any]]) -> None:
        """Compaction: put these records in place of the whole log, at once."""
        write_file(self.path, records)
        self._file.close()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self.nbytes = self._file.tell()
        self._since = math.inf

    def close(self) -> None:
        self.sync(now=True)
        self._file.close()


def record(frames: Sequence[Any]) -> list[Any]:
    """The parts of a record, to be written one after the other."""
    views = [memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(b"") for frame in frames]
    sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    crc = zlib.crc32(sizes)
    for view in views:
        crc = zlib.crc32(view, crc)
    return [HEAD.pack(MAGIC, len(views), sum(view.nbytes for view in views), crc), sizes, *views]


def write_parts(file: int, parts: Sequence[Any]) -> int:
    """All of the parts to a file descriptor, in one system call where the kernel takes them; their bytes."""
    left = [memoryview(part) for part in parts if len(part)]
    nbytes = sum(map(len, left))
    while left:
        written = os.writev(file, left[:VECTORS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return nbytes


def write_file(path: Path, records: Iterable[Sequence[Any]]) -> int:
    """A file of records, complete or not there at all; its size. Raises CheckpointError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb", buffering=1 << 16) as file:
            for frames in records:
                for part in record(frames):
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        os.replace(new, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: {error.strerror}", "make room, or choose another folder") from None
    return nbytes


def read(path: Path, mend: bool = False) -> Iterator[list[bytearray]]:
    """The records of a file, in order. Raises CheckpointError for damage.

    mend  a torn record at the end is what a crash leaves: cut it off. Without it that too is damage.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            good = 0
            while good < size:
                frames = _next(file, size - good)
                if frames is None:
                    break
                good = file.tell()
                yield frames
            if good < size and (not mend or _another(file, good)):
                raise CheckpointError(f"{path} is damaged at byte {good}", "use an older snapshot")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if good < size:
        os.truncate(path, good)


def _next(file: Any, left: int) -> list[bytearray] | None:
    """The record at the file's position; None when it is not whole."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    magic, count, nbytes, crc = HEAD.unpack(head)
    if magic != MAGIC or count > FRAMES or nbytes > RECORD or HEAD.size + 8 * count + nbytes > left:
        return None
    sizes = file.read(8 * count)
    found = zlib.crc32(sizes)
    frames = []
    lengths = struct.unpack(f"<{count}Q", sizes)
    if sum(lengths) != nbytes:
        return None
    for length in lengths:
        frame = bytearray(length)
        file.readinto(frame)
        found = zlib.crc32(frame, found)
        frames.append(frame)
    return frames if found == crc else None


def _another(file: Any, start: int) -> bool:
    """A whole record follows somewhere after a bad one. Inside of a torn one, whose rows may hold anything, is none."""
    file.seek(start)
    head = file.read(HEAD.size)
    first = start + 1
    if len(head) == HEAD.size:
        magic, count, nbytes, _ = HEAD.unpack(head)
        sizes = file.read(8 * count) if magic == MAGIC and count <= FRAMES else b""
        if len(sizes) == 8 * count and sizes and sum(struct.unpack(f"<{count}Q", sizes)) == nbytes:
            first = start + HEAD.size + 8 * count + nbytes  # head and sizes agree: its end is known
    file.seek(first)
    rest = file.read()
    at = rest.find(MAGIC)
    while at >= 0:
        file.seek(first + at)
        if _next(file, len(rest) - at) is not None:
            return True
        at = rest.find(MAGIC, at + 1)
    return False
