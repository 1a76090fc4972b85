"""Whole numbers on the wire in as few bytes as their range needs: ids that follow one another, lengths, places.

frame    count (uint32), then one array after the other
array    width (int8), base and step (int64), then an unsigned number of that many bytes per entry
    0        base, base + step, base + 2 step, ...: no entry is written
    1 2 4    base + entry (a frame of reference)
    -1 -2    the first is base; each next one is the one before + step + entry (a delta code; count - 1 entries)
    8        the entries as they are
Everything received is checked before an array of that size is made; whatever is wrong raises WireError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from docklands.dock.wire.format import Buffer
from docklands.errors import WireError

MOST = 1 << 22
"""Numbers of an array at most."""
COUNT, HEAD = struct.Struct("<I"), struct.Struct("<bqq")
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def pack_ints(arrays: Sequence[np.ndarray]) -> bytes:
    """Arrays of one length, int64 [n] each, as one frame."""
    count = len(arrays[0])
    return b"".join([COUNT.pack(count), *(_packed(array) for array in arrays)] if count else [COUNT.pack(0)])


def unpack_ints(frame: Buffer, arrays: int, start: int = 0) -> tuple[list[np.ndarray], int]:
    """So many arrays of one length, int64 [n] each, from `start` on; and where they end. Raises WireError."""
    view = memoryview(frame)
    if view.nbytes < start + COUNT.size:
        raise WireError("malformed message: numbers without their count")
    (count,) = COUNT.unpack_from(view, start)
    if count > MOST:
        raise WireError(f"message of {count} numbers, at most {MOST} are allowed")
    at = start + COUNT.size
    if not count:
        return [np.zeros(0, np.int64) for _ in range(arrays)], at
    found = []
    for _ in range(arrays):
        array, at = _unpacked(view, at, count)
        found.append(array)
    return found, at


def _packed(array: np.ndarray) -> bytes:
    if len(array) == 1:
        return HEAD.pack(0, int(array[0]), 0)
    steps = array[1:] - array[:-1]  # wraps around, and so does the sum at the other end
    low, high = int(steps.min()), int(steps.max())
    if low == high:
        return HEAD.pack(0, int(array[0]), low)
    delta = _width(high - low)
    if delta > 1:
        least = int(array.min())
        plain = _width(int(array.max()) - least)
        if plain <= delta:
            if plain == 8:
                return HEAD.pack(8, 0, 0) + np.ascontiguousarray(array, np.int64).tobytes()
            return HEAD.pack(plain, least, 0) + (array - least).astype(UNSIGNED[plain]).tobytes()
        if delta > 2:
            return HEAD.pack(8, 0, 0) + np.ascontiguousarray(array, np.int64).tobytes()
    return HEAD.pack(-delta, int(array[0]), low) + (steps - low).astype(UNSIGNED[delta]).tobytes()


def _width(span: int) -> int:
    """Bytes of an unsigned number up to `span`."""
    return 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8


def _unpacked(view: memoryview, at: int, count: int) -> tuple[np.ndarray, int]:
    if view.nbytes < at + HEAD.size:
        raise WireError("malformed message: numbers that are cut off")
    width, base, step = HEAD.unpack_from(view, at)
    at += HEAD.size
    if width == 0:
        return np.arange(count, dtype=np.int64) * step + base, at
    if width not in (1, 2, 4, 8, -1, -2):
        raise WireError(f"malformed message: numbers of width {width}")
    entries = count if width > 0 else count - 1
    end = at + entries * abs(width)
    if view.nbytes < end:
        raise WireError("malformed message: numbers that are cut off")
    if width == 8:
        return np.frombuffer(view[at:end], np.int64).copy(), end
    numbers = np.frombuffer(view[at:end], UNSIGNED[abs(width)]).astype(np.int64)
    if width > 0:
        return numbers + base, end
    found = np.empty(count, np.int64)
    found[0] = base
    np.cumsum(numbers + step, out=found[1:])
    found[1:] += base
    return found, end
