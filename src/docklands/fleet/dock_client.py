"""A dock client for a worker: blocking calls; an event loop on a thread of its own looks after the line."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.graph import Graph
from docklands.core.protocols import Rows
from docklands.dock.distributed import DistributedDock
from docklands.dock.look import DockAddress
from docklands.dock.rules.options import DockOptions
from docklands.errors import TakeTimeout

MORE_S = 60.0
"""Every call has deadlines of its own; this is how long after them a thread still waits for its event loop."""


class WorkerDock:
    """Bytes of rows in and out, from one thread at a time. Raises what DistributedDock raises."""

    def __init__(self, graph: Graph, options: DockOptions, address: DockAddress, name: str) -> None:
        self._dock = DistributedDock(graph, options, address, name)
        self._loop = asyncio.new_event_loop()
        self._deadline_s = options.wait_s + MORE_S
        self._thread = threading.Thread(target=self._loop.run_forever, name="dock", daemon=True)
        self._thread.start()
        self._run(self._dock.open())

    def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """Columns of rows, in their order; of no rows, too."""
        return self._run(self._dock.fetch(rows, fields)) if len(rows) else empty(fields)

    def put(self, batch: Batch) -> None:
        """Columns of rows that are in the dock."""
        self._run(self._dock.put(batch))

    def close(self) -> None:
        """Disconnect."""
        self._run(self._dock.leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(MORE_S)
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(self._deadline_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TakeTimeout(
                f"no answer from the dock within {self._deadline_s:g} s", "its processes or this one hang"
            ) from None


def empty(fields: Sequence[Field[Any]]) -> Batch:
    """A batch of no rows with these columns."""
    return Batch([], dict.fromkeys(fields, ()))
