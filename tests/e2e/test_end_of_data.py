"""The end of the data is the end of the run, not a fault: what was trained is saved."""

from __future__ import annotations

import json
from pathlib import Path

from docklands.cli.main import run as cli
from docklands.obs.rundir import RunDir
from docklands.train import checkpoint
from tests.e2e.runs import overrides

RECIPE = "configs/mix6_grpo.yaml"


def rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{i}{i}30=", "answer": f"03{i}{i}"}) + "\n" for i in range(count)))
    return path


def test_a_run_ends_with_its_prompts(tmp_path: Path) -> None:
    source = rows(tmp_path / "rows.jsonl", 8)
    more = overrides(tmp_path / "run", f"data.source={source}", "data.epochs=1", "run.steps=3")
    assert cli(["train", RECIPE, *more]) == 0
    run = RunDir(tmp_path / "run")
    assert [step for step, _ in run.read_metrics()] == [1, 2]
    found = checkpoint.latest(run.checkpoints)
    assert found is not None and checkpoint.step_of(found) == 2
    said = "".join(path.read_text(encoding="utf-8") for path in run.log.iterdir())
    assert "the prompts ended after 2 of 3 steps" in said


def test_a_last_step_with_fewer_prompts_is_trained(tmp_path: Path) -> None:
    source = rows(tmp_path / "rows.jsonl", 6)
    more = overrides(tmp_path / "run", f"data.source={source}", "data.epochs=1", "run.steps=5")
    assert cli(["train", RECIPE, *more]) == 0
    samples = [metrics["reward/scored"] for _, metrics in RunDir(tmp_path / "run").read_metrics()]
    assert samples == [16.0, 8.0]
