"""Runs that train adapters: they learn, repeat, resume, publish either way, and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from docklands.cli.main import run as cli
from docklands.models import load
from docklands.obs.rundir import RunDir
from docklands.train import sharded_checkpoint
from tests.e2e.runs import ROOT, overrides, run_here
from tests.e2e.test_determinism import lines, samples
from tests.e2e.test_resume import equal

pytestmark = pytest.mark.slow
RECIPE = "mix6_lora.yaml"


def metrics(run: RunDir, name: str) -> list[float]:
    return [json.loads(line)["metrics"][name] for line in run.metrics.read_text().splitlines()]


def learning(run: RunDir) -> list[dict[str, float]]:
    """All but the bytes: a resumed run publishes once more, before its first step."""
    rows = [json.loads(line)["metrics"] for line in lines(run)]
    return [{name: value for name, value in row.items() if not name.startswith("reshard/")} for row in rows]


def weights(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return dict(sharded_checkpoint.weights(run.checkpoints / f"step_{step:06d}"))


def test_learns(tmp_path: Path) -> None:
    run = run_here(
        RECIPE, tmp_path / "run", "run.steps=16", "rollout.prompts_per_step=16", "rollout.samples_per_prompt=8"
    )
    rewards = metrics(run, "critic/rewards/mean")
    assert sum(rewards[-4:]) / 4 > 2 * sum(rewards[:4]) / 4, rewards


def test_repeats_resumes_and_publishes_either_way(tmp_path: Path) -> None:
    """A reference too: the base with the adapters off. Bitwise, but for the engine that applies adapters itself."""
    more = ("algorithm.kl.coef=0.05", "obs.samples_per_step=64", "checkpoint.every_steps=2")
    whole = run_here(RECIPE, tmp_path / "whole", "run.steps=4", *more)
    again = run_here(RECIPE, tmp_path / "again", "run.steps=4", *more)
    assert lines(whole) == lines(again) and samples(whole) == samples(again)
    kl = metrics(whole, "actor/kl_loss")
    assert kl[0] == 0.0 < kl[-1], "step 0 is the reference"
    run_here(RECIPE, tmp_path / "broken", "run.steps=2", *more)
    broken = run_here(RECIPE, tmp_path / "broken", "run.steps=4", *more, resume=True)
    assert learning(broken) == learning(whole) and equal(weights(broken, 4), weights(whole, 4))
    adapter = run_here(RECIPE, tmp_path / "adapter", "run.steps=4", *more, "lora.publish=adapter")
    found = metrics(adapter, "critic/rewards/mean")
    assert found == pytest.approx(metrics(whole, "critic/rewards/mean"))
    assert metrics(adapter, "reshard/bytes_received")[1] < metrics(whole, "reshard/bytes_received")[1] / 5


def test_workers_say_what_one_process_says(tmp_path: Path) -> None:
    """Tensor ranks; the reference is the base of the workers' own actor; adapters alone from the second publish on."""
    more = ("run.steps=3", "algorithm.kl.coef=0.05", "lora.publish=adapter")
    one = run_here(RECIPE, tmp_path / "one", *more)
    two = run_here(RECIPE, tmp_path / "two", *more, "layout.tp=2", "sync.probe_every=1")
    for name in ("critic/rewards/mean", "actor/kl_loss", "actor/grad_norm"):
        assert metrics(two, name) == pytest.approx(metrics(one, name), rel=1e-3, abs=1e-7), name
    assert max(metrics(two, "reshard/probe_diff")) < 1e-4
    received = metrics(two, "reshard/bytes_received")
    assert received[1] == received[2] < received[0] / 10


def test_exports_merged_and_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_here(RECIPE, tmp_path / "run", "run.steps=3")
    assert cli(["export", str(run.path), str(tmp_path / "merged")]) == 0
    assert cli(["export", str(run.path), str(tmp_path / "adapter"), "--adapter"]) == 0
    merged, base = load(tmp_path / "merged"), load(ROOT / "assets" / "mix6-warm")
    trained, targets = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), 0
    theirs = dict(merged.named_parameters())
    for name, weight in base.named_parameters():
        targets += not torch.equal(weight, theirs[name])
    assert targets == 4 * base.config.num_layers, "qkv, o, gate_up, down of each layer and nothing else"
    assert len(trained) == 2 * 7 * base.config.num_layers
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 8 and settings["peft_type"] == "LORA" and "q_proj" in settings["target_modules"]
    plain = run_here("mix6_grpo.yaml", tmp_path / "plain", "run.steps=1")
    capsys.readouterr()
    assert cli(["export", str(plain.path), str(tmp_path / "none"), "--adapter"]) == 2
    assert "trained all weights: there is no adapter" in capsys.readouterr().err


def test_a_wrong_target_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = overrides(tmp_path / "run", 'lora.targets=["q_porj"]')
    assert cli(["train", str(ROOT / "configs" / RECIPE), *asked]) == 2
    said = capsys.readouterr().err
    assert "no projection 'q_porj'" in said and "did you mean 'q_proj'?" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()
