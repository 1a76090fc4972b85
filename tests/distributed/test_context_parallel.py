"""Context parallelism against one process: the tokens of a pack on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from docklands.parallel import Layout
from tests.distributed.cases import alone, compare, sharded
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2_two_kv_heads", Layout(cp=4)),
        ("llama_bias", Layout(cp=2, fsdp=2)),
    ],
    ids=str,
)
def test_ulysses_equals_one_process(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / name, layout), alone(models / name), layout)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2_two_kv_heads", Layout(cp=4, context="ring")),
    ],
    ids=str,
)
def test_ring_equals_one_process(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / name, layout), alone(models / name), layout)


def test_value_model(models: Path, pool: Pool) -> None:
    layout = Layout(cp=2, tp=2)
    compare(pool.run(4, sharded, models / "qwen3_tied", layout, True), alone(models / "qwen3_tied", True), layout)
