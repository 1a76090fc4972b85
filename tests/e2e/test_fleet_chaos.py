"""A process dies at a random moment, whatever it is: the run ends with the weights of an undisturbed one.

Generators of their own: test_fleet_elastic.py. `make chaos-fleet` kills in 20 runs of real processes (fleet_chaos.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docklands.dock import hosted
from docklands.dock.launch import Launcher
from docklands.fleet.workers import Workers
from docklands.obs.rundir import RunDir
from docklands.rewards import sandbox
from docklands.run import parts
from tests.dock_processes import Forked
from tests.e2e.runs import run_here
from tests.e2e.test_dock_in_processes import lines, weights
from tests.e2e.test_fleet_runs import RECIPE, SPREAD
from tests.fleet_chaos import ISOLATED, Blow, Drill
from tests.fleet_chaos import STEPS as WHOLE
from tests.fleet_outside import QUICK

STEPS = ("run.steps=8", "checkpoint.every_steps=2", ISOLATED, *SPREAD)


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str], int]]:
    """For each start of the run's processes: kills one of a kind, -> its process id."""
    launchers: list[Launcher] = []
    found: list[Callable[[str], int]] = []

    def launcher(*arguments: Any) -> Launcher:
        launchers.append(Launcher(*arguments, spawn=Forked))
        return launchers[-1]

    class Watched(Workers):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self.strike)

        def strike(self, kind: str) -> int:
            if kind in ("warehouse 0", "control"):
                return launchers[-1].kill(kind)
            able = [line.pid for line in self.lines]  # type: ignore[attr-defined]
            if kind == "reward":
                able = [pid for pool in sandbox._pools for pid in pool.pids]
            pid = random.choice(able)
            os.kill(pid, signal.SIGKILL)
            return pid

    monkeypatch.setattr(hosted, "Launcher", launcher)
    monkeypatch.setattr(parts, "Workers", Watched)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted, "Launcher", lambda *arguments: Launcher(*arguments, spawn=Forked))
        return run_here(RECIPE, tmp_path_factory.mktemp("calm") / "run", *STEPS)


SEEDS = range(int(os.environ.get("DOCKLANDS_CHAOS", "1")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["worker", "warehouse 0", "control", "reward"])
def test_a_death_at_a_random_moment_changes_no_weight(
    undisturbed: RunDir, living: list[Callable[[str], int]], tmp_path: Path, kind: str, seed: int
) -> None:
    """DOCKLANDS_CHAOS=20: so many moments for each kind of process."""
    run, killed = RunDir(tmp_path / "run"), list[int]()
    drawn = random.Random(f"{kind} {seed}")
    after, delay, over = drawn.randrange(7), drawn.uniform(0.0, 0.5), threading.Event()

    def strike() -> None:
        while lines(run) < after + 1 and not over.is_set():
            time.sleep(0.005)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError, IndexError):
            killed.append(living[0](kind))

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        run_here(RECIPE, run.path, *STEPS)
    finally:
        over.set()
        thread.join(120)
    assert len(killed) == 1, "the run was over before"
    ours, theirs = weights(undisturbed), weights(run)
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    log = (run.log / "driver.0.log").read_text()
    again = log.count("all processes are started again from the last checkpoint")
    assert len(living) == 1 + again and again <= 1
    if kind == "worker":  # a warehouse or the control process comes back by itself, unless rows of an update were lost
        assert again == 1 and f"(pid {killed[0]}) died with exit code -9 (killed, perhaps for memory) during" in log
    if kind == "reward":
        assert again == 0 and log.count(f"(pid {killed[0]}) ended: signal 9 (SIGKILL); what it was at is scored") == 1


def test_a_driver_that_is_killed_leaves_nothing_and_goes_on_with_resume(
    living: list[Callable[[str], int]], tmp_path: Path
) -> None:
    """Trainers, generators and a reward process of their own, seen from outside; see fleet_chaos.py."""
    drill = Drill(tmp_path, QUICK)
    blow = Blow("driver", "apart", 0, "wal", after=WHOLE // 2, delay=random.Random(7).uniform(0.0, 0.5), which=0.0)
    drill.calms["apart"] = run_here(RECIPE, tmp_path / "calm", *blow.overrides)
    outcome = drill.strike("run", blow)
    assert not outcome.wrong, outcome
