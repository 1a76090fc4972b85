"""Rows by id: a dict from id to slot and one numpy array per attribute, so that work on many rows is a few array calls.

Legend: B rows of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NO_ROWS = np.empty(0, np.int64)


class RowTable:
    """Struct of arrays with reused slots. Attributes of a new row are 0. Memory is bounded by the most rows at once."""

    def __init__(self, **dtypes: Any) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._data = {name: np.zeros(0, dtype) for name, dtype in {"row_id": np.int64, **dtypes}.items()}
        self._grow(4)  # never empty: slot -1 (absent) must be an index that can be read

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, name: str) -> np.ndarray:
        """The attribute of all slots, used and unused; index it with slots. Invalid after the next `add`."""
        return self._data[name]

    @property
    def slots(self) -> np.ndarray:
        """Slots in use, in order of insertion, int64 [rows]."""
        return np.fromiter(self._slots.values(), np.int64, len(self._slots))

    @property
    def ids(self) -> np.ndarray:
        """Ids in order of insertion, int64 [rows]."""
        return np.fromiter(self._slots.keys(), np.int64, len(self._slots))

    def add(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of new rows, int64 [B]; the ids must not be there yet."""
        short = len(row_ids) - len(self._free)
        if short > 0:
            self._grow(short)
        slots = [self._free.pop() for _ in range(len(row_ids))]
        self._slots.update(zip(row_ids.tolist(), slots))
        at = np.array(slots, np.int64)
        for array in self._data.values():
            array[at] = 0
        self._data["row_id"][at] = row_ids
        return at

    def find(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of rows, -1 for those that are not here, int64 [B]."""
        get = self._slots.get
        return np.array([get(row, -1) for row in row_ids.tolist()], np.int64)

    def present(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of those rows that are here."""
        slots = self.find(row_ids)
        return slots[slots >= 0]

    def remove(self, slots: np.ndarray) -> None:
        for row in self._data["row_id"][slots].tolist():
            self._free.append(self._slots.pop(row))

    def _grow(self, short: int) -> None:
        old = len(self._data["row_id"])
        new = max(2 * old, old + short)
        self._free.extend(range(new - 1, old - 1, -1))
        for name, array in self._data.items():
            bigger = np.zeros((new, *array.shape[1:]), array.dtype)
            bigger[:old] = array
            self._data[name] = bigger


def unique_ids(row_ids: np.ndarray) -> bool:
    """No id twice."""
    return len(set(row_ids.tolist())) == len(row_ids)
