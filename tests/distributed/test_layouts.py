"""Every named layout for a dense model, one with experts, and one with latent attention and experts: losses, log-probs,
every gradient and the parameters after three updates are those of one process. More products of axes: test_*_parallel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from docklands.config.schema import TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK, OLD_LOGPROBS, REF_LOGPROBS, ROLLOUT_LOGPROBS, TOKEN_IDS
from docklands.core.stage import Learner
from docklands.models import load
from docklands.models.sharded import load_sharded
from docklands.parallel import Layout
from docklands.parallel.mesh import Mesh
from docklands.train import TrainEngine
from docklands.train.sharded import ShardedEngine
from tests.algorithm_cases import algorithm
from tests.distributed.cases import OPTIM, alone, batches, compare, difference, gradients_of, sharded
from tests.distributed.pool import Pool

NAMED: dict[str, Layout] = {
    "tp2": Layout(tp=2, sp=False),
    "tp2_sp": Layout(tp=2),
    "tp4": Layout(tp=4),  # with 2 kv heads, but for latent attention, which has none
    "fsdp2": Layout(fsdp=2),
    "fsdp2_tp2": Layout(fsdp=2, tp=2),
    "pp2": Layout(pp=2),
    "pp2_zero_bubble": Layout(pp=2, schedule="zero_bubble"),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "pp2_vpp2_zero_bubble": Layout(pp=2, vpp=2, schedule="zero_bubble"),
    "pp2_tp2": Layout(pp=2, tp=2),
    "ep2": Layout(dp=2, ep=2),
    "ep2_tp2": Layout(dp=2, tp=2, ep=2, etp=2),
    "ep2_in_tp2": Layout(tp=2, ep=2),
    "ep2_in_fsdp2": Layout(fsdp=2, ep=2),
    "ep2_fsdp2": Layout(fsdp=4, ep=2),  # of 4 ranks two hold the same experts, and share them
    "cp2_ring": Layout(cp=2, context="ring"),
    "cp2_ulysses": Layout(cp=2),
    "cp2_ring_tp2": Layout(cp=2, tp=2, context="ring"),
    "cp2_ulysses_tp2": Layout(cp=2, tp=2),
    "pp2_ep2_tp2": Layout(pp=2, dp=2, tp=2, ep=2, etp=2),
}
DENSE = {name: "qwen3_five_layers" for name, layout in NAMED.items() if layout.ep == 1} | {"tp4": "qwen2_two_kv_heads"}
KINDS = {
    "dense": DENSE,
    "moe": {name: "qwen3_moe" for name in NAMED if name != "tp2"},  # experts want distinct tokens: refused without sp
    "mla": {name: "deepseek" for name in NAMED if name != "tp2"},
}
CASES = [(model, NAMED[name]) for models in KINDS.values() for name, model in models.items()]
IDS = [f"{kind}-{name}" for kind, models in KINDS.items() for name in models]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=IDS)
def test_a_layout_equals_one_process(model: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / model, layout), alone(models / model), layout)


GRPO = algorithm("grpo", {"entropy_coef": 0.01, "kl": {"coef": 0.1}})
LEARNER = Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK), GRPO.loss, entropy=True)


def off_policy(batch: Batch) -> Batch:
    """With an old policy and a reference that are not the model: ratios, some of them clipped, and a KL term."""
    draw = np.random.default_rng(7)
    masks = [mask.numpy() for mask in batch[LOSS_MASK]]
    old = [np.where(mask, draw.normal(-4.0, 0.4, len(mask)), np.nan).astype(np.float32) for mask in masks]
    reference = [(column + draw.normal(0, 0.3, len(column))).astype(np.float32) for column in old]
    return batch.with_({ROLLOUT_LOGPROBS: old, OLD_LOGPROBS: old, REF_LOGPROBS: reference})


def of_engine(engine: TrainEngine, replica: int, replicas: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    whole = off_policy(batches()[0])
    metrics = engine.forward_backward(whole.select(np.arange(replica, len(whole), replicas)), LEARNER)
    return metrics, gradients_of(engine)


def grpo(path: Path, layout: Layout, cap: int) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    mesh = Mesh(layout, timeout_s=60)
    section = TrainSection(tokens_per_microbatch=cap)
    engine = ShardedEngine(load_sharded(path / "policy", mesh), section, OPTIM, max_tokens=8, total_updates=10)
    metrics, gradients = of_engine(engine, 0 if mesh.data is None else mesh.data.rank, layout.data)
    return metrics, None if mesh.rank else gradients


SPLITS = [(Layout(dp=2), 400), (Layout(dp=4), 25), (Layout(dp=2, fsdp=2), 20), (Layout(pp=2, dp=2), 25)]


@pytest.mark.parametrize(("layout", "cap"), SPLITS, ids=str)
@pytest.mark.parametrize("model", ["qwen2_two_kv_heads", "deepseek"])
def test_pitfall_01_grpo_depends_neither_on_replicas_nor_on_micro_batches(
    model: str, layout: Layout, cap: int, models: Path, pool: Pool
) -> None:
    """GRPO's own loss, clipped, with a KL term and an entropy bonus; the reference is one process, one micro-batch."""
    section = TrainSection(tokens_per_microbatch=1000)
    engine = TrainEngine(load(models / model / "policy"), section, OPTIM, max_tokens=8, total_updates=10)
    expected, gradients = of_engine(engine, 0, 1)
    assert expected["actor/microbatches"][0] == 1 and expected["actor/pg_clipfrac"][0] > 0
    found = pool.run(layout.world_size, grpo, models / model, layout, cap)
    for metrics, _ in found:
        assert metrics["actor/loss"][0] == pytest.approx(expected["actor/loss"][0], rel=1e-5)
        assert cap == 400 or metrics["actor/microbatches"][0] > 1
    assert found[0][1] is not None
    for name, gradient in gradients.items():
        assert difference(found[0][1][name], gradient) < 1e-5, name
