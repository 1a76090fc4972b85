"""Router choices and balance over the ranks of a layout: each replays its own layers' and tokens' part, and the load,
the balance loss, the bias and every weight are those of one process.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from docklands.config.schema import TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import routes_field
from docklands.models import ModelConfig, load
from docklands.models.sharded import load_sharded
from docklands.parallel import Layout
from docklands.parallel.mesh import Mesh
from docklands.train import TrainEngine
from docklands.train.sharded import ShardedEngine
from tests.distributed.cases import MODELS, OPTIM, batches, compare, run
from tests.distributed.pool import Pool
from tests.train_cases import ACTOR_WITH_ENTROPY


def with_choices(batch: Batch, name: str) -> Batch:
    """Choices that no router would make: by token and position, so that a prompt's samples agree."""
    shape = ModelConfig.from_hf(MODELS[name]).routed
    assert shape is not None
    packed = batch.pack()
    first_T = (packed.token_ids_T + packed.positions_T) % 8
    routes_TLk = torch.stack([(first_T + 3 * layer + j) % 8 for layer in range(shape[0]) for j in range(shape[1])], 1)
    routes_TLk = routes_TLk.view(-1, *shape).to(torch.int16)
    return batch.with_({routes_field(*shape): packed.unpack(routes_TLk)})


def section(name: str) -> TrainSection:
    router = {"aux_loss_coef": 0.05, "bias_update_rate": 0.01 if name == "deepseek" else 0.0}
    return TrainSection(tokens_per_microbatch=70, router=router)  # type: ignore[arg-type]


def rows_of(name: str, replay: bool) -> list[Batch]:
    return [with_choices(batch, name) if replay else batch for batch in batches()]


@cache
def alone(path: Path, name: str, replay: bool) -> dict[str, Any]:
    engine = TrainEngine(load(path / "policy"), section(name), OPTIM, max_tokens=8, total_updates=10)
    return run(engine, rows_of(name, replay), ACTOR_WITH_ENTROPY)


def spread(path: Path, name: str, layout: Layout, replay: bool) -> dict[str, Any]:
    mesh = Mesh(layout, timeout_s=60)
    engine = ShardedEngine(load_sharded(path / "policy", mesh), section(name), OPTIM, max_tokens=8, total_updates=10)
    replica = 0 if mesh.data is None else mesh.data.rank
    rows = [batch.select(np.arange(replica, len(batch), layout.data)) for batch in rows_of(name, replay)]
    found = run(engine, rows, ACTOR_WITH_ENTROPY)
    if mesh.rank:
        del found["gradients"], found["weights"]
    return {**found, "replica": replica}


CASES = [
    ("qwen3_moe", Layout(tp=2), True),
    ("qwen3_moe", Layout(cp=2, context="ring"), True),
    ("qwen3_moe", Layout(pp=2), True),
    ("deepseek", Layout(cp=2, tp=2), True),
    ("deepseek", Layout(pp=2, fsdp=2, ep=2), True),
    ("qwen3_moe", Layout(pp=2, dp=2, ep=2), False),
]


@pytest.mark.parametrize(("name", "layout", "replay"), CASES, ids=str)
def test_pitfall_21_replay_and_balance_in_a_layout(
    name: str, layout: Layout, replay: bool, models: Path, pool: Pool
) -> None:
    expected = alone(models / name, name, replay)
    found = pool.run(layout.world_size, spread, models / name, name, layout, replay)
    compare(found, expected, layout, tolerance=2e-5)
    for mine in found:
        for metrics, reference in zip(mine["metrics"], expected["metrics"], strict=True):
            assert reference["actor/router_replayed"][0] == replay
            for key in ("load_max", "idle", "replayed", "aux_loss"):
                value = metrics[f"actor/router_{key}"][0]
                assert value == pytest.approx(reference[f"actor/router_{key}"][0], rel=1e-5), key


def published(path: Path, layout: Layout) -> dict[str, torch.Tensor]:
    mesh = Mesh(layout, timeout_s=60)
    model = load_sharded(path / "policy", mesh, dtype=torch.bfloat16)
    engine = ShardedEngine(model, TrainSection(dtype="bfloat16"), OPTIM, total_updates=10)
    return {name: tensor.clone() for name, tensor in engine.weights()}


def test_bf16_weights_leave_a_pipeline_beside_fp32_norms_and_biases(models: Path, pool: Pool) -> None:
    """Stages hold both dtypes; each tensor comes in its own."""
    expected = dict(load(models / "deepseek" / "policy").named_parameters())
    for found in pool.run(2, published, models / "deepseek", Layout(pp=2)):
        for name, tensor in found.items():
            assert tensor.dtype == (torch.bfloat16 if tensor.dim() > 1 else torch.float32)
            assert torch.equal(tensor, expected[name].detach().to(tensor.dtype)), name
