"""Whole runs on Ray: started by the run itself, equal to the same ranks without Ray, and gone when the driver is."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from docklands.errors import ConfigError
from docklands.obs.rundir import RunDir
from tests.e2e.runs import ROOT, command, docklands, environment, run_here, train_arguments
from tests.e2e.test_dock_in_processes import lines, same_run, until
from tests.e2e.test_fleet_runs import RECIPE, SPREAD, forked

__all__ = ["forked"]
RAY = ("fleet.backend=ray", *SPREAD)


@pytest.fixture(autouse=True)
def no_other_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine, a run starts a Ray of its own."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


def test_a_run_on_ray_is_the_same_run(tmp_path: Path) -> None:
    """Ranks, dock and loop are those of the other backend; the Ray that the run started ends with it."""
    here = run_here(RECIPE, tmp_path / "here", "run.steps=2", *SPREAD)
    there = RunDir(tmp_path / "there")  # by the command: a Ray that ends its driver ends no test runner
    done = docklands(*train_arguments(RECIPE, there.path, ["run.steps=2", *RAY]))
    assert done.returncode == 0, done.stderr
    same_run(here, there)
    assert "Traceback" not in (there.log / "worker.1.log").read_text()
    with pytest.raises(ConfigError, match="no Ray answers at 127.0.0.1:1"):
        run_here(RECIPE, tmp_path / "nowhere", "fleet.ray_address=127.0.0.1:1", *RAY)


def test_nothing_is_left_after_kill_9_of_a_driver_that_started_ray(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    arguments = command(*train_arguments(RECIPE, run.path, [*RAY, "run.steps=4000"]))
    process: Any = subprocess.Popen(
        arguments, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        until("two steps", lambda: lines(run) >= 2)
        left = psutil.Process(process.pid).children(recursive=True)
        names = " ".join(child.name() for child in left)
        assert "raylet" in names and "gcs_server" in names and names.count("ray::Actor") == 2
        process.kill()
        assert process.communicate(timeout=60)[0] is not None and process.returncode == -signal.SIGKILL
    finally:
        process.kill()
    assert not psutil.wait_procs(left, 60)[1]
