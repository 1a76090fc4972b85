"""Experts on several ranks against one process: Qwen3-MoE, and DeepSeek's latent attention with a shared expert."""

from __future__ import annotations

from pathlib import Path

import pytest

from docklands.parallel import Layout
from tests.distributed.cases import alone, compare, sharded
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", Layout(dp=2, fsdp=2, ep=2)),
        ("deepseek", Layout(tp=2, sp=True, fsdp=2, ep=4)),
        ("deepseek", Layout(cp=2, context="ring", ep=2)),
        ("deepseek", Layout(cp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_expert_parallel_equals_one_process(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / name, layout), alone(models / name), layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek", Layout(pp=2, dp=2, tp=2, ep=2)),
        ("deepseek", Layout(pp=2, fsdp=4, ep=2)),
        ("deepseek", Layout(pp=2, tp=2, cp=2, ep=4)),
    ],
    ids=str,
)
def test_on_eight_processes(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(8, sharded, models / name, layout), alone(models / name), layout)
