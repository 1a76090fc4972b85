"""A run whose dock lives in processes of its own: the same training to the bit, through deaths, nothing left over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from docklands.cli.main import run as cli
from docklands.config.load import load_config
from docklands.core.protocols import Rows
from docklands.core.stage import Stage
from docklands.dock import hosted
from docklands.dock.launch import Launcher
from docklands.dock.warehouse.arena import SHM
from docklands.errors import ConfigError
from docklands.obs.rundir import RunDir
from docklands.run.build import build_dock
from docklands.train import checkpoint, sharded_checkpoint
from tests.dock_parts import PLAIN
from tests.dock_processes import Forked
from tests.e2e.runs import ROOT, command, environment, overrides, run_here, train_arguments

pytestmark = pytest.mark.slow
RECIPE = "mix6_grpo.yaml"
PROCESSES = ("dock.transport=processes", "dock.warehouses=2")
MOVES = ("timing_s", "perf/", "memory/", "dock/", "checkpoint/")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four steps with the dock in the driver's process."""
    return run_here(RECIPE, tmp_path_factory.mktemp("local") / "run", "run.steps=4")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[Launcher]:
    """The dock's processes come from a forkserver, in a second instead of ten; every launcher made."""
    made: list[Launcher] = []

    def launcher(*arguments: object) -> Launcher:
        made.append(Launcher(*arguments, spawn=Forked))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(hosted, "Launcher", launcher)
    return made


def measured(run: RunDir) -> list[dict[str, float]]:
    """All metrics but times and sizes of the machine, and what was saved."""
    return [{k: v for k, v in row.items() if not k.startswith(MOVES)} for _, row in run.read_metrics()]


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run.checkpoints)
    assert path is not None
    return dict(sharded_checkpoint.weights(path))


def same_run(left: RunDir, right: RunDir) -> None:
    assert measured(left) == measured(right)
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def until(what: str, condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def lines(run: RunDir) -> int:
    return run.metrics.read_text().count("\n") if run.metrics.exists() else 0


def test_four_steps_with_resumptions_in_other_docks_are_the_four_of_a_local_dock(
    local: RunDir, forked: list[Launcher], tmp_path: Path
) -> None:
    """Over two warehouses, then one, then the driver's process, then three warehouses."""
    run_here(RECIPE, tmp_path / "run", *PROCESSES, "run.steps=1")
    run_here(RECIPE, tmp_path / "run", PROCESSES[0], "run.steps=2", resume=True)
    run_here(RECIPE, tmp_path / "run", "run.steps=3", resume=True)
    run = run_here(RECIPE, tmp_path / "run", PROCESSES[0], "dock.warehouses=3", "run.steps=4", resume=True)
    same_run(local, run)
    assert [made.deaths for made in forked] == [[], [], []]
    for made in forked:
        assert all(path.suffix == ".log" for path in made.folder.iterdir())
        assert not list(SHM.glob(f"docklands-{made.run}-*"))


@pytest.mark.parametrize(
    ("durability", "stage"), [("none", "update"), ("none", "reward"), ("wal", "update"), ("replica", "reward")]
)
def test_a_warehouse_that_dies_in_mid_run_changes_no_weight(
    local: RunDir, forked: list[Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, stage: str
) -> None:
    """It dies when a stage has rows of it in hand: they are replayed, copied, or made anew from the same streams."""
    taken: list[str] = []
    take = hosted.HostedDock.take

    async def deadly(self: hosted.HostedDock, of: Stage, **want: Any) -> Rows:
        rows = await take(self, of, **want)
        taken.append(of.name)
        if of.name == stage and taken.count(stage) == 2:
            self.launcher.kill(f"warehouse {rows.places[0]}")
        return rows

    monkeypatch.setattr(hosted.HostedDock, "take", deadly)
    run = run_here(RECIPE, tmp_path / "run", *PROCESSES, "run.steps=4", f"dock.durability={durability}")
    assert len(forked[0].deaths) == 1 and "warehouse" in forked[0].deaths[0]
    assert taken.count(stage) > 4 if durability == "none" else taken.count(stage) == 4
    ours, theirs = weights(local), weights(run)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def shared(family: list[psutil.Process]) -> list[Path]:
    """Files in /dev/shm that belong to these processes: others' tests have theirs."""
    pids = {str(process.pid) for process in family}
    return [path for path in SHM.glob("docklands-*") if path.name.split("-")[2] in pids]


def started(run: RunDir, *more: str) -> subprocess.Popen[str]:
    arguments = command(*train_arguments(RECIPE, run.path, [*PROCESSES, "run.steps=4000"]), *more)
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )  # type: ignore[return-value]


def top(run: RunDir, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """`docklands dock top --once`: exit code, what it says."""
    code = cli(["dock", "top", str(run.path), "--once"])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_nothing_is_left_after_ctrl_c_or_kill_9(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C goes to the whole process group, as in a terminal; kill -9 to the driver alone."""
    run = RunDir(tmp_path / "run")
    for end, more in ((signal.SIGINT, ()), (signal.SIGKILL, ("--resume",))):
        begun = lines(run)
        process = started(run, *more)
        try:
            until("two steps", partial(lambda begun: lines(run) >= begun + 2, begun))
            family = [c for c in children(process) if "docklands.dock." in " ".join(c.cmdline())]
            named = [
                word.removeprefix("docklands.dock.")
                for child in family
                for word in child.cmdline()
                if "docklands.dock." in word
            ]
            assert sorted(named) == ["control.server", "warehouse.server", "warehouse.server"]
            assert len(shared(family)) == 2
            if end == signal.SIGINT:
                code, shown = top(run, capsys)
                assert code == 0 and "of 4 groups in flight" in shown
                assert all(f" {name} " in shown for name in ("rollout", "reward", "advantage", "update"))
                os.killpg(process.pid, end)
            else:
                process.kill()
            said = process.communicate(timeout=180)[0]
            assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL), said
        finally:
            process.kill()
        assert not psutil.wait_procs(family, 120)[1]
        assert not shared(family)
    assert checkpoint.latest(run.checkpoints) is not None
    code, shown = top(run, capsys)
    assert code == 4 and "no answer within 3 s from the dock's control process" in shown


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    config, _ = load_config(ROOT / "configs" / RECIPE, overrides(tmp_path / "run", "dock.durability=wal"))
    with pytest.raises(ConfigError, match="lives and dies with the driver"):
        build_dock(config, PLAIN, tmp_path)
    config, _ = load_config(ROOT / "configs" / RECIPE, overrides(tmp_path / "run", *PROCESSES, "dock.overtake=1"))
    with pytest.raises(ConfigError, match="overtake is 1"):
        build_dock(config, PLAIN, tmp_path)
