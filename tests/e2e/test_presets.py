"""Every algorithm preset runs three steps through the whole loop on the tiny model, and its weights move."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from docklands import models
from docklands.train import checkpoint
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
    if not recipe.startswith("warm"):
        start = models.load(ROOT / "assets/mix6-warm").state_dict()
    moved = [name for name in start if not torch.equal(start[name], trained[name])]
    assert len(moved) == len(start), sorted(set(start) - set(moved))
