"""Where imported models live, and what a model path in a config means. The only reader of the environment here."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

from docklands.errors import DataError

if TYPE_CHECKING:
    from docklands.config.schema import Config

CACHE = "cache:"
PATHS = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("critic", "path"),
    ("reference", "path"),
    ("data", "source"),
    ("eval", "source"),
)
"""Keys that may hold a path from the current directory."""


def home() -> Path:
    """The user's home, also where HOME is unset or empty."""
    return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)


def cache_dir() -> Path:
    """DOCKLANDS_CACHE, or docklands/ under the user's cache directory."""
    given = os.environ.get("DOCKLANDS_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home() / ".cache") / "docklands"


def models_dir() -> Path:
    """Where `docklands import` puts Hugging Face directories."""
    return cache_dir() / "models"


def resolve_model_path(path: str) -> Path:
    """`cache:NAME` is an imported model, `~/...` is under the home, anything else a path from the current directory.

    Raises DataError when the directory is not there.
    """
    if path.startswith(CACHE):
        found = models_dir() / path.removeprefix(CACHE)
        hint = "run `docklands import gguf`"
    else:
        found = home() / path[2:] if path.startswith("~/") else Path(path)
        hint = "model.path is a Hugging Face directory, or cache:NAME for an imported model"
        if not found.is_absolute():
            hint += f"; a relative path starts at the current directory, {Path.cwd()}"
    if not found.is_dir():
        raise DataError(f"no model directory {found}", hint)
    return found


def anchored(config: Config) -> Config:
    """`config` with absolute paths of models, data and user code, for a run directory that is used from anywhere.

    Names that are no path of something that exists (cache:NAME, task:NAME, module:attribute) stay as they are.
    """
    data = config.model_dump(mode="json")
    for section, key in PATHS:
        data[section][key] = absolute(data[section][key])
    for item in data["reward"]["functions"]:
        path, colon, attribute = item["name"].rpartition(":")
        if path.endswith(".py"):
            item["name"] = f"{absolute(path)}{colon}{attribute}"
    return type(config).model_validate_json(json.dumps(data), strict=True)


def absolute(path: str) -> str:
    """The path made absolute, if there is such a file or directory."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path
