"""The command line of the dock's processes: one argument, options as JSON, a file of them, or `-`.

A secret key does not belong on a command line: options without one take it from the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from docklands.errors import ConfigError, DocklandsError

Options = TypeVar("Options")

SECRET = "DOCKLANDS_DOCK_SECRET"
"""Environment variable: the secret key of a process whose options have none."""


def run(name: str, kind: type[Options], serve: Callable[[Options], None], arguments: Sequence[str] | None) -> int:
    """Read the options of docklands.dock.`name` and serve; the exit code. An error is one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if len(given) != 1:
            raise ConfigError(
                f"usage: python -m docklands.dock.{name} OPTIONS.json", "- for standard input, or the JSON itself"
            )
        try:
            options: Any = msgspec.json.decode(text_of(given[0]), type=kind)
            if (secret := os.environ.pop(SECRET, "")) and not options.secret_key:
                options = msgspec.structs.replace(options, secret_key=secret)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{name.removesuffix('.server')} options {given[0][:60]}: {error}") from None
        serve(options)
    except DocklandsError as error:
        print(f"docklands: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def text_of(argument: str) -> bytes:
    """The options that the argument is, or names. Raises OSError."""
    if argument.lstrip().startswith("{"):
        return argument.encode()
    return sys.stdin.buffer.read() if argument == "-" else Path(argument).read_bytes()
