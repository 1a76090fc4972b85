"""Replicas and FSDP against one process, also together with tensor parallelism; replicas have unequal work."""

from __future__ import annotations

from pathlib import Path

import pytest

from docklands.parallel import Layout
from tests.distributed.cases import alone, compare, sharded
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_tied", Layout(dp=2)),
        ("qwen3_tied", Layout(fsdp=2)),
        ("llama_bias", Layout(fsdp=2, tp=2)),
        ("qwen2_two_kv_heads", Layout(dp=2, fsdp=2)),
    ],
    ids=str,
)
def test_data_parallel_equals_one_process(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / name, layout), alone(models / name), layout)


@pytest.mark.slow
def test_shared_kv_heads_under_fsdp(models: Path, pool: Pool) -> None:
    """8 processes: 4 tensor ranks share 2 kv heads, and FSDP cuts through the fused projection."""
    layout = Layout(fsdp=2, tp=4)
    name = "qwen2_two_kv_heads"
    compare(pool.run(8, sharded, models / name, layout), alone(models / name), layout)
