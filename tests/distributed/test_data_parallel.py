"""Replicas and FSDP against one process, also together with tensor parallelism; replicas have unequal work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from docklands.config.schema import TrainSection
from docklands.models.sharded import load_sharded
from docklands.parallel import Layout
from docklands.parallel.mesh import Mesh
from docklands.train.resident import resident
from docklands.train.sharded import ShardedEngine
from tests.distributed.cases import OPTIM, TRAIN, alone, batches, compare, sharded
from tests.distributed.pool import Pool
from tests.train_cases import ACTOR


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_tied", Layout(dp=2)),
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


def held_bytes(path: Path, layout: Layout) -> dict[str, int]:
    """Numbers of this rank: parameters, their masters, gradients after a pass, Adam's moments after an update."""
    engine = ShardedEngine(load_sharded(path / "policy", Mesh(layout, timeout_s=60)), TrainSection(**TRAIN), OPTIM)
    replica = 0 if engine.mesh.data is None else engine.mesh.data.rank
    engine.forward_backward(batches()[0].select(np.arange(replica, 12, layout.data)), ACTOR)
    found = {"gradients": numbers(resident(engine)["gradients"])}
    engine.optim_step()
    return found | {kind: numbers(tensors) for kind, tensors in resident(engine).items() if kind != "gradients"}


def numbers(tensors: Mapping[str, torch.Tensor]) -> int:
    """Elements in distinct storages: a master that is the parameter counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4 for t in tensors.values()}.values())


@pytest.mark.parametrize("name", ["qwen2_two_kv_heads", "deepseek"])
def test_fsdp_divides_weights_gradients_and_optimizer_state(name: str, models: Path, pool: Pool) -> None:
    whole = pool.run(1, held_bytes, models / name, Layout())[0]
    layout = Layout(fsdp=2, ep=2) if name == "deepseek" else Layout(fsdp=2)
    for mine in pool.run(2, held_bytes, models / name, layout):
        for kind, count in mine.items():
            assert count == pytest.approx(whole[kind] / 2, rel=0.05), kind
    assert whole["optimizer"] == pytest.approx(2 * whole["gradients"], rel=1e-3)  # a router's bias has no gradient
