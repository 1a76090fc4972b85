"""Pipelines: 1F1B, interleaved and zero-bubble, ragged micro-batches, tied embeddings, uneven splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docklands.parallel import Layout
from tests.distributed.cases import alone, compare, sharded
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama_bias", Layout(pp=2, fsdp=2)),
        ("qwen3_five_layers", Layout(pp=4)),
        ("llama_bias", Layout(pp=3)),
        ("qwen3_five_layers", Layout(pp=4, schedule="zero_bubble")),
        ("qwen3_moe", Layout(pp=2, dp=2, ep=2, schedule="zero_bubble")),
    ],
    ids=str,
)
def test_pipeline_equals_one_process(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / name, layout), alone(models / name), layout)


def test_value_model(models: Path, pool: Pool) -> None:
    layout = Layout(pp=2, cp=2)
    compare(pool.run(4, sharded, models / "qwen3_tied", layout, True), alone(models / "qwen3_tied", True), layout)


def recomputed(path: Path, layout: Layout) -> Any:
    return sharded(path, layout, recompute="full")


def test_weight_gradients_of_a_recomputed_pass_wait_too(models: Path, pool: Pool) -> None:
    layout = Layout(pp=2, schedule="zero_bubble")
    expected = alone(models / "qwen3_five_layers")
    compare(pool.run(2, recomputed, models / "qwen3_five_layers", layout), expected, layout)
