"""train 4 = train 2 + kill -9 + resume 2, to the bit; Ctrl-C leaves a clean checkpoint; the epoch's end is no edge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from docklands.cli.main import run as cli
from docklands.core.protocols import Rows
from docklands.obs.metrics import Metrics
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import strip_times
from docklands.rollout import NativeEngine
from docklands.run import session
from docklands.run.session import Run
from docklands.train import checkpoint
from docklands.train.engine import TrainEngine
from tests.e2e.runs import ROOT, docklands, overrides, run_here, start, train_arguments

pytestmark = pytest.mark.slow


def wait_for_checkpoint(run: RunDir, step: int, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = checkpoint.latest(run.checkpoints) if run.checkpoints.is_dir() else None
        if path is not None and checkpoint.step_of(path) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no checkpoint of step {step} within {seconds} s")


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command line, running; gone at the end, whatever the test found."""
    process = start(*arguments)
    try:
        yield process
    finally:
        process.kill()
        process.wait(120)


def flow_of(run: RunDir, step: int) -> dict:
    return checkpoint.load(run.checkpoints / f"step_{step:06d}", "flow")


def equal(left: object, right: object) -> bool:
    """Bitwise equality of nested states."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


STEERED = [f"algorithm.kl.{key}" for key in ("coef=0.05", "where=reward", "target=0.01", "horizon=100")]


@pytest.mark.parametrize("recipe", ["mix6_grpo.yaml", "mix6_ppo.yaml"])
def test_pitfall_24_kill_and_resume_is_bitwise(recipe: str, tmp_path: Path) -> None:
    more = ["run.steps=4", "checkpoint.every_steps=2", "algorithm.samples_per_update=8"]
    more += STEERED if "ppo" in recipe else []
    whole = RunDir(tmp_path / "whole")
    assert docklands(*train_arguments(recipe, whole.path, more)).returncode == 0

    broken = RunDir(tmp_path / "broken")
    with started(*train_arguments(recipe, broken.path, [*more, "run.steps=4000"])):
        wait_for_checkpoint(broken, 2)
    for path in broken.checkpoints.glob("step_*"):  # later ones that the kill was too late for
        if path.name != "step_000002":
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    done = docklands(*train_arguments(recipe, broken.path, more), "--resume")
    assert done.returncode == 0, done.stderr

    for name in ("actor", "critic", "flow") if "ppo" in recipe else ("actor", "flow"):
        left = checkpoint.load(checkpoint.latest(whole.checkpoints), name)
        right = checkpoint.load(checkpoint.latest(broken.checkpoints), name)
        assert equal(left, right), name
    if "ppo" in recipe:  # the controller had something to go on from
        coefficients = [flow_of(broken, step)["algorithm"]["kl_coef"] for step in (2, 4)]
        assert len({0.05, *coefficients}) == 3
    ours = [strip_times(line) for line in whole.metrics.read_text().splitlines()]
    theirs = [strip_times(line) for line in broken.metrics.read_text().splitlines()]
    assert ours[2:] == theirs[2:]
    assert len(ours) == len(theirs) == 4


def test_ctrl_c_saves_a_clean_checkpoint_and_exits_130(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with started(*train_arguments("mix6_grpo.yaml", run.path, ["run.steps=4000"])) as process:
        deadline = time.monotonic() + 240
        while not (run.metrics.exists() and run.metrics.read_text().count("\n") >= 2):
            assert time.monotonic() < deadline, "the run did not start"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 130
    path = checkpoint.latest(run.checkpoints)
    assert path is not None
    steps = [step for step, _ in run.read_metrics()]
    assert checkpoint.step_of(path) == steps[-1] >= 2
    more = [f"run.steps={steps[-1] + 1}"]
    assert docklands(*train_arguments("mix6_grpo.yaml", run.path, more), "--resume").returncode == 0
    assert [step for step, _ in run.read_metrics()] == list(range(1, steps[-1] + 2))


def test_ctrl_c_in_an_update_begins_no_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is done; what was to be generated for later ones is not waited for, and is there after a resume."""
    take_step, update, generate, after, runs = Run.take_step, TrainEngine.update, NativeEngine.generate, [], []

    async def seen(run: Run, metrics: Metrics) -> Rows:
        runs[:] = [run]
        return await take_step(run, metrics)

    def interrupted(engine: TrainEngine, *args: Any) -> Any:
        if not runs[0].stop_asked:
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 120
            while not runs[0].stop_asked:
                assert time.monotonic() < deadline, "the signal was not heard"
                time.sleep(0.002)
        return update(engine, *args)

    def counted(engine: NativeEngine, requests: Any) -> Any:
        after.extend(requests if runs and runs[0].stop_asked else ())
        return generate(engine, requests)

    monkeypatch.setattr(Run, "take_step", seen)
    monkeypatch.setattr(TrainEngine, "update", interrupted)
    monkeypatch.setattr(NativeEngine, "generate", counted)
    more = overrides(tmp_path / "run", "dock.max_staleness=2", "dock.groups_per_take=1", "run.steps=4")
    assert cli(["train", str(ROOT / "configs/mix6_grpo.yaml"), *more]) == 130
    run = RunDir(tmp_path / "run")
    assert [step for step, _ in run.read_metrics()] == [1] and not after
    monkeypatch.undo()
    assert cli(["train", str(ROOT / "configs/mix6_grpo.yaml"), *more, "--resume"]) == 0
    assert [step for step, _ in run.read_metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("end", ["steps", "prompts"])
def test_ctrl_c_in_the_last_evaluation_records_none_and_a_resume_makes_it(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, runs, measure, roll_out = tmp_path / "rows.jsonl", list[Run](), Run.measure, session.roll_out
    rows.write_text("".join(json.dumps({"prompt": f"{i}{i}30="}) + "\n" for i in range(4)))
    more = overrides(tmp_path / "run", "eval.prompts=4", "eval.after=true", "checkpoint.at_end=false")
    more += ["run.steps=1"] if end == "steps" else [f"data.source={rows}", "data.epochs=1", "eval.source=task:mix6"]

    async def seen(run: Run, *args: Any) -> Any:
        runs.append(run)
        return await measure(run, *args)

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 120
        while not runs[0].stop_asked:
            assert time.monotonic() < deadline, "the signal was not heard"
            time.sleep(0.002)
        return roll_out(*args)

    monkeypatch.setattr(Run, "measure", seen)
    monkeypatch.setattr(session, "roll_out", interrupted)
    assert cli(["train", str(ROOT / "configs/mix6_grpo.yaml"), *more]) == 130
    run = RunDir(tmp_path / "run")
    assert [step for step, _ in run.read_metrics()] == [1] and not run.read_evals()
    monkeypatch.undo()
    assert cli(["train", str(ROOT / "configs/mix6_grpo.yaml"), *more, "--resume"]) == 0
    assert [step for step, _ in run.read_metrics()] == [1] and [row["step"] for row in run.read_evals()] == [1]


def test_pitfall_23_resume_at_the_epoch_boundary(tmp_path: Path) -> None:
    """3 batches an epoch, 2 epochs, saved at 3: exactly 3 more steps, every prompt once per epoch."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}{i}30="}) + "\n" for i in range(6)))
    more = (f"data.source={rows}", "rollout.prompts_per_step=2", "data.epochs=2", "obs.samples_per_step=64")
    run = run_here("mix6_grpo.yaml", tmp_path / "run", *more, "run.steps=3")
    run_here("mix6_grpo.yaml", tmp_path / "run", *more, "run.steps=6", resume=True)
    assert [step for step, _ in run.read_metrics()] == [1, 2, 3, 4, 5, 6]
    seen = [
        sorted({s["prompt_id"] for step in steps for s in run.read_samples(step)}) for steps in ((1, 2, 3), (4, 5, 6))
    ]
    assert seen == [list(range(6)), list(range(6, 12))]


@pytest.mark.parametrize("after", [2, 8])
def test_resuming_with_another_batch_size_admits_what_the_steps_left_need(after: int, tmp_path: Path) -> None:
    """Two steps of 4 prompts, then three of another number: no step goes without, no prompt is rolled out in vain."""
    run = run_here("mix6_grpo.yaml", tmp_path / "run", "run.steps=2")
    more = ("run.steps=5", f"rollout.prompts_per_step={after}")
    run_here("mix6_grpo.yaml", tmp_path / "run", *more, resume=True)
    assert [step for step, _ in run.read_metrics()] == [1, 2, 3, 4, 5]
    path = checkpoint.latest(run.checkpoints)
    assert path is not None
    ledger = checkpoint.load(path, "flow")["dock"]["ledger"]
    assert ledger["retired"] == ledger["admitted"] == 2 * 4 + 3 * after


def test_what_a_resumed_run_does_otherwise_is_told_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pitfall 26's kind: no setting changes in silence, and prompt ids never mean other rows."""
    recipe, directory = str(ROOT / "configs/mix6_grpo.yaml"), tmp_path / "run"
    run = run_here("mix6_grpo.yaml", directory, "run.steps=1", "data.args={size: 100}")

    def resume(*more: str) -> tuple[int, str]:
        arguments = [*overrides(directory, "run.steps=2", "data.args={size: 100}", "obs.console=plain"), *more]
        code = cli(["train", recipe, *arguments, "--resume"])
        said = capsys.readouterr()
        return code, said.out + said.err

    other = ROOT / "assets/cot6-warm"
    refused = {
        "data.args={size: 100, digits: 5}": ("data.args: {size: 100} -> {size: 100, digits: 5}", "other rows"),
        f"model.path={other}": ("mix6-warm -> ", "error: model.path: the run was started with"),
        f"model.tokenizer={other}": ('model.tokenizer: "" -> ', "error: model.tokenizer: the run was started with"),
        "algorithm.name=ppo": ("algorithm.name: grpo -> ppo", "has no critic"),
        "algorithm.name=dapo": ("algorithm.name: grpo -> dapo", "only here filter_groups(group_id, reward)"),
    }
    for override, words in refused.items():
        code, said = resume(override)
        assert code == 2 and "Traceback" not in said and said.count("error:") == 1, said
        assert all(word in said for word in words), said
        assert "changed since step 1: run.steps: 1 -> 2" in said
    code, said = resume("rollout.temperature=0.9", "algorithm.kl.coef=0.0")
    changed = [line.split(": ")[1] for line in said.splitlines() if line.startswith("changed since step 1: ")]
    assert code == 0 and changed == ["run.steps", "rollout.temperature", "obs.console"]
    log = "".join(path.read_text(encoding="utf-8") for path in run.log.iterdir())
    assert "changed since step 1: rollout.temperature: 1.0 -> 0.9\n" in log
    assert [step for step, _ in run.read_metrics()] == [1, 2]
