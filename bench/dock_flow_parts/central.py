"""A central Ray actor that holds the rows as jagged numpy arrays: the usual replay buffer, well made."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would run its actors at 15, and so behind everything else
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dock_flow_parts.flow import Column, side  # noqa: E402

Cells = tuple[np.ndarray, "np.ndarray | None"]


@ray.remote(num_cpus=1)
class Buffer:
    """(column, chunk) -> values and offsets."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Cells] = {}

    def put(self, start: int, columns: dict[str, Cells]) -> None:
        for name, (values, lengths) in columns.items():
            offsets = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)])
            self._held[name, start] = (values, offsets)

    def get(self, chunk: int, first: int, last: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        found = {}
        for name in names:
            values, offsets = self._held[name, chunk]
            start, stop = (first, last) if offsets is None else (int(offsets[first]), int(offsets[last]))
            found[name] = values[start:stop]
        return found

    def clear(self) -> None:
        self._held.clear()


class Central:
    """The flow through the actor."""

    def __init__(self, _: str) -> None:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
        self._buffer = Buffer.remote()  # type: ignore[attr-defined]
        self._chunks: list[int] = []

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None:
        if stage == "rollout":
            self._chunks.append(start)
        ray.get(self._buffer.put.remote(start, {name: (c.values, c.lengths) for name, c in columns.items()}))

    def get(self, stage: str, start: int, stop: int, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        chunk = max(first for first in self._chunks if first <= start)
        return ray.get(self._buffer.get.remote(chunk, start - chunk, stop - chunk, list(names)))

    def clear(self, rows: int) -> None:
        ray.get(self._buffer.clear.remote())
        self._chunks.clear()

    def close(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    side(Central, sys.argv[1:])
