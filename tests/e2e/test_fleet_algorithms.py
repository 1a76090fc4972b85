"""GRPO, DAPO and PPO on a model with experts over four workers: in turns, and 2 + 2 one step ahead, as in one process.

Here with processes of this machine and for two steps (GRPO in turns: test_reshard_run.py). test_fleet_ray_runs.py has
the same ranks on Ray, to the bit, and docs/concepts/fleet.md the rewards of whole runs on Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from docklands.obs.rundir import RunDir
from tests.e2e.runs import run_here
from tests.e2e.test_fleet_runs import forked

__all__ = ["forked"]
LOCAL = ("fleet.backend=local", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8", "run.steps=2")
ONE = ("layout.tp=1", "layout.dp=1", "layout.ep=1", "rollout.layout.ep=1", "sync.swap=none")
SAME = ("critic/rewards/mean", "actor/grad_norm", "actor/pg_loss", "actor/tokens", "response_length/mean")
CRITIC = ("critic/loss", "critic/grad_norm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunDir]:
    """The recipe of an algorithm in one process."""

    @cache
    def run(algorithm: str) -> RunDir:
        folder = tmp_path_factory.mktemp(algorithm)
        return run_here(f"fleet_{algorithm}_colocated.yaml", folder / "run", *LOCAL, *ONE)

    return run


@pytest.mark.parametrize(
    ("algorithm", "placement"),
    [("grpo", "apart"), ("dapo", "colocated"), ("dapo", "apart"), ("ppo", "colocated"), ("ppo", "apart")],
)
def test_four_workers_train_as_one_process(
    algorithm: str, placement: str, alone: Callable[[str], RunDir], tmp_path: Path
) -> None:
    """One step ahead, the second step's samples are of either version: its figures are no other run's."""
    run = run_here(f"fleet_{algorithm}_{placement}.yaml", tmp_path / "run", *LOCAL)
    mine, theirs = ([row for _, row in each.read_metrics()] for each in (run, alone(algorithm)))
    assert len(mine) == len(theirs) == 2
    names = (*SAME, *(CRITIC if algorithm == "ppo" else ()))
    for ours, other in list(zip(mine, theirs))[: 1 if placement == "apart" else 2]:
        for name in names:
            assert ours[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    assert all(row["actor/grad_norm"] > 0 for row in mine)
    behind = [row["training/staleness/max"] for row in mine]
    assert behind[0] == 0 and (behind[1] <= 1 if placement == "apart" else behind[1] == 0)
