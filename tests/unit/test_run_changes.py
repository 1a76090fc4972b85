"""A resumed run's config against that of its last start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from docklands.config.load import make_config, resolved_yaml
from docklands.config.paths import anchored
from docklands.config.schema import Config
from docklands.errors import ConfigError
from docklands.obs.rundir import RunDir
from docklands.run.changes import tell_changes
from docklands.train import checkpoint


def config(model: Path, *more: str) -> Config:
    return make_config(None, [f"model.path={model}", "reward.functions=[{name: number}]", *more])[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.fixture
def run(tmp_path: Path, model: Path) -> RunDir:
    """Saved at step 3."""
    run = RunDir(tmp_path / "run")
    checkpoint.save(run.checkpoints, 3, {"flow": {"step": 3}})
    run.write_config(resolved_yaml(anchored(config(model))))
    return run


def told(config: Config, run: RunDir) -> list[str]:
    lines: list[str] = []
    tell_changes(config, run, lines.append)
    return lines


def test_one_line_a_changed_key(run: RunDir, model: Path) -> None:
    assert told(config(model), run) == []
    more = ("train.optim.lr=0.5", "rollout.stop=[x]", "reward.functions=[{name: number, weight: 2.0}]")
    assert told(config(model, *more), run) == [
        "changed since step 3: rollout.stop: [] -> [x]",
        "changed since step 3: reward.functions.0.weight: 1.0 -> 2.0",
        "changed since step 3: train.optim.lr: 1.0e-06 -> 0.5",
    ]


def test_another_model_is_refused_and_another_way_to_the_same_is_not(run: RunDir, model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert told(config(tmp_path / "link"), run) == [f"changed since step 3: model.path: {model} -> {tmp_path / 'link'}"]
    assert len(told(config(model, f"model.tokenizer={model}"), run)) == 1
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"model.path: the run was started with .*/model, .* got .*/other"):
        told(config(tmp_path / "other"), run)
    with pytest.raises(ConfigError, match="model.tokenizer: the run was started with"):
        told(config(model, f"model.tokenizer={tmp_path / 'other'}"), run)


def test_nothing_is_told_without_a_checkpoint_or_of_an_unreadable_config(
    run: RunDir, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = RunDir(tmp_path / "new")
    assert told(config(model, "run.steps=7"), new) == []
    run.config.write_text("run: {gone: 1}\n")
    with caplog.at_level(logging.WARNING, "docklands.run"):
        assert told(config(model, "run.steps=7"), run) == []
    assert "what has changed since the first start is not known: unknown key run.gone" in caplog.text
