"""Checkpoints of runs over several ranks: each rank writes its part, any layout goes on, a cut save costs nothing."""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from docklands import models
from docklands.dock import hosted
from docklands.dock.launch import Launcher
from docklands.errors import CheckpointError
from docklands.fleet.workers import Workers
from docklands.obs.rundir import RunDir
from docklands.obs.spans import read_spans
from docklands.run.main import export_run
from docklands.train import checkpoint, sharded_checkpoint
from tests.dock_processes import Forked
from tests.e2e.runs import ROOT, environment, run_here, train_arguments
from tests.e2e.test_disk_full import mounting
from tests.e2e.test_dock_in_processes import same_run
from tests.e2e.test_layout import close, metrics
from tests.fleet_outside import quick

pytestmark = pytest.mark.slow

RECIPE = "mix6_grpo.yaml"
MORE = ("rollout.samples_per_prompt=8",)
SPREAD = (*MORE, "layout.dp=2")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dock's processes come from a forkserver, in a second instead of ten."""
    monkeypatch.setattr(hosted, "Launcher", lambda *arguments: Launcher(*arguments, spawn=Forked))


def newest(run: RunDir) -> Path:
    path = checkpoint.latest(run.checkpoints)
    assert path is not None
    return path


@pytest.mark.timeout(300)
def test_saved_at_tp2_pp2_a_run_goes_on_at_fsdp4_and_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actor and critic: the losses of one process. The driver hears paths and numbers, and no rank writes it all."""
    heard: list[int] = []
    call = Workers.call

    def listening(self: Workers, name: str, method: str, *args: Any, **more: Any) -> list[Any]:
        found = call(self, name, method, *args, **more)
        if name == "checkpoint":
            heard.append(len(pickle.dumps((args, found))))
        return found

    monkeypatch.setattr(Workers, "call", listening)
    recipe, more = "mix6_ppo.yaml", (*MORE, "algorithm.samples_per_update=32")
    alone = run_here(recipe, tmp_path / "alone", "run.steps=4", *more)
    saved = ("checkpoint.every_steps=1", "checkpoint.keep=1")
    run = run_here(recipe, tmp_path / "cut", "run.steps=2", *more, *saved, "layout.tp=2", "layout.pp=2")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000002"]
    sizes = [file.stat().st_size for file in (newest(run) / "engines").glob("*.distcp")]
    assert len(sizes) == 4 and max(sizes) < 0.4 * sum(sizes)
    run_here(recipe, tmp_path / "cut", "run.steps=3", *more, *saved, "layout.fsdp=4", resume=True)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000003"]
    assert len(heard) >= 5 and max(heard) < 20_000
    export_run(run.path, tmp_path / "exported")
    exported = dict(models.load(tmp_path / "exported").named_parameters())
    assert all(torch.equal(exported[name], weight) for name, weight in sharded_checkpoint.weights(newest(run)))
    run_here(recipe, tmp_path / "cut", "run.steps=4", *more, resume=True)
    close(run, alone, 4)
    for mine, other in zip(metrics(run), metrics(alone), strict=True):
        for name in ("critic/loss", "critic/grad_norm", "critic/lr"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    writes = [row for row in read_spans(run.path) if row["name"] == "checkpoint/write"]
    assert {(row["step"], row["rank"]) for row in writes} == {(step, rank) for step in (1, 2, 3) for rank in range(4)}


def test_a_checkpoint_that_cannot_be_begun_is_counted_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room for the flow's state at step 1; of the last step, it would end the run."""
    begin = checkpoint.begin

    def full(root: Path, step: int, *more: Any) -> checkpoint.Begun:
        if step < 2 or last:
            raise CheckpointError(f"checkpoint of step {step} was not written", "free space")
        return begin(root, step, *more)

    last = False
    monkeypatch.setattr(checkpoint, "begin", full)
    run = run_here(RECIPE, tmp_path / "run", "run.steps=2", "checkpoint.every_steps=1", *SPREAD)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000002"]
    assert [row.get("checkpoint/failed") for row in metrics(run)] == [None, 1.0]
    assert "step 1 was not written (free space); the run goes on" in (run.log / "driver.0.log").read_text("utf-8")
    last = True
    with pytest.raises(BaseExceptionGroup) as caught:
        run_here(RECIPE, tmp_path / "run", "run.steps=3", *SPREAD, resume=True)
    assert "step 3 was not written" in str(caught.value.exceptions[0])


