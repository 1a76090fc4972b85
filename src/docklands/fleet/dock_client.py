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
from docklands.dock.warehouse.calls import Borrowed
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

    def lent(self, rows: Rows) -> None:
        """The driver's lease that is worked on from now on, all of its rows."""
        self._dock.lent(rows)

    def read_here(self, rows: Rows) -> tuple[int, int]:
        """What was read without a word to a warehouse, since the rows were `lent`: fetches, bytes."""
        return self._dock.read_here(rows)

    def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """Columns of rows, in their order; of no rows, too."""
        if not len(rows):
            return empty(fields)
        found = self._dock.read_nearby(rows, fields)
        return self._run(self._dock.fetch(rows, fields)) if found is None else found

    def borrow(self, rows: Rows, fields: Sequence[Field[Any]]) -> Borrowed:
        """As `fetch`, but what lies in shared memory on this node is not copied: use it, then `check`."""
        if not len(rows):
            return Borrowed(empty(fields), ())
        found = self._dock.borrow_nearby(rows, fields)
        return self._run(self._dock.borrow(rows, fields)) if found is None else found

    def put(self, batch: Batch, rows: Rows | None = None) -> None:
        """Columns of rows that are in the dock. rows: the leased ones that the batch was made of."""
        self._run(self._dock.put(batch, rows))

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
