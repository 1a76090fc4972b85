"""TransferQueue with its SimpleStorage, jagged nested tensors, its own client and controller. Option: storage units."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402
import transfer_queue as tq  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dock_flow_parts.flow import Column, side  # noqa: E402


class Queue:
    """Rows are taken in the order in which they became ready, which is the order of the flow."""

    def __init__(self, option: str) -> None:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
        settings = {"backend": {"SimpleStorage": {"num_data_storage_units": int(option)}}}
        tq.init(OmegaConf.create(settings))
        self._client = tq.get_client()
        self._round = 0
        self._taken: dict[str, tuple[int, Any]] = {}

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None:
        data = TensorDict({name: column_of(column) for name, column in columns.items()}, batch_size=stop - start)
        if stage == "rollout":
            self._client.put(data, partition_id=f"round{self._round}")
        else:
            self._client.put(data, metadata=self._taken[stage][1])

    def take(self, stage: str, start: int, stop: int, names: Sequence[str]) -> None:
        partition = f"round{self._round}"
        meta = self._client.get_meta(list(names), stop - start, partition, mode="fetch", task_name=stage)
        self._taken[stage] = start, meta

    def get(self, stage: str, start: int, stop: int, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        first, meta = self._taken[stage]
        if stop - start < meta.size:
            meta = meta.select_samples(list(range(start - first, stop - first)))
        data = self._client.get_data(meta)
        return {name: values_of(data[name]) for name in names}

    def clear(self, rows: int) -> None:
        self._client.clear_partition(f"round{self._round}")
        self._round += 1

    def close(self) -> None:
        tq.close()
        ray.shutdown()


def column_of(column: Column) -> torch.Tensor:
    values = torch.from_numpy(column.values)
    if column.lengths is None:
        return values
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(column.lengths)]))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def values_of(column: torch.Tensor) -> np.ndarray:
    return (column.values() if column.is_nested else column).numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    side(Queue, sys.argv[1:])
