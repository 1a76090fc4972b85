"""What a resumed run is to do otherwise than before: told key by key, and refused where it would be another run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docklands.config import yaml_io
from docklands.config.load import diff_configs, load_config
from docklands.config.paths import anchored, resolve_model_path
from docklands.config.schema import Config
from docklands.errors import ConfigError
from docklands.obs.rundir import RunDir
from docklands.train import checkpoint

log = logging.getLogger("docklands.run")


def tell_changes(config: Config, run_dir: RunDir, say: Callable[[str], None]) -> None:
    """Hold `config` against the config.yaml of the run's last start: one line a changed key, also in the log.

    Nothing to tell before the first checkpoint. ConfigError when the model or its tokenizer is another one: optimizer
    state and prompt tokens would belong to neither. That the data are the same, the prompts' own state knows.
    """
    found = checkpoint.latest(run_dir.checkpoints)
    if found is None:
        return
    try:
        before, _ = load_config(run_dir.config)
    except ConfigError as error:  # of another version
        log.warning("what has changed since the first start is not known: %s", " ".join(error.message.split()))
        return
    for key, old, new in diff_configs(before, anchored(config)):
        line = f"changed since step {checkpoint.step_of(found)}: {key}: {shown(old)} -> {shown(new)}"
        say(line)
        log.info("%s", line)
    for key, old, new in zip(("model.path", "model.tokenizer"), places(before), places(config), strict=True):
        if old != new:
            raise ConfigError(
                f"{key}: the run was started with {old}, and a checkpoint fits no other: got {new}",
                f"start a new run from it; if the directory only moved, write its new place into {run_dir.config}",
            )


def shown(value: Any) -> str:
    """A value on one line: text as it is, other values as YAML."""
    return value if isinstance(value, str) and value and value.isprintable() else yaml_io.flow(value)


def places(config: Config) -> tuple[Path | str, Path | str]:
    """Where the model and its tokenizer are, links followed; as written when there is nothing."""
    found: list[Path | str] = []
    for path in (config.model.path, config.model.tokenizer or config.model.path):
        try:
            found.append(resolve_model_path(path).resolve())
        except ConfigError:
            found.append(path)
    return found[0], found[1]
