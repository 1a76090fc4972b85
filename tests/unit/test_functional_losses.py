"""The pure loss functions: aggregation, clipping, shaping, correction weights; pitfalls 1, 2, 4."""

from __future__ import annotations

import math

import pytest
import torch
from tests.algorithm_cases import algorithm, piece, random_batch, random_output, whole
from torch import Tensor

from docklands.algorithms.advantage import group_advantages
from docklands.algorithms.correction import correction_weights
from docklands.algorithms.functional import (
    ClipRange,
    aggregate,
    clipped_importance,
    overlong_penalty,
    ppo_clip,
    ratio,
    reinforce,
    sequence_ratio,
    value_clip_loss,
)
from docklands.core.batch import Batch, Packed
from docklands.core.fields import LOSS_MASK, TOKEN_IDS
from docklands.core.loss import Denominators
from docklands.obs.metrics import Metrics

MODES = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def packed_of(masks: list[list[int]]) -> Packed:
    return Batch(range(len(masks)), {TOKEN_IDS: [[1] * len(m) for m in masks], LOSS_MASK: masks}).pack()


def total_over(pieces: list[tuple[Packed, Tensor]], mode: str, denominators: Denominators) -> float:
    return sum(float(aggregate(v, p, p.loss_mask_T, mode, denominators).loss) for p, v in pieces)  # type: ignore[arg-type]


def test_pitfall_01_token_mean_does_not_depend_on_the_split() -> None:
    """L = [[1,1,1,1],[4]] -> 1.6 in one micro-batch and in two."""
    one = [(packed_of([[1, 1, 1, 1], [1]]), torch.tensor([1.0, 1, 1, 1, 4]))]
    two = [(packed_of([[1, 1, 1, 1]]), torch.ones(4)), (packed_of([[1]]), torch.tensor([4.0]))]
    counts = Denominators(tokens=5, sequences=2, max_tokens=8)
    assert total_over(one, "token_mean", counts) == pytest.approx(1.6)
    assert total_over(two, "token_mean", counts) == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("mode", "expected"), [("token_mean", 1.6), ("sequence_mean", 2.5), ("sequence_sum", 4.0), ("constant", 0.5)]
)
def test_aggregation_by_hand(mode: str, expected: float) -> None:
    """The same losses; (1 + 4) / 2, (4 + 4) / 2, (4 + 4) / (2 x 8). An empty sample changes nothing."""
    packed, value_T = packed_of([[1, 1, 1, 1], [0], [1]]), torch.tensor([1.0, 1, 1, 1, 99, 4])
    assert total_over([(packed, value_T)], mode, Denominators(5, 2, 8)) == pytest.approx(expected)
    found = aggregate(value_T, packed, packed.loss_mask_T, mode, Denominators(5, 2, 8))  # type: ignore[arg-type]
    assert float(found.sum) / float(found.count) == pytest.approx(expected)


@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_pitfall_02_metrics_do_not_depend_on_the_split(split: int) -> None:
    """(sum, count), divided once: the same values for 1, 2, 4 and 8 samples a micro-batch."""
    keys = {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "correction": {"mode": "token_mask", "min_ratio": 0.9}}
    for name in ("grpo", "dr_grpo", "gspo", "cispo", "ppo", "reinforce_pp"):
        made = algorithm(name, keys)
        batch = random_batch()
        out = random_output(batch)
        expected = Metrics(made.loss(batch.pack(), out, whole(batch)).metrics).result()
        pieces = [piece(batch, out, list(range(i, i + split))) for i in range(0, len(batch), split)]
        found = Metrics()
        for part, part_out in pieces:
            found.merge(made.loss(part.pack(), part_out, whole(batch)).metrics)
        assert found.result() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_pitfall_04_loss_at_ratio_one() -> None:
    """Group-normalised A, ratio 1, no KL: 0 with equal lengths; with unequal ones only the mean per sequence is 0."""
    advantage_B = group_advantages(torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0]), torch.zeros(6))
    losses: dict[tuple[str, bool], float] = {}
    for equal in (True, False):
        packed = packed_of([[0] + [1] * (3 if equal else n) for n in (1, 2, 3, 4, 5, 6)])
        loss_T = ppo_clip(torch.ones(packed.num_tokens), advantage_B[packed.row_T], ClipRange(0.2, 0.2)).loss_T
        for mode in MODES:
            counts = Denominators(int(packed.loss_mask_T.sum()), 6, 8)
            losses[mode, equal] = total_over([(packed, loss_T)], mode, counts)
    for mode in MODES:
        assert losses[mode, True] == pytest.approx(0, abs=1e-7)
    assert losses["sequence_mean", False] == pytest.approx(0, abs=1e-7)
    assert all(abs(losses[mode, False]) > 1e-2 for mode in ("token_mean", "sequence_sum", "constant"))


