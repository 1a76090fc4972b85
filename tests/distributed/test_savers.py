"""Memory savers in a layout: bit for bit what the layout gives without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docklands.config.schema import TrainSection
from docklands.models.sharded import load_sharded
from docklands.parallel import Layout
from docklands.parallel.mesh import Mesh
from docklands.train.sharded import ShardedEngine
from tests.distributed.cases import OPTIM, TRAIN, batches, run
from tests.distributed.pool import Pool
from tests.train_cases import ACTOR_WITH_ENTROPY, largest_difference

SAVERS: dict[str, Any] = {"recompute": "selective", "activation_offload": True}


def with_and_without(path: Path, layout: Layout) -> tuple[Any, Any, dict[str, float], int]:
    """Runs of three updates, what the savers counted, and bytes that they still hold."""
    mesh = Mesh(layout, timeout_s=60)
    replica = 0 if mesh.data is None else mesh.data.rank
    rows = [batch.select(np.arange(replica, len(batch), layout.data)) for batch in batches()]
    found = []
    for savers in ({}, SAVERS):
        optim = OPTIM.model_copy(update={"offload": bool(savers)})
        section = TrainSection(**{**TRAIN, **savers})
        engine = ShardedEngine(load_sharded(path / "policy", mesh), section, optim, max_tokens=8, total_updates=10)
        if engine.saver is not None:
            engine.saver.least = 0
        found.append(run(engine, rows, ACTOR_WITH_ENTROPY))
    counted = {key: value for key, (value, _) in found[1]["metrics"][-1].items() if key.endswith("_mib")}
    assert engine.saver is not None
    return found[0], found[1], counted, engine.saver.away


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_tied", Layout(tp=2)),
        ("qwen3_tied", Layout(pp=2)),
        ("qwen3_tied", Layout(fsdp=2)),
        ("qwen3_moe", Layout(dp=2, ep=2)),
        ("qwen3_moe", Layout(fsdp=2)),
        ("qwen3_moe", Layout(fsdp=4, ep=2)),
        ("deepseek", Layout(cp=2)),
    ],
    ids=str,
)
def test_savers_change_no_bit(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    for plain, saving, counted, away in pool.run(layout.world_size, with_and_without, models / name, layout):
        for what in ("gradients", "weights"):
            assert largest_difference(plain[what], saving[what]) == 0.0
        for before, after in zip(plain["metrics"], saving["metrics"]):
            assert before == {key: value for key, value in after.items() if not key.endswith("_mib")}
        assert len(counted) == 3 and min(counted.values()) > 0 and away == 0
