"""Which parts of a warehouse's arenas are whose: slabs that producers write, and extents that spilled chunks lie in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from docklands.dock.warehouse.arena import Arena, Extent, start_ticks
from docklands.dock.wire.format import Home, Part
from docklands.errors import WireError

MEMORY, DISK = 0, 1
SPILL_BLOCK = 1 << 16


@dataclass(slots=True)
class Slab:
    """An extent that one producer writes.

    live  chunks in it that are not freed
    """

    extent: Extent
    owner: bytes
    live: int = 0
    closed: bool = False


class Slabs:
    """The shared memory of a warehouse, and its spill file.

    memory_bytes, disk_bytes  sizes at most; 0: none
    """

    def __init__(self, run: str, memory_bytes: int, disk_bytes: int, spill_folder: str) -> None:
        self.arenas: list[Arena] = []
        if memory_bytes:
            self.arenas.append(Arena(run, memory_bytes))
        if memory_bytes and disk_bytes:
            self.arenas.append(Arena(run, disk_bytes, Path(spill_folder), SPILL_BLOCK))
        self._slabs: dict[int, Slab] = {}
        self._spilled: dict[int, Extent] = {}
        self._pids: dict[bytes, tuple[int, int]] = {}

    @property
    def can_spill(self) -> bool:
        return len(self.arenas) > DISK

    @property
    def used(self) -> int:
        """Bytes of shared memory that are given away."""
        return self.arenas[MEMORY].used if self.arenas else 0

    def greet(self, owner: bytes, pid: int, start: int) -> None:
        """A client says hello. Slabs are for those only whose death can be seen from here."""
        if start and start_ticks(pid) == start:
            self._pids[owner] = (pid, start)

    def lease(self, owner: bytes, nbytes: int, done: list[int], spare: bool = False) -> Extent | None:
        """A slab for a producer that will not write to the slabs `done` any more. None: send the bytes instead.

        spare  it is not needed yet: None also where others might lack it
        """
        for generation in done:
            slab = self._slabs.get(generation)
            if slab is not None and slab.owner == owner:
                self._close(generation)
        if not self.arenas or owner not in self._pids:
            return None
        if spare and self.used + nbytes > self.arenas[MEMORY].capacity // 2:
            return None
        extent = self.arenas[MEMORY].lease(nbytes)
        if extent is None and self.bury():
            extent = self.arenas[MEMORY].lease(nbytes)
        if extent is not None:
            self._slabs[extent.generation] = Slab(extent, owner)
        return extent

    def bury(self) -> int:
        """Close the slabs of producers that have died; how many."""
        dead = {owner for owner, (pid, start) in self._pids.items() if start_ticks(pid) != start}
        for owner in dead:
            del self._pids[owner]
        open_ = [number for number, slab in self._slabs.items() if slab.owner in dead and not slab.closed]
        for generation in open_:
            self._close(generation)
        return len(open_)

    def finder(self, owner: bytes) -> Callable[[Home, int], Tensor] | None:
        """What gives a producer's bytes from its reference, or WireError; None where nothing is shared."""
        if not self.arenas:
            return None

        def find(home: Home, nbytes: int) -> Tensor:
            arena, generation, offset = home
            slab = self._slabs.get(generation)
            if arena != MEMORY or slab is None or slab.owner != owner or slab.closed:
                raise WireError(f"malformed message: a reference to slab {generation}, which is not the sender's")
            first = slab.extent.offset
            if not (first <= offset and offset + nbytes <= first + slab.extent.nbytes):
                raise WireError(f"malformed message: a reference to bytes {offset}+{nbytes} outside of its slab")
            return self.arenas[MEMORY].view(offset, nbytes)

        return find

    def hold(self, home: Home) -> None:
        """A chunk lies there now."""
        if home[0] == MEMORY:
            self._slabs[home[1]].live += 1

    def release(self, home: Home) -> None:
        """That chunk is freed."""
        if home[0] == DISK:
            self.arenas[DISK].release(self._spilled.pop(home[1]))
            return
        slab = self._slabs[home[1]]
        slab.live -= 1
        self._end(home[1])

    def to_disk(self, values: Tensor) -> tuple[Tensor, Home] | None:
        """Copy values into the spill file: (a view of them there, their home). None: it is full."""
        nbytes = values.numel() * values.element_size()
        arena = self.arenas[DISK]
        extent = arena.lease(nbytes)
        if extent is None:
            return None
        self._spilled[extent.generation] = extent
        view = arena.view(extent.offset, nbytes)
        there = view.view(values.dtype).reshape(values.shape)
        there.copy_(values)
        return there, (DISK, extent.generation, extent.offset)

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()

    def _close(self, generation: int) -> None:
        self._slabs[generation].closed = True
        self._end(generation)

    def _end(self, generation: int) -> None:
        """Give the room back if nobody writes there and nothing is left."""
        slab = self._slabs[generation]
        if slab.closed and slab.live <= 0:
            self.arenas[MEMORY].release(slab.extent)
            del self._slabs[generation]


def lease_bytes(nbytes: int, most: int) -> int:
    """Bytes of the slab asked for, checked."""
    if not 0 < nbytes <= most:
        raise WireError(f"a slab of {nbytes} bytes, at most {most} are allowed")
    return nbytes


def home_of(part: Part) -> Home | None:
    """Where a column's values lie, if in one piece of shared memory."""
    return part.pieces[0][1] if len(part.pieces) == 1 else None
