"""docs/howto/own_task.md: its files, written to disk as they stand there, train."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from docklands.obs.rundir import RunDir
from tests.e2e.runs import ROOT, command, environment

BLOCK = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_files_of_the_howto_train(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "howto" / "own_task.md").read_text(encoding="utf-8")
    found = dict(BLOCK.findall(text))
    assert set(found) == {"rows.jsonl", "reward.py", "recipe.yaml"}
    for name, content in found.items():
        (tmp_path / name).write_text(content.replace("assets/", f"{ROOT}/assets/"), encoding="utf-8")
    for arguments in (["config", "check", "recipe.yaml"], ["train", "recipe.yaml", "run.threads=1"]):
        done = subprocess.run(
            command(*arguments), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
    steps = RunDir(tmp_path / "runs" / "mine").read_metrics()
    assert [step for step, _ in steps] == [1, 2]
    for _, metrics in steps:
        assert 0 <= metrics["critic/rewards/mean"] <= 1
        assert metrics["reward/errors"] == 0 and metrics["reward/scored"] == 8
