"""A real file system that fills up while a run saves: one clear line, the last checkpoint whole, resumable later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docklands.obs.rundir import RunDir
from docklands.train import checkpoint
from tests.e2e.runs import ROOT, environment, train_arguments

pytestmark = pytest.mark.slow

SCRIPT = """
set -u
mount -t tmpfs -o size=$1 none "$2" || exit 77
shift; where=$1; shift
"$@"
echo "first: $?"
ls "$where/run/checkpoints"
mount -o remount,size=400m "$where"
"$@" --resume
echo "second: $?"
cp -r "$where/run" "$where.copy"
"""
"""The mount lives and dies with the shell's own namespace."""


def mounting(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A shell script that mounts, in a namespace of its own; it echoes "first:" once it has."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    done = subprocess.run(
        [*namespace, "bash", "-c", script, "-", *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    if done.returncode in (1, 77) and "first:" not in done.stdout:
        pytest.skip(f"this kernel lets no one mount a file system here: {done.stderr.strip()[-200:]}")
    return done


def test_a_full_disk_ends_the_run_with_one_line_and_costs_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    more = ["run.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=10"]
    train = [sys.executable, "-m", "docklands.cli.main", *train_arguments("mix6_grpo.yaml", disk / "run", more)]
    size = f"{int(2.5 * bytes_of_a_checkpoint(tmp_path))}"
    done = mounting(SCRIPT, size, str(disk), *train)
    first, _, second = done.stdout.partition("first: ")
    assert second.startswith(("2\n", "3\n")), done.stdout + done.stderr
    said = done.stderr.split("hint:")[0].strip().splitlines()
    assert "Traceback" not in done.stderr
    assert any("No space left on device" in line and line.startswith("error: ") for line in said), done.stderr
    assert second.split()[1:3] == ["step_000001", "step_000002"], second
    assert second.count("step_") == 2, second  # of the third, nothing is left
    assert "second: 0" in second, done.stderr
    run = RunDir(Path(f"{disk}.copy"))
    assert [step for step, _ in run.read_metrics()] == [1, 2, 3, 4]
    newest = checkpoint.latest(run.checkpoints)
    assert newest is not None and checkpoint.step_of(newest) == 4


def bytes_of_a_checkpoint(tmp_path: Path) -> int:
    """Of a run of one step, everything else in its directory included."""
    from tests.e2e.runs import run_here

    run = run_here("mix6_grpo.yaml", tmp_path / "sized", "run.steps=1", "checkpoint.every_steps=1")
    return sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
