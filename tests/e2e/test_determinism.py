"""One seed, one result: between two runs, and between one rollout worker and four."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docklands.obs.rundir import RunDir
from docklands.obs.sinks import strip_times
from tests.e2e.runs import run_here

pytestmark = pytest.mark.slow


def lines(run: RunDir) -> list[str]:
    return [strip_times(line) for line in run.metrics.read_text().splitlines()]


def learning(run: RunDir) -> list[dict[str, float]]:
    """Metrics without the engine's own counts (batch sizes, cache pages), which do depend on how work is split."""
    rows = [json.loads(line)["metrics"] for line in lines(run)]
    return [{name: value for name, value in row.items() if not name.startswith("rollout/")} for row in rows]


def samples(run: RunDir) -> list[str]:
    return [path.read_text() for _, path in run.sample_files()]


def test_pitfall_37_two_runs_are_byte_equal_and_workers_do_not_matter(tmp_path: Path) -> None:
    more = ("run.steps=3", "obs.samples_per_step=64")
    first = run_here("mix6_grpo.yaml", tmp_path / "a", *more)
    second = run_here("mix6_grpo.yaml", tmp_path / "b", *more)
    four = run_here("mix6_grpo.yaml", tmp_path / "c", *more, "fleet.rollout_workers=4")
    other = run_here("mix6_grpo.yaml", tmp_path / "d", *more, "run.seed=43")
    assert len(lines(first)) == 3
    assert lines(first) == lines(second)
    assert samples(first) == samples(second) == samples(four)
    assert learning(first) == learning(four)
    assert samples(first) != samples(other)


def test_pitfall_22_streaming_in_small_takes_equals_whole_steps(tmp_path: Path) -> None:
    """Staleness 0: how the flow is cut into takes changes no sample and no reward."""
    whole = run_here("mix6_grpo.yaml", tmp_path / "a", "run.steps=3", "obs.samples_per_step=64")
    cut = run_here("mix6_grpo.yaml", tmp_path / "b", "run.steps=3", "obs.samples_per_step=64", "dock.groups_per_take=1")
    assert samples(whole) == samples(cut)
    assert learning(whole) == learning(cut)
