"""What the train engine's tests share: a tiny model, batches, plain losses, and the naive loop to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.config.schema import OptimSection, TrainSection
from docklands.core.batch import Batch, Packed
from docklands.core.fields import ADVANTAGE, GROUP_ID, LOSS_MASK, RETURNS, TOKEN_IDS
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Learner
from docklands.models import ModelConfig, PackedCausal, build, build_value
from docklands.train import TrainEngine

V = 61
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": V,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}

Rows = Sequence[tuple[int, Sequence[int], Sequence[bool]]]
"""(group, token ids, loss mask) of each row."""


def tiny(value: bool = False, **changes: Any) -> Any:
    """A model with random weights; the value head is random too."""
    config = ModelConfig.from_hf({**SHAPE, **changes})
    if not value:
        return build(config, seed=3)
    model = build_value(config, seed=3)
    with torch.no_grad():
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(5))
    return model


def engine(value: bool = False, optim: OptimSection | None = None, total: int = 10, **train: Any) -> TrainEngine:
    """A train engine on the tiny model; keywords go to TrainSection, but temperature."""
    temperature = train.pop("temperature", 1.0)
    section = TrainSection(**{"tokens_per_microbatch": 256, **train})
    rate = optim or OptimSection(lr=1e-2)
    return TrainEngine(tiny(value), section, rate, temperature=temperature, max_tokens=8, total_updates=total)


def batch_of(rows: Rows, seed: int = 0) -> Batch:
    """A batch with random advantages and returns."""
    draw = np.random.default_rng(seed)
    return Batch(
        np.arange(len(rows)) + 100,
        {
            TOKEN_IDS: [np.array(ids, np.int32) for _, ids, _ in rows],
            LOSS_MASK: [np.array(mask, bool) for _, _, mask in rows],
            GROUP_ID: np.array([group for group, _, _ in rows]),
            ADVANTAGE: draw.normal(size=len(rows)).astype(np.float32),
            RETURNS: [draw.normal(size=len(ids)).astype(np.float32) for _, ids, _ in rows],
        },
    )


def sampled(seed: int = 0, groups: int = 3, samples: int = 4, prompt: int = 9, longest: int = 7) -> Batch:
    """Groups that share a prompt; responses of 1 to `longest` tokens; one with an observation, two rows equal."""
    draw = np.random.default_rng(seed)
    rows: list[tuple[int, list[int], list[bool]]] = []
    for group in range(groups):
        shared = draw.integers(0, V, int(draw.integers(2, prompt + 1))).tolist()
        for _ in range(samples):
            response = draw.integers(0, V, int(draw.integers(1, longest + 1))).tolist()
            rows.append((group, shared + response, [False] * len(shared) + [True] * len(response)))
    group, ids, mask = rows[1]
    rows[1] = group, ids + [7, 8, 9, 3], mask + [False, False, False, True]
    rows[3] = rows[2]
    order = draw.permutation(len(rows))  # groups do not stand together
    return batch_of([rows[i] for i in order], seed)


def policy_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    """-A * ratio, token mean; metrics of every kind of reduction."""
    logprobs_T = out.logprobs_T
    assert logprobs_T is not None
    ratio_T = torch.exp(logprobs_T - logprobs_T.detach())
    loss = torch.where(packed.loss_mask_T, -packed.per_token(ADVANTAGE) * ratio_T, 0.0).sum()
    most = float(ratio_T.detach()[packed.loss_mask_T].max()) if bool(packed.loss_mask_T.any()) else 0.0
    trained = int(packed.loss_mask_T.sum())
    metrics = {"actor/pg_loss": (loss.detach(), trained), "actor/ratio_max": (most, int(trained > 0))}
    return LossResult(loss / denominators.tokens, metrics)


def entropy_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    """The policy loss with an entropy bonus."""
    assert out.entropy_T is not None
    bonus = torch.where(packed.loss_mask_T, out.entropy_T, 0.0).sum() / denominators.tokens
    return LossResult(policy_loss(packed, out, denominators).loss - 0.1 * bonus)


def value_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    """Squared error to the returns, token mean."""
    assert out.values_T is not None
    error_T = torch.where(packed.loss_mask_T, out.values_T - packed[RETURNS], 0.0)
    return LossResult(error_T.square().sum() / denominators.tokens)


ACTOR = Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK), policy_loss)
ACTOR_WITH_ENTROPY = Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK), entropy_loss, entropy=True)
CRITIC = Learner("critic", "critic", (TOKEN_IDS, LOSS_MASK), value_loss)


def naive_outputs(model: Any, batch: Batch, temperature: float = 1.0) -> list[dict[str, Tensor]]:
    """Per row, from a forward pass of its own over all its tokens: log-probs and entropy, or values. No sharing."""
    found = []
    for ids, mask in zip(batch[TOKEN_IDS], batch[LOSS_MASK]):
        ids = ids.long()
        out = model(ids, torch.arange(len(ids)), PackedCausal([len(ids)]))
        if out.dim() == 1:
            found.append({"values_T": torch.cat([torch.zeros(1), out[:-1]]) * mask})
            continue
        log_p_TV = torch.log_softmax(out @ model.head_weight.t() / temperature, -1)
        logprobs = log_p_TV[:-1].gather(1, ids[1:, None]).squeeze(1)
        entropy = -(log_p_TV.exp() * log_p_TV).sum(-1)[:-1]
        zero = torch.zeros(1)
        found.append({"logprobs_T": torch.cat([zero, logprobs]) * mask, "entropy_T": torch.cat([zero, entropy]) * mask})
    return found


def naive_gradients(model: Any, batch: Batch, loss: Callable[..., LossResult], temperature: float = 1.0) -> Any:
    """(loss, gradients by name) with one forward and backward per row."""
    model.zero_grad()
    tokens = batch.num_trained_tokens
    counts = Denominators(tokens, sum(bool(m.any()) for m in batch[LOSS_MASK]), 8)
    total = 0.0
    for row, out in enumerate(naive_outputs(model, batch, temperature)):
        value = loss(batch.select([row]).pack(), ModelOutput(**out), counts).loss
        total += float(value.detach())
        if value.requires_grad:
            value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradients


def gradients_of(trainer: TrainEngine, batch: Batch, learner: Learner) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients by name) of the engine; it forgets them."""
    metrics = trainer.forward_backward(batch, learner)
    assert trainer.optimizer is not None
    found = {name: g.clone().float() for name, g in trainer.optimizer.gradients().items()}
    trainer.optimizer.clear()
    return metrics[f"{learner.name}/loss"][0], found


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Over all tensors of two dicts with the same names."""
    assert left.keys() == right.keys() and left
    return max(float((left[name] - right[name]).abs().max()) for name in left)
