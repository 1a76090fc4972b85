"""Tiny models with experts, rollouts that record their router choices, and the plain way to see a router's choice."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from docklands.config.schema import OptimSection, RolloutSection, TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    ROLLOUT_LOGPROBS,
    ROUTES,
    TOKEN_IDS,
    Field,
    routes_field,
)
from docklands.models import CausalLM, ModelConfig, PackedCausal
from docklands.models.config import MlaConfig, MoeConfig
from docklands.models.routing import Routes
from docklands.rollout import NativeEngine, RolloutWorker
from docklands.train import TrainEngine
from tests import rollout_cases as cases

QWEN = ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=len(cases.CHARACTERS) + 2,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    intermediate_size=56,
    qk_norm=True,
    max_positions=512,
    init_std=0.2,
    moe=MoeConfig(experts=6, top_k=2, expert_size=24),
)
DEEPSEEK = dataclasses.replace(
    QWEN,
    architecture="DeepseekV3ForCausalLM",
    num_layers=3,
    num_heads=5,
    num_kv_heads=5,
    head_dim=14,
    qk_norm=False,
    moe=MoeConfig(
        experts=6, top_k=2, expert_size=24, shared_size=24, scoring="sigmoid", groups=3, top_groups=2, first_dense=1
    ),
    mla=MlaConfig(q_rank=14, kv_rank=18, nope_dim=8, rope_dim=6, v_dim=10),
)
DENSE = dataclasses.replace(QWEN, architecture="Qwen3ForCausalLM", moe=None)
CONFIGS = {"qwen3_moe": QWEN, "deepseek": DEEPSEEK, "dense": DENSE}


def column_of(config: ModelConfig) -> Field[Any]:
    assert config.routed is not None
    return routes_field(*config.routed)


def worker(model: CausalLM, dtype: str = "float32", engines: int = 1, env: Any = None, **section: Any) -> RolloutWorker:
    """Engines that hold the model's weights and record what its routers choose."""
    record = model.config.routed is not None
    settings = RolloutSection(**{"max_batch": 16, "max_response_tokens": 24, "record_routes": record, **section})
    made = [NativeEngine(model.config, settings, dtype=getattr(torch, dtype)) for _ in range(engines)]
    found = RolloutWorker(made, cases.tokenizer(), env, settings, 7, column_of(model.config) if record else None)
    found.load_weights(model.named_parameters(), 0)
    return found


def played(made: RolloutWorker, prompts: int = 5, samples: int = 6, seed: int = 0) -> Batch:
    """A rollout with what an update needs, advantages random."""
    rows = cases.admitted([f"{a}+{a * 7}=" for a in range(prompts)], samples)
    batch = made.rollout(rows).batch
    assert batch is not None
    advantage_B = torch.randn(len(rows), generator=torch.Generator().manual_seed(seed))
    return batch.with_({GROUP_ID: rows[GROUP_ID], ADVANTAGE: advantage_B})


def without_routes(batch: Batch) -> Batch:
    return batch.only([field for field in batch.fields if field.name != ROUTES])


def trainer(model: CausalLM, optim: OptimSection | None = None, **train: Any) -> TrainEngine:
    """A train engine on a copy of the model."""
    section = TrainSection(**{"tokens_per_microbatch": 400, **train})
    return TrainEngine(copy.deepcopy(model), section, optim or OptimSection(lr=1e-2), max_tokens=24, total_updates=10)


def gaps(engine: TrainEngine, batch: Batch) -> Tensor:
    """|log p of the trainer - log p of the generator| of every sampled token."""
    gap_T = (engine.logprobs(batch).values - batch[ROLLOUT_LOGPROBS].values).abs()
    return gap_T[batch[LOSS_MASK].values]


@torch.no_grad()
def chosen(model: CausalLM, ids: Tensor) -> Tensor:
    """What the routers choose for one sequence alone, int16 [T, L, k]."""
    routes = Routes()
    model(ids.long(), torch.arange(len(ids)), PackedCausal([len(ids)]), routes=routes)
    return routes.choices()


def fed(batch: Batch, column: Field[Any], row: int) -> tuple[Tensor, Tensor]:
    """(token ids, recorded choices) of what the model was fed of a row: all but the last token."""
    return batch[TOKEN_IDS][row][:-1], batch[column][row][:-1]
