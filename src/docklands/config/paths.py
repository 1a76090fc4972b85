"""Where imported models live, and what a model path in a config means. The only reader of the environment here."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from docklands.errors import DataError

CACHE = "cache:"


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
    """`cache:NAME` is an imported model, `~/...` is under the home, anything else is a path as it stands.

    Raises DataError when the directory is not there.
    """
    if path.startswith(CACHE):
        found = models_dir() / path.removeprefix(CACHE)
        hint = "run `docklands import gguf`"
    else:
        found = home() / path[2:] if path.startswith("~/") else Path(path)
        hint = "model.path is a Hugging Face directory, or cache:NAME for an imported model"
    if not found.is_dir():
        raise DataError(f"no model directory {found}", hint)
    return found
