"""A central Ray actor that holds the rows as jagged numpy arrays: the usual replay buffer, well made."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would run its actors at 15, and so behind everything else
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
HERE = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))  # of the actor
sys.path.insert(0, HERE)

import ray  # noqa: E402

from dock_flow_parts.flow import Column, Held, side  # noqa: E402

Cells = tuple[np.ndarray, "np.ndarray | None"]


@ray.remote(num_cpus=1)
class Buffer:
    """(column, chunk) -> values and offsets."""

    def __init__(self) -> None:
        self._held = Held()

    def put(self, start: int, columns: dict[str, Cells]) -> None:
        for name, (values, lengths) in columns.items():
            self._held.put(name, start, values, lengths)

    def get(self, first: int, last: int, names: Sequence[str]) -> dict[str, list[np.ndarray]]:
        return {name: self._held.pieces(name, first, last) for name in names}

    def clear(self) -> None:
        self._held.clear()


class Central:
    """The flow through the actor."""

    def __init__(self, _: str) -> None:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
        self._buffer = Buffer.remote()  # type: ignore[attr-defined]

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None:
        ray.get(self._buffer.put.remote(start, {name: (c.values, c.lengths) for name, c in columns.items()}))

    def take(self, stage: str, start: int, stop: int, names: Sequence[str]) -> None:
        """Nothing to ask: rows come in the order of the flow."""

    def get(self, stage: str, start: int, stop: int, names: Sequence[str]) -> Mapping[str, Sequence[np.ndarray]]:
        return ray.get(self._buffer.get.remote(start, stop, list(names)))

    def clear(self, rows: int) -> None:
        ray.get(self._buffer.clear.remote())

    def close(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    side(Central, sys.argv[1:])
