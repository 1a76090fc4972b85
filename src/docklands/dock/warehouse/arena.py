"""Shared memory on one node: a file under /dev/shm (or on disk, for spilled rows) that one process owns and others map.

The protocol, chosen for one copy of a value on the way in, none or one on the way out, and no leak after any crash:
- The *warehouse* owns the arena, so shared bytes live exactly as long as the process that answers for them. (An arena
  per producer would save nothing, and a dead producer's rows would hang on a file that nobody owns.)
- A producer leases a *slab*, some MiB, in one call, and fills it with many puts, each of them one message of a few
  hundred bytes: (generation, offset, nbytes) instead of values. A reader gets the same references and maps the file.
- A slab is one extent of blocks. It is free again when its producer has closed it (or died) and its last row has been
  freed. The extent's *generation*, a number that is never used twice, stands in a table at the start of the file, once
  per block, and is wiped before the room can be given away. A reader looks there before and after it has used bytes:
  the same generation both times means that nobody can have written over them. (This needs loads in program order, as on
  x86; on Arm it has not been tested, and there is no barrier between the two looks.)
- Readers map privately (copy on write): they cannot change what others see.
- Room is reserved (posix_fallocate) before it is given away, so a full /dev/shm is an answer, not a SIGBUS.
- The owner holds a lock (flock) on the file, which the kernel drops with the process, however that dies: `sweep`
  removes the files whose lock is free. The name carries run, pid and start time for people; the lock decides, also
  between containers that share /dev/shm but not process ids.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from docklands.errors import DockError, RowGone, WireError

SHM = Path("/dev/shm")
PREFIX = "docklands-"
HEAD = struct.Struct("<8s16sQQ")
MAGIC = b"DKARENA1"
TABLE = 4096
"""Where the table of generations begins."""
ALIGN = 64
YOUNG_S = 60.0
"""A file that is empty and younger than this is being made, not left behind."""


@dataclass(slots=True)
class Extent:
    """Blocks given away under one generation. offset and nbytes are of the file."""

    generation: int
    offset: int
    nbytes: int


class Arena:
    """The owner's side.

    nbytes  bytes of data at most; they are taken from the file system only as they are first used
    """

    def __init__(self, run: str, nbytes: int, folder: Path = SHM, block: int = 1 << 20) -> None:
        blocks = max(1, -(-nbytes // block))
        self.block = block
        self.nonce = secrets.token_bytes(16)
        self.path = folder / f"{PREFIX}{run}-{os.getpid()}-{start_ticks(os.getpid())}-{secrets.token_hex(4)}"
        self._data = -(-(TABLE + 8 * blocks) // TABLE) * TABLE
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.ftruncate(self._fd, self._data + blocks * block)
        os.posix_fallocate(self._fd, 0, self._data)
        self._map = mmap.mmap(self._fd, 0)
        HEAD.pack_into(self._map, 0, MAGIC, self.nonce, block, self._data)
        self._table = np.frombuffer(self._map, np.uint64, blocks, TABLE)
        self._reserved = np.zeros(blocks, bool)
        self._used = np.zeros(blocks, bool)
        self._last = secrets.randbits(40) << 20
        """The last generation. It begins anywhere: an old reference can never fit a new arena."""

    @property
    def capacity(self) -> int:
        return len(self._used) * self.block

    @property
    def used(self) -> int:
        """Bytes of extents that are given away."""
        return int(self._used.sum()) * self.block

    def lease(self, nbytes: int) -> Extent | None:
        """An extent of at least `nbytes`; None when there is no room in a row, here or in the file system."""
        need = max(1, -(-nbytes // self.block))
        first = first_run(self._used, need)
        if first is None:
            return None
        rows = slice(first, first + need)
        fresh = np.nonzero(~self._reserved[rows])[0] + first
        try:
            for block in fresh.tolist():
                os.posix_fallocate(self._fd, self._data + block * self.block, self.block)
                self._reserved[block] = True
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise
            return None
        self._last += 1
        self._used[rows] = True
        self._table[rows] = self._last
        return Extent(self._last, self._data + first * self.block, need * self.block)

    def release(self, extent: Extent) -> None:
        """Wipe the generation, then let the room be given away again."""
        first = (extent.offset - self._data) // self.block
        rows = slice(first, first + extent.nbytes // self.block)
        self._table[rows] = 0
        self._used[rows] = False

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of the file as uint8 [nbytes], without a copy. The caller has checked the range."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=nbytes)

    def close(self) -> None:
        """Unlink the file. What others have mapped stays readable to them until they let go of it."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class Mapped:
    """Another process's arena, to read. Raises WireError when the file is not the one meant."""

    def __init__(self, path: str, nonce: bytes) -> None:
        if not Path(path).name.startswith(PREFIX):
            raise WireError(f"{path} is not an arena of the dock")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise WireError(f"arena {path}: {error.strerror}", "the warehouse is on another node") from None
        try:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            self._map = mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self.nbytes = len(self._map)
        except (OSError, ValueError) as error:
            raise WireError(f"arena {path}: {error}") from None
        finally:
            os.close(fd)
        if self.nbytes < TABLE:
            raise WireError(f"{path} is not an arena of the dock")
        magic, found, self._block, self._data = HEAD.unpack_from(self._map)
        if magic != MAGIC or found != nonce or self._block <= 0 or not TABLE < self._data <= self.nbytes:
            raise WireError(f"{path} is not the arena that the warehouse has named")
        self.path, self.nonce = path, nonce
        self._blocks = (self.nbytes - self._data) // self._block
        self._table = memoryview(self._map)[TABLE : TABLE + 8 * self._blocks].cast("Q")

    def fresh(self, generation: int, offset: int) -> bool:
        """The bytes at `offset` still belong to that generation."""
        block = (offset - self._data) // self._block
        return generation > 0 and 0 <= block < self._blocks and self._table[block] == generation

    def view(self, generation: int, offset: int, nbytes: int) -> Tensor:
        """Bytes as uint8 [nbytes], without a copy; look with `check` after using them.

        Raises RowGone when the room belongs to others by now, WireError when the range is not in the arena.
        """
        if not (self._data <= offset and 0 < nbytes <= self.nbytes - offset):
            raise WireError(f"malformed message: bytes {offset}+{nbytes} of an arena of {self.nbytes}")
        self.check(generation, offset)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=nbytes)

    def check(self, generation: int, offset: int) -> None:
        """RowGone unless the bytes are still those of that generation."""
        if not self.fresh(generation, offset):
            raise RowGone(
                "rows were freed while they were read from shared memory",
                "they were retired or dropped, or the reader's lease had expired",
            )


