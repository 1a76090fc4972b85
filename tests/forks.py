"""The server that forks processes for the tests of one pytest process: one, with all loaded that any of them needs.

Python has one such server a process, and who starts it first says what it loads. A rank, a warehouse or a case that had
to import the rest after its fork would pay seconds for it, each of them anew.
"""

from __future__ import annotations

import multiprocessing

from docklands.fleet import local_carrier

PRELOAD = [
    *local_carrier.PRELOAD,
    "torch.distributed.checkpoint",
    "docklands.dock.control.server",
    "docklands.dock.warehouse.server",
    "docklands.kernels.compiled_rows",
    "docklands.run.main",
    "docklands.rollout.mesh",
    "pytest",
    "tests.dock_processes",
    "tests.distributed.cases",
    "tests.frozen",
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOAD)
local_carrier.PRELOAD[:] = PRELOAD
