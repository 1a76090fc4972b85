"""Random batches for the algorithm tests, and the losses once more as plain Python loops over samples and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from docklands.algorithms import Algorithm, build_algorithm
from docklands.config.schema import Config
from docklands.core.batch import Batch
from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RETURNS,
    ROLLOUT_LOGPROBS,
    TOKEN_ADVANTAGES,
    TOKEN_IDS,
    VALUES,
)
from docklands.core.loss import Denominators, ModelOutput

NAN = float("nan")
MAX_TOKENS = 16
POLICIES = ["grpo", "dapo", "ppo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo"]


def config(name: str, algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A config for `name`: 4 prompts x 4 samples (sft: x 1), two updates a step unless the algorithm takes only one."""
    size = 1 if name == "sft" else 4
    chosen: dict[str, Any] = {"name": name, **(algorithm or {})}
    if name not in ("rloo", "sft"):
        chosen.setdefault("samples_per_update", 8)
    rollout = {
        "prompts_per_step": 4,
        "samples_per_prompt": size,
        "max_response_tokens": MAX_TOKENS,
        **sections.pop("rollout", {}),
    }
    return Config.model_validate({"algorithm": chosen, "rollout": rollout, **sections})


def algorithm(name: str, keys: dict[str, Any] | None = None, **sections: Any) -> Algorithm:
    return build_algorithm(config(name, keys, **sections))


def random_batch(rows: int = 8, seed: int = 0, spread: float = 0.4, off_mask: float = NAN) -> Batch:
    """Ragged rows: a prompt, sampled tokens, sometimes an observation in between, one row without a sampled token.

    Everything but ids and mask holds `off_mask` where the mask is False.
    """
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    masks = []
    for row in range(rows):
        first = integer(1, 6) if row != 2 else 0
        mask = [False] * integer(1, 4) + [True] * first
        if first and integer(0, 1):
            mask += [False] * integer(1, 3) + [True] * integer(0, 3)
        masks.append(torch.tensor(mask))

    def column(scale: float, shift: float = 0.0) -> list[Tensor]:
        noise = [torch.randn(len(m), generator=generator) * scale + shift for m in masks]
        return [torch.where(m, n, torch.tensor(off_mask)) for m, n in zip(masks, noise)]

    base = [torch.where(m, -torch.rand(len(m), generator=generator) * 2 - 0.1, torch.tensor(off_mask)) for m in masks]
    columns = {
        GROUP_ID: torch.arange(rows) // 4,
        TOKEN_IDS: [torch.randint(0, 50, (len(m),), generator=generator) for m in masks],
        LOSS_MASK: masks,
        ROLLOUT_LOGPROBS: base,
        OLD_LOGPROBS: [b + d for b, d in zip(base, column(spread / 4))],
        REF_LOGPROBS: [b + d for b, d in zip(base, column(spread))],
        ADVANTAGE: torch.randn(rows, generator=generator),
        TOKEN_ADVANTAGES: column(1.0),
        VALUES: column(1.0),
        RETURNS: column(1.0),
    }
    return Batch(range(rows), columns)