def writable(path: str) -> mmap.mmap:
    """All of an arena's file, to write the slabs that its owner gives: pages that were used before are at hand."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


class SlabWriter:
    """A producer's slab: bytes go in one after the other, each once. file: a path, or what `writable` has mapped."""

    def __init__(self, file: str | mmap.mmap, extent: Extent) -> None:
        self._map = writable(file) if isinstance(file, str) else file
        self._at, self._shift = 0, extent.offset
        self._room = np.frombuffer(self._map, np.uint8, extent.nbytes, extent.offset)
        self.generation = extent.generation

    @property
    def left(self) -> int:
        """Bytes that still fit, in one piece."""
        return len(self._room) - self._at

    def write(self, *pieces: Tensor) -> tuple[int, int, int]:
        """Copy uint8 [n] each in, end to end; their home: (arena 0, generation, offset in the file).

        The caller has checked `left`.
        """
        start = stop = self._at
        for values in pieces:
            first, stop = stop, stop + values.numel()
            if stop > len(self._room):
                raise DockError(f"{stop - start} bytes do not fit into the {self.left} bytes that are left of a slab")
            self._room[first:stop] = values.numpy()
        self._at = min(-(-stop // ALIGN) * ALIGN, len(self._room))
        return 0, self.generation, self._shift + start


def first_run(used: np.ndarray, need: int) -> int | None:
    """Start of the first `need` free blocks in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[1], used.astype(np.int8), [1]])))
    starts, stops = edges[::2], edges[1::2]
    fits = np.flatnonzero(stops - starts >= need)
    return int(starts[fits[0]]) if len(fits) else None


def start_ticks(pid: int) -> int:
    """When a process was started, in clock ticks after boot; 0 when there is no such process.

    With the pid it names a process for good: a pid that was given away again has another start.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    state, *fields = text.rpartition(")")[2].split()
    return 0 if state in ("Z", "X") else int(fields[18])


def sweep(folder: Path = SHM) -> list[str]:
    """Remove the arenas in `folder` whose owner is dead; their names."""
    removed = []
    for path in folder.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(fd)
            if found.st_size or time.time() - found.st_mtime > YOUNG_S:
                path.unlink(missing_ok=True)
                removed.append(path.name)
        except OSError:  # its owner lives, or it is another user's
            pass
        finally:
            os.close(fd)
    return removed
