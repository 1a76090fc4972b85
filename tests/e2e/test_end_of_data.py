"""The end of the data is the end of the run, not a fault: what was trained is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docklands.cli.main import run as cli
from docklands.errors import WorkerLost
from docklands.obs.rundir import RunDir
from docklands.run import session
from docklands.train import checkpoint
from tests.e2e.runs import overrides, run_here

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


def test_the_remedy_that_the_warning_names_works(tmp_path: Path) -> None:
    """The dock's snapshot does not remember an end that the data no longer has."""
    source = rows(tmp_path / "rows.jsonl", 8)
    more = overrides(tmp_path / "run", f"data.source={source}", "run.steps=4")
    assert cli(["train", RECIPE, *more, "data.epochs=1"]) == 0
    run = RunDir(tmp_path / "run")
    assert [step for step, _ in run.read_metrics()] == [1, 2]
    assert cli(["train", RECIPE, *more, "data.epochs=0", "--resume"]) == 0
    assert [step for step, _ in run.read_metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("ended_by", ["steps", "prompts"])
def test_a_finished_run_without_a_checkpoint_is_neither_resumed_nor_evaluated(
    ended_by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its records stay, and nobody takes the starting weights for what it trained."""
    source = rows(tmp_path / "rows.jsonl", 8)
    end = {"steps": ["run.steps=2"], "prompts": ["run.steps=3", "data.epochs=1", f"data.source={source}"]}[ended_by]
    more = overrides(tmp_path / "run", *end, "checkpoint.at_end=false")
    assert cli(["train", RECIPE, *more]) == 0
    run = RunDir(tmp_path / "run")
    before = run.metrics.read_bytes()
    capsys.readouterr()
    assert cli(["train", RECIPE, *more, "run.steps=4", "--resume"]) == 3
    assert "ended at step 2 without a checkpoint" in capsys.readouterr().err
    assert run.metrics.read_bytes() == before
    assert cli(["eval", str(run.path), "eval.prompts=4"]) == 3
    assert "has no complete checkpoint: the weights that it trained are not there" in capsys.readouterr().err


@pytest.mark.parametrize("saved", ["true", "false"])
def test_a_process_lost_in_the_last_evaluation_costs_no_evaluation(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back to its last checkpoint by itself, and be it the start."""
    roll_out, lost = session.roll_out, [WorkerLost("worker 1 died")]

    def once(*args: Any) -> Any:
        if lost:
            raise lost.pop()
        return roll_out(*args)

    monkeypatch.setattr(session, "roll_out", once)
    end = ("run.steps=1", f"checkpoint.at_end={saved}", "eval.prompts=4", "eval.after=true")
    run = run_here("mix6_grpo.yaml", tmp_path / "run", *end)
    assert [step for step, _ in run.read_metrics()] == [row["step"] for row in run.read_evals()] == [1] and not lost