def test_ppo_clip_by_hand() -> None:
    r = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0, 9.0])
    a = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    found = ppo_clip(r, a, ClipRange(0.2, 0.28, dual=3.0))
    assert found.loss_T.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.0, 3.0])
    assert found.clipped_T is not None and found.lower_T is not None
    assert found.clipped_T.tolist() == [True, False, False, True, False, False]
    assert found.lower_T.tolist() == [False] * 5 + [True]


def test_clip_higher_lets_unlikely_tokens_rise() -> None:
    """At ratio 1.25 and A > 0 the gradient is gone with 0.2 on both sides and there with DAPO's 0.28."""
    for high, moves in ((0.2, False), (0.28, True)):
        r = torch.tensor([1.25], requires_grad=True)
        ppo_clip(r, torch.tensor([1.0]), ClipRange(0.2, high)).loss_T.sum().backward()
        assert r.grad is not None and bool(r.grad.any()) == moves


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    """ratio 10 clipped to 5: gradient -5 A on the log-prob; PPO's is 0."""
    logprob = torch.tensor([math.log(10.0)], requires_grad=True)
    found = clipped_importance(logprob.exp(), logprob, torch.tensor([2.0]), ClipRange(1.0, 4.0))
    found.loss_T.sum().backward()
    assert logprob.grad is not None and logprob.grad.item() == pytest.approx(-10.0)
    assert found.clipped_T is not None and found.clipped_T.item()


def test_gspo_ratio_by_hand() -> None:
    packed = packed_of([[0, 1, 1], [0, 0], [1]])
    log_T = torch.tensor([9.0, 0.2, 0.4, 9.0, 9.0, -0.5])
    found = sequence_ratio(packed, log_T, packed.loss_mask_T)
    assert found.tolist() == pytest.approx([0, math.exp(0.3), math.exp(0.3), 0, 0, math.exp(-0.5)])


def test_reinforce_and_value_loss_by_hand() -> None:
    assert reinforce(torch.tensor([-2.0]), torch.tensor([0.5])).loss_T.item() == pytest.approx(1.0)
    value, old, target = torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    found = value_clip_loss(value, old, target, 0.2)
    assert found.loss_T.tolist() == pytest.approx([0.32, 0.405])  # 0.5 (0.2 - 1)^2, 0.5 (0.1 - 1)^2
    assert found.clipped_T is not None and found.clipped_T.tolist() == [True, False]


def test_overlong_penalty_is_dapo_equation_13() -> None:
    """Limit 16, buffer 4: 0 up to 12 tokens, then -1/4 a token, -1 at the limit and beyond."""
    length_B = torch.tensor([1, 12, 13, 14, 16, 20])
    assert overlong_penalty(length_B, 16, 4).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert not overlong_penalty(length_B, 16, 0).any()


def test_ratio_is_bounded() -> None:
    assert ratio(torch.tensor([1e9, -1e9])).isfinite().all()


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("off", (0.0, 2.0), [1.0, 1.0, 1.0]),
        ("token_tis", (0.0, 2.0), [2.0, 0.5, 1.5]),
        ("sequence_tis", (0.0, 1.6), [1.6, 1.6, 1.5]),
        ("token_mask", (0.6, 2.0), [0.0, 0.0, 1.5]),
        ("sequence_mask", (1.6, 2.5), [2.0, 2.0, 0.0]),
    ],
)
def test_correction_weights_by_hand(mode: str, bounds: tuple[float, float], expected: list[float]) -> None:
    """Ratios 4, 0.5 (product 2) and 1.5; an observation in between keeps weight 1 and enters no product."""
    packed = packed_of([[1, 0, 1], [1]])
    log_T = torch.tensor([4.0, 77.0, 0.5, 1.5]).log()
    weight_T, metrics = correction_weights(packed, log_T, packed.loss_mask_T, mode, bounds)  # type: ignore[arg-type]
    assert weight_T[packed.loss_mask_T].tolist() == pytest.approx(expected)
    assert weight_T[1] == 1
    assert not weight_T.requires_grad
    if mode == "sequence_tis":
        total, count = metrics["rollout_corr/truncated_fraction"]
        assert float(total) / float(count) == pytest.approx(0.5)  # one of two samples
