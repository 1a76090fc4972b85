"""Every algorithm's loss and gradient against a plain loop over samples and tokens; pitfalls 5, 7, 8, 10."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.algorithm_cases import (
    POLICIES,
    algorithm,
    naive_aggregate,
    naive_kl,
    naive_policy_terms,
    naive_samples,
    naive_weights,
    random_batch,
    random_output,
    whole,
)

from docklands.algorithms import Algorithm, PolicyAlgorithm
from docklands.algorithms.ppo import PPO
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
from docklands.core.loss import LossResult, ModelOutput
from docklands.errors import TrainError

KIND = {"rloo": "reinforce", "gspo": "sequence", "cispo": "cispo"}
OWN = {  # clip low, clip high, aggregation: the papers' own, written out once more
    "grpo": (0.2, 0.28, "token_mean"),
    "dapo": (0.2, 0.28, "token_mean"),
    "ppo": (0.2, 0.2, "token_mean"),
    "dr_grpo": (0.2, 0.2, "constant"),
    "rloo": (0.0, 0.0, "sequence_sum"),
    "reinforce_pp": (0.2, 0.2, "token_mean"),
    "gspo": (3e-4, 4e-4, "sequence_mean"),
    "cispo": (1.0, 4.0, "token_mean"),
}


def naive(name: str, batch: Batch, out: ModelOutput, keys: dict[str, Any]) -> torch.Tensor:
    """The whole loss of `name`."""
    low, high, aggregation = OWN[name]
    low, high = keys.get("clip_low", low), keys.get("clip_high", high)
    aggregation = keys.get("aggregation", aggregation)
    old = keys.get("old_logprobs", "current" if name == "rloo" else "recompute")
    samples = naive_samples(batch, out, name in ("ppo", "reinforce_pp"), old)
    correction = {"mode": "off", "min_ratio": 0.0, "max_ratio": 2.0, **keys.get("correction", {})}
    terms = []
    for sample in samples:
        weights = naive_weights(correction["mode"], sample, correction["min_ratio"], correction["max_ratio"])
        policy = naive_policy_terms(KIND.get(name, "clip"), sample, (low, high, keys.get("dual_clip", 0.0)))
        terms.append([w * x for w, x in zip(weights, policy)])
    loss = naive_aggregate(terms, aggregation)
    if "entropy_coef" in keys:
        loss = loss - keys["entropy_coef"] * naive_aggregate([s.entropy for s in samples], aggregation)
    if "kl" in keys:
        kl = [[naive_kl(keys["kl"]["estimator"], n, r) for n, r in zip(s.now, s.ref)] for s in samples]
        loss = loss + keys["kl"]["coef"] * naive_aggregate(kl, aggregation)
    return loss


def gradients(loss: torch.Tensor, out: ModelOutput) -> list[torch.Tensor]:
    leaves = [x for x in (out.logprobs_T, out.entropy_T, out.values_T) if x is not None]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves)]


def run(made: Algorithm, batch: Batch, out: ModelOutput) -> LossResult:
    return made.loss(batch.pack(), out, whole(batch))


VARIANTS: dict[str, dict[str, Any]] = {
    "own": {},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "sequence_sum": {"aggregation": "sequence_sum"},
    "constant": {"aggregation": "constant"},
    "token_mean": {"aggregation": "token_mean"},
    "rollout_is_old": {"old_logprobs": "rollout"},
    "clip": {"clip_low": 0.1, "clip_high": 0.05},
    "dual_clip": {"dual_clip": 1.2},
    "entropy": {"entropy_coef": 0.01},
    "kl_k1": {"kl": {"coef": 0.1, "estimator": "k1"}},
    "kl_k2": {"kl": {"coef": 0.1, "estimator": "k2"}},
    "kl_k3": {"kl": {"coef": 0.1, "estimator": "k3"}},
    "token_tis": {"correction": {"mode": "token_tis", "max_ratio": 1.1}},
    "sequence_tis": {"correction": {"mode": "sequence_tis", "max_ratio": 1.1}},
    "token_mask": {"correction": {"mode": "token_mask", "min_ratio": 0.9, "max_ratio": 1.1}},
    "sequence_mask": {"correction": {"mode": "sequence_mask", "min_ratio": 0.8, "max_ratio": 1.2}},
}
UNREAD = {
    "rloo": {"rollout_is_old", "clip", "dual_clip"},
    "cispo": {"dual_clip"},
}
CASES = [(name, v) for name in POLICIES for v in VARIANTS if v not in UNREAD.get(name, set())]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_loss_and_gradient_equal_a_naive_loop(name: str, variant: str) -> None:
    keys = VARIANTS[variant]
    made = algorithm(name, keys)
    for seed in range(3):
        batch = random_batch(seed=seed)
        out = random_output(batch, seed=seed + 100)
        result, expected = run(made, batch, out), naive(name, batch, out, keys)
        torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(gradients(result.loss, out), gradients(expected, out)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_one_update_per_step_has_ratio_one(name: str) -> None:
    """pi_old = the current policy: the policy gradient without any clipping, and the loss of ratio 1."""
    made = algorithm(name, {} if name == "rloo" else {"samples_per_update": 16})
    assert isinstance(made, PolicyAlgorithm) and made.old == "current"
    batch = random_batch()
    out = random_output(batch)
    result = run(made, batch, out)
    expected = naive(name, batch, out, {"old_logprobs": "current"})
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(result.loss, out)[0], gradients(expected, out)[0], rtol=1e-5, atol=1e-6)
    if "actor/pg_clipfrac" in result.metrics:
        assert float(result.metrics["actor/pg_clipfrac"][0]) == 0


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    batch = random_batch()
    out = random_output(batch)
    assert out.logprobs_T is not None
    result = run(algorithm("sft"), batch, out)
    chosen = [out.logprobs_T[t] for t in range(batch.num_tokens) if batch[LOSS_MASK].values[t]]
    expected = -sum(chosen[1:], chosen[0]) / len(chosen)
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(gradients(result.loss, out)[0], gradients(expected, out)[0])
    total, count = result.metrics["actor/sft_loss"]
    assert float(total) / float(count) == pytest.approx(float(expected.detach()))


@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_value_loss_equals_a_naive_loop(clip: float) -> None:
    made = algorithm("ppo", {"value_clip": clip})
    assert isinstance(made, PPO)
    batch = random_batch()
    out = random_output(batch)
    assert out.values_T is not None
    terms = []
    for t in range(batch.num_tokens):
        if not batch[LOSS_MASK].values[t]:
            continue
        v, old, target = out.values_T[t], batch[VALUES].values[t], batch[RETURNS].values[t]
        loss = 0.5 * (v - target) ** 2
        if clip:
            loss = torch.maximum(loss, 0.5 * (old + (v - old).clamp(-clip, clip) - target) ** 2)
        terms.append(loss)
    expected = torch.stack(terms).mean()
    result = made.value_loss(batch.pack(), out, whole(batch))
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(gradients(result.loss, out)[2], gradients(expected, out)[2])
    assert ("critic/vf_clipfrac" in result.metrics) == bool(clip)


def test_pitfall_05_no_loss_is_silently_ignored() -> None:
    """Two different losses on one batch differ, and so do two aggregations of one loss."""
    batch = random_batch(spread=0.6)
    out = random_output(batch, spread=0.6)
    plain = {name: run(algorithm(name), batch, out).loss for name in ("grpo", "dr_grpo", "rloo", "gspo", "cispo")}
    plain["sft"] = run(algorithm("sft"), batch, out).loss
    plain["ppo"] = run(algorithm("ppo"), batch, out).loss
    for mode in ("sequence_mean", "sequence_sum"):  # constant is Dr. GRPO's own
        plain[f"grpo {mode}"] = run(algorithm("grpo", {"aggregation": mode}), batch, out).loss
    for key in ("token_tis", "sequence_tis", "token_mask", "sequence_mask", "kl_k1", "kl_k2", "kl_k3", "dual_clip"):
        plain[f"grpo {key}"] = run(algorithm("grpo", VARIANTS[key]), batch, out).loss
    for (one, a), (two, b) in itertools.combinations(plain.items(), 2):
        assert float((a - b).abs().detach()) > 1e-5, f"{one} and {two} give the same loss"


def test_pitfall_07_nan_off_the_mask_is_harmless() -> None:
    """Old log-prob [0, NaN], mask [1, 0]: finite loss and gradient."""
    nan = float("nan")
    for name in POLICIES:
        batch = Batch(
            [0],
            {
                **row_of([[True, False]], OLD_LOGPROBS, [[0.0, nan]]),
                ADVANTAGE: [1.0],
                TOKEN_ADVANTAGES: [[1.0, nan]],
                ROLLOUT_LOGPROBS: [[0.0, nan]],
                REF_LOGPROBS: [[0.0, nan]],
            },
        )
        out = ModelOutput(torch.tensor([-0.5, nan], requires_grad=True))
        result = run(algorithm(name, {"kl": {"coef": 0.1}}), batch, out)
        result.loss.backward()
        assert out.logprobs_T is not None and out.logprobs_T.grad is not None
        assert result.loss.isfinite() and out.logprobs_T.grad.isfinite().all()
        assert out.logprobs_T.grad[1] == 0 and out.logprobs_T.grad[0] != 0
        assert all(torch.as_tensor(total).isfinite() for total, _ in result.metrics.values())


def row_of(masks: list[list[bool]], field: Any, values: list[list[float]]) -> dict[Any, Any]:
    return {
        GROUP_ID: [0] * len(masks),
        TOKEN_IDS: [[1] * len(m) for m in masks],
        LOSS_MASK: masks,
        field: values,
    }


@pytest.mark.parametrize("name", POLICIES)
def test_pitfall_08_masked_values_do_not_matter(name: str) -> None:
    """Change everything off the mask from 0 to 10: loss, gradient and metrics do not move."""
    made = algorithm(name, {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "correction": {"mode": "token_tis"}})
    seen = []
    for filler in (0.0, 10.0):
        batch = random_batch(off_mask=filler)
        out = random_output(batch, off_mask=filler)
        result = run(made, batch, out)
        seen.append((result.loss, *gradients(result.loss, out), *[x for pair in result.metrics.values() for x in pair]))
    for a, b in zip(*seen):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.parametrize("name", [*POLICIES, "sft"])
def test_pitfall_10_empty_responses(name: str) -> None:
    """A zero-token response contributes 0 and is never NaN; so does a batch of nothing else."""
    keys = {} if name == "sft" else {"kl": {"coef": 0.1}, "entropy_coef": 0.01}
    made = algorithm(name, keys)
    full = random_batch()
    rows = [i for i in range(len(full)) if bool(full[LOSS_MASK][i].any())]
    assert len(rows) == len(full) - 1
    without, out = full.select(rows), random_output(full)
    kept_T = torch.cat([torch.full((n,), i in rows) for i, n in enumerate(full.lengths.tolist())])
    dense = ModelOutput(*(v[kept_T] for v in (out.logprobs_T, out.entropy_T, out.values_T) if v is not None))
    torch.testing.assert_close(run(made, full, out).loss, run(made, without, dense).loss)
    empty = full.select([2, 2])
    nothing = random_output(empty)
    result = run(made, Batch([0, 1], {f: empty[f] for f in empty.fields}), nothing)
    assert float(result.loss.detach()) == 0
    assert all(not g.any() for g in gradients(result.loss, nothing))


def test_a_missing_output_is_named() -> None:
    batch = random_batch()
    with pytest.raises(TrainError, match="logprobs_T"):
        run(algorithm("grpo"), batch, ModelOutput())
    out = random_output(batch)
    with pytest.raises(TrainError, match="entropy_T"):
        run(algorithm("grpo", {"entropy_coef": 0.1}), batch, ModelOutput(out.logprobs_T))


def test_extreme_ratios_stay_finite() -> None:
    """log ratios of +-200 with advantage 0, +-1: finite loss and gradient."""
    batch = Batch(
        range(3),
        {**row_of([[True, True]] * 3, OLD_LOGPROBS, [[-200.0, 0.0]] * 3), ADVANTAGE: [0.0, 1.0, -1.0]}
        | {ROLLOUT_LOGPROBS: [[0.0, -200.0]] * 3, REF_LOGPROBS: [[-200.0, 0.0]] * 3},
    )
    for name in ("grpo", "gspo", "cispo", "dr_grpo"):
        for mode in ("token_tis", "sequence_mask"):
            out = ModelOutput(torch.tensor([0.0, -200.0] * 3, requires_grad=True))
            made = algorithm(name, {"kl": {"coef": 0.1}, "correction": {"mode": mode}})
            result = run(made, batch, out)
            assert result.loss.isfinite() and gradients(result.loss, out)[0].isfinite().all()
