"""Whole runs whose training is spread over processes: a `layout:` section is the only change."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docklands.dock import hosted
from docklands.dock.launch import Launcher
from docklands.fleet.local_backend import LocalRole
from docklands.obs.rundir import RunDir
from tests.dock_processes import Forked
from tests.e2e.runs import docklands, run_here, train_arguments

pytestmark = pytest.mark.slow

MORE = ("rollout.samples_per_prompt=8",)
KL = ("algorithm.kl.coef=0.001",)
HELD = f"reward.functions=[{{name: sorted_digits}}, {{name: '{__name__}:held', isolate: false}}]"
WORK, BESIDE = threading.Condition(), list[bool]()
BEGUN, ENDED = Counter[str](), Counter[str]()
"""Hand-outs by stage, and what `held` has found."""


def held(completions: list[str], **_: Any) -> list[float]:
    """A reward of 0 that ends once the device has left its samples: other prompts are generated beside it, and the
    reference has the samples that are scored here. Passes when that has been so before.
    """
    with WORK:
        BESIDE.append(WORK.wait_for(lambda: BEGUN["rollout"] > 1 and ENDED["ref_logprobs"] > 0, 60))
    return [0.0] * len(completions)


async def told(self: LocalRole, stage: Any, rows: Any, run: Any = LocalRole.run) -> Any:
    """See LocalRole.run."""
    for when in (BEGUN, ENDED):
        outcome = await run(self, stage, rows) if when is ENDED else None
        with WORK:
            when[stage.name] += 1
            WORK.notify_all()
    return outcome


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


def test_a_run_in_a_layout_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colocated workers that take two prompts at a time; generation and the reference go on beside a reward."""
    alone = run_here("mix6_grpo.yaml", tmp_path / "alone", "run.steps=2", *MORE, *KL)
    monkeypatch.setattr(LocalRole, "run", told)
    more = (*MORE, *KL, HELD, "reward.deadline_s=120", "dock.groups_per_take=2", "layout.tp=2", "layout.dp=2")
    spread = run_here("mix6_grpo.yaml", tmp_path / "spread", "run.steps=2", *more)
    close(spread, alone, 2)
    assert BESIDE and all(BESIDE)
    assert all("timing_s/ref/wait" in step and "timing_s/reward/wait" in step for step in metrics(spread))


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
