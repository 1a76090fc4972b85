"""Tensor and sequence parallelism against one process: losses, every gradient, parameters after three updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from docklands.parallel import Layout
from tests.distributed.cases import alone, compare, sharded
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_tied", Layout(tp=2, sp=False)),
        ("qwen3_tied", Layout(tp=2)),
        ("qwen2_two_kv_heads", Layout(tp=4)),
        ("qwen2_two_kv_heads", Layout(tp=4, sp=False)),
        ("llama_bias", Layout(tp=2)),
    ],
    ids=str,
)
def test_tensor_parallel_equals_one_process(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / name, layout), alone(models / name), layout)


def test_tensor_parallel_value_model(models: Path, pool: Pool) -> None:
    layout = Layout(tp=2)
    found = pool.run(2, sharded, models / "qwen3_tied", layout, True)
    compare(found, alone(models / "qwen3_tied", True), layout)
