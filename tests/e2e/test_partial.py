"""Partial rollouts in a whole run: long samples go on under newer weights, every prompt is trained once, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from docklands.obs.rundir import RunDir
from tests.e2e.runs import run_here

pytestmark = pytest.mark.slow

PARTIAL = ("dock.max_staleness=1", "rollout.partial_tokens=3", "obs.samples_per_step=64", "data.shuffle=false")


def trained(run: RunDir, steps: range) -> list[list[int]]:
    """Prompt ids of each step."""
    return [sorted({sample["prompt_id"] for sample in run.read_samples(step)}) for step in steps]


@pytest.mark.parametrize("transport", ["local", "processes"])
def test_every_prompt_is_trained_once_and_tokens_come_from_several_versions(transport: str, tmp_path: Path) -> None:
    run = run_here("mix6_grpo_tis.yaml", tmp_path / "run", *PARTIAL, "run.steps=6", f"dock.transport={transport}")
    metrics = dict(run.read_metrics())
    assert sorted(metrics) == [1, 2, 3, 4, 5, 6]
    assert trained(run, range(1, 7)) == [[4 * step + i for i in range(4)] for step in range(6)]
    assert max(m.get("rollout/unfinished", 0) for m in metrics.values()) > 0
    lags = [m["training/staleness/max"] for m in metrics.values()]
    assert max(lags) == 1, lags
    assert all(m["response_length/min"] >= 1 for m in metrics.values())


def test_it_goes_on_after_a_stop(tmp_path: Path) -> None:
    run = run_here("mix6_grpo_tis.yaml", tmp_path / "run", *PARTIAL, "run.steps=3")
    run_here("mix6_grpo_tis.yaml", tmp_path / "run", *PARTIAL, "run.steps=6", resume=True)
    assert trained(run, range(1, 7)) == [[4 * step + i for i in range(4)] for step in range(6)]
