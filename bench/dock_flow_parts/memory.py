"""The floor: every byte that is put or got is copied once, within one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dock_flow_parts.flow import Column, side  # noqa: E402


class Memory:
    """Columns by name and chunk."""

    def __init__(self, _: str) -> None:
        self._held: dict[tuple[str, int], tuple[Column, np.ndarray | None]] = {}
        self._chunks: list[int] = []

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None:
        if stage == "rollout":
            self._chunks.append(start)
        for name, column in columns.items():
            offsets = None if column.lengths is None else np.concatenate([[0], np.cumsum(column.lengths)])
            self._held[name, start] = (Column(column.values.copy(), column.lengths), offsets)

    def get(self, stage: str, start: int, stop: int, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        chunk = max(first for first in self._chunks if first <= start)
        found = {}
        for name in names:
            column, offsets = self._held[name, chunk]
            first, last = start - chunk, stop - chunk
            if offsets is not None:
                first, last = int(offsets[first]), int(offsets[last])
            found[name] = column.values[first:last].copy()
        return found

    def clear(self, rows: int) -> None:
        self._held.clear()
        self._chunks.clear()

    def close(self) -> None:
        self._held.clear()


if __name__ == "__main__":
    side(Memory, sys.argv[1:])
