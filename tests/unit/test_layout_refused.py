"""`docklands train` with a layout that does not fit exits with 2 and shows the sum, before any process starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.distributed.cases import MODELS
from tests.e2e.runs import ROOT, overrides
from tests.train_cases import SHAPE

from docklands import models
from docklands.cli.main import run
from docklands.models import ModelConfig

DENSE = {**MODELS["qwen3_five_layers"], "intermediate_size": 54, "num_hidden_layers": 4}
SHAPES = {"dense": DENSE, "six": SHAPE, "moe": MODELS["qwen3_moe"], "mla": MODELS["deepseek"]}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    for name, shape in SHAPES.items():
        config = ModelConfig.from_hf({**shape, "eos_token_id": 1, "pad_token_id": 0})
        models.export(models.build(config, seed=0), root / name)
        shutil.copyfile(ROOT / "assets/mix6-warm/char_tokenizer.json", root / name / "char_tokenizer.json")
    return root


CASES: list[tuple[str, Sequence[str], str]] = [
    ("dense", ["tp=3"], "8 heads do not divide by tp 3 (8 / 3 = 2.67)"),
    ("dense", ["tp=4"], "54 feed-forward columns do not divide by tp 4 (54 / 4 = 13.50)"),
    ("dense", ["pp=5"], "pp 5 x vpp 1 = 5 chunks for 4 layers"),
    ("dense", ["pp=2", "vpp=3"], "pp 2 x vpp 3 = 6 chunks for 4 layers"),
    ("dense", ["vpp=2"], "vpp 2 with pp 1"),
    ("dense", ["cp=3"], "8 heads (4 kv heads) of a tensor rank do not divide by cp 3"),
    ("dense", ["dp=2", "ep=2"], "ep 2, etp 1, but the model has no experts"),
    ("dense", ["pp=2", "fsdp=2", "schedule=zero_bubble"], "zero_bubble with pp 2, fsdp 2"),
    ("six", ["tp=3"], "2 kv heads and tp 3: neither divides the other"),
    ("moe", ["dp=3", "ep=3"], "8 experts do not divide by ep 3 (8 / 3 = 2.67)"),
    ("moe", ["tp=2", "ep=4"], "dp 1 x fsdp 1 x cp 1 x tp 2 = 2 ranks of a stage do not divide by ep 4 x etp 1 = 4"),
    ("moe", ["tp=4", "etp=2"], "etp 2 with tp 4"),
    ("moe", ["tp=2", "sp=false"], "tp 2 without sp for a model with experts"),
    ("moe", ["tp=2", "ep=2", "sp=false"], "tp 2, ep 2 without sp"),
    ("mla", ["tp=8"], "4 heads do not divide by tp 8 (4 / 8 = 0.50)"),
    ("mla", ["dp=5", "ep=5"], "8 experts do not divide by ep 5 (8 / 5 = 1.60)"),
]


def said(model: Path, run_dir: Path, more: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the command wrote to stderr; it exits with 2 and leaves nothing."""
    words = ["train", str(ROOT / "configs/mix6_grpo.yaml"), *overrides(run_dir), f"model.path={model}", *more]
    assert run(words) == 2
    assert not run_dir.exists()
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("model", "layout", "sum_"), CASES, ids=[f"{m}-{'-'.join(x)}" for m, x, _ in CASES])
def test_pitfall_32_a_wrong_layout_exits_with_the_arithmetic(
    model: str, layout: Sequence[str], sum_: str, directories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(directories / model, tmp_path / "run", [f"layout.{item}" for item in layout], capsys)
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("hint: "), lines
    assert sum_ in lines[0]


def test_pitfall_32_worlds_of_other_sizes(
    directories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Colocated generators are the trainers' processes: both products are shown."""
    more = ["layout.tp=2", "layout.pp=2", "rollout.layout.tp=2", "rollout.layout.dp=3"]
    lines = said(directories / "dense", tmp_path / "run", more, capsys)
    assert "rollout.layout: tp 2 x dp 3 = 6 ranks, layout: 4; colocated generators" in lines[0]
