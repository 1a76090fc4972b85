"""Publishing by plan on real processes: trainers of one layout, generators of another, several versions with updates in
between; memory, metrics, and what happens when generators do not hold what was published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from docklands.config.layouts import SyncSection
from docklands.config.schema import RolloutSection, TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, LOSS_MASK, TOKEN_IDS
from docklands.core.protocols import Generation, Sampling
from docklands.errors import ConfigError, SyncError
from docklands.models import ModelConfig
from docklands.models.sharded import load_sharded
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.rollout.mesh import MeshEngine
from docklands.sync.memory import is_resident
from docklands.sync.publish import Publisher, Route, check_sync
from docklands.train.resident import TrainState
from docklands.train.sharded import ShardedEngine
from tests import rollout_cases
from tests.distributed.cases import MODELS, OPTIM, batches
from tests.distributed.pool import Pool
from tests.distributed.test_generate_mesh import layout_of
from tests.train_cases import ACTOR


def sides(path: Path, training: Layout, generation: Layout, section: SyncSection, apart: bool) -> Publisher:
    """This rank's trainer, generator, and part in publishing."""
    rank, first = dist.get_rank(), training.world_size if apart else None
    trainer = generator = None
    config = ModelConfig.from_hf(MODELS[path.name])
    if rank < training.world_size:
        model = load_sharded(path / "policy", Mesh(training, timeout_s=60, first=0 if apart else None))
        engine = ShardedEngine(model, TrainSection(tokens_per_microbatch=70), OPTIM, max_tokens=8, total_updates=10)
        trainer = TrainState(engine)
    if not apart or rank >= training.world_size:
        mesh = Mesh(generation, timeout_s=60, first=first)
        generator = MeshEngine(config, RolloutSection(max_batch=4, kv_block_tokens=16), mesh)
    route = Route(config, training, generation, torch.float32, apart)
    return Publisher(route, section, trainer, generator, timeout_s=60)


