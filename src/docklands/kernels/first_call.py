"""The first call of a compiled function, one process at a time: who comes second finds the result in numba's cache.

Compiling takes seconds of a core. A run of many workers, all new on a machine, would do it once in each of them.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 300.0
"""Longest wait for another process that compiles; then this one does it, too."""
POLL_S = 0.05
_known: set[object] = set()


@contextmanager
def alone_at_first(what: object) -> Iterator[None]:
    """Hold the machine's lock for compiling, if this process has not been here with `what` before."""
    if what in _known:
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"docklands-compile-{os.getuid()}.lock", "a") as lock:
        _acquire(lock.fileno())
        yield
    _known.add(what)


def _acquire(fd: int) -> None:
    """Lock a file, which ends when it is closed or its process is no more. After WAIT_S go on without."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
