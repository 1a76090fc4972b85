"""Adapters over ranks against one process: losses, gradients, merged weights after three updates; the base at rest.
Published by plan, merged or as adapters, to generators of another layout.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from docklands.config.layouts import SyncSection
from docklands.config.lora import LoraSection
from docklands.config.schema import RolloutSection, TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK
from docklands.errors import GateFailed
from docklands.models import CausalLM, load, read_config
from docklands.models.adapters import is_adapter, with_lora
from docklands.models.lora import adapters_off
from docklands.models.sharded import ShardedModel
from docklands.parallel import Layout, fsdp
from docklands.parallel.mesh import Mesh
from docklands.rollout.mesh import MeshEngine
from docklands.sync.publish import Publisher, Route
from docklands.train import TrainEngine
from docklands.train.resident import TrainState, resident
from docklands.train.sharded import ShardedEngine
from tests.distributed.cases import OPTIM, TRAIN, batches, compare, difference, offsets, run
from tests.distributed.pool import Pool
from tests.distributed.test_generate_mesh import layout_of
from tests.distributed.test_publish import as_batch, generated
from tests.train_cases import ACTOR, ACTOR_WITH_ENTROPY

ADAM = OPTIM.model_copy(update={"eps": 1e-3})
"""Gradients of adapters are small: see OPTIM."""
PLAIN = LoraSection(rank=4, alpha=6.0)
EXPERTS = LoraSection(rank=4, alpha=6.0, experts=True)
SOME = LoraSection(rank=3, alpha=6.0, targets=["k_proj", "up_proj", "o_proj"], rslora=True)
FAULT = ".o.lora.o_proj.b"
SECTIONS = {"plain": PLAIN, "experts": EXPERTS, "some": SOME}


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of a B that has been trained: from zero, A would have no gradient."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.empty(shape).normal_(0.0, 0.2, generator=generator)


def engine_alone(path: Path, section: LoraSection) -> TrainEngine:
    model = load(path / "policy", config=with_lora(read_config(path / "policy"), section), seed=9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) and name.endswith(".b"):
                parameter.copy_(drawn(name, tuple(parameter.shape)))
    return TrainEngine(model, TrainSection(**TRAIN), ADAM, max_tokens=8, total_updates=10)


def engine_sharded(path: Path, section: LoraSection, layout: Layout) -> ShardedEngine:
    mesh = Mesh(layout, timeout_s=60)
    config = with_lora(read_config(path / "policy"), section)
    model = ShardedModel(CausalLM, config, mesh, dtype=torch.float32)
    model.load(path / "policy")
    model.init_adapters(9)
    named = {name: p for name, p in model.parameters().items() if is_adapter(name) and name.endswith(".b")}
    model.scatter(
        {n: fsdp.local(p.data) for n, p in named.items()}, {n: drawn(n, model.slots[n].spec.shape) for n in named}
    )
    return ShardedEngine(model, TrainSection(**TRAIN), ADAM, max_tokens=8, total_updates=10)


@cache
def expected(path: Path, section_key: str) -> dict[str, Any]:
    engine = engine_alone(path, SECTIONS[section_key])
    with adapters_off([engine.model]):
        off = engine.logprobs(batches()[0]).values
    return {**trained(engine, batches()), "off": off}


def trained(engine: TrainEngine, rows: list[Batch]) -> dict[str, Any]:
    """As cases.run; beside the merged weights the adapters."""
    found = run(engine, rows, ACTOR_WITH_ENTROPY)
    found["weights"] |= {name: tensor.clone() for name, tensor in engine.parts() if is_adapter(name)}
    return found


def adapted(path: Path, section_key: str, layout: Layout) -> dict[str, Any]:
    """A case: this rank of the layout, the rows of its replica."""
    engine = engine_sharded(path, SECTIONS[section_key], layout)
    replica = 0 if engine.mesh.data is None else engine.mesh.data.rank
    rows = [batch.select(np.arange(replica, len(batch), layout.data)) for batch in batches()]
    base = {n: fsdp.local(p).detach().clone() for n, p in engine.sharded.parameters().items() if not is_adapter(n)}
    with adapters_off(engine.sharded.chunks):
        off = engine.logprobs(rows[0]).values
    engine.forward_backward(rows[0], ACTOR_WITH_ENTROPY)
    bare = all(p.grad is None for name, p in engine.sharded.parameters().items() if not is_adapter(name))
    assert engine.optimizer is not None
    engine.optimizer.clear()
    found = trained(engine, rows)
    parameters = engine.sharded.parameters()
    rested = all(torch.equal(fsdp.local(parameters[name]), tensor) for name, tensor in base.items())
    kinds = resident(engine)
    names = {kind: sorted({n.split("/")[-2] if kind == "optimizer" else n for n in kinds[kind]}) for kind in kinds}
    if engine.mesh.rank:
        del found["gradients"], found["weights"]
    only = all(is_adapter(name) for kind in ("gradients", "optimizer") for name in names[kind])
    return {**found, "replica": replica, "rested": rested and bare, "only": only, "off": off}


@pytest.mark.parametrize(
    ("name", "section", "layout"),
    [
        ("qwen3_tied", "plain", Layout(tp=2)),
        ("qwen3_tied", "some", Layout(tp=2, sp=False)),
        ("qwen3_tied", "plain", Layout(fsdp=2)),
        ("qwen3_tied", "some", Layout(pp=2, schedule="zero_bubble")),
        ("qwen2_two_kv_heads", "plain", Layout(tp=4)),
        ("qwen2_two_kv_heads", "some", Layout(fsdp=2, tp=2)),
        ("qwen3_moe", "experts", Layout(dp=2, ep=2)),
        ("qwen3_moe", "experts", Layout(tp=2, dp=2, ep=2, etp=2)),
        ("qwen3_moe", "experts", Layout(fsdp=4, ep=2)),
        ("deepseek", "experts", Layout(tp=2, pp=2, ep=2)),
        ("deepseek", "plain", Layout(tp=2, sp=True, ep=2)),
    ],
    ids=str,
)
def test_adapters_over_ranks_equal_one_process(
    name: str, section: str, layout: Layout, models: Path, pool: Pool
) -> None:
    found = pool.run(layout.world_size, adapted, models / name, section, layout)
    whole, reference = batches()[0], expected(models / name, section)
    compare(found, reference, layout)
    ends = offsets(whole)
    for rank, mine in enumerate(found):
        assert mine["rested"], f"the base changed on rank {rank}"
        assert mine["only"], f"gradients or moments of the base on rank {rank}"
        rows = range(mine["replica"], len(whole), layout.data)
        off = torch.cat([reference["off"][ends[row] : ends[row + 1]] for row in rows])
        assert difference(mine["off"], off) < 1e-5, "the reference: adapters switched off"


def published(path: Path, key: str, training: Layout, generation: Layout, sync: SyncSection, adapters: bool) -> Any:
    """A case: three versions. -> (differences of log-probs, bytes received, tokens, what the gate said of a fault)"""
    engine = engine_sharded(path, SECTIONS[key], training)
    config = read_config(path / "policy")
    shape = with_lora(config, SECTIONS[key]) if adapters else config
    generator = MeshEngine(shape, RolloutSection(max_batch=4, kv_block_tokens=16), Mesh(generation, timeout_s=60))
    route = Route(shape, training, generation, torch.float32)
    publisher = Publisher(route, sync, TrainState(engine), generator, timeout_s=60)
    base = {n: fsdp.local(p).detach().clone() for n, p in engine.sharded.parameters().items() if not is_adapter(n)}
    replica = 0 if engine.mesh.data is None else engine.mesh.data.rank
    gaps, received, tokens = [], [], []
    for version in range(3):
        received.append(publisher.publish(version)["reshard/bytes_received"][0])
        samples = generated(publisher)
        tokens.append([list(sample.token_ids) for _, sample in samples])
        publisher.for_training()
        batch = as_batch(samples)
        found = torch.cat([torch.tensor(sample.logprobs) for _, sample in samples])
        gaps.append(float((engine.logprobs(batch).values[batch[LOSS_MASK].values] - found).abs().max()))
        rows = batches()[version]
        engine.update(rows.select(np.arange(replica, len(rows), training.data)), ACTOR)
    parameters = engine.sharded.parameters()
    assert all(torch.equal(fsdp.local(parameters[name]), tensor) for name, tensor in base.items())
    said = ""
    if adapters:
        adopt = publisher._adopt

        def spoilt(weights: Any, version: int) -> int:
            next(tensor for name, tensor in weights.items() if name.endswith(FAULT))[0, 0] += 1e-3
            return adopt(weights, version)

        publisher._adopt = spoilt if engine.mesh.rank == 1 else adopt  # type: ignore[method-assign]
        try:
            publisher.publish(3)
        except GateFailed as error:
            said = error.message
    publisher.close()
    return gaps, received, tokens, said


@pytest.mark.parametrize(
    ("name", "key", "training", "degrees", "swap"),
    [
        ("qwen3_tied", "plain", Layout(tp=2), {"dp": 2}, "disk"),
        ("qwen2_two_kv_heads", "some", Layout(fsdp=2, tp=2), {"tp": 2, "dp": 2}, "none"),
        ("qwen3_moe", "experts", Layout(fsdp=2, tp=2, ep=2), {"ep": 4}, "none"),
        ("deepseek", "plain", Layout(pp=2), {"tp": 2}, "disk"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_generators_follow_merged_or_adapted(
    name: str, key: str, training: Layout, degrees: dict[str, int], swap: Any, models: Path, pool: Pool
) -> None:
    generation = layout_of(name, **degrees)
    ways = {}
    for adapters in (False, True):
        sync = SyncSection(swap="none" if adapters else swap, probe_every=1, bucket_mib=0.01)
        found = pool.run(training.world_size, published, models / name, key, training, generation, sync, adapters)
        assert max(gap for gaps, *_ in found for gap in gaps) < 1e-5
        ways[adapters] = found
    assert ways[False][0][2] == ways[True][0][2], "the same tokens, merged or not"
    assert ways[True][0][2][0] != ways[True][0][2][2], "the updates are to be seen"
    for (_, whole, *_), (_, received, _, said) in zip(ways[False], ways[True]):
        assert max(received[1:]) < received[0] and max(received[1:]) <= max(whole[1:]) / 2
        assert FAULT in said
