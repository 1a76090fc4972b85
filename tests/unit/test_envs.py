"""Environments: the protocol's guard, the factory, the calculator."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docklands.config.schema import EnvSection
from docklands.envs import StepResult, build_env_factory
from docklands.envs.base import GuardedEnv
from docklands.envs.calculator import Calculator, answer_to
from docklands.envs.single_turn import SingleTurn
from docklands.errors import ConfigError, EnvError, EnvTimeout


def play(env: Any, row: dict, *turns: tuple[str, str]) -> list[StepResult]:
    """All step results of an episode."""

    async def run() -> list[StepResult]:
        await env.reset(row)
        return [await env.step(text, finish) for text, finish in turns]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("12*(3+4)", "84"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("1/3", "0.333333333333"),
        ("-3 + +5", "2"),
        ("7//2 - 7%4", "0"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("4**0.5", "2"),
        ("10**100", "1" + "0" * 100),
        ("1e300*1e10", "error: the number is too large"),
        ("1/0", "error: division by zero"),
        ("0**-1", "error: division by zero"),
        ("(-8)**0.5", "error: a root of a negative number"),
        ("9**9**9", "error: the power is too large"),
        ("9**999999999", "error: the power is too large"),
        ("2.0**2000", "error: the power is too large"),
        ("2**256*2**255*4", "error: the number is too large"),
        ("2**511*2", "error: the power is too large"),
        ("", "error: not an arithmetic expression"),
        ("1+", "error: not an arithmetic expression"),
        ("007", "error: not an arithmetic expression"),
        ("1\n+1", "error: one line, please"),
        ("1" * 201, "error: longer than 200 characters"),
        ("+".join("1" * 90), "error: too many operations"),
        ("-" * 35 + "1", "error: nested too deeply"),
        ("(" * 99 + "1" + ")" * 99, "1"),
        ("__import__('os')", "error: only numbers, + - * / // % ** and parentheses"),
        ("abs(1)", "error: only numbers, + - * / // % ** and parentheses"),
        ("'a'*9", "error: only numbers, + - * / // % ** and parentheses"),
        ("True+1", "error: only numbers, + - * / // % ** and parentheses"),
        ("1j", "error: only numbers, + - * / // % ** and parentheses"),
        ("x", "error: only numbers, + - * / // % ** and parentheses"),
        ("1<2", "error: only numbers, + - * / // % ** and parentheses"),
    ],
)
def test_arithmetic_is_safe_and_says_what_is_wrong(expression: str, answer: str) -> None:
    assert answer_to(expression) == answer


@given(st.text(alphabet="0123456789+-*/%(). e", max_size=40))
def test_any_expression_is_answered_quickly(expression: str) -> None:
    start = time.monotonic()
    said = answer_to(expression)
    assert said and len(said) < 200 and time.monotonic() - start < 1


@given(st.integers(-999, 999), st.integers(-999, 999), st.integers(1, 99), st.sampled_from(["+", "-", "*", "//", "%"]))
def test_whole_numbers_are_exact(a: int, b: int, c: int, sign: str) -> None:
    assert answer_to(f"({a} {sign} {b}) * {c}" if b else "0") == (str(eval(f"({a} {sign} {b}) * {c}")) if b else "0")  # noqa: S307


ROW = {"prompt": "What is 12*(3+4)?", "answer": "84"}


def test_a_call_is_answered_and_the_answer_ends_the_episode() -> None:
    first, second = play(Calculator(), ROW, ("I need <calc>12*(3+4)</calc>", "stop"), ("So it is 84.", "stop"))
    assert first == StepResult("<result>84</result>", 0.0, False, {"calls": 1})
    assert second == StepResult(None, 1.0, True, {"calls": 1})


@pytest.mark.parametrize(
    ("text", "finish", "reward"),
    [
        ("84", "stop", 1.0),
        ("84.0", "stop", 1.0),
        ("it is 12 times 7 = 84", "stop", 1.0),
        ("85", "stop", 0.0),
        ("", "stop", 0.0),
        ("84", "length", 0.0),
        ("84", "abort", 0.0),
        ("<calc>1+1</calc>", "length", 0.0),
        ("<calc>12*7</calc> which is 84", "stop", 1.0),
        ("84 <calc>1</calc> no idea", "stop", 0.0),
        ("<calc>84", "stop", 1.0),
    ],
)
def test_turns_that_end_the_episode(text: str, finish: str, reward: float) -> None:
    (result,) = play(Calculator(), ROW, (text, finish))
    assert (result.observation, result.reward, result.done) == (None, reward, True)


def test_a_wrong_expression_is_the_models_to_learn_from() -> None:
    (result,) = play(Calculator(), ROW, ("<calc>12*</calc>", "stop"))
    assert result.observation == "<result>error: not an arithmetic expression</result>" and not result.done


def test_a_new_episode_starts_clean() -> None:
    env = Calculator()
    play(env, ROW, ("<calc>1</calc>", "stop"))
    (result,) = play(env, {"answer": "1,000"}, ("1000", "stop"))
    assert result == StepResult(None, 1.0, True, {"calls": 0})
    for answer in (None, "many", float("nan")):
        with pytest.raises(EnvError, match="not a number"):
            play(env, {"answer": answer})


def test_factory_gives_fresh_guarded_environments() -> None:
    make = build_env_factory(EnvSection(name="calculator", max_turns=3, args={"pay": 2.0}))
    assert make is not None
    one, two = make(), make()
    assert one is not two and one.max_turns == 3
    play(one, ROW, ("<calc>1</calc>", "stop"))
    assert play(two, ROW, ("84", "stop"))[0].reward == 2.0
    assert build_env_factory(EnvSection()) is None


def test_the_last_turn_is_the_end_even_with_a_call() -> None:
    make = build_env_factory(EnvSection(name="calculator", max_turns=2))
    assert make is not None
    first, last = play(make(), ROW, ("<calc>1</calc>", "stop"), ("<calc>2</calc>", "stop"))
    assert not first.done
    assert (last.observation, last.reward, last.done, last.info["out_of_turns"]) == (None, 0.0, True, True)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "calculatr"}, "did you mean 'calculator'"),
        ({"name": "calculator", "max_turns": 1}, "leaves no turn after a call"),
        ({"name": "calculator", "max_turns": 2, "args": {"payy": 1}}, "payy"),
        ({"name": "single_turn", "max_turns": 2}, "mean nothing to single_turn"),
        ({"name": "json:dumps"}, "environment 'json:dumps'"),
        ({"name": "json:__name__"}, "not a class"),
        ({"name": "collections:OrderedDict"}, "no signature found"),
        ({"name": "collections:UserList"}, "whole number `max_turns`"),
        ({"name": "no_such_module_here:Env"}, "no_such_module_here"),
    ],
)
def test_wrong_configs_are_the_users_mistake(section: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_env_factory(EnvSection(**section))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_environment_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_env_module.py").write_text(
        "from docklands.envs import StepResult\n"
        "class Echo:\n"
        "    max_turns = 2\n"
        "    async def reset(self, row): self.row = row\n"
        "    async def step(self, completion, finish):\n"
        "        return StepResult(completion + self.row['prompt'], 0.5, False)\n"
        "class Sync(Echo):\n"
        "    def step(self, completion, finish): return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    make = build_env_factory(EnvSection(name="own_env_module:Echo"))
    assert make is not None
    first, last = play(make(), {"prompt": "!"}, ("a", "stop"), ("b", "stop"))
    assert first.observation == "a!" and last.done and last.reward == 0.5
    with pytest.raises(ConfigError, match="no `async def step`"):
        build_env_factory(EnvSection(name="own_env_module:Sync"))


class Acting:
    """Does what the completion says."""

    max_turns = 9

    def __init__(self) -> None:
        self.row: dict = {}

    async def reset(self, row: dict) -> None:
        if row.get("break"):
            raise OSError("no server\nat all")
        row["seen"] = True
        self.row = row

    async def step(self, completion: str, finish: str) -> Any:
        if completion == "raise":
            raise KeyError("lost")
        if completion == "hang":
            await asyncio.sleep(60)
        results = {
            "none": None,
            "tuple": ("x", 0.0, False),
            "nan": StepResult("x", float("nan"), False),
            "str": StepResult("x", "1", False),  # type: ignore[arg-type]
            "ids": StepResult([1, 2], 0.0, False),  # type: ignore[arg-type]
            "silent": StepResult(None, 0.0, False),
            "end": StepResult(None, 1.0, True),
            "rich": StepResult("x", 1e38, False),
        }
        return results.get(completion, StepResult("go on", 0.0, False))


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ("raise", "environment 'acting', step: KeyError: 'lost'"),
        ("hang", "no answer within 0.1 s"),
        ("none", "not a StepResult"),
        ("tuple", "not a StepResult"),
        ("nan", "not a StepResult with a number"),
        ("str", "not a StepResult with a number"),
        ("ids", "not a StepResult"),
        ("silent", "neither an observation nor the end"),
    ],
)
def test_every_failure_is_an_env_error_of_one_line(turn: str, says: str) -> None:
    with pytest.raises(EnvError) as caught:
        play(GuardedEnv(Acting(), "acting", 0.1), {}, ("go", "stop"), (turn, "stop"))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_missed_deadline_is_a_timeout_of_the_configs() -> None:
    make = build_env_factory(EnvSection(name=f"{__name__}:Acting", deadline_s=0.1, error_window=7))
    assert make is not None and make.failures.window == 7
    with pytest.raises(EnvTimeout, match=r"no answer within 0.1 s.*env.deadline_s"):
        play(make(), {}, ("hang", "stop"))


def test_an_episode_may_not_earn_more_than_float32_holds() -> None:
    with pytest.raises(EnvError, match="not a StepResult with a number"):
        play(GuardedEnv(Acting(), "acting", 5.0), {}, *[("rich", "stop")] * 4)


def test_reset_failures_and_steps_out_of_order() -> None:
    env = GuardedEnv(Acting(), "acting", 5.0)
    with pytest.raises(EnvError, match="reset: OSError: no server at all"):
        play(env, {"break": True})
    with pytest.raises(EnvError, match="before reset"):
        asyncio.run(env.step("go", "stop"))
    with pytest.raises(EnvError, match="after the end"):
        play(env, {}, ("end", "stop"), ("go", "stop"))
    row: dict = {}
    assert play(env, row, ("go", "stop"))[0].observation == "go on" and row == {}


def test_single_turn_ends_at_once() -> None:
    assert play(SingleTurn(), {}, ("anything", "stop")) == [StepResult(None, 0.0, True)]
