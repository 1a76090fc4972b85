"""The command line of the dock's processes: one argument, a file of options as JSON or `-`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from docklands.errors import ConfigError, DocklandsError

Options = TypeVar("Options")


def run(name: str, kind: type[Options], serve: Callable[[Options], None], arguments: Sequence[str] | None) -> int:
    """Read the options of docklands.dock.`name` and serve; the exit code. An error is one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if len(given) != 1:
            raise ConfigError(f"usage: python -m docklands.dock.{name} OPTIONS.json", "- for standard input")
        try:
            text = sys.stdin.buffer.read() if given[0] == "-" else Path(given[0]).read_bytes()
            options = msgspec.json.decode(text, type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{name.removesuffix('_server')} options {given[0]}: {error}") from None
        serve(options)
    except DocklandsError as error:
        print(f"docklands: {error}", file=sys.stderr)
        return error.exit_code
    return 0
