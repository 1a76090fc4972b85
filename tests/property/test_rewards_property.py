"""Properties: outcomes are total, sums are linear, the limit is a window count, arithmetic is Python's."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.errors import TooManyRewardErrors
from docklands.rewards.base import ErrorBudget, RewardOutcome, RewardSample, failed, ok
from docklands.rewards.builtin import first_number
from docklands.rewards.scorer import WeightedSum
from docklands.rewards.scoring import adapt, outcome_of

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["score", "a"]), inner, max_size=2),
    max_leaves=5,
)


@given(ANYTHING)
def test_any_result_of_a_user_is_an_outcome(value: Any) -> None:
    outcome = outcome_of(value)
    assert outcome.status in ("ok", "error") and (outcome.value is None) == (outcome.status == "error")
    assert outcome.value is None or math.isfinite(outcome.value)


@given(ANYTHING, st.integers(1, 3))
def test_any_result_of_a_batch_function_is_one_outcome_per_sample(value: Any, count: int) -> None:
    outcomes = adapt("r", lambda completions, **columns: value).run([RewardSample({}, "x")] * count)
    assert len(outcomes) == count


class Fixed:
    def __init__(self, name: str, outcomes: list[RewardOutcome]) -> None:
        self.name = name
        self._outcomes = outcomes

    async def score(self, samples: Any) -> list[RewardOutcome]:
        return self._outcomes

    def close(self) -> None: ...


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10) | st.none()), min_size=1, max_size=4))
def test_a_weighted_sum_is_linear_and_lacks_no_term(parts: list[tuple[float, float | None]]) -> None:
    rewards = [
        (Fixed(f"r{i}", [failed("error", "x") if value is None else ok(value)]), weight)
        for i, (weight, value) in enumerate(parts)
    ]
    (outcome,) = asyncio.run(WeightedSum(rewards).score([RewardSample({}, "x")]))
    if any(value is None for _, value in parts):
        assert outcome.dropped
    else:
        assert outcome.value == pytest.approx(sum(w * v for w, v in parts if v is not None))


@settings(max_examples=200)
@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=8), st.integers(1, 8), st.floats(0, 1))
def test_the_limit_is_a_count_over_a_window(batches: list[list[bool]], window: int, fraction: float) -> None:
    """Against the definition, written out; and how samples are cut into batches does not matter."""
    history: list[bool] = []
    budget = ErrorBudget(fraction, window)
    for batch in batches:
        tripped = False
        for bad in batch:
            history.append(bad)
            tripped |= sum(history[-window:]) > fraction * window
        outcomes = [failed("error", "x") if bad else ok(1.0) for bad in batch]
        if tripped:
            with pytest.raises(TooManyRewardErrors):
                budget.add(outcomes)
            return
        budget.add(outcomes)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "it is {}.", " {} and 7", "{:,}"]))
def test_a_number_written_out_is_read_back(number: int, frame: str) -> None:
    assert first_number(frame.format(number)) == number
