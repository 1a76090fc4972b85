"""Whole runs over worker processes: equal to the bit, through a worker's death, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from docklands.core.protocols import Rows
from docklands.core.stage import Stage
from docklands.dock import hosted
from docklands.dock.launch import Launcher
from docklands.errors import ConfigError, WarehouseLost, WorkerLost
from docklands.fleet.supervise import Restarts, lost_process
from docklands.fleet.workers import Workers
from docklands.obs.rundir import RunDir
from docklands.run import parts
from docklands.train import checkpoint
from tests.dock_processes import Forked
from tests.e2e.runs import ROOT, command, environment, run_here, train_arguments
from tests.e2e.test_dock_in_processes import lines, same_run, until, weights
from tests.fleet_chaos import COMMON, MODES
from tests.fleet_outside import QUICK, Fleet
from tests.fleet_soak import typical, weigh

RECIPE = "mix6_grpo.yaml"
SPREAD = ("layout.dp=2", "rollout.samples_per_prompt=8")
MANY, WARM, SHORT_KIB = 40, 15, 150.0
"""Steps, those of the warm-up, and KiB a step that a process may typically grow by."""
TIGHT_HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives back what is freed, so that resident memory is what is in use."""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dock's processes come from a forkserver, in a second instead of ten."""
    monkeypatch.setattr(hosted, "Launcher", lambda *arguments: Launcher(*arguments, spawn=Forked))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four steps on two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted, "Launcher", lambda *arguments: Launcher(*arguments, spawn=Forked))
        return run_here(RECIPE, tmp_path_factory.mktemp("two") / "run", "run.steps=4", *SPREAD)


def test_two_runs_are_equal_to_the_bit(undisturbed: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the dock's part of a checkpoint finds no room: that is told, and the run goes on."""
    save = hosted.HostedDock.save

    async def without_room(self: hosted.HostedDock) -> Any:
        taken = self.launcher.folder / f"{hosted.SNAPSHOT}.0"
        taken.mkdir()  # where the warehouse is to write its file
        monkeypatch.undo()
        try:
            return await save(self)
        finally:
            taken.rmdir()

    monkeypatch.setattr(hosted.HostedDock, "save", without_room)
    run = run_here(RECIPE, tmp_path / "run", "run.steps=4", "checkpoint.every_steps=2", *SPREAD)
    assert [row.get("checkpoint/failed", 0) for _, row in run.read_metrics()] == [0, 0, 1, 0]
    same_run(undisturbed, run)
    assert "Traceback" not in (undisturbed.log / "worker.1.log").read_text()


def test_a_worker_lost_too_often_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies when the first update has its rows, and the run may not start it again."""
    made: list[Workers] = []
    take = hosted.HostedDock.take

    class Watched(Workers):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    async def deadly(self: hosted.HostedDock, of: Stage, **want: Any) -> Rows:
        rows = await take(self, of, **want)
        if of.name == "update":
            os.kill(made[-1].lines[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return rows

    monkeypatch.setattr(parts, "Workers", Watched)
    monkeypatch.setattr(hosted.HostedDock, "take", deadly)
    with pytest.raises((WorkerLost, BaseExceptionGroup)) as caught:
        run_here(RECIPE, tmp_path / "run", "run.steps=4", "fleet.max_restarts=0", *SPREAD)
    assert lost_process(caught.value) is not None and len(made) == 1


def test_restarts_are_counted_within_a_hundred_steps() -> None:
    counted = Restarts(2)
    assert [counted.allow(step) for step in (0, 50, 60, 100, 101, 160)] == [True, True, False, True, False, True]
    lost, other = WorkerLost("a"), ValueError("b")
    assert lost_process(BaseExceptionGroup("", [lost, BaseExceptionGroup("", [WarehouseLost("c")])])) is lost
    assert lost_process(BaseExceptionGroup("", [lost, other])) is None


def test_a_local_dock_is_out_of_reach_of_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local is out of reach of worker processes"):
        run_here(RECIPE, tmp_path / "run", "dock.transport=local", *SPREAD)


def test_a_fleet_is_no_larger_after_many_steps_and_ctrl_c_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers and generators apart, seen from outside; `make soak` weighs 200 steps. kill -9: test_fleet_chaos.py."""
    for name, value in TIGHT_HEAP.items():
        monkeypatch.setenv(name, value)
    fleet = Fleet(RECIPE, RunDir(tmp_path / "run"), [*COMMON, *MODES["apart"][1], "run.steps=4000"], QUICK)
    try:
        fleet.start()
        found = weigh(fleet, MANY)
        os.killpg(fleet.process.pid, signal.SIGINT)
        assert fleet.wait(180) == 130
        left = fleet.left()
    finally:
        fleet.kill()
    assert not left
    kinds = {"driver 0", "trainer 1", "rollout 1", "warehouse 1", "control 0", "reward 0", "forkserver 0"}
    assert kinds <= found.keys() and fleet.sockets
    grows = {name: typical(weights, WARM) for name, weights in found.items() if len(weights) > MANY // 2}
    assert kinds <= grows.keys() and all(kib < SHORT_KIB for kib in grows.values()), grows


def test_a_stop_for_the_whole_process_group_saves_and_trains_no_rollout_that_it_cuts(tmp_path: Path) -> None:
    """SIGTERM as timeout, scancel and systemd send it: to the driver and its workers at once, in a rollout. There is a
    checkpoint of the last step; with --resume the run ends with the weights of one that nobody disturbed. The dock's
    processes are those of a user: in sessions of their own, which the signal does not reach.
    """
    more = ["checkpoint.every_steps=1", "checkpoint.keep=9", "layout.dp=2", "rollout.prompts_per_step=24"]
    more.append("rollout.max_batch=4")
    cut = RunDir(tmp_path / "cut")
    with subprocess.Popen(
        command(*train_arguments(RECIPE, cut.path, [*more, "run.steps=4000"])), cwd=ROOT, env=environment(),
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            until("a step", lambda: lines(cut) >= 1)
            time.sleep(0.3)
            os.killpg(process.pid, signal.SIGTERM)
            said, _ = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "started again" not in said
    steps = [step for step, _ in cut.read_metrics()]
    newest = checkpoint.latest(cut.checkpoints)
    assert newest is not None and checkpoint.step_of(newest) == steps[-1]
    more.append(f"run.steps={steps[-1] + 1}")
    run_here(RECIPE, cut.path, *more, resume=True)
    whole = run_here(RECIPE, tmp_path / "whole", *more)
    assert all(metrics["completions/aborted_ratio"] == 0 for _, metrics in cut.read_metrics())
    ends = [weights(whole), weights(cut)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
