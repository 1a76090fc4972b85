"""What a run directory goes through besides training: refused starts, evaluation, damage, use from another place."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from docklands.cli.main import run as cli
from docklands.config.load import load_config
from docklands.errors import NonFinite
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import Sinks
from docklands.run import resume
from docklands.run.build import build
from docklands.train import checkpoint
from tests.e2e.runs import ROOT, overrides, run_here

RECIPE = str(ROOT / "configs/mix6_grpo.yaml")


def files_of(run: RunDir) -> dict[str, bytes]:
    """Everything that a run told, by name; not the logs of its processes."""
    found = [p for p in run.path.rglob("*") if p.is_file() and run.log not in p.parents and p != run.lock]
    return {str(p.relative_to(run.path)): p.read_bytes() for p in found}


def refused(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 2) -> str:
    """The command ends with `code` and one error line; what it said."""
    assert cli(words) == code
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "Traceback" not in said, said
    return said


def test_a_refused_start_leaves_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Correct the mistake and run the same command again: it starts."""
    for mistake in ("algorithm.name=grpp", "model.path=/nowhere", "reward.functions=[{name: sorted_digit}]"):
        refused(capsys, ["train", RECIPE, *overrides(tmp_path / "run", mistake)])
        assert not (tmp_path / "run").exists()
    run_here("mix6_grpo.yaml", tmp_path / "run", "run.steps=1", "checkpoint.at_end=false")


@pytest.mark.parametrize("mistake", ["rollout.samples_per_prompt=2", "run.seed=7", "data.shuffle=false"])
def test_a_refused_resume_leaves_the_run_as_it_was(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_here("mix6_grpo.yaml", tmp_path / "run", "run.steps=1")
    before = files_of(run)
    refused(capsys, ["train", RECIPE, *overrides(run.path, "run.steps=2", mistake), "--resume"])
    assert files_of(run) == before


def test_a_resume_with_damaged_checkpoints_only_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Starting at step 0 instead would remove what is left of them."""
    run = run_here("mix6_grpo.yaml", tmp_path / "run", "run.steps=1")
    again = ["train", RECIPE, *overrides(run.path, "run.steps=2"), "--resume"]
    path = run.checkpoints / "step_000001"
    whole = (path / "actor.pt").read_bytes()
    (path / "actor.pt").write_bytes(whole[:-1])
    before = files_of(run)
    assert "step_000001" in refused(capsys, again, 3)
    (path / "actor.pt").write_bytes(whole[:5000] + bytes(64) + whole[5064:])
    assert "actor.pt is damaged" in refused(capsys, again, 3)
    (path / "actor.pt").write_bytes(whole)
    assert files_of(run).keys() == before.keys() and len(run.read_metrics()) == 1
    assert cli(again) == 0


def test_evaluation_leaves_the_run_directory_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a run: it starts. After it: with other samples and temperature, it is no part of the run's story."""
    more = overrides(tmp_path / "run", "eval.prompts=4")
    assert cli(["eval", RECIPE, *more]) == 0
    assert not (tmp_path / "run").exists()
    run = run_here("mix6_grpo.yaml", tmp_path / "run", "eval.prompts=4", "eval.before=true", "run.steps=1")
    before = files_of(run)
    assert cli(["eval", str(run.path), "--n", "2"]) == 0
    assert "mean@2" in capsys.readouterr().out
    assert files_of(run) == before and len(run.read_evals()) == 1


def test_a_run_directory_is_used_from_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of the config were relative to where the run was started."""
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    shutil.copytree(ROOT / "assets/mix6-warm", "model")
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}{i}30="}) + "\n" for i in range(8)))
    Path("my.py").write_text("def own(solution_str):\n    return float(len(solution_str))\n")
    paths = ("model.path=model", "data.source=rows.jsonl", "reward.functions=[{name: 'my.py:own'}]")
    run = run_here("mix6_grpo.yaml", tmp_path / "run", *paths, "run.steps=1")
    monkeypatch.chdir("/")
    assert cli(["export", str(run.path), str(tmp_path / "out")]) == 0
    assert cli(["train", str(run.path), "run.steps=2", "--resume"]) == 0, capsys.readouterr().err
    config, _ = load_config(run.config)
    assert config.model.path == str(tmp_path / "start" / "model")
    said = refused(capsys, ["train", RECIPE, *overrides(tmp_path / "other", "model.path=model")])
    assert "a relative path starts at the current directory, /" in said


def test_pitfall_25_weights_with_a_nan_are_neither_loaded_nor_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "assets/mix6-warm", model)
    weights = load_file(model / "model.safetensors")
    name = sorted(weights)[3]
    weights[name].view(-1)[5] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    said = refused(capsys, ["train", RECIPE, *overrides(tmp_path / "run", f"model.path={model}")])
    assert f"model.safetensors: tensor {name} has 1 of" in said
    run = run_here("mix6_grpo.yaml", tmp_path / "run", "run.steps=1")
    path = checkpoint.latest(run.checkpoints)
    assert path is not None
    states = {state: checkpoint.load(path, state) for state in ("actor", "flow")}
    states["actor"]["model"]["final_norm.weight"][0] = torch.inf
    checkpoint.save(run.checkpoints, 1, states)
    again = ["train", RECIPE, *overrides(run.path, "run.steps=2"), "--resume"]
    assert "actor.pt: 1 of 128 elements of weight final_norm.weight" in refused(capsys, again, 3)


def test_pitfall_25_weights_with_a_nan_are_not_saved(tmp_path: Path) -> None:
    """The last good checkpoint stays the last one."""
    config, _ = load_config(ROOT / "configs/mix6_grpo.yaml", overrides(tmp_path / "run"))

    async def save() -> None:
        run = build(config, RunDir.create(config.run_dir), Sinks([]))
        try:
            await resume.save(run)
            run.step = 1
            run.fleet["actor"].resource.masters()["final_norm.weight"][0] = torch.nan
            with pytest.raises(NonFinite, match="actor after step 1: 1 of 128 elements of weight final_norm.weight"):
                await resume.save(run)
        finally:
            run.close()

    asyncio.run(save())
    assert [path.name for path in checkpoint.complete(tmp_path / "run" / "checkpoints")] == ["step_000000"]
