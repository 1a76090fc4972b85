"""Every algorithm preset runs three steps through the whole loop on the tiny model, and its weights move."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from docklands import models
from docklands.train import checkpoint
from docklands.train.engine import TrainEngine
from tests.e2e.runs import ROOT, run_here

PRESETS = [
    ("mix6_grpo.yaml", ()),
    ("mix6_grpo_kl.yaml", ("algorithm.samples_per_update=8",)),
    ("mix6_grpo_tis.yaml", ()),
    ("mix6_dapo.yaml", ()),
    ("mix6_ppo.yaml", ("algorithm.samples_per_update=8",)),
    ("mix6_dr_grpo.yaml", ()),
    ("mix6_rloo.yaml", ()),
    ("mix6_reinforce_pp.yaml", ()),
    ("mix6_reinforce_pp_kl.yaml", ()),
    ("mix6_gspo.yaml", ()),
    ("mix6_cispo.yaml", ()),
    ("mix6_dpo.yaml", ("rollout.samples_per_prompt=2",)),
    ("mix6_distill.yaml", ()),
    ("warm_mix6.yaml", ("rollout.samples_per_prompt=1",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "more"), PRESETS, ids=[recipe.removesuffix(".yaml") for recipe, _ in PRESETS])
def test_preset_runs_three_steps(recipe: str, more: tuple[str, ...], tmp_path: Path) -> None:
    run = run_here(recipe, tmp_path / "run", "run.steps=3", "rollout.prompts_per_step=8", *more)
    rows = run.read_metrics()
    assert [step for step, _ in rows] == [1, 2, 3]
    for _, metrics in rows:
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["dock/in_flight"] == 8
    assert max(metrics["actor/grad_norm"] for _, metrics in rows) > 0
    path = checkpoint.latest(run.checkpoints)
    assert path is not None
    trained = checkpoint.load(path, "actor")["model"]
    start = models.build(models.read_config(ROOT / "assets/tiny-char"), seed=42).state_dict()
    if not recipe.startswith(("warm", "mix6_distill")):
        start = models.load(ROOT / "assets/mix6-warm").state_dict()
    moved = [name for name in start if not torch.equal(start[name], trained[name])]
    assert len(moved) == len(start), sorted(set(start) - set(moved))


@pytest.mark.slow
def test_pitfall_03_the_schedule_ends_with_the_actors_last_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the critic warms up, the actor makes no update: its horizon is shorter by those steps, the critic's not.

    Two updates a step: a horizon counted in steps would end in the middle.
    """
    update, used = TrainEngine.update, {"actor/lr": [], "critic/lr": []}

    def seen(engine: TrainEngine, *args: Any) -> Any:
        metrics = update(engine, *args)
        for name, rates in used.items():
            rates += [metrics[name][0]] if name in metrics else []
        return metrics

    monkeypatch.setattr(TrainEngine, "update", seen)
    more = (
        "run.steps=4",
        "algorithm.critic_warmup_steps=2",
        "algorithm.samples_per_update=8",
        "checkpoint.at_end=false",
    )
    optim = (
        "train.optim={lr: 1.0e-4, schedule: linear, warmup_updates: 0}",
        "critic.optim={lr: 1.0e-4, schedule: linear, warmup_updates: 0}",
    )
    rows = run_here("mix6_ppo.yaml", tmp_path / "run", *more, *optim).read_metrics()
    assert used["actor/lr"] == pytest.approx([1e-4 * left / 4 for left in (4, 3, 2, 1)])
    assert used["critic/lr"] == pytest.approx([1e-4 * left / 8 for left in (8, 7, 6, 5, 4, 3, 2, 1)])
    assert [metrics.get("actor/lr") for _, metrics in rows] == [None, None, *used["actor/lr"][1::2]]
    assert [metrics["critic/lr"] for _, metrics in rows] == used["critic/lr"][1::2]
