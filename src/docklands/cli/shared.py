"""What several commands share: arguments, and reading a config from a file or a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from docklands.errors import ConfigError

if TYPE_CHECKING:
    from docklands.config.schema import Config

ConfigFile = Annotated[Path, typer.Argument(help="YAML file, or a run directory (its config.yaml).", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example algorithm.clip_high=0.28")]
RunDir = Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN_DIR")]


def read_config(path: Path, overrides: list[str] | None) -> tuple[Config, dict[str, str]]:
    """Config and sources. For a run directory: its config.yaml, with run.dir and run.name set to where it lies now."""
    from docklands.config.load import load_config

    if path.is_dir():
        inner = check_run_dir(path) / "config.yaml"
        return load_config(inner, [*place(path), *(overrides or [])])
    return load_config(path, overrides or [])


def place(run_dir: Path) -> list[str]:
    """Overrides that make `run_dir` the run directory."""
    from docklands.config.yaml_io import flow

    full = run_dir.resolve()
    if not full.name:
        raise ConfigError(f"{run_dir} cannot be a run directory")
    parent = run_dir.parent if run_dir.name not in ("", ".", "..") else full.parent
    return [f"run.dir={flow(str(parent))}", f"run.name={flow(full.name)}"]


def check_run_dir(path: Path) -> Path:
    """`path` if a run was started there; ConfigError otherwise."""
    if not path.is_dir():
        raise ConfigError(f"no run directory {path}", "`docklands train CONFIG` prints where it writes")
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is not a run directory: it has no config.yaml")
    return path
