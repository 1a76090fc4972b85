"""What runs in the processes of test_vllm_replica: trainers, and generators on vLLM or on the native engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests import rollout_cases as cases

from docklands.config.layouts import SyncSection
from docklands.config.schema import RolloutSection
from docklands.core.protocols import Sampling
from docklands.models import CausalLM, ModelConfig
from docklands.models.sharded import build_sharded
from docklands.parallel import fsdp
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.rollout.engines import build_shard
from docklands.sync.publish import Publisher, Resident, Route

SECTION = RolloutSection(engine="vllm", max_batch=16, max_response_tokens=32)


@dataclass
class Shards:
    """A trainer that does not learn: its shards, and the whole model's log-probs."""

    config: ModelConfig
    layout: Layout
    seed: int = 1

    def __post_init__(self) -> None:
        self.take(self.seed)

    def take(self, seed: int) -> None:
        """Weights of another model."""
        sharded = build_sharded(self.config, Mesh(self.layout, timeout_s=60, first=0), seed=seed)
        self.weights = {name: fsdp.local(p).detach() for name, p in sharded.parameters().items()}
        self.whole = cases.model(self.config, seed=seed)

    def resident(self) -> Resident:
        return {"weights": self.weights}

    def published(self, weights: Any, adapters: bool) -> Any:
        return weights

    def probe(self, sequences: Any) -> torch.Tensor:
        return torch.cat([plain(self.whole, ids) for ids in sequences])


def plain(model: CausalLM, ids: list[int]) -> torch.Tensor:
    logits = cases.full_logits(model, ids)
    chosen = torch.log_softmax(logits.float(), -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def publish_and_generate(
    config: ModelConfig, training: Layout, generation: Layout, apart: bool, section: SyncSection
) -> dict[str, Any]:
    """A case: two versions; (largest gap to the trainer's log-probs, tokens, probe's gap) of each."""
    rank, first = dist.get_rank(), training.world_size if apart else 0
    trainer = Shards(config, training) if rank < training.world_size else None
    engine = None
    if rank >= first:
        mesh = Mesh(generation, timeout_s=60, first=first)
        engine = build_shard(SECTION, config, mesh, torch.float32, "cpu", 128)
    route = Route(config, training, generation, torch.float32, apart)
    publisher = Publisher(route, section, trainer, engine, timeout_s=60)
    found: dict[str, Any] = {"tokens": [], "gaps": [], "probe": [], "held": []}
    for version, seed in enumerate((1, 2)):
        if trainer is not None:
            trainer.take(seed)
        found["probe"].append(publisher.publish(version)["reshard/probe_diff"][0])
        publisher.for_generation()
        if engine is not None:
            assert engine.version == version
            found["held"].append(sum(t.untyped_storage().nbytes() for t in (publisher._weights or {}).values()))
            requests = cases.groups(3, 2, Sampling(8, temperature=0.8))

            def play(engine: Any = engine, requests: Any = requests) -> list[Any]:
                return engine.generate(requests) + engine.generate(requests[:2])

            said = engine.together(play if engine.is_leader else None)
            if said is not None:
                model = cases.model(config, seed=seed)
                want = [
                    cases.full_logprobs(model, r, list(g.token_ids)) for r, g in zip([*requests, *requests[:2]], said)
                ]
                gap = max(float((w - torch.tensor(list(g.logprobs))).abs().max()) for w, g in zip(want, said))
                found["gaps"].append(gap)
                found["tokens"].append([list(g.token_ids) for g in said])
        publisher.generated()
        publisher.for_generation()
        publisher.generated()
    publisher.close()
    return found
