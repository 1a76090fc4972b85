"""Loaded by the server that forks workers (local_carrier.PRELOAD), and nowhere else: its socket is not left behind.

Python removes that file when the driver ends, which `kill -9` of the driver skips. The server ends in any case, once
the last process that could ask it for another has gone. What it forks does not run its exit functions.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from multiprocessing import forkserver


def tidy() -> None:
    """Remove the socket that this server listens at, and its folder unless there is more in it."""
    address = getattr(forkserver._forkserver, "_forkserver_address", None)  # type: ignore[attr-defined]
    if isinstance(address, str) and os.path.isabs(address):
        with contextlib.suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))


atexit.register(tidy)
