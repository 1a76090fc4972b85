"""Where rows' values lie in the shared memory of their warehouses, so that a reader on the same node finds them itself.

An address is a hint and nothing more: the reader looks whether the generation that it names stands in the arena, before
and after it has used the bytes (warehouse/arena.py), and asks the warehouse if not. So an address that has become old
costs a question, never a wrong value. It cannot name what came later: a generation is never used twice.

Legend: B rows of a call, N slots, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from docklands.core.batch import torch_dtype
from docklands.core.fields import Field
from docklands.dock.rules.messages import Home
from docklands.dock.rules.table import larger

Runs = list[int]
"""A column of some rows in stretches of which each lies in one piece: (first row, generation, offset) of each, flat."""
RUN = 3
"""Numbers of a stretch."""
MEMORY = 0
"""The arena that addresses are of. What a warehouse has moved to disk has lost its generation there."""


@lru_cache(maxsize=1024)
def width(field: Field[Any]) -> tuple[int, bool] | None:
    """(bytes, True) of a token or (bytes, False) of a row; None: a row's tokens do not say how long it is."""
    if field.is_json or (field.is_ragged and not field.is_token):
        return None
    nbytes = math.prod(field.inner_shape) * torch_dtype(field).itemsize
    return (nbytes, field.is_token) if nbytes else None


class Addresses:
    """Of the rows of a roster, by slot. widths: column -> see `width`; of other columns nothing is kept."""

    def __init__(self, widths: Mapping[str, tuple[int, bool]]) -> None:
        self._widths = dict(widths)
        self._number = {name: number for number, name in enumerate(widths)}
        self._generation_NC = np.zeros((0, len(widths)), np.int64)
        self._offset_NC = np.zeros((0, len(widths)), np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; none until a first address is known."""
        return self._generation_NC.nbytes + self._offset_NC.nbytes

    def forget(self, slots: np.ndarray) -> None:
        """Rows are new there, or nothing is known of them any more."""
        self._generation_NC[slots[slots < len(self._generation_NC)]] = 0

    def note(self, slots: np.ndarray, lengths: np.ndarray, homes: Sequence[tuple[int, Mapping[str, Home]]]) -> None:
        """Values of rows (slot -1: gone) lie one after the other from a home on, put after put.

        lengths  tokens of each row, int64 [B]
        """
        start = 0
        for count, named in homes:
            part = slice(start, start + count)
            start += count
            self._note(slots[part], lengths[part], named)

    def _note(self, slots: np.ndarray, lengths: np.ndarray, named: Mapping[str, Home]) -> None:
        here = slice(None) if not len(slots) or slots.min() >= 0 else slots >= 0
        most = int(slots.max(initial=-1))
        if most >= len(self._generation_NC):
            self._generation_NC = larger(self._generation_NC, 2 * most + 2)
            self._offset_NC = larger(self._offset_NC, 2 * most + 2)
        before = np.cumsum(lengths) - lengths
        for name, (arena, generation, offset) in named.items():
            if name not in self._widths or arena != MEMORY:
                continue
            size, by_token = self._widths[name]
            number = self._number[name]
            at = offset + size * (before if by_token else np.arange(len(slots)))
            self._generation_NC[slots[here], number] = generation
            self._offset_NC[slots[here], number] = at[here]

    def runs(self, slots: np.ndarray, lengths: np.ndarray, places: np.ndarray, names: Sequence[str]) -> dict[str, Runs]:
        """Stretches of each of these columns of which all rows have an address. lengths: tokens, places: int [B]."""
        found: dict[str, Runs] = {}
        if not len(slots) or int(slots.max()) >= len(self._generation_NC):
            return found
        moves = places[1:] != places[:-1]
        for name in names:
            if name not in self._widths:
                continue
            size, by_token = self._widths[name]
            number = self._number[name]
            generation, offset = self._generation_NC[slots, number], self._offset_NC[slots, number]
            if not generation.all():
                continue
            ends = offset + (lengths * size if by_token else size)
            cuts = moves | (generation[1:] != generation[:-1]) | (offset[1:] != ends[:-1])
            if not cuts.any():
                found[name] = [0, int(generation[0]), int(offset[0])]
                continue
            starts = [0, *(np.flatnonzero(cuts) + 1).tolist()]
            table = np.stack([starts, generation[starts], offset[starts]], 1)
            found[name] = table.ravel().tolist()
        return found
