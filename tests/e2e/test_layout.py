"""Whole runs whose training is spread over processes: a `layout:` section is the only change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docklands.dock import hosted
from docklands.dock.launch import Launcher
from docklands.obs.rundir import RunDir
from tests.dock_processes import Forked
from tests.e2e.runs import docklands, run_here, train_arguments

pytestmark = pytest.mark.slow

MORE = ("rollout.samples_per_prompt=8",)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dock's processes come from a forkserver, in a second instead of ten."""
    monkeypatch.setattr(hosted, "Launcher", lambda *arguments: Launcher(*arguments, spawn=Forked))


def metrics(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in run.metrics.read_text().splitlines()]


def close(left: RunDir, right: RunDir, steps: int) -> None:
    """The same losses, norms and rewards, up to the order of summation."""
    pairs = list(zip(metrics(left), metrics(right), strict=True))
    assert len(pairs) == steps
    for mine, other in pairs:
        for name in ("actor/grad_norm", "actor/tokens", "actor/pg_loss", "critic/rewards/mean", "response_length/mean"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_a_run_in_a_layout_is_the_same_run(tmp_path: Path) -> None:
    alone = run_here("mix6_grpo.yaml", tmp_path / "alone", "run.steps=2", *MORE)
    spread = run_here("mix6_grpo.yaml", tmp_path / "spread", "run.steps=2", *MORE, "layout.tp=2", "layout.dp=2")
    close(spread, alone, 2)


def test_a_run_resumes_in_another_layout(tmp_path: Path) -> None:
    """In one process, then two that share parameters, then two pipeline stages."""
    alone = run_here("mix6_grpo.yaml", tmp_path / "alone", "run.steps=3", *MORE)
    run_here("mix6_grpo.yaml", tmp_path / "cut", "run.steps=1", *MORE, "checkpoint.at_end=true")
    run_here("mix6_grpo.yaml", tmp_path / "cut", "run.steps=2", *MORE, "layout.fsdp=2", resume=True)
    resumed = run_here("mix6_grpo.yaml", tmp_path / "cut", "run.steps=3", *MORE, "layout.pp=2", resume=True)
    close(resumed, alone, 3)


def test_pitfall_32_a_layout_that_does_not_fit_exits_with_the_arithmetic(tmp_path: Path) -> None:
    done = docklands(*train_arguments("mix6_grpo.yaml", tmp_path / "run", ["layout.tp=3"]))
    assert done.returncode == 2
    assert "4 heads do not divide by tp 3 (4 / 3 = 1.33)" in done.stdout + done.stderr
