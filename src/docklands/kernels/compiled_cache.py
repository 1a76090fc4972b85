"""`njit` for the compiled_*.py files: what it compiles is kept on disk for this very code.

numba compares a function's own file with the one that was compiled, and not the files of what it calls. So after a
change in one of these files, by an edit or a new version, old code of another one could run on. The folder is named
after the contents of all of them, and after what they ask of the processor that numba does not compare.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import config

from docklands.config.paths import cache_dir
from docklands.kernels.compiled_processor import matrix_registers


@cache
def folder() -> str:
    """Where compiled code is kept: below NUMBA_CACHE_DIR, or the user's cache; "": nowhere."""
    digest = hashlib.sha256(b"matrix registers" if matrix_registers() else b"")
    for path in sorted(Path(__file__).parent.glob("compiled_*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    base = os.environ.get("NUMBA_CACHE_DIR")
    found = (Path(base) if base else cache_dir() / "numba") / digest.hexdigest()[:20]
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError:
        return ""
    return str(found) if os.access(found, os.W_OK) else ""


def njit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """As numba.njit."""
    if function is None:
        return lambda made: njit(made, **options)
    settings: Any = config
    before, settings.CACHE_DIR = settings.CACHE_DIR, folder()
    try:
        options["cache"] = bool(folder()) and options.get("cache", False)
        return numba.njit(**options)(function)
    finally:
        settings.CACHE_DIR = before
