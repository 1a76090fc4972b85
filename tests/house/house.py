"""Finds the files that the house tests look at."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "docklands"


@cache
def files(*suffixes: str) -> tuple[Path, ...]:
    """Every file that git knows or would add, with one of the suffixes (all without)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=120,
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return tuple(sorted(p for p in paths if p.is_file() and (not suffixes or p.suffix in suffixes)))


def under(folder: Path, *suffixes: str) -> list[Path]:
    """Those of `files` that lie in a folder."""
    return [path for path in files(*suffixes) if path.is_relative_to(folder)]


def short(path: Path) -> str:
    """Relative to the root."""
    return str(path.relative_to(ROOT))