def generated(publisher: Publisher) -> list[tuple[tuple[int, ...], Generation]]:
    """Three prompts, two samples each, over the lanes; (prompt, sample) of all, on every rank."""
    publisher.for_generation()
    engine, mine = publisher.generator, []
    if isinstance(engine, MeshEngine):
        lane, lanes = engine.mesh.coords["dp"], engine.mesh.layout.dp
        requests = [r for r in rollout_cases.groups(3, 2, Sampling(6)) if r.request_id // 2 % lanes == lane]
        found = engine.together((lambda: engine.generate(requests)) if engine.is_leader else None) or []
        mine = [(request.prompt, generation) for request, generation in zip(requests, found)]
    publisher.generated()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sorted((pair for part in everyone for pair in part), key=lambda pair: pair[1].request_id)


def as_batch(samples: list[tuple[tuple[int, ...], Generation]]) -> Batch:
    ids = [[*prompt, *sample.token_ids] for prompt, sample in samples]
    masks = [[False] * len(prompt) + [True] * len(sample.token_ids) for prompt, sample in samples]
    groups = np.arange(len(samples)) // 2
    return Batch(np.arange(len(samples)), {TOKEN_IDS: ids, LOSS_MASK: masks, GROUP_ID: groups})


def versions(path: Path, training: Layout, generation: Layout, section: SyncSection, apart: bool) -> dict[str, Any]:
    """A case: three versions; after each, what generators say of their samples against what trainers say of them."""
    publisher = sides(path, training, generation, section, apart)
    gaps, seen, said = [], [], {}
    swapped = section.swap != "none"
    for version in range(3):
        metrics = publisher.publish(version)
        state = publisher.trainer.resident() if publisher.trainer is not None else {}
        engine = publisher.generator
        if isinstance(engine, MeshEngine):  # the engine's weights are the buffers that the plan filled
            assert publisher._weights is not None
            held = {name: p.data_ptr() for name, p in engine._model.named_parameters()}
            assert held == {name: buffer.data_ptr() for name, buffer in publisher._weights.items()}
        if swapped:
            weights = state["weights"].values()
            assert not any(is_resident(tensor) for tensor in weights if tensor.numel())
            assert publisher.tiers is not None
            assert publisher.tiers.ledger.of("device") == publisher.tiers.ledger.of("device", "generation")
        samples = generated(publisher)
        if version == 1:  # a step that asks for more after it has trained: the weights come once more
            publisher.for_training()
            again = generated(publisher)
            assert [g.token_ids for _, g in again] == [g.token_ids for _, g in samples]
        seen.append([list(sample.token_ids) for _, sample in samples])
        assert {v for _, sample in samples for v in sample.versions} == {version}
        publisher.for_training()
        if isinstance(publisher.trainer, TrainState):
            policy = publisher.trainer.policy
            assert all(is_resident(tensor) for tensor in policy.masters().values())
            batch = as_batch(samples)
            found = torch.cat([torch.tensor(sample.logprobs) for _, sample in samples])
            gaps.append(float((policy.logprobs(batch).values[batch[LOSS_MASK].values] - found).abs().max()))
            replica = policy.mesh.data.rank if policy.mesh.data is not None else 0  # type: ignore[attr-defined]
            rows = batches()[version]
            policy.update(rows.select(np.arange(replica, len(rows), training.data)), ACTOR)
        said[version] = metrics
    publisher.close()
    return {"gaps": gaps, "seen": seen, "metrics": said}


L = Layout
CASES = [
    ("qwen3_moe", L(tp=2, dp=2, ep=2), {"ep": 4}, SyncSection(swap="disk", probe_every=1, bucket_mib=0.01), False),
    ("qwen3_tied", L(pp=2, tp=2), {"dp": 4}, SyncSection(probe_every=2, method="allgather_swap"), False),
    ("deepseek", L(fsdp=2, tp=2, ep=2), {"tp": 2, "dp": 2, "ep": 4}, SyncSection(swap="disk"), False),
    ("qwen3_tied", L(tp=2, dp=2), {"dp": 4}, SyncSection(transfer_dtype="fp8", swap="disk", probe_every=1), False),
    ("qwen2_two_kv_heads", L(dp=2), {"tp": 2, "dp": 1}, SyncSection(probe_every=1, bucket_mib=0.01), True),
]


@pytest.mark.parametrize(("name", "training", "degrees", "section", "apart"), CASES, ids=lambda value: str(value)[:24])
def test_generators_follow_the_trainer(
    name: str, training: Layout, degrees: dict[str, int], section: SyncSection, apart: bool, models: Path, pool: Pool
) -> None:
    generation = layout_of(name, **degrees)
    said = pool.run(4, versions, models / name, training, generation, section, apart)
    assert all(one["seen"] == said[0]["seen"] for one in said)
    assert said[0]["seen"][0] != said[0]["seen"][2]  # the updates are to be seen
    gaps = [gap for one in said for gap in one["gaps"]]
    low, high = (1e-4, 1.0) if section.quantized else (-1.0, 1e-5)  # fp8: the generator is another policy, and shows it
    assert len(gaps) == 3 * training.world_size and low < max(gaps) < high
    for rank, one in enumerate(said):
        for version, metrics in one["metrics"].items():
            probed = bool(section.probe_every) and version % section.probe_every == 0
            assert ("reshard/probe_diff" in metrics) == probed
            if probed:
                assert low < metrics["reshard/probe_diff"][0] < high
            if section.swap != "none":  # weights, which are masters too, and two moments: no gradients between steps
                weights = sum(t.numel() for t in locals_of(models / name, training, rank))
                assert metrics["reshard/freed_bytes"][0] >= 3 * 4 * weights
    planned = Route(ModelConfig.from_hf(MODELS[name]), training, generation, torch.float32, apart).plan(section)
    received = sum(one["metrics"][1]["reshard/bytes_received"][0] for one in said)
    assert received == planned.links().total + planned.devices * planned.scale_bytes > 0
    assert (planned.scale_bytes > 0) == section.quantized


def locals_of(path: Path, layout: Layout, rank: int) -> list[torch.Tensor]:
    """Shapes of what a rank trains."""
    from docklands.sync.plan import plan_reshard
    from docklands.sync.script import Script

    plan = plan_reshard(ModelConfig.from_hf(MODELS[path.name]), layout, Layout(dp=layout.world_size))
    return [torch.empty(held.shape, device="meta") for held in Script(plan, rank).source.values()]


def faulty(path: Path, training: Layout, generation: Layout, fault: str) -> str:
    """A case: rank 3's generator does not do what it should at the second publish."""
    section = SyncSection(probe_every=1, gate=fault != "probe")
    publisher = sides(path, training, generation, section, False)
    publisher.publish(0)
    engine = publisher.generator
    assert isinstance(engine, MeshEngine)
    if dist.get_rank() == 3:
        hold = engine.hold

        def wrong(weights: Any, version: int) -> None:
            hold(weights, version if fault != "version" else 0)
            if fault == "weight":
                weights["layers.1.o.weight"].view(torch.int32)[2, 3] ^= 1

        engine.hold = wrong  # type: ignore[method-assign]
        if fault == "probe":
            engine._model.layers[1].scale *= 1.5  # type: ignore[operator]
    try:
        publisher.publish(1)
    except SyncError as error:
        return f"{type(error).__name__}: {error.message}"
    return ""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("weight", "GateFailed: {}, generators differ from the trainer: layers.1.o.weight on device 3"),
        ("version", "VersionMismatch: {}: device 3 has 0"),
        ("probe", "GateFailed: {}, log-probs of the probe differ by "),
    ],
    ids=["weight", "version", "probe"],
)
def test_what_is_not_what_was_published_ends_the_run_on_every_rank(
    fault: str, says: str, models: Path, pool: Pool
) -> None:
    layout = layout_of("qwen3_tied", dp=4)
    for said in pool.run(4, faulty, models / "qwen3_tied", Layout(tp=2, dp=2), layout, fault):
        assert said.startswith(says.format("after publishing version 1"))


def test_a_swap_that_cannot_be_is_refused() -> None:
    for section, apart, message in (
        (SyncSection(swap="host"), False, "the device is the host"),
        (SyncSection(swap="disk"), True, "devices of their own"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_sync(section, "cpu", apart)
    with pytest.raises(ConfigError, match="training state is on an accelerator"):
        check_sync(SyncSection(swap="disk"), "cuda:0", False)
