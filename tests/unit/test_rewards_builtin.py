"""Built-in rewards, the outcome type, the counts and the limit."""

from __future__ import annotations

import math

import pytest

from docklands.errors import ConfigError, RewardError, TooManyRewardErrors
from docklands.rewards.base import ErrorBudget, OutcomeCounts, RewardOutcome, RewardSample, failed, ok, wrong
from docklands.rewards.builtin import first_number, make
from docklands.rewards.scoring import Target, load


def value(name: str, text: str, row: dict | None = None, args: dict | None = None, **sample: object) -> float | None:
    made = RewardSample(row or {"prompt": "q", "answer": "82"}, text, **sample)  # type: ignore[arg-type]
    return load(Target(name, args or {})).run([made])[0].value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("82", 1),
        ("The larger is 82.", 1),
        ("82, not 47", 1),
        ("82.0", 1),
        ("47 < 82", 0),
        ("-82", 0),
        ("820", 0),
        ("none", 0),
        ("", 0),
    ],
)
def test_number_is_the_first_number(text: str, expected: float) -> None:
    assert value("number", text) == expected


def test_first_number_reads_signs_and_thousands() -> None:
    found = [first_number(t) for t in ("1,234.5", "a-3", "x -3", "5-3", "12,34", "no")]
    assert [None if n is None else float(n) for n in found] == [1234.5, 3, -3, 5, 12, None]


def test_exact_match_and_where_answers_come_from() -> None:
    assert value("exact_match", " Yes \n", {"prompt": "q", "answer": "Yes"}) == 1
    assert value("exact_match", "yes", {"prompt": "q", "answer": "Yes"}) == 0
    assert value("exact_match", "yes", {"prompt": "q", "answer": "Yes"}, {"ignore_case": True}) == 1
    assert value("exact_match", "7", {"prompt": "q", "reward_model": {"ground_truth": 7}}) == 1
    assert value("exact_match", "7", {"prompt": "q", "gold": 7}, {"column": "gold"}) == 1
    outcome = load(Target("exact_match")).run([RewardSample({"prompt": "q", "a": 1}, "7")])[0]
    assert outcome.status == "error" and "'answer'" in outcome.detail and "prompt, a" in outcome.detail


def test_multi_turn_completions_are_judged_by_the_last_model_turn() -> None:
    turns = [{"role": "assistant", "content": "47"}, {"role": "user", "content": "9"}]
    assert RewardSample({}, [*turns, {"role": "assistant", "content": "82"}]).text == "82"
    assert RewardSample({}, turns).text == "47" and RewardSample({}, []).text == ""


def test_task_rewards() -> None:
    assert value("sorted_digits", "023489", {"prompt": "483920="}) == 1
    assert value("sorted_digits", "02348", {"prompt": "483920="}) == 0
    row = {"prompt": "3+5+2=", "answer": "10"}
    cases = {
        "10": (1, False, False),
        "<3+5=8,8+2=10>10": (1, True, True),
        "<3+5=9,9+2=11>10": (1, True, False),
        "<3+5=8,8+2=10>11": (0, True, True),
        "<3+5=8,8+2=10": (0, False, False),
        "<>10": (1, True, False),
    }
    for text, (right, worked, steps) in cases.items():
        outcome = load(Target("cot6")).run([RewardSample(row, text)])[0]
        assert (outcome.value, outcome.info["worked"], outcome.info["steps_right"]) == (right, worked, steps), text


def test_format_matches_the_whole_completion() -> None:
    pattern = "<think>.*</think>\\s*<answer>.*</answer>"
    assert value("format", "<think>a\nb</think>\n<answer>1</answer>", args={"pattern": pattern, "value": 0.5}) == 0.5
    assert value("format", "so <think>a</think><answer>1</answer>", args={"pattern": pattern}) == 0
    assert value("format", "so <b>", args={"pattern": "<b>", "whole": False}) == 1


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (150, -1)])
def test_overlong_is_linear_over_the_buffer(tokens: int, expected: float) -> None:
    assert value("overlong", "", args={"max_tokens": 100, "buffer_tokens": 20}, response_tokens=tokens) == expected


