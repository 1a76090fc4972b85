"""Whole numbers on the wire: any array comes back, ids that follow one another cost nothing, bad frames are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docklands.dock.wire.ints import COUNT, HEAD, MOST, pack_ints, unpack_ints
from docklands.errors import WireError

NUMBERS = st.one_of(
    st.integers(0, 300),
    st.integers(-(1 << 20), 1 << 20),
    st.integers(0, 1 << 40),
    st.integers(-(1 << 63), (1 << 63) - 1),
)


@given(
    st.integers(0, 40).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=4))
)
def test_any_arrays_come_back(numbers: list[list[int]]) -> None:
    arrays = [np.array(each, np.int64) for each in numbers]
    frame = b"before" + pack_ints(arrays)
    found, end = unpack_ints(frame, len(arrays), 6)
    assert [each.tolist() for each in found] == numbers and end == len(frame)


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [
        (np.arange(5000, 5064), 0),
        (np.arange(0, 640, 10), 0),
        (np.repeat(np.arange(8), 8), 63),
        (np.random.default_rng(0).integers(64, 2048, 64), 128),
        (np.concatenate([np.arange(10), np.arange(1 << 40, (1 << 40) + 10)]), 160),
        (np.concatenate([np.arange(first, first + 10) for first in (0, 40_000, 80_000)]), 58),
    ],
    ids=["ids", "steps", "groups", "lengths", "far apart", "runs"],
)
def test_numbers_take_the_bytes_of_their_range(array: np.ndarray, nbytes: int) -> None:
    assert len(pack_ints([array])) == COUNT.size + HEAD.size + nbytes


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        COUNT.pack(3),
        COUNT.pack(MOST + 1) + HEAD.pack(0, 0, 1),
        COUNT.pack(3) + HEAD.pack(3, 0, 0) + bytes(9),
        COUNT.pack(3) + HEAD.pack(2, 0, 0) + bytes(5),
        COUNT.pack(3) + HEAD.pack(-1, 0, 0) + bytes(1),
    ],
)
def test_a_bad_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        unpack_ints(frame, 1)
