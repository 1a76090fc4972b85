"""Held-out metrics: pass@k against counting, the interval's coverage, the majority's vote."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from docklands.cli.evaluate import table
from docklands.core.batch import Batch
from docklands.core.fields import COMPLETION, GROUP_ID, PROMPT, REWARD, REWARD_INFO
from docklands.obs.metrics import find
from docklands.rewards.base import RewardSample
from docklands.rewards.builtin import make
from docklands.run.evaluate import bootstrap_interval, majority, pass_at_k, summarise


@pytest.mark.parametrize(("samples", "correct", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 4), (6, 6, 2), (7, 3, 7)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples: int, correct: int, k: int) -> None:
    draws = list(combinations(range(samples), k))
    share = sum(any(i < correct for i in draw) for draw in draws) / len(draws)
    assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3"):
        pass_at_k(2, 1, 3)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.binomial(1, 0.3, 60).tolist(), seed=trial, draws=400)
        hits += low <= 0.3 <= high
    assert 178 <= hits <= 200  # 95 % of 200 less four standard deviations


def scored(texts: list[str], rewards: list[float], infos: list[dict[str, Any]]) -> Batch:
    """One group."""
    size = len(texts)
    columns = {
        GROUP_ID: torch.zeros(size, dtype=torch.int64),
        REWARD: rewards,
        REWARD_INFO: infos,
        COMPLETION: texts,
        PROMPT: [{"prompt": "?"}] * size,
    }
    return Batch(np.arange(size), columns)


def judge(texts: list[str]) -> Batch:
    """A group as the `number` reward scores it; the answer is 5."""
    reward = make("number")
    outcomes = [reward(RewardSample({"prompt": "?", "answer": "5"}, text)) for text in texts]
    return scored(texts, [float(o.value or 0) for o in outcomes], [{"info": {"number": o.info}} for o in outcomes])


def test_answers_vote_not_wordings() -> None:
    batch = judge(["It is 5.", "7", "7", "so 5", "5 of course"])
    rewards = batch[REWARD].numpy()
    assert majority(batch, np.arange(5), rewards) == 1.0  # three say 5, in three ways; two say 7 in the same words
    found = summarise(batch, "numbers", ks=(1, 2))
    assert found["val-core/numbers/maj@5"] == 1.0
    assert found["val-core/numbers/mean@5"] == pytest.approx(0.6)
    assert found["val-core/numbers/pass@2"] == pytest.approx(1 - 1 / 10)


def test_replies_without_an_answer_do_not_vote() -> None:
    batch = judge(["?", "no idea", "?", "8"])
    assert majority(batch, np.arange(4), np.array([0.0, 0.0, 0.0, 1.0])) == 1.0


def test_whole_texts_vote_where_no_verifier_read_an_answer() -> None:
    batch = scored(["a", "b ", "b", "c"], [0.0, 1.0, 1.0, 0.0], [{}, {}, {}, {}])
    assert majority(batch, np.arange(4), batch[REWARD].numpy()) == 1.0


def test_pass_at_k_says_over_how_many_prompts_it_is() -> None:
    """Of the second prompt's two samples one was lost: pass@2 is the first prompt's alone."""
    batch = scored(["5", "5", "4"], [1.0, 1.0, 0.0], [{}] * 3).with_({GROUP_ID: torch.tensor([0, 0, 1])})
    found = summarise(batch, "numbers", ks=(1, 2), asked=4)
    assert (found["val-core/numbers/pass@2"], found["val-aux/numbers/pass@2_prompts"]) == (1.0, 1.0)
    assert (found["val-core/numbers/pass@1"], found["val-aux/numbers/pass@1_prompts"]) == (0.5, 2.0)
    assert find("val-aux/numbers/pass@2_prompts") is not None
    assert "pass@2_prompts  1.0000" in table(found)
