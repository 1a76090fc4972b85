"""A dozen pairs of layouts on 2, 4 and 8 processes, for dense models, models with experts and latent attention: after a
publish by each method, what generators say of their samples is what trainers say of them, all methods gave the same
bits, and no device held more than the plan said.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from docklands.config.layouts import SyncSection
from docklands.core.fields import LOSS_MASK
from docklands.core.protocols import Sampling
from docklands.models import ModelConfig
from docklands.parallel.layout import Layout
from docklands.rollout.mesh import MeshEngine
from docklands.sync.memory import Ledger
from docklands.sync.publish import Publisher
from docklands.train.resident import TrainState
from tests import rollout_cases
from tests.distributed.cases import MODELS
from tests.distributed.pool import Pool
from tests.distributed.test_generate_mesh import layout_of
from tests.distributed.test_publish import as_batch, sides

L = Layout
METHODS = ("minimal", "allgather_swap", "broadcast")
PAIRS: list[tuple[Layout, int, dict[str, int], dict[str, int]]] = [
    # training, its ep where there are experts, generation, and what it has beside where there are experts
    (L(tp=2), 2, {"dp": 2}, {"ep": 2}),
    (L(pp=2), 1, {"tp": 2, "dp": 1}, {"ep": 2}),
    (L(dp=2), 2, {"tp": 2, "dp": 1}, {}),
    (L(tp=2, pp=2), 2, {"dp": 4}, {"ep": 4}),
    (L(fsdp=4), 2, {"tp": 4, "dp": 1}, {"ep": 2}),
    (L(fsdp=2, tp=2), 4, {"dp": 4}, {"ep": 2}),
    (L(tp=4), 1, {"tp": 2, "dp": 2}, {"ep": 4}),
    (L(tp=2, dp=2), 4, {"tp": 4, "dp": 1}, {"etp": 4}),
    (L(pp=2, dp=2), 2, {"tp": 2, "dp": 2}, {"ep": 2, "etp": 2}),
    (L(cp=2, fsdp=2, context="ring"), 2, {"tp": 2, "dp": 2}, {"ep": 4}),
    (L(tp=4, pp=2), 4, {"tp": 2, "dp": 4}, {"ep": 8}),
    (L(fsdp=4, tp=2), 8, {"tp": 4, "dp": 2}, {"ep": 2}),
]


def fullest(ledger: Ledger) -> int:
    """Most bytes that were on the device while weights moved, that is, without gradients and moments."""
    now: dict[str, int] = {}
    worst = 0
    for _, tier, kind, size in ledger.history:
        if tier == "device":
            now[kind] = size
            if not now.get("gradients") and not now.get("optimizer"):
                worst = max(worst, sum(now.values()))
    return worst


def sampled(publisher: Publisher, tokens: int) -> list[Any]:
    """One prompt a lane, a sample of so many tokens each; (prompt, sample) of all, on every rank."""
    publisher.for_generation()
    engine = publisher.generator
    assert isinstance(engine, MeshEngine)
    lane, lanes = engine.mesh.coords["dp"], engine.mesh.layout.dp
    mine = [r for r in rollout_cases.groups(lanes, 1, Sampling(tokens)) if r.request_id % lanes == lane]
    found = engine.together((lambda: engine.generate(mine)) if engine.is_leader else None) or []
    publisher.generated()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(request.prompt, sample) for request, sample in zip(mine, found)])
    return sorted((pair for part in everyone for pair in part), key=lambda pair: pair[1].request_id)


def published(path: Path, training: Layout, generation: Layout) -> dict[str, tuple[float, int, int]]:
    """A case: method -> (largest difference of log-probs, most bytes on the device, as planned)."""
    first: dict[str, torch.Tensor] = {}
    said = {}
    made = sides(path, training, generation, SyncSection(), False)
    for version, method in enumerate(METHODS):
        section = SyncSection(method=method, swap="disk", bucket_mib=0.01)  # type: ignore[arg-type]
        publisher = Publisher(made.route, section, made.trainer, made.generator, timeout_s=60)
        state = publisher.trainer.resident() if publisher.trainer is not None else {}
        sizes = [tensor.untyped_storage().nbytes() for tensor in state["weights"].values()]
        padding = sum(sizes) - sum(tensor.numel() * 4 for tensor in state["weights"].values())  # FSDP's
        publisher.publish(version)
        assert publisher._weights is not None and publisher.tiers is not None
        weights = {name: tensor.clone() for name, tensor in publisher._weights.items()}
        first = first or weights
        assert weights.keys() == first.keys()
        assert all(torch.equal(tensor, first[name]) for name, tensor in weights.items()), f"{method}: other bits"
        batch = as_batch(samples := sampled(publisher, 2 if version else 4))  # the same bits: less is enough
        publisher.for_training(update=False)  # log-probs need no moments
        assert isinstance(publisher.trainer, TrainState)
        mine = torch.cat([torch.tensor(sample.logprobs) for _, sample in samples])
        gap = float((publisher.trainer.policy.logprobs(batch).values[batch[LOSS_MASK].values] - mine).abs().max())
        planned = publisher.resharder.script.peak().total + padding
        said[method] = (gap, fullest(publisher.tiers.ledger), planned)
        publisher.close()
    return said


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe", "deepseek"])
@pytest.mark.parametrize(("training", "ep", "degrees", "sparse"), PAIRS, ids=lambda value: str(value)[:40])
def test_generators_say_what_the_trainer_says(
    name: str,
    training: Layout,
    ep: int,
    degrees: dict[str, int],
    sparse: dict[str, int],
    models: Path,
    pool: Pool,
) -> None:
    if ModelConfig.from_hf(MODELS[name]).moe:
        training, degrees = replace(training, ep=ep), degrees | sparse
    generation = layout_of(name, **degrees)
    for said in pool.run(training.world_size, published, models / name, training, generation):
        assert said.keys() == set(METHODS)
        for gap, fullest, planned in said.values():
            assert gap < 1e-5
            assert 0.5 * planned < fullest <= planned
