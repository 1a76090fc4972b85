"""Helpers of the end-to-end tests: tiny runs, in this process or in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from docklands.config.load import load_config
from docklands.obs.rundir import RunDir
from docklands.run.main import train_run

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("obs.console=off", "obs.report=false", "eval.prompts=0", "eval.before=false", "eval.after=false")
SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "run.threads=1")


def overrides(directory: Path, *more: str) -> list[str]:
    """A small, quiet run in `directory`."""
    return [f"run.dir={directory.parent}", f"run.name={directory.name}", *QUIET, *SMALL, *more]


def run_here(recipe: str, directory: Path, *more: str, resume: bool = False) -> RunDir:
    """Train in this process; asserts that it ended well."""
    config, sources = load_config(ROOT / "configs" / recipe, overrides(directory, *more))
    assert train_run(config, sources, resume) == 0
    return RunDir(directory)


def command(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> list[str]:
    return [sys.executable, "-m", "docklands.cli.main", *arguments]


def docklands(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command line, running."""
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def train_arguments(recipe: str, directory: Path, more: Sequence[str] = ()) -> list[str]:
    return ["train", f"configs/{recipe}", *overrides(directory, *more)]
