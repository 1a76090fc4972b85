"""Schedules of a pipeline, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.parallel.pipeline import Action, bubble, most_held, schedule


@settings(max_examples=150)
@given(pp=st.integers(2, 5), vpp=st.integers(1, 3), micros=st.integers(0, 11), kind=st.integers(0, 2))
def test_everything_runs_once_and_after_what_it_needs(pp: int, vpp: int, micros: int, kind: int) -> None:
    done: set[Action] = set()
    for tick in schedule(pp, vpp, micros, kind > 0, kind > 1):
        for rank, action in enumerate(tick):
            if action is None:
                continue
            assert action.stage % pp == rank and action not in done
            if action.weights:
                assert Action(action.stage, action.micro, True) in done
                continue
            before = Action(action.stage + 1, action.micro, True) if action.backward else None
            if action.backward:
                assert Action(action.stage, action.micro) in done
                assert action.stage == pp * vpp - 1 or before in done
            else:
                assert action.stage == 0 or Action(action.stage - 1, action.micro) in done
        done |= {action for action in tick if action is not None}
    assert len(done) == pp * vpp * micros * (kind + 1)


@pytest.mark.parametrize(("pp", "micros"), [(2, 4), (4, 8), (3, 7)])
def test_1f1b_holds_few_micro_batches_and_takes_the_least_time(pp: int, micros: int) -> None:
    ticks = schedule(pp, 1, micros)
    assert len(ticks) == 2 * (micros + pp - 1)
    assert bubble(ticks) == pytest.approx((pp - 1) / (micros + pp - 1))
    for rank in range(pp):
        held = most = 0
        for tick in ticks:
            action = tick[rank]
            if action is not None:
                held += -1 if action.backward else 1
            most = max(most, held)
        assert most == min(micros, pp - rank)


@pytest.mark.parametrize("pp", [2, 4])
def test_interleaving_makes_the_bubble_smaller(pp: int) -> None:
    micros = 2 * pp
    plain, interleaved = (bubble(schedule(pp, vpp, micros)) for vpp in (1, 2))
    assert interleaved == pytest.approx((pp - 1) / (2 * micros + pp - 1))
    assert interleaved < plain


@pytest.mark.parametrize(("pp", "micros"), [(2, 4), (4, 8), (4, 5), (3, 7)])
def test_zero_bubble_is_shorter_within_the_memory_of_1f1b(pp: int, micros: int) -> None:
    """Three equal parts: ZB-H1 loses pp - 1 of 3 m, 1F1B 3 (pp - 1), as its backward counts twice."""
    ticks = schedule(pp, 1, micros, True, True)
    assert len(ticks) == 3 * micros + pp - 1
    assert bubble(ticks) == pytest.approx((pp - 1) / (3 * micros + pp - 1))
    for rank in range(pp):
        held = most = 0
        for tick in ticks:
            action = tick[rank]
            if action is not None:
                held += -1 if action.weights else not action.backward
            most = max(most, held)
        assert most <= pp


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2), (2, 3)])
def test_ranks_hold_what_the_memory_plan_counts(pp: int, vpp: int, split: bool) -> None:
    ticks = schedule(pp, vpp, 4 * pp, True, split)
    for rank in range(pp):
        held = most = 0
        for action in (tick[rank] for tick in ticks):
            if action is not None:
                held += -1 if action.weights or (action.backward and not split) else not action.backward
            most = max(most, held)
        assert 0 < most <= most_held(pp, vpp, rank, split)
        assert split or most == most_held(pp, vpp, rank)
