"""docklands train"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from docklands.cli.shared import ConfigFile, Overrides, place, read_config


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Write the run here instead of <run.dir>/<run.name>.")] = None,
) -> int:
    """Train: prompts -> rollout -> reward -> log-probs -> advantage -> update -> publish.

    Ctrl-C finishes the step, saves a checkpoint and exits with 130.
    """
    chosen = [*(place(run_dir) if run_dir else []), *(overrides or [])]
    loaded, sources = read_config(config, chosen)
    from docklands.run.main import train_run

    return train_run(loaded, sources, resume)