def random_output(batch: Batch, seed: int = 1, spread: float = 0.4, off_mask: float = NAN) -> ModelOutput:
    """Leaf tensors near pi_old, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(seed)
    mask_T = batch[LOSS_MASK].values

    def leaf(value_T: Tensor) -> Tensor:
        return torch.where(mask_T, value_T, torch.tensor(off_mask)).requires_grad_()

    noise = [torch.randn(batch.num_tokens, generator=generator) for _ in range(3)]
    old_T = batch[OLD_LOGPROBS].values
    return ModelOutput(leaf(old_T + spread * noise[0]), leaf(noise[1].abs()), leaf(noise[2]))


def whole(batch: Batch) -> Denominators:
    """Counts of the update that consists of `batch`."""
    tokens = [int(mask.sum()) for mask in batch[LOSS_MASK]]
    return Denominators(sum(tokens), sum(n > 0 for n in tokens), MAX_TOKENS)


def piece(batch: Batch, out: ModelOutput, rows: list[int]) -> tuple[Batch, ModelOutput]:
    """Some consecutive rows of a batch with their model outputs (still the same leaves)."""
    start, stop = batch.pack().cu_seqlens[rows[0]], batch.pack().cu_seqlens[rows[-1] + 1]
    cut = [None if v is None else v[int(start) : int(stop)] for v in (out.logprobs_T, out.entropy_T, out.values_T)]
    return batch.select(rows), ModelOutput(*cut)


@dataclass
class NaiveSample:
    """Trained tokens of one sample, as lists of scalar tensors."""

    now: list[Tensor]
    old: list[Tensor]
    mu: list[Tensor]
    ref: list[Tensor]
    advantage: list[Tensor]
    entropy: list[Tensor]


def naive_samples(batch: Batch, out: ModelOutput, token_level: bool, old: str) -> list[NaiveSample]:
    """Samples with at least one trained token."""
    packed = batch.pack()
    assert out.logprobs_T is not None and out.entropy_T is not None
    samples = []
    for row in range(len(batch)):
        places = [t for t in range(packed.num_tokens) if packed.row_T[t] == row and packed.loss_mask_T[t]]
        if not places:
            continue
        now = [out.logprobs_T[t] for t in places]
        mu = [batch[ROLLOUT_LOGPROBS].values[t] for t in places]
        olds = {"recompute": [batch[OLD_LOGPROBS].values[t] for t in places], "rollout": mu}
        samples.append(
            NaiveSample(
                now=now,
                old=[x.detach() for x in now] if old == "current" else olds[old],
                mu=mu,
                ref=[batch[REF_LOGPROBS].values[t] for t in places],
                advantage=[batch[TOKEN_ADVANTAGES].values[t] if token_level else batch[ADVANTAGE][row] for t in places],
                entropy=[out.entropy_T[t] for t in places],
            )
        )
    return samples


def naive_aggregate(terms: list[list[Tensor]], mode: str) -> Tensor:
    tokens = sum(len(sample) for sample in terms)
    if mode == "token_mean":
        return torch.stack([x for sample in terms for x in sample]).sum() / tokens
    sums = [torch.stack(sample).sum() for sample in terms]
    if mode == "sequence_mean":
        return torch.stack([s / len(sample) for s, sample in zip(sums, terms)]).sum() / len(terms)
    return torch.stack(sums).sum() / (len(terms) * (MAX_TOKENS if mode == "constant" else 1))


def clamp(value: Tensor, low: float, high: float) -> Tensor:
    return value.clamp(low, high)


def naive_clip(r: Tensor, a: Tensor, low: float, high: float, dual: float) -> Tensor:
    gain = torch.minimum(r * a, clamp(r, 1 - low, 1 + high) * a)
    if dual and float(a) < 0:
        gain = torch.maximum(gain, dual * a)
    return -gain


def naive_policy_terms(kind: str, sample: NaiveSample, bounds: tuple[float, float, float]) -> list[Tensor]:
    low, high, dual = bounds
    if kind == "reinforce":
        return [-a * now for a, now in zip(sample.advantage, sample.now)]
    if kind == "sequence":
        s = (torch.stack([n - o for n, o in zip(sample.now, sample.old)]).sum() / len(sample.now)).exp()
        return [naive_clip(s, a, low, high, dual) for a in sample.advantage]
    terms = []
    for now, old, a in zip(sample.now, sample.old, sample.advantage):
        r = (now - old).exp()
        if kind == "cispo":
            terms.append(-clamp(r, 1 - low, 1 + high).detach() * a * now)
        else:
            terms.append(naive_clip(r, a, low, high, dual))
    return terms


def naive_weights(mode: str, sample: NaiveSample, low: float, high: float) -> list[float]:
    logs = [float(o.detach()) - float(m) for o, m in zip(sample.old, sample.mu)]
    ratios = [math.exp(sum(logs))] * len(logs) if mode.startswith("sequence") else [math.exp(x) for x in logs]
    if mode == "off":
        return [1.0] * len(logs)
    if mode.endswith("tis"):
        return [min(r, high) for r in ratios]
    return [r if low <= r <= high else 0.0 for r in ratios]


def naive_kl(estimator: str, now: Tensor, ref: Tensor) -> Tensor:
    """The estimator's value with the gradient of k2."""
    d = now - ref
    value = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator].detach()
    slope = d**2 / 2
    return value + slope - slope.detach()