def test_cosine_runs_between_its_ends() -> None:
    args = {"max_tokens": 100, "of": "number"}

    def at(text: str, tokens: int, finish: str = "stop") -> float | None:
        return value("cosine", text, args=args, response_tokens=tokens, finish=finish)

    assert [at("82", 0), at("82", 50), at("82", 100)] == pytest.approx([2.0, 1.5, 1.0])
    assert [at("1", 0), at("1", 50), at("1", 100)] == pytest.approx([-10, -5, 0])
    assert at("82", 100, "length") == at("82", 101) == -10
    assert at("82", 25) == pytest.approx(1 + 0.5 * (1 + math.cos(math.pi / 4)))
    missing = load(Target("cosine", args)).run([RewardSample({"prompt": "q"}, "82")])[0]
    assert missing.status == "error"


def test_env_reward_is_passed_on() -> None:
    assert value("env", "", env_reward=0.5) == 0.5
    assert load(Target("env")).run([RewardSample({}, "", env_reward=0.0)])[0].status == "wrong"


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("exact_mach", {}, "did you mean 'exact_match'"),
        ("number", {"colum": "a"}, "colum"),
        ("format", {}, "pattern"),
        ("format", {"pattern": "("}, "unterminated"),
        ("overlong", {"max_tokens": 10, "buffer_tokens": 20}, "at most max_tokens"),
        ("cosine", {"max_tokens": 10, "of": "cosine"}, "itself"),
        ("cosine", {"max_tokens": 10, "values": {"short": 1}}, "unknown values"),
    ],
)
def test_wrong_arguments_are_the_users_mistake(name: str, args: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(name, args)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_outcome_without_a_value_is_no_reward() -> None:
    for status, number in (("ok", None), ("wrong", None), ("timeout", 0.0), ("error", 1.0), ("fine", 1.0)):
        with pytest.raises(RewardError):
            RewardOutcome(status, number)  # type: ignore[arg-type]
    for number in (math.nan, math.inf):
        with pytest.raises(RewardError):
            ok(number)
    assert failed("error", "two\nlines  here").detail == "two lines here"


def test_pitfall_16_counts_say_why_nothing_is_learned() -> None:
    counts = OutcomeCounts()
    counts.add_group([wrong(), wrong(), wrong()])
    counts.add_group([ok(1), ok(1)])
    counts.add_group([ok(0.5), ok(0.5)])
    counts.add_group([ok(1), wrong(), failed("error", "x")])
    counts.add_group([ok(1), failed("timeout", "x")])
    assert (counts.all_zero, counts.all_one, counts.all_equal, counts.mixed, counts.unscored) == (1, 1, 3, 1, 1)
    assert (counts.total, counts.failures) == (12, 2)
    assert "all 0: 1, all 1: 1" in counts.text() and "timeout 1, error 1" in counts.text()


def test_pitfall_29_the_limit_ends_the_run_with_counts() -> None:
    budget = ErrorBudget(max_fraction=0.5, window=8)
    budget.add([failed("error", "sandbox down")] * 4)
    with pytest.raises(TooManyRewardErrors) as caught:
        budget.add([failed("error", "sandbox down")])
    assert "5 of the last 5" in str(caught.value) and "(5 times) error: sandbox down" in str(caught.value)


def test_the_limit_looks_at_a_window_and_forgets() -> None:
    budget = ErrorBudget(max_fraction=0.25, window=8)
    for _ in range(50):
        budget.add([failed("timeout", "slow"), failed("error", "x"), *[ok(1)] * 6])
    assert budget.counts.failures == 100
    with pytest.raises(TooManyRewardErrors, match="3 of the last 8"):
        budget.add([failed("error", "x")] * 3)
    ErrorBudget(1.0, 4).add([failed("error", "x")] * 20)
    with pytest.raises(TooManyRewardErrors):
        ErrorBudget(0.0, 4).add([ok(1), failed("error", "x")])


def test_a_burst_inside_one_batch_counts_though_the_batch_ends_well() -> None:
    with pytest.raises(TooManyRewardErrors, match="3 of the last"):
        ErrorBudget(0.5, 4).add([failed("error", "x")] * 3 + [ok(1)] * 9)
