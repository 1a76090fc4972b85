"""Logging: everything of a process into log/<role>.<rank>.log, warnings (or more) to the console."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = "docklands"
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class ConsoleHandler(logging.Handler):
    """Prints records through `show`, so that a live display is not torn; by default to stderr."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {self.format(record)}"
        if self._show is not None:
            self._show(text)
        else:
            print(text, file=sys.stderr, flush=True)


def log_path(run_dir: Path, role: str, rank: int) -> Path:
    """Where a worker's log lies."""
    return Path(run_dir) / "log" / f"{role}.{rank}.log"


def setup_logging(
    run_dir: Path | None,
    role: str = "driver",
    rank: int = 0,
    console_level: int = logging.WARNING,
    show: Callable[[str], None] | None = None,
) -> logging.Logger:
    """Set the `docklands` logger up for this process; calling it again replaces what it set up before.

    run_dir  None: console only
    show     prints a line on the console (a live display's own print); None: stderr
    """
    logger = logging.getLogger(ROOT)
    teardown_logging()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    console = ConsoleHandler(show)
    console.setLevel(console_level)
    console.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(console)
    if run_dir is not None:
        path = log_path(run_dir, role, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(file)
    return logger


def teardown_logging() -> None:
    """Close and remove the handlers that `setup_logging` added."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, for an error message; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 200 * lines))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
