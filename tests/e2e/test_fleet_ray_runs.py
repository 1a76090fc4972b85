"""Whole runs on Ray: started by the run itself, equal to the same ranks without Ray, and gone when the driver is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docklands.errors import ConfigError, WorkerLost
from docklands.fleet import ray_carrier
from docklands.obs.rundir import RunDir
from docklands.train import checkpoint
from tests.e2e.runs import run_here
from tests.e2e.test_dock_in_processes import same_run
from tests.e2e.test_fleet_runs import RECIPE, SPREAD, forked
from tests.fleet_outside import Fleet, until

__all__ = ["forked"]
RAY = ("fleet.backend=ray", *SPREAD)
FOUR = ("run.steps=2", "rollout.samples_per_prompt=8", "algorithm.samples_per_update=16")


@pytest.fixture(autouse=True)
def no_other_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine, a run starts a Ray of its own."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


def test_a_run_on_ray_is_the_same_run(tmp_path: Path) -> None:
    """PPO on a model with experts, four workers that train (tp 2, dp 2, ep 2) and generate (ep 4) in turns. Ranks, dock
    and loop are those of the other backend; the Ray that the run started ends with it.
    """
    recipe = "fleet_ppo_colocated.yaml"
    here = run_here(recipe, tmp_path / "here", *FOUR, "fleet.backend=local")
    fleet = Fleet(recipe, RunDir(tmp_path / "there"), FOUR)  # in a process: a Ray that ends its driver ends no pytest
    try:
        fleet.start()
        assert until(lambda: fleet.note() or fleet.process.poll() is not None, 240, 0.5)
        assert fleet.process.returncode == 0, fleet.said
        left = fleet.left()
    finally:
        fleet.kill()
    assert not left and any(name.endswith("plasma_store") for name in fleet.sockets)
    same_run(here, fleet.run)
    assert "Traceback" not in (fleet.run.log / "worker.3.log").read_text()
    with pytest.raises(ConfigError, match="no Ray answers at 127.0.0.1:1"):
        run_here(RECIPE, tmp_path / "nowhere", "fleet.ray_address=127.0.0.1:1", *RAY)


def test_nothing_is_left_after_ctrl_c_or_kill_9_of_a_driver_that_started_ray(tmp_path: Path) -> None:
    """Not a process, and not a socket of Ray's either; after Ctrl-C, which Ray's processes get too, a checkpoint."""
    fleet = Fleet(RECIPE, RunDir(tmp_path / "run"), [*RAY, "run.steps=4000"])
    try:
        fleet.start()
        assert until(lambda: fleet.steps >= 2, 240), fleet.said
        fleet.note()
        names = fleet.members().keys()
        assert {"raylet 0", "gcs_server 0", "trainer 1"} <= names and "trainer 2" not in names
        assert any(name.endswith("plasma_store") for name in fleet.sockets)
        os.killpg(fleet.process.pid, signal.SIGINT)
        assert fleet.wait(180) == 130, fleet.said
        assert not fleet.left()
        steps = fleet.steps
        assert checkpoint.latest(fleet.run.checkpoints) == fleet.run.checkpoints / f"step_{steps:06d}"
        fleet.start(resume=True)
        assert until(lambda: fleet.steps > steps, 240), fleet.said
        fleet.note()
        fleet.process.kill()
        assert fleet.wait(180) == -signal.SIGKILL
        left = fleet.left()
    finally:
        fleet.kill()
    assert not left


JOIN = "from docklands.fleet.ray_carrier import join, private; print(join('', 1)[0], private(), flush=True); input()"


def test_a_run_does_not_join_the_ray_that_another_one_started_for_itself() -> None:
    """It has room for its owner's workers and ends with them: two runs would each hold what the other waits for."""
    free = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    said = []
    with contextlib.ExitStack() as open_:
        for environment in (os.environ, free):
            process = subprocess.Popen(
                [sys.executable, "-c", JOIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            open_.callback(process.communicate, "\n", timeout=60)
            assert process.stdout is not None
            said.append(process.stdout.readline().split())
    assert said[0] == ["started", "True"]
    assert said[1] in (["started", "True"], ["joined", "False"])  # joined: one that other tests keep for all


def test_a_ray_that_does_not_start_leaves_nothing_and_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is too busy: Ray raises a plain Exception, and its processes stay."""
    begun: list[subprocess.Popen[bytes]] = []

    def slow(**_: Any) -> None:
        begun.append(subprocess.Popen(["sleep", "600"]))
        raise Exception("The current node timed out during startup.")  # noqa: TRY002

    monkeypatch.setattr(ray_carrier.ray, "init", slow)
    with pytest.raises(WorkerLost, match="no Ray could be started here: The current node timed out during startup"):
        ray_carrier.Session().enter(object(), "local", 1)
    assert begun[0].wait(60) == -signal.SIGKILL
