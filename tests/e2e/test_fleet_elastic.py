"""Generators with processes of their own die, hang, join and leave in the middle of a run: the run goes on, and trains
the weights of one that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docklands.cli.main import run as command
from docklands.dock import hosted
from docklands.dock.launch import Launcher
from docklands.errors import ConfigError
from docklands.fleet import replicas
from docklands.fleet.publishing import Member, Party
from docklands.fleet.replicas import Replica, Replicas
from docklands.obs.metrics import Metrics
from docklands.obs.rundir import RunDir
from docklands.obs.spans import read_spans
from docklands.run import fleet
from docklands.run.session import Run
from docklands.sync.publish import SumCount
from tests.dock_processes import Forked
from tests.e2e.runs import run_here
from tests.e2e.test_dock_in_processes import lines, until, weights

RECIPE = "mix6_grpo.yaml"
APART = ("rollout.samples_per_prompt=8", "fleet.placement=disaggregated")
SILENT_S = 5
EVALUATE = (
    "eval.prompts=6",
    "eval.samples_per_prompt=2",
    "eval.temperature=1.0",
    "eval.every_steps=2",
    "eval.after=true",
)
STEPS = ("run.steps=8", *APART)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replicas]:
    """The replicas of each start; the dock's processes come from a forkserver, in a second instead of ten."""
    found: list[Replicas] = []

    class Watched(Replicas):
        def __init__(self, *arguments: Any) -> None:
            found.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(hosted, "Launcher", lambda *arguments: Launcher(*arguments, spawn=Forked))
    monkeypatch.setattr(fleet, "Replicas", Watched)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """One generator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted, "Launcher", lambda *arguments: Launcher(*arguments, spawn=Forked))
        return run_here(RECIPE, tmp_path_factory.mktemp("calm") / "run", *STEPS, *EVALUATE, "rollout.layout.dp=1")


def disturbed(run: RunDir, disturb: Callable[[], None], *more: str) -> str:
    """A run in whose course `disturb` does something; -> the driver's log."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            disturb()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    run_here(RECIPE, run.path, *STEPS, *more)
    thread.join(120)
    assert not errors, errors
    return (run.log / "driver.0.log").read_text()


def pid_of(replicas: Replicas, number: int) -> int:
    return replicas.members[number].workers.lines[0].pid  # type: ignore[attr-defined]


def metrics(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in run.metrics.read_text().splitlines()]