def cut_in_mid_save(process: Any, run: RunDir, after: int) -> Path:
    """Stop all processes while they write a checkpoint later than `after`, then kill -9 them; -> what is left of it."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        for path in run.checkpoints.glob(".writing-step_*"):
            if int(path.name.rpartition("_")[2]) <= after or not (path / "engines").is_dir():
                continue
            everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            send(everyone, signal.SIGSTOP)
            if path.is_dir() and not (path / checkpoint.MARKER).exists():
                send(everyone, signal.SIGKILL)
                assert not psutil.wait_procs(everyone[1:], 120)[1]
                return path
            send(everyone, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError("no save was caught")


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for found in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.send_signal(number)


@pytest.mark.timeout(300)
def test_pitfall_25_kill_9_in_the_middle_of_a_save_is_resumed_to_the_bit(tmp_path: Path) -> None:
    run, more = RunDir(tmp_path / "run"), [*SPREAD, "checkpoint.every_steps=1", "checkpoint.keep=9"]
    arguments = quick(*train_arguments(RECIPE, run.path, [*more, "run.steps=4000"]))
    with subprocess.Popen(
        arguments, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            left = cut_in_mid_save(process, run, after=1)
        finally:
            process.kill()
    cut = int(left.name.rpartition("_")[2])
    assert left.is_dir() and checkpoint.step_of(newest(run)) == cut - 1
    run_here(RECIPE, run.path, *more, f"run.steps={cut + 1}", resume=True)
    assert not left.exists()
    same_run(run, run_here(RECIPE, tmp_path / "whole", *SPREAD, f"run.steps={cut + 1}"))


SCRIPT = """
set -u
where=$1; shift
mkdir -p "$where/checkpoints"
mount -t tmpfs -o size=14m none "$where/checkpoints" || exit 77
"$@"
echo "first: $?"
ls -A "$where/checkpoints"
cp "$where/metrics.jsonl" "$where.first"
mount -o remount,size=200m "$where/checkpoints"
"$@" --resume
echo "second: $?"
ls -A "$where/checkpoints"
"""
"""Room for one checkpoint of 9 MB. The mount lives and dies with the shell's own namespace."""


@pytest.mark.timeout(300)
def test_a_disk_that_is_full_for_checkpoints_is_counted_told_and_costs_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    more = [*SPREAD, "run.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=9"]
    train = quick(*train_arguments(RECIPE, run.path, more))
    done = mounting(SCRIPT, str(run.path), *train)
    first, second = done.stdout.partition("first: ")[2].partition("second: ")[::2]
    code, *left = first.splitlines()[:2]
    assert code == "3" and left == ["step_000001"], done.stdout + done.stderr
    said = done.stderr.splitlines()
    assert sum(line.startswith("error: checkpoint of step 4 was not written") for line in said) == 1, done.stderr
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
    counted = [json.loads(line)["metrics"].get("checkpoint/failed", 0) for line in Path(f"{run.path}.first").open()]
    assert len(counted) == 4 and 1 <= sum(counted) <= 2
    log = (run.log / "driver.0.log").read_text(encoding="utf-8")
    assert "checkpoint of step 2 was not written" in log and "the run goes on" in log
    assert second.split() == ["0", *(f"step_00000{step}" for step in (1, 2, 3, 4))], done.stdout + done.stderr
    assert [step for step, _ in run.read_metrics()] == [1, 2, 3, 4]
