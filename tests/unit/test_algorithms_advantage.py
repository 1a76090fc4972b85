"""The advantage and filter stages of the algorithms, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithm_cases import algorithm

from docklands.algorithms import stages
from docklands.core.batch import Batch
from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RETURNS,
    REWARD,
    ROLLOUT_LOGPROBS,
    SHAPED_REWARD,
    TOKEN_ADVANTAGES,
    VALUES,
)
from docklands.core.stage import Result
from docklands.obs.metrics import Metrics

NAN = float("nan")
MASKS = [[False, True, True], [False, True, False, True], [False, True], [False, True, True]]


def scored(rewards: list[float], groups: list[int], masks: list[list[bool]] | None = None, **columns: Any) -> Batch:
    masks = masks or (MASKS * len(rewards))[: len(rewards)]
    flat = {REWARD: rewards, GROUP_ID: groups, LOSS_MASK: masks}
    return Batch(range(10, 10 + len(rewards)), {**flat, **{FIELDS[k]: v for k, v in columns.items()}})


FIELDS = {"old": OLD_LOGPROBS, "mu": ROLLOUT_LOGPROBS, "ref": REF_LOGPROBS, "values": VALUES}


def advantage(name: str, batch: Batch, keys: dict[str, Any] | None = None) -> Result:
    """Through the stage itself, with only the columns that it reads."""
    made = algorithm(name, keys)
    stage = made.graph()["advantage"]
    columns = [field for field in stage.reads if field != stages.KEPT]
    result = stage.run(made, batch.only(columns))
    assert isinstance(result, Result) and result.batch is not None
    assert set(result.batch.fields) == set(stage.writes)
    assert result.batch.row_ids.tolist() == batch.row_ids.tolist()
    Metrics(result.metrics)  # every name is declared
    return result


def values(result: Result, field: Any) -> Any:
    assert result.batch is not None
    return result.batch[field]


def test_group_algorithms() -> None:
    batch = scored([1.0, 0.0, 3.0, 5.0], [0, 0, 1, 1])
    half = 0.5**0.5
    for name in ("grpo", "dapo", "gspo", "cispo"):
        assert values(advantage(name, batch), ADVANTAGE).tolist() == pytest.approx([half, -half, -half, half])
        plain = advantage(name, batch, {"normalize_std": False})
        assert values(plain, ADVANTAGE).tolist() == pytest.approx([0.5, -0.5, -1, 1])
    assert values(advantage("dr_grpo", batch), ADVANTAGE).tolist() == pytest.approx([0.5, -0.5, -1, 1])
    assert values(advantage("rloo", batch), ADVANTAGE).tolist() == pytest.approx([1, -1, -2, 2])


def test_a_group_that_lost_samples_to_reward_errors() -> None:
    """Three of four left, and one of four left: the first is compared among itself, the second has advantage 0."""
    batch = scored([1.0, 0.0, 0.5, 7.0], [0, 0, 0, 1])
    assert values(advantage("dr_grpo", batch), ADVANTAGE).tolist() == pytest.approx([0.5, -0.5, 0, 0])


def test_overlong_punishment_enters_the_advantage() -> None:
    """Limit 16, buffer 4: 14 tokens cost half the penalty; the observation tokens do not count."""
    masks = [[False] + [True] * 14, [False] * 9 + [True] * 3]
    batch = scored([1.0, 1.0], [0, 0], masks)
    result = advantage("dr_grpo", batch, {"overlong_buffer_tokens": 4, "overlong_penalty": 0.4})
    assert values(result, ADVANTAGE).tolist() == pytest.approx([-0.1, 0.1])
    assert values(result, SHAPED_REWARD).tolist() == pytest.approx([0.8, 1.0])


def test_kl_in_the_reward_of_a_sample() -> None:
    """reward - coef x sum of d over its trained tokens; metrics per token."""
    old, ref = [[NAN, -1.0, -2.0], [NAN, -1.0, NAN, -1.0]], [[NAN, -1.5, -2.5], [NAN, -1.0, NAN, -1.2]]
    batch = scored([0.0, 0.0], [0, 0], MASKS[:2], old=old, mu=old, ref=ref)
    keys = {"kl": {"coef": 0.1, "where": "reward", "estimator": "k1"}}
    for old_logprobs in ("auto", "rollout"):
        result = advantage("dr_grpo", batch, {**keys, "old_logprobs": old_logprobs})
        assert values(result, ADVANTAGE).tolist() == pytest.approx([-0.04, 0.04], abs=1e-6)
        total, count = result.metrics["actor/kl_reward"]
        assert (total, count) == (pytest.approx(1.2, abs=1e-6), 4)
        assert result.metrics["actor/kl_coef"] == (0.1, 1.0)
        assert values(result, SHAPED_REWARD).tolist() == pytest.approx([-0.1, -0.02], abs=1e-6)


def test_kl_in_the_reward_of_tokens() -> None:
    """REINFORCE++: return-to-go of [-coef d_t ... reward], then normalised over all tokens of the step."""
    old, ref = [[NAN, -1.0, -2.0], [NAN, -1.0, NAN, -1.0]], [[NAN, -1.5, -2.5], [NAN, -1.0, NAN, -1.2]]
    batch = scored([1.0, 0.0], [0, 0], MASKS[:2], old=old, mu=old, ref=ref)
    keys = {"kl": {"coef": 0.1, "where": "reward", "estimator": "k1"}, "gamma": 0.5}
    result = advantage("reinforce_pp", batch, keys)
    expected = torch.tensor([-0.05 + 0.5 * 0.95, 0.95, 0.5 * -0.02, -0.02], dtype=torch.float64)
    expected = (expected - expected.mean()) / expected.std()
    mask_T = batch[LOSS_MASK].values
    found = values(result, TOKEN_ADVANTAGES)
    assert found.values[mask_T].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert not found.values[~mask_T].any()
    earned = (1.0 - 0.1 * 1.0, 0.0 - 0.1 * 0.2)
    assert values(result, SHAPED_REWARD).tolist() == pytest.approx(earned, abs=1e-6)


def test_ppo_advantages_and_returns() -> None:
    """gamma = lambda = 1: A + V is the return; normalised over the step; explained variance reported."""
    critic = [[NAN, 0.5, 0.25], [NAN, 0.1, NAN, 0.2]]
    batch = scored([1.0, 0.0], [0, 0], MASKS[:2], values=critic)
    result = advantage("ppo", batch)
    mask_T = batch[LOSS_MASK].values
    assert values(result, RETURNS).values[mask_T].tolist() == pytest.approx([1, 1, 0, 0])
    raw = torch.tensor([0.5, 0.75, -0.1, -0.2], dtype=torch.float64)
    white = (raw - raw.mean()) / raw.std()
    assert values(result, TOKEN_ADVANTAGES).values[mask_T].tolist() == pytest.approx(white.tolist(), abs=1e-6)
    residual = torch.tensor([0.5, 0.75, -0.1, -0.2]).var() / torch.tensor([1.0, 1, 0, 0]).var()
    assert result.metrics["critic/vf_explained_var"][0] == pytest.approx(1 - float(residual))


def test_ppo_with_an_empty_response() -> None:
    batch = scored([1.0, 0.0], [0, 0], [[False, False], [False, True]], values=[[NAN, NAN], [NAN, 0.3]])
    result = advantage("ppo", batch)
    assert not values(result, TOKEN_ADVANTAGES).values.any()  # one token: nothing to compare it with
    assert values(result, RETURNS).values.tolist() == [0, 0, 0, 0]


def test_adaptive_coefficient_is_measured_by_step() -> None:
    """Over the target: the next step pays 1 + 0.2 x samples / horizon times as much; the same step again does not."""
    keys = {"kl": {"coef": 0.1, "where": "reward", "estimator": "k1", "target": 0.01, "horizon": 10}}
    made = algorithm("grpo", keys)
    stage = made.graph()["advantage"]
    assert stage.by == "step"
    row = [[0.0, -1.0, -1.0]] * 2
    batch = scored([0.0, 1.0], [0, 0], [MASKS[0]] * 2, old=row, mu=row, ref=[[0.0, -2.0, -2.0]] * 2)
    next_step = Batch([20, 21], {field: batch[field] for field in batch.fields})
    results = [stage.run(made, rows) for rows in (batch, batch, next_step)]
    seen = [result.metrics["actor/kl_coef"][0] for result in results]
    assert seen == pytest.approx([0.1, 0.1, 0.1 * (1 + 0.2 * 2 / 10)])
    assert values(results[0], ADVANTAGE).tolist() == values(results[1], ADVANTAGE).tolist()


def test_dynamic_sampling_drops_groups_of_equal_rewards() -> None:
    """Reasons and counts; a group that keeps some spread goes on whole (pitfall 16: what a stop will report)."""
    made = algorithm("dapo")
    rewards = [0.0, 0.0, 1.0, 1.0, 0.5, 0.5, 0.0, 1.0, 0.2]
    batch = scored(rewards, [4, 4, 9, 9, 2, 2, 7, 7, 8], [[True]] * 9)
    stage = made.graph()["filter_groups"]
    result = stage.run(made, batch.only(stage.reads))
    assert result.batch.row_ids.tolist() == [16, 17]
    assert result.batch[stages.KEPT].tolist() == [True, True]
    assert dict(result.dropped) == {10: "all_0", 11: "all_0", 12: "all_1", 13: "all_1"} | {
        14: "equal",
        15: "equal",
        18: "equal",
    }
    counts = {k.removeprefix("dynamic_sampling/"): v for k, v in Metrics(result.metrics).result().items()}
    assert counts == {"groups": 5, "kept": 1, "all_0": 1, "all_1": 1, "equal": 2}


def test_the_filter_looks_at_the_reward_before_the_length_punishment() -> None:
    made = algorithm("dapo", {"overlong_buffer_tokens": 4})
    batch = scored([1.0, 1.0], [0, 0], [[True] * 16, [True]])
    assert set(made.filter_groups(batch).dropped.values()) == {"all_1"}


def test_a_batch_of_only_dropped_groups() -> None:
    result = algorithm("dapo").filter_groups(scored([0.0, 0.0], [0, 0]))
    assert result.batch is not None and len(result.batch) == 0
    assert len(result.dropped) == 2


class Engine:
    """Answers with the batch's mask as float, so that the written column can be recognised."""

    def logprobs(self, batch: Batch) -> list[torch.Tensor]:
        return [-row.float() for row in batch[LOSS_MASK]]

    values = logprobs
    rollout = score = demonstrate = lambda self, batch: batch


def test_standard_stages_call_their_resources() -> None:
    batch = scored([0.0], [0])
    for run, field in (
        (stages.run_old_logprobs, OLD_LOGPROBS),
        (stages.run_ref_logprobs, REF_LOGPROBS),
        (stages.run_values, VALUES),
    ):
        written = run(Engine(), batch)
        assert written.fields == (field,)
        assert written[field].values.tolist() == [0, -1, -1]
    for run in (stages.run_rollout, stages.run_reward, stages.run_demonstrate):
        assert run(Engine(), batch) is batch