def same_end(run: RunDir, other: RunDir) -> None:
    """The same weights to the bit, and no sample trained twice."""
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    assert [m["training/samples"] for m in metrics(run)] == [m["training/samples"] for m in metrics(other)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_generator_that_dies_or_hangs_is_started_again_beside_the_others(
    undisturbed: RunDir, made: list[Replicas], tmp_path: Path, number: signal.Signals
) -> None:
    run, victim = RunDir(tmp_path / "run"), list[int]()

    def strike() -> None:
        until("two steps", lambda: lines(run) >= 2)
        victim.append(pid_of(made[0], 1))
        os.kill(victim[0], number)

    more = () if number == signal.SIGKILL else (f"fleet.heartbeat_s={SILENT_S}", "fleet.max_restarts=9")
    log = disturbed(run, strike, "rollout.layout.dp=2", *more)
    same_end(run, undisturbed)
    said = "died with exit code -9" if number == signal.SIGKILL else f"gave no sign of life for {SILENT_S} s during "
    assert f"worker 2 (pid {victim[0]}) {said}" in log
    again = log.count("is started again, the others go on")  # a busy machine may silence others, too
    assert log.count("rollout replica 1 is started again") >= 1 and (again == 1 or number == signal.SIGSTOP)
    assert sum(m.get("fleet/restarts", 0) for m in metrics(run)) == again
    assert len(made) == 1 and "from the last checkpoint" not in log, "trainers keep their processes"


def samples(run: RunDir) -> list[str]:
    return [file.read_text() for file in sorted(run.samples.glob("step_*.jsonl"))]


def test_generators_join_and_leave_and_the_samples_are_the_same(
    undisturbed: RunDir, made: list[Replicas], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One generator, then four, then two: `docklands fleet scale`. Newcomers have the version of the moment.

    Some die at held-out prompts, the only one, one of four, and both after the last step: evaluations are those of the
    undisturbed run, too.
    """
    run, after_step, seen = RunDir(tmp_path / "run"), Run.after_step, list[int]()
    call, doomed = Replica.call, {(2, 0), (4, 3), (8, 0), (8, 1)}

    def deadly(self: Replica, method: str, *args: Any) -> list[Any]:
        moment = made[0].version, self.number
        if method == "rollout" and moment in doomed:
            doomed.remove(moment)
            os.kill(pid_of(made[0], self.number), signal.SIGKILL)
        return call(self, method, *args)

    async def scale(wanted: int) -> None:
        assert command(["fleet", "scale", str(run.path), str(wanted)]) == 0
        members = made[0].members
        async with asyncio.timeout(240):
            while len(members) != wanted or not all(replica.holds.is_set() for replica in members.values()):
                await asyncio.sleep(0.02)
        seen.append(len(members))

    async def scaled(self: Run, step: int, metrics: Metrics) -> None:
        await after_step(self, step, metrics)
        if step in (1, 4):
            await scale(4 if step == 1 else 2)

    monkeypatch.setattr(Run, "after_step", scaled)
    monkeypatch.setattr(Replica, "call", deadly)
    run_here(RECIPE, run.path, *STEPS, *EVALUATE, "rollout.layout.dp=1", "sync.probe_every=3", "fleet.max_restarts=9")
    assert seen == [4, 2] and len(made) == 1 and not doomed
    assert sum(m.get("fleet/restarts", 0) for m in metrics(run)) == 2
    assert (run.log / "driver.0.log").read_text().count("is started again, the others go on") == 4
    assert [row["step"] for row in run.read_evals()] == [2, 4, 6, 8] and run.read_evals() == undisturbed.read_evals()
    assert [m["fleet/replicas"] for m in metrics(run)] == [1, 1, 4, 4, 4, 2, 2, 2]
    same_end(run, undisturbed)
    assert samples(run) == samples(undisturbed)
    visits = {row["rank"] for row in read_spans(run.path) if row["name"] == "rollout/visit"}
    assert visits == {1, 2, 3, 4}, "newcomers work"


@pytest.mark.parametrize("publish", ["in_flight", "drain"])
def test_weights_come_while_samples_are_under_way(tmp_path: Path, publish: str) -> None:
    """More groups than slots, one step ahead: nothing is lost or cut, and no sample is later than was allowed."""
    more = ("dock.max_staleness=1", "rollout.max_batch=4", "rollout.prompts_per_step=8", f"fleet.publish={publish}")
    run = run_here(RECIPE, tmp_path / "run", *STEPS, *more, "rollout.layout.dp=2", "run.steps=6")
    found = metrics(run)
    assert len(found) == 6 and all(m["training/samples"] == 64 for m in found)
    assert max(m["training/staleness/max"] for m in found) == 1
    assert all(m["completions/aborted_ratio"] == 0 for m in found)
    sizes = [m["rollout/batch_size"] for m in found if "rollout/batch_size" in m]  # none where no visit has ended
    assert sizes and max(sizes) <= 4


class Dying(Member):
    """The second generator dies once in a publish: the weights have come, the gate is still to be passed."""

    def publish(self, party: Party, first: int, version: int) -> SumCount:
        mark = self.context.setup.log / "died"  # type: ignore[operator]
        if version == 2 and self.context.setup.first == 2 and not mark.exists():
            mark.touch()
            assert self.publisher is not None
            self.publisher.generator.hold = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[union-attr, method-assign]
        return super().publish(party, first, version)


def test_a_generator_that_dies_in_a_publish_costs_the_others_nothing(
    undisturbed: RunDir, made: list[Replicas], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in the middle of it hear of the death at once, and publish again among themselves."""
    monkeypatch.setattr(replicas, "Member", Dying)
    run = run_here(RECIPE, tmp_path / "run", *STEPS, "rollout.layout.dp=2", "layout.dp=2")
    log = (run.log / "driver.0.log").read_text()
    assert (run.log / "died").exists() and len(made) == 1
    assert log.count("rollout replica 0 is started again, the others go on") == 1
    assert "died with exit code -9 (killed, perhaps for memory) during sync publish" in log
    close(run, undisturbed)


def close(run: RunDir, other: RunDir) -> None:
    """Another number of trainers: the same figures, up to the order of summation."""
    for mine, theirs in zip(metrics(run), metrics(other), strict=True):
        for name in ("actor/grad_norm", "critic/rewards/mean", "response_length/mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_what_no_generator_apart_can_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="partial_tokens is 4, but generators have processes of their own"):
        more = ("rollout.partial_tokens=4", "dock.max_staleness=1", "rollout.layout.dp=2")
        run_here(RECIPE, tmp_path / "run", *APART, *more)
    with pytest.raises(ConfigError, match=r"fleet.publish is drain, but colocated"):
        run_here(RECIPE, tmp_path / "run", "fleet.publish=drain", "layout.dp=2")
    run = RunDir(tmp_path / "other")
    run.path.mkdir()
    run.config.write_text("model: {path: assets/mix6-warm}\n")
    assert command(["fleet", "scale", str(run.path), "2"]) == 2
    assert "are the trainers' processes" in capsys.readouterr().err
