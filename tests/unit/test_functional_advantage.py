"""Group baselines, GAE with observations in between, whitening; pitfalls 9, 12, 13."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from docklands.algorithms.advantage import (
    credit_observations,
    discounted_returns,
    explained_variance,
    gae,
    group_advantages,
    terminal_rewards,
    whiten,
)
from docklands.core.batch import Batch, Packed
from docklands.core.fields import LOSS_MASK


def packed_of(*masks: list[int]) -> tuple[Packed, Tensor]:
    packed = Batch(range(len(masks)), {LOSS_MASK: list(masks)}).pack()
    return packed, packed.loss_mask_T


def test_pitfall_09_a_reward_before_an_observation_is_not_lost() -> None:
    """r = [0,0,1], m = [1,0,1], gamma = .5 -> first return .5."""
    packed, mask_T = packed_of([1, 0, 1])
    assert discounted_returns(packed, torch.tensor([0.0, 0.0, 1.0]), mask_T, 0.5).tolist() == [0.5, 0.0, 1.0]


def test_pitfall_09_a_reward_on_an_observation_is_not_lost() -> None:
    """The environment pays 1 on the observation and 1 at the end, gamma = .5 -> returns 1.5 and 1."""
    packed, mask_T = packed_of([1, 0, 1])
    assert discounted_returns(packed, torch.tensor([0.0, 1.0, 1.0]), mask_T, 0.5).tolist() == [1.5, 0.0, 1.0]


def test_pitfall_09_inserted_observations_change_no_advantage() -> None:
    """Any number of observation tokens, with any values on them, in between, before and behind."""
    reward, value = [0.1, 0.0, -0.3, 1.0], [0.5, 0.2, 0.9, -0.4]
    packed, mask_T = packed_of([1, 1, 1, 1])
    plain = gae(packed, torch.tensor(reward), torch.tensor(value), mask_T, gamma=0.9, lam=0.8)
    for k in (1, 3, 7):
        mask, r, v = [0] * k, [0.0] * k, [float("nan")] * k
        for i in range(4):
            gap = k if i != 1 else 0
            mask += [1] + [0] * gap
            r += [reward[i]] + [0.0] * gap
            v += [value[i]] + [float("nan")] * gap
        packed, mask_T = packed_of(mask)
        found = gae(packed, torch.tensor(r), torch.tensor(v), mask_T, gamma=0.9, lam=0.8)
        for ours, theirs in zip(found, plain):
            torch.testing.assert_close(ours[mask_T], theirs)
            assert not ours[~mask_T].any()


def test_pitfall_09_a_trajectory_that_ends_in_an_observation_keeps_its_reward() -> None:
    packed, mask_T = packed_of([0, 1, 1, 0, 0], [0, 0], [1])
    reward_T = terminal_rewards(packed, torch.tensor([2.0, 5.0, 3.0]), mask_T)
    assert reward_T.tolist() == [0, 0, 2, 0, 0, 0, 0, 3]
    assert discounted_returns(packed, reward_T, mask_T).tolist() == [0, 2, 2, 0, 0, 0, 0, 3]


def test_rewards_on_observations_are_credited_to_the_token_before() -> None:
    """Also across rows: a reward at a row's start belongs to that row's first token, one of an empty row to nobody."""
    packed, mask_T = packed_of([0, 1, 0, 1, 0], [0, 0], [0, 1])
    reward_T = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 100.0, 200.0, 32.0, 64.0])
    assert credit_observations(packed, reward_T, mask_T).tolist() == [0, 7, 0, 24, 0, 0, 0, 0, 96]


def naive_gae(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    """sum over l of (gamma lam)^l delta_{t+l}, written out."""
    n = len(reward)
    delta = [reward[t] + gamma * (value[t + 1] if t + 1 < n else 0.0) - value[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, n)) for t in range(n)]


def test_gae_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [[0, 0, 1, 1, 1, 0, 1], [0, 1], [0, 0, 0], [1] * 9]
    packed, mask_T = packed_of(*masks)
    reward_T, value_T = (torch.randn(packed.num_tokens, generator=generator) for _ in range(2))
    reward_T = torch.where(mask_T, reward_T, 0.0)
    advantage_T, return_T = gae(packed, reward_T, value_T, mask_T, gamma=0.95, lam=0.7)
    for row in range(len(masks)):
        here = mask_T & (packed.row_T == row)
        expected = naive_gae(reward_T[here].tolist(), value_T[here].tolist(), 0.95, 0.7)
        assert advantage_T[here].tolist() == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(return_T[here], advantage_T[here] + value_T[here])


def test_pitfall_12_two_pass_variance() -> None:
    """Rewards [0, .95 x 7] in float32: bounded advantages with a leave-one-out baseline, with and without std."""
    reward_B, group_B = torch.tensor([0.0] + [0.95] * 7), torch.zeros(8, dtype=torch.int64)
    plain = group_advantages(reward_B, group_B, normalize_std=False, leave_one_out=True)
    assert plain.tolist() == pytest.approx([-0.95] + [0.95 / 7] * 7, abs=1e-6)
    scaled = group_advantages(reward_B, group_B, leave_one_out=True)
    std = float(reward_B.double().std())
    assert scaled.tolist() == pytest.approx([-0.95 / std] + [0.95 / 7 / std] * 7, abs=1e-6)
    assert scaled.abs().max() < 3


def test_pitfall_12_equal_rewards_have_advantage_zero() -> None:
    """Below the tolerance: 0, also for values that float32 cannot hold exactly and for a huge common offset."""
    for rewards in ([0.95] * 7, [0.1] * 8, [1e6] * 8, [0.3, 0.3 + 1e-8], [1.0]):
        for std in (True, False):
            found = group_advantages(torch.tensor(rewards), torch.zeros(len(rewards)), normalize_std=std)
            assert not found.any()


def test_group_advantages_by_hand() -> None:
    """(r - mean) / std with n - 1; then the offset of 1e4 that would ruin E[x^2] - E[x]^2 in float32."""
    group_B = torch.tensor([7, 3, 7, 3, 7, 3])
    for offset in (0.0, 1e4):
        reward_B = torch.tensor([1.0, 10.0, 2.0, 10.0, 3.0, 40.0], dtype=torch.float64) + offset
        found = group_advantages(reward_B, group_B)
        third = 10 / 300**0.5
        assert found.tolist() == pytest.approx([-1, -third, 0, -third, 1, 2 * third], abs=1e-6)
    assert len(group_advantages(torch.zeros(0), torch.zeros(0))) == 0


def test_pitfall_13_groups_are_explicit() -> None:
    """Two groups of one prompt text do not merge, and the order of rows does not split a group."""
    reward_B = torch.tensor([0.0, 1.0, 5.0, 9.0])
    apart = group_advantages(reward_B, torch.tensor([0, 0, 1, 1]), normalize_std=False)
    assert apart.tolist() == [-0.5, 0.5, -2.0, 2.0]
    order = torch.tensor([2, 0, 3, 1])
    mixed = group_advantages(reward_B[order], torch.tensor([0, 0, 1, 1])[order], normalize_std=False)
    assert mixed.tolist() == apart[order].tolist()


def test_whiten() -> None:
    mask_T = torch.tensor([True, False, True, True])
    white_T = whiten(torch.tensor([1e4 + 1.0, float("nan"), 1e4 + 2.0, 1e4 + 3.0]), mask_T)
    assert white_T.tolist() == pytest.approx([-1, 0, 0, 1], abs=1e-6)
    assert not whiten(torch.tensor([0.95, 0.0, 0.95, 0.95]), mask_T).any()
    assert not whiten(torch.tensor([5.0, 0.0]), torch.tensor([True, False])).any()
    assert not whiten(torch.tensor([5.0, 0.0]), torch.tensor([False, False])).any()


def test_explained_variance() -> None:
    mask_T = torch.tensor([True, True, True, False])
    return_T = torch.tensor([1.0, 2.0, 3.0, float("nan")])
    assert explained_variance(return_T, return_T, mask_T) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 7.0), return_T, mask_T) == pytest.approx(0.0)
    assert explained_variance(return_T, torch.ones(4), mask_T) is None
