"""Users' functions: signatures, results, failures."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from docklands.errors import ConfigError
from docklands.obs.metrics import Metrics
from docklands.rewards.base import ErrorBudget, RewardOutcome, RewardSample
from docklands.rewards.sandbox import Sandbox
from docklands.rewards.scorer import Scorer, WeightedSum, function_reward
from docklands.rewards.scoring import Target, adapt, load, outcome_of

ROWS = [{"prompt": "p0", "answer": "a", "level": 1}, {"prompt": "p1", "answer": "b"}]
SAMPLES = [RewardSample(ROWS[0], "a"), RewardSample(ROWS[1], "x")]


def statuses(outcomes: list[RewardOutcome]) -> list[tuple[str, float | None]]:
    return [(outcome.status, outcome.value) for outcome in outcomes]


def test_batch_signature_gets_columns_as_lists() -> None:
    seen: dict = {}

    def reward(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [float(c == a) for c, a in zip(completions, columns["answer"])]

    assert statuses(adapt("r", reward).run(SAMPLES)) == [("ok", 1.0), ("ok", 0.0)]
    assert seen == {"prompts": ["p0", "p1"], "completions": ["a", "x"], "answer": ["a", "b"], "level": [1, None]}


def test_batch_signature_with_named_columns_only() -> None:
    def reward(completions, answer, bonus=0.5):
        return [bonus * (c == a) for c, a in zip(completions, answer)]

    assert statuses(adapt("r", reward).run(SAMPLES)) == [("ok", 0.5), ("ok", 0.0)]
    assert statuses(adapt("r", reward, {"bonus": 2.0}).run(SAMPLES)) == [("ok", 2.0), ("ok", 0.0)]

    def needs_level(completions, level):
        return [1.0] * len(level)

    outcomes = adapt("r", needs_level).run(SAMPLES)
    assert statuses(outcomes) == [("ok", 1.0), ("error", None)] and "'level'" in outcomes[1].detail


def test_compute_score_signature() -> None:
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(solution_str == ground_truth), "why": "because"}

    row = {"prompt": "p", "data_source": "mine", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
    outcomes = adapt("r", compute_score).run([RewardSample(row, "7"), RewardSample(ROWS[0], "b", finish="length")])
    assert statuses(outcomes) == [("ok", 1.0), ("ok", 0.0)] and outcomes[0].info == {"why": "because"}
    assert seen[0] == ("mine", "7", "7", {"index": 3, "finish": "stop"})
    assert seen[1] == ("", "b", "a", {"finish": "length"})


def test_async_versions_of_both() -> None:
    async def batch(prompts, completions, **columns):
        return [1.0 for _ in completions]

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if solution_str == ground_truth else 0.0

    assert statuses(adapt("r", batch).run(SAMPLES, 5.0)) == [("ok", 1.0), ("ok", 1.0)]
    assert statuses(adapt("r", compute_score).run(SAMPLES, 5.0)) == [("ok", 1.0), ("ok", 0.0)]


def test_async_deadline_costs_only_the_slow_sample() -> None:
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(30 if solution_str == "x" else 0)
        return 1.0

    outcomes = adapt("r", compute_score).run(SAMPLES, 0.2)
    assert statuses(outcomes) == [("ok", 1.0), ("timeout", None)] and "0.2 s" in outcomes[1].detail


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class SilentTimeout(Silent, TimeoutError):
    pass


@pytest.mark.parametrize(("kind", "status"), [(Silent, "error"), (SilentTimeout, "timeout")])
def test_an_exception_without_a_text_costs_its_sample_only(kind: type[Exception], status: str) -> None:
    """In a sandbox it used to end the process."""

    def compute_score(solution_str):
        if solution_str == "x":
            raise kind
        return 1.0

    ok, lost = adapt("r", compute_score).run(SAMPLES)
    assert (ok.status, lost.status) == ("ok", status)
    assert f"{kind.__mro__[0].__name__ if status == 'error' else 'TimeoutError'}: its text cannot be had" in lost.detail


def test_one_sample_that_raises_costs_only_itself() -> None:
    def reward(completions, **columns):
        if "x" in completions:
            raise KeyError("no such key")
        return [1.0] * len(completions)

    def compute_score(solution_str, ground_truth):
        raise SystemExit(3) if solution_str == "x" else ValueError("no")

    outcomes = adapt("r", reward).run(SAMPLES)
    assert statuses(outcomes) == [("ok", 1.0), ("error", None)] and "KeyError: 'no such key'" in outcomes[1].detail
    assert [o.detail for o in adapt("r", compute_score).run(SAMPLES)] == ["ValueError: no", "SystemExit: 3"]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ([1.0], "1 values for 2 samples"),
        ([1.0, 1.0, 1.0], "3 values for 2 samples"),
        (1.0, "returned float, not a list of 2 numbers"),
        (None, "returned NoneType"),
        ("ab", "returned str"),
        (iter([1.0, 2.0]), "not a list"),
        ([None, None], "None (NoneType), not a number"),
        (["1", "2"], "'1' (str), not a number"),
        ([math.nan, math.inf], "returned nan"),
        ([{"scores": 1}, {}], "without 'score'"),
        ([np.zeros(2), [1]], "not a number"),
        ([1j, object()], "not a number"),
    ],
)
def test_results_that_are_no_scores(result: object, says: str) -> None:
    calls = []

    def reward(completions, **columns):
        calls.append(len(completions))
        return result

    outcomes = adapt("r", reward).run(SAMPLES)
    assert [outcome.status for outcome in outcomes] == ["error", "error"]
    assert says in outcomes[0].detail and calls == [2]


def test_results_that_are_scores() -> None:
    good = [True, 1, 0.5, np.float32(0.5), np.int64(2), np.array(3.0), torch.tensor(0.25), torch.tensor([1.0])]
    assert [outcome_of(v).value for v in good] == [1, 1, 0.5, 0.5, 2, 3, 0.25, 1]
    assert outcome_of({"score": np.float64(2), "acc": math.nan, "o": object}).info["acc"] == "nan"

    def reward(completions, **columns):
        return torch.tensor([0.5, 1.0])

    assert statuses(adapt("r", reward).run(SAMPLES)) == [("ok", 0.5), ("ok", 1.0)]


def test_a_score_dict_may_have_any_key() -> None:
    """'The rest is kept as info': also keys that are names inside."""
    found = outcome_of({"score": 1.0, "value": 3, "status": "x", "info": {}, "detail": "d"})
    assert (found.status, found.value) == ("ok", 1.0) and found.info["value"] == 3
    calls = []

    def reward(completions, **columns):
        calls.append(len(completions))
        return [{"score": 1.0, "raised": True, "lost": True} for _ in completions]

    assert statuses(adapt("r", reward).run(SAMPLES)) == [("ok", 1.0)] * 2 and calls == [2]


def test_a_function_that_needs_no_ground_truth_needs_none_in_the_row() -> None:
    def compute_score(solution_str):
        return float(len(solution_str))

    def with_default(solution_str, ground_truth="123"):
        return float(solution_str == ground_truth)

    def with_any(solution_str, **more):
        return float("ground_truth" in more)

    def needs(solution_str, ground_truth):
        return 1.0

    sample = RewardSample({"prompt": "1="}, "123")
    for function, score in ((compute_score, 3.0), (with_default, 1.0), (with_any, 0.0)):
        assert statuses(adapt("r", function).run([sample])) == [("ok", score)]
    assert statuses(adapt("r", with_any).run([RewardSample({"answer": 0}, "1")])) == [("ok", 1.0)]
    assert "no answer" in adapt("r", needs).run([sample])[0].detail


@pytest.mark.parametrize("value", [1e39, -1e39, 10**40, 10**400, math.inf, math.nan, np.float64(1e300)])
def test_a_reward_that_float32_cannot_hold_is_an_error(value: float) -> None:
    """REWARD is float32: 1e39 is finite in Python and infinite in the table."""

    def compute_score(solution_str):
        return value

    assert outcome_of(value).status == "error"
    assert statuses(adapt("r", compute_score).run(SAMPLES)) == [("error", None)] * 2
    assert outcome_of(3.4e38).value == 3.4e38


def test_functions_from_files_modules_and_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own_reward_file.py"
    path.write_text(
        "def plain(completions, **columns):\n    return [2.0] * len(completions)\n"
        "class Judge:\n"
        "    isolate = False\n"
        "    def __init__(self, value=1.0):\n        self.value = value\n"
        "    async def __call__(self, solution_str, ground_truth):\n        return self.value\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (f"{path}:plain", "own_reward_file:plain"):
        scoring = load(Target(name))
        assert scoring.isolate and not scoring.each and statuses(scoring.run(SAMPLES)) == [("ok", 2.0)] * 2
    judge = load(Target("own_reward_file:Judge", {"value": 3.0}))
    assert not judge.isolate and statuses(judge.run(SAMPLES, 5.0)) == [("ok", 3.0)] * 2


def test_functions_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_broken_file.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "own_odd_file.py").write_text("def odd(a, b):\n    return 1\nNUMBER = 3\ndef f(completions): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cases = [
        (f"{tmp_path}/own_broken_file.py:f", {}, "RuntimeError: at import"),
        ("own_broken_file:f", {}, "RuntimeError: at import"),
        (f"{tmp_path}/absent.py:f", {}, "does not exist"),
        (f"{tmp_path}/own_odd_file.py:g", {}, "defines no 'g'"),
        ("own_odd_file:fx", {}, "no attribute 'fx'"),
        ("no_such_module_here:f", {}, "no_such_module_here"),
        ("own_odd_file:odd", {}, "neither signature: it takes (a, b)"),
        ("own_odd_file:NUMBER", {}, "not a function"),
        ("builtins:print", {}, "neither signature"),
        ("builtins:max", {}, "no signature found"),
        ("collections:OrderedDict", {}, "not a function"),
        ("own_odd_file:f", {"weight": 1}, "no parameter 'weight'"),
    ]
    for name, args, says in cases:
        with pytest.raises(ConfigError) as caught:
            load(Target(name, args))
        assert says in str(caught.value) and "\n" not in str(caught.value), name


def combined(function: object, weight: float = 1.0) -> tuple[Scorer, list[RewardOutcome]]:
    """A scorer of one function, and its outcomes for SAMPLES."""
    scorer = Scorer(WeightedSum([(function_reward(function, name="my/cs"), weight)]), ErrorBudget(0.5, 8), Sandbox())
    outcomes = asyncio.run(scorer.score_samples(SAMPLES))
    scorer.close()
    return scorer, outcomes


@pytest.mark.parametrize("key", ["a/b c", "richtig?", "acc", "", "raised"])
def test_a_true_or_false_remark_of_any_name_has_a_metric(key: str) -> None:
    def compute_score(solution_str):
        return {"score": 1.0, key: True}

    scorer, outcomes = combined(compute_score)
    found = Metrics(scorer.metrics(outcomes)).result()
    assert found["reward/my_cs/mean"] == 1.0
    assert found[f"reward/my_cs.{key.replace('/', '_') or '_'}/mean"] == 1.0


def test_a_weighted_sum_that_float32_cannot_hold_is_an_error() -> None:
    def compute_score(solution_str):
        return 1e38 if solution_str == "a" else 1.0

    _, outcomes = combined(compute_score, 10.0)
    assert statuses(outcomes) == [("error", None), ("ok", 10.0)] and "no finite float32" in outcomes[0].detail
