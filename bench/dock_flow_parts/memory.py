"""The floor: every byte that is put or got is copied once, within one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dock_flow_parts.flow import Column, Held, side  # noqa: E402


class Memory:
    """Columns by name and chunk."""

    def __init__(self, _: str) -> None:
        self._held = Held()

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            self._held.put(name, start, column.values.copy(), column.lengths)

    def take(self, stage: str, start: int, stop: int, names: Sequence[str]) -> None:
        """Nothing to ask: the rows are here."""

    def get(self, stage: str, start: int, stop: int, names: Sequence[str]) -> Mapping[str, Sequence[np.ndarray]]:
        return {name: [piece.copy() for piece in self._held.pieces(name, start, stop)] for name in names}

    def clear(self, rows: int) -> None:
        self._held.clear()

    def close(self) -> None:
        self._held.clear()


if __name__ == "__main__":
    side(Memory, sys.argv[1:])
