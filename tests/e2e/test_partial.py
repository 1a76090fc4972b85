"""Partial rollouts in a whole run: long samples go on under newer weights, every prompt is trained once, in order."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from docklands.core.protocols import Rows
from docklands.obs.metrics import Metrics
from docklands.obs.rundir import RunDir
from docklands.rollout import RolloutWorker
from docklands.run import resume as resuming
from docklands.run.session import Run
from docklands.train import checkpoint
from tests.e2e.runs import run_here

pytestmark = pytest.mark.slow

PARTIAL = ("dock.max_staleness=1", "rollout.partial_tokens=3", "obs.samples_per_step=64", "data.shuffle=false")


def trained(run: RunDir, steps: range) -> list[list[int]]:
    """Prompt ids of each step."""
    return [sorted({sample["prompt_id"] for sample in run.read_samples(step)}) for step in steps]


@pytest.mark.parametrize(("transport", "kv"), [("local", "recompute"), ("processes", "recompute"), ("local", "keep")])
def test_every_prompt_is_trained_once_and_tokens_come_from_several_versions(
    transport: str, kv: str, tmp_path: Path
) -> None:
    more = ("run.steps=6", f"dock.transport={transport}", f"rollout.partial_kv={kv}")
    run = run_here("mix6_grpo_tis.yaml", tmp_path / "run", *PARTIAL, *more)
    metrics = dict(run.read_metrics())
    assert sorted(metrics) == [1, 2, 3, 4, 5, 6]
    assert trained(run, range(1, 7)) == [[4 * step + i for i in range(4)] for step in range(6)]
    assert max(m.get("rollout/unfinished", 0) for m in metrics.values()) > 0
    lags = [m["training/staleness/max"] for m in metrics.values()]
    assert max(lags) == 1, lags
    assert all(m["response_length/min"] >= 1 for m in metrics.values())


def test_it_goes_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, versions and weights are those of the run that went on; a visit passes before the file is written.

    The update waits until the flow is at rest, in both runs: then no visit's weights depend on who was faster.
    """
    visit, take_step, save, visits = RolloutWorker.rollout, Run.take_step, resuming.save, [0]

    def counted(worker: RolloutWorker, *args: Any, **more: Any) -> Any:
        result = visit(worker, *args, **more)
        visits[0] += 1
        return result

    async def until(reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(180):
            while not reached():
                await asyncio.sleep(0)

    async def at_rest(run: Run, metrics: Metrics) -> Rows:
        def resting() -> bool:
            counts = run.dock.stats()  # type: ignore[attr-defined]
            moving = counts["dock/rollout/ready"] + counts["dock/rollout/leased"]
            return not moving and counts["dock/in_flight"] == min(8, 4 * (run.config.run.steps - run.step))

        await until(resting)
        return await take_step(run, metrics)

    async def beside_a_visit(run: Run, last: bool = False) -> Path | None:
        if last:
            return await save(run, last)
        await until(lambda: bool(run.fleet["rollout"].resource._unfinished))
        dock_save = run.dock.save

        async def slowly() -> Any:
            saved, before = await dock_save(), visits[0]
            await until(lambda: visits[0] > before)
            return saved

        monkeypatch.setattr(run.dock, "save", slowly)
        try:
            return await save(run, last)
        finally:
            monkeypatch.setattr(run.dock, "save", dock_save)

    monkeypatch.setattr(RolloutWorker, "rollout", counted)
    monkeypatch.setattr(Run, "take_step", at_rest)
    monkeypatch.setattr(resuming, "save", beside_a_visit)
    more = (*PARTIAL, "run.steps=5", "checkpoint.every_steps=3", "checkpoint.keep=2")
    whole = run_here("mix6_grpo_tis.yaml", tmp_path / "whole", *more)
    shutil.copytree(whole.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_000005")
    waiting = checkpoint.load(tmp_path / "run/checkpoints/step_000003", "flow")["rollout"]["episodes"]
    assert {len(e["tokens"]) - e["prompt_length"] for e in waiting} == {3}
    run = run_here("mix6_grpo_tis.yaml", tmp_path / "run", *more, resume=True)
    assert trained(run, range(1, 6)) == [[4 * step + i for i in range(4)] for step in range(5)]
    for step in range(1, 6):
        ours, theirs = ({s["row_id"]: s["tokens"] for s in one.read_samples(step)} for one in (run, whole))
        assert len(ours) == 16 and ours.keys() == theirs.keys()
        for row, tokens in ours.items():
            assert (tokens["text"], tokens["versions"]) == (theirs[row]["text"], theirs[row]["versions"]), (step, row)
    left, right = (checkpoint.load(one.checkpoints / "step_000005", "actor")["model"] for one in (run, whole))
    for name, weight in left.items():
        assert torch.allclose(weight, right[name], rtol=0, atol=5e-6), name
