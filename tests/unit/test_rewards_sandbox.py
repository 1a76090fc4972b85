"""Killable processes: hangs, crashes, orphans; and the whole reward stage over them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from docklands.config.schema import RewardItem, RewardSection
from docklands.core.batch import Batch
from docklands.core.fields import COMPLETION, ENV_REWARD, FINISH_REASON, LOSS_MASK, PROMPT, REWARD, REWARD_INFO
from docklands.errors import ConfigError, TooManyRewardErrors, UnknownField
from docklands.rewards import build_scorer
from docklands.rewards.base import RewardOutcome, RewardSample
from docklands.rewards.sandbox import Sandbox
from docklands.rewards.scorer import Scorer, function_reward
from docklands.rewards.scoring import Target

SOURCE = """
import os, re, subprocess, sys, time

def compute_score(solution_str, ground_truth):
    return act(solution_str)

def batch(completions, **columns):
    return [act(c) for c in completions]

def slow_batch(completions, **columns):
    time.sleep(0.15 * len(completions))
    return [1.0] * len(completions)

def act(text):
    if text == "hang":
        time.sleep(1000)
    if text == "hang_with_the_lock":
        re.fullmatch("(a+)+b", "a" * 64)
    if text == "child":
        subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
        time.sleep(1000)
    if text == "crash":
        os.abort()
    if text == "leave":
        os._exit(7)
    if text == "print":
        print("to stdout", flush=True)
        os.write(1, b"raw noise")
        sys.stdin.read()
    if text == "raise":
        raise RuntimeError("said no")
    if text == "nan":
        return float("nan")
    if text == "none":
        return None
    if text == "str":
        return "1.0"
    return float(text)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "acting.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def scorer(file: Path) -> Iterator[Callable[..., Scorer]]:
    made: list[Scorer] = []

    def make(*names: str, deadline_s: float = 1.0, **section: object) -> Scorer:
        items = [RewardItem(name=f"{file}:{n}" if n in SOURCE else n) for n in names]
        made.append(build_scorer(RewardSection(functions=items, deadline_s=deadline_s, **section)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def score(scorer: Scorer, *texts: str) -> list[RewardOutcome]:
    samples = [RewardSample({"prompt": "q", "answer": "1"}, text) for text in texts]
    return asyncio.run(scorer.score_samples(samples))


def alive(pid: int) -> bool:
    """Running, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


BAD = ("hang", "crash", "leave", "raise", "nan", "none", "str")


@pytest.mark.parametrize("name", ["compute_score", pytest.param("batch", marks=pytest.mark.slow)])
def test_every_kind_of_failure_costs_one_sample(scorer: Callable[..., Scorer], name: str) -> None:
    texts = [text for bad in BAD for text in ("1", bad)] + ["0.5"]
    outcomes = score(scorer(name), *texts)
    by_text = dict(zip(texts, outcomes))
    assert [o.value for o, text in zip(outcomes, texts) if text not in BAD] == [1.0] * len(BAD) + [0.5]
    assert {bad: by_text[bad].status for bad in BAD} == {bad: "timeout" if bad == "hang" else "error" for bad in BAD}
    says = {
        "hang": "no result within 1 s; its process was killed",
        "crash": "SIGABRT",
        "leave": "exit code 7",
        "raise": "RuntimeError: said no",
        "nan": "returned nan",
        "none": "None (NoneType)",
        "str": "'1.0' (str)",
    }
    for bad, text in says.items():
        assert text in by_text[bad].detail, bad


def test_a_call_that_holds_the_interpreter_lock_is_killed(scorer: Callable[..., Scorer]) -> None:
    start = time.monotonic()
    outcomes = score(scorer("compute_score", deadline_s=0.5), "hang_with_the_lock", "1")
    assert [o.status for o in outcomes] == ["timeout", "ok"] and time.monotonic() - start < 10


def test_a_pattern_of_exponential_time_is_killed() -> None:
    items = [RewardItem(name="format", args={"pattern": "(a+)+b"})]
    scorer = build_scorer(RewardSection(functions=items, deadline_s=0.5))
    try:
        assert [o.status for o in score(scorer, "a" * 64, "aab", "c")] == ["timeout", "ok", "wrong"]
    finally:
        scorer.close()


def test_what_a_reward_prints_does_not_reach_the_protocol(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    scorer = build_scorer(RewardSection(functions=[RewardItem(name=f"{file}:compute_score")], deadline_s=5), log)
    try:
        assert [o.status for o in score(scorer, "print", "1")] == ["error", "ok"]
    finally:
        scorer.close()
    assert log.read_text() == "to stdout\nraw noise"


def test_hopeless_rewards_end_early(scorer: Callable[..., Scorer]) -> None:
    start = time.monotonic()
    outcomes = score(scorer("compute_score", deadline_s=0.1), *["hang"] * 40)
    assert all(o.status == "timeout" for o in outcomes) and "not tried" in outcomes[-1].detail
    assert time.monotonic() - start < 12


@pytest.mark.slow
def test_a_slow_batch_function_is_called_one_by_one_from_then_on(scorer: Callable[..., Scorer]) -> None:
    slow = scorer("slow_batch", deadline_s=0.6)
    assert [o.value for o in score(slow, *["1"] * 9)] == [1.0] * 9
    pid = slow.sandbox.pids
    assert [o.value for o in score(slow, *["1"] * 9)] == [1.0] * 9
    assert slow.sandbox.pids == pid


def test_the_process_is_kept_and_dies_with_its_children(scorer: Callable[..., Scorer]) -> None:
    one = scorer("compute_score", deadline_s=0.7)
    assert one.sandbox.pids == []
    score(one, "1")
    (pid,) = one.sandbox.pids
    score(one, "1")
    assert one.sandbox.pids == [pid]
    before = sleepers()
    assert score(one, "child")[0].status == "timeout"
    assert gone(pid) and all(map(gone, sleepers() - before))
    score(one, "1")
    (pid,) = one.sandbox.pids
    one.close()
    assert gone(pid) and one.sandbox.pids == []
    assert score(one, "1")[0].status == "error"


def sleepers() -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes() == b"sleep\x001000\x00":
                found.add(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("text", ["1", "hang", "hang_with_the_lock"])
def test_no_orphan_after_the_parent_is_killed(file: Path, text: str) -> None:
    code = f"""
import sys, threading, time
from docklands.rewards.base import RewardSample
from docklands.rewards.sandbox import Sandbox
from docklands.rewards.scoring import Target
pool = Sandbox()
target = Target({str(file) + ":compute_score"!r})
row = {{"prompt": "q", "answer": "1"}}
pool.submit(target, [RewardSample(row, "1")], True, 60).result()
pool.submit(target, [RewardSample(row, {text!r})], True, 60)
time.sleep(0.3)
print(*pool.pids, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    parent.stdout.close()
    assert gone(pid)


def test_several_processes_share_a_batch(scorer: Callable[..., Scorer]) -> None:
    wide = scorer("compute_score", workers=2)
    outcomes = score(wide, *map(str, range(9)))
    assert [o.value for o in outcomes] == list(range(9)) and len(wide.sandbox.pids) == 2


def test_a_reward_that_does_not_load_says_why(tmp_path: Path) -> None:
    pool = Sandbox()
    try:
        sample = RewardSample({"prompt": "q"}, "1")
        outcomes = pool.submit(Target(f"{tmp_path}/absent.py:f"), [sample] * 2, True, 1.0).result(60)
    finally:
        pool.close()
    assert [o.status for o in outcomes] == ["error"] * 2 and "does not load" in outcomes[0].detail


def test_functions_in_a_thread_have_a_deadline_and_are_not_called_while_stuck() -> None:
    calls = []

    def compute_score(solution_str, ground_truth):
        calls.append(solution_str)
        time.sleep(1.5 if solution_str == "hang" else 0)
        return 1.0

    reward = function_reward(compute_score, deadline_s=0.2)
    row = {"prompt": "q", "answer": "1"}

    async def run() -> list[list[str]]:
        first = await reward.score([RewardSample(row, t) for t in ("a", "hang", "b")])
        await asyncio.sleep(1.5)
        second = await reward.score([RewardSample(row, "c")])
        return [[o.status for o in first], [o.status for o in second]]

    assert asyncio.run(run()) == [["ok", "timeout", "timeout"], ["ok"]]
    assert calls == ["a", "hang", "c"]
    reward.close()


# --- the reward stage ------------------------------------------------------------------------------------------


def batch_of(*texts: str, **columns: object) -> Batch:
    rows = [{"prompt": "q", "answer": "1"} for _ in texts]
    given = {PROMPT: rows, COMPLETION: list(texts)}
    return Batch([10 + i for i in range(len(texts))], {**given, **columns})  # type: ignore[arg-type]


def test_stage_writes_rewards_and_drops_failures(scorer: Callable[..., Scorer]) -> None:
    result = asyncio.run(scorer("compute_score").score(batch_of("1", "raise", "0.5", "nan")))
    assert result.batch is not None
    assert result.batch.row_ids.tolist() == [10, 12] and result.batch[REWARD].tolist() == [1.0, 0.5]
    assert result.batch[REWARD_INFO][0]["components"] == {"compute_score": 1.0}
    assert set(result.dropped) == {11, 13} and result.dropped[11].startswith("reward_error: compute_score: RuntimeErr")
    assert result.metrics["reward/scored"] == (2.0, 1.0) and result.metrics["reward/errors"] == (2.0, 1.0)
    assert result.metrics["reward/error_fraction"] == (2.0, 4.0)
    assert result.metrics["reward/compute_score/mean"] == (1.5, 2.0)


def test_metric_names_are_declared(scorer: Callable[..., Scorer]) -> None:
    from docklands.obs.metrics import Metrics

    result = asyncio.run(scorer("compute_score", "number").score(batch_of("1", "raise")))
    metrics = Metrics()
    for name, (total, count) in result.metrics.items():
        metrics.add(name, total, count)
    assert metrics.result()["reward/error_fraction"] == 0.5


def test_pitfall_29_sandbox_down_for_a_step(scorer: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are not trained, a metric shows it, the next step is whole again, and a limit ends a long outage."""
    one = scorer("compute_score", error_window=8, max_error_fraction=0.5)
    assert len(asyncio.run(one.score(batch_of("1", "0", "1", "0"))).batch or []) == 4
    for pid in one.sandbox.pids:
        os.kill(pid, signal.SIGKILL)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nonexistent/python")
        down = asyncio.run(one.score(batch_of("1", "0", "1", "0")))
        assert down.batch is not None and len(down.batch) == 0 and len(down.dropped) == 4
        assert down.metrics["reward/errors"] == (4.0, 1.0) and down.metrics["reward/error_fraction"] == (4.0, 4.0)
        assert one.counts.failures == 4
    up = asyncio.run(one.score(batch_of("1", "0", "1", "0")))
    assert up.batch is not None and up.batch[REWARD].tolist() == [1, 0, 1, 0] and not up.dropped
    with pytest.raises(TooManyRewardErrors, match="of the last 8"):
        asyncio.run(one.score(batch_of(*["raise"] * 5)))


def test_weighted_sum_keeps_components_and_drops_on_any_failure(file: Path) -> None:
    items = [
        RewardItem(name="number", weight=2.0),
        RewardItem(name="overlong", weight=0.5, args={"max_tokens": 4, "buffer_tokens": 4}),
        RewardItem(name=f"{file}:compute_score", weight=0.1),
        RewardItem(name="env", weight=1.0),
    ]
    scorer = build_scorer(RewardSection(functions=items, deadline_s=5.0))
    batch = batch_of("1", "5", "raise").with_(
        {LOSS_MASK: [[False, True, True], [True], [True]], ENV_REWARD: [0.25, 0.0, 1.0], FINISH_REASON: [0, 1, 0]}
    )
    try:
        result = asyncio.run(scorer.score(batch))
    finally:
        scorer.close()
    assert result.batch is not None
    assert result.batch[REWARD].tolist() == pytest.approx([2.0 - 0.25 + 0.1 + 0.25, 0.0 - 0.125 + 0.5 + 0.0])
    info = result.batch[REWARD_INFO][0]
    assert info["components"] == {"number": 1.0, "overlong": -0.5, "compute_score": 1.0, "env": 0.25}
    assert [i["status"] for i in result.batch[REWARD_INFO]] == ["ok", "wrong"]
    assert list(result.dropped) == [12] and "compute_score: RuntimeError: said no" in result.dropped[12]


def test_two_of_a_kind_have_two_labels() -> None:
    items = [RewardItem(name="number"), RewardItem(name="number", args={"column": "b"})]
    scorer = build_scorer(RewardSection(functions=items))
    assert scorer.reward.labels == ["number_1", "number_2"]
    scorer.close()


def test_nothing_to_score_with_and_missing_columns() -> None:
    with pytest.raises(ConfigError, match="reward.functions is empty.*exact_match"):
        build_scorer(RewardSection())
    with pytest.raises(ConfigError, match="did you mean 'number'"):
        build_scorer(RewardSection(functions=[RewardItem(name="numbr")]))
    scorer = build_scorer(RewardSection(functions=[RewardItem(name="number")]))
    with pytest.raises(UnknownField, match="completion"):
        asyncio.run(scorer.score(Batch([1], {PROMPT: [{}]})))
    scorer.close()


# --- verifiers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifiers() -> Iterator[dict[str, Scorer]]:
    made = {
        name: build_scorer(RewardSection(functions=[RewardItem(name=name)], deadline_s=3.0))
        for name in ("math_verify", "reasoning_gym")
    }
    yield made
    for scorer in made.values():
        scorer.close()


@pytest.mark.slow
def test_math_verify_gives_typed_outcomes(verifiers: dict[str, Scorer]) -> None:
    cases = [
        ("so $\\frac{1}{2}$", "0.5", "ok"),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", "ok"),
        ("the answer is 42", "42", "ok"),
        ("41", "42", "wrong"),
        ("no idea", "42", "wrong"),
        ("", "42", "wrong"),
        ("$9^{9^{9^{9}}}$", "3", "timeout"),
        ("12", "12", "ok"),
        ("12", "", "error"),
    ]
    samples = [RewardSample({"prompt": "q", "answer": gold}, text) for text, gold, _ in cases]
    outcomes = asyncio.run(verifiers["math_verify"].score_samples(samples))
    assert [o.status for o in outcomes] == [status for _, _, status in cases]
    assert "cannot read" in outcomes[-1].detail


@pytest.mark.slow
def test_reasoning_gym_verifies_with_the_tasks_own_rule(verifiers: dict[str, Scorer]) -> None:
    import reasoning_gym

    item = reasoning_gym.create_dataset("countdown", seed=7, size=3)[2]
    row = {
        "prompt": item["question"],
        "reasoning_gym": {"name": "countdown", "seed": 7, "size": 3, "config": {}, "index": 2},
    }
    texts = [item["answer"], f"thinking... <answer> {item['answer']} </answer>", "1+1", "<answer>1+1</answer>"]
    samples = [RewardSample(row, text) for text in texts] + [RewardSample({"prompt": "q"}, "1")]
    outcomes = asyncio.run(verifiers["reasoning_gym"].score_samples(samples))
    assert [o.status for o in outcomes] == ["ok", "ok", "wrong", "wrong", "error"]
    assert outcomes[0].value == 1.0 and "not of a reasoning_gym source" in outcomes[-1].detail
