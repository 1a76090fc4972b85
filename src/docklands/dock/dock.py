"""The transfer dock as the loop sees it: admit, take, fetch, put, finish, retire, each wait with a deadline.

The rules are in control.py and exchange.py; this file adds time. A call looks under the lock, and if it cannot be
answered yet it sleeps on a future that the next relevant change resolves: nothing polls, an idle dock uses no CPU.

Threads: the methods that wait belong to one event loop. Everything else (`stats`, `describe`, `state_dict`, and the
changes themselves) is guarded by a lock, so a watchdog or a checkpoint thread may look in at any time; a thread that
wants to fetch or put uses `ThreadClient`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.graph import Graph
from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Stage
from docklands.dock import snapshot
from docklands.dock.exchange import Exchange
from docklands.dock.rules import explain
from docklands.dock.rules.control import ROOM, SLOT
from docklands.dock.rules.options import DockOptions
from docklands.dock.waits import Waiter, Waits, running_loop
from docklands.errors import DockClosed, DockError, TakeTimeout


class InProcess:
    """What little a dock without processes does about them."""

    async def open(self) -> None:
        """Ready as it is."""

    async def leave(self) -> None:
        """Nothing is left behind."""

    async def counts(self) -> dict[str, float]:
        """See Dock.stats."""
        return self.stats()

    async def save(self) -> tuple[dict[str, Any], list[Path]]:
        """Dock.state_dict; no files. Never suspends."""
        return self.state_dict(), []

    def stats(self) -> dict[str, float]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


class Dock(InProcess):
    """Warehouses and controllers of one graph behind one facade.

    At rest: in deterministic mode a take holds exactly its number of groups. When dropped groups leave too few for
    that and nothing else can move, the next take is allowed to be short (rest.py).
    """

    def __init__(self, graph: Graph, options: DockOptions, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds; leases and deadlines are measured by it."""
        self.graph = graph
        self._clock = clock
        self.options = options
        self._exchange = Exchange(graph, options)
        self._control = self._exchange.control
        self._waits = Waits()
        self._lock = threading.RLock()
        self._timer: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None

    # --- prompts come in ---------------------------------------------------------------------------------------

    async def slots(self) -> int:
        """Wait until a group may be admitted; how many may. 0: the dock is closing, or no more groups are wanted."""
        why = partial(explain.why_slot, self._control, ())
        return await self._until(SLOT, self._control.look_slots, "slot", lambda: why(self._clock()))

    async def admit(self, batch: Batch) -> None:
        """Enter groups of `group_size` rows with the graph's source columns, all or none of them. The same ids again
        change nothing.
        Waits for slots and for room. Raises DockError and UnknownField for a batch that is not of whole groups.
        """
        if self._control.closed:
            raise DockClosed("the dock is closed: no group is admitted any more")
        await self._write("admit", lambda: not self._control.closed and self._exchange.admit(batch))

    async def here(self, row_ids: np.ndarray) -> np.ndarray:
        """Which rows are in the flow, bool [B]."""
        return self._control.roster.find(row_ids) >= 0

    async def end_of_prompts(self) -> None:
        """No further group will be admitted: the last takes may be short, then streams end."""
        with self._lock:
            self._control.end_of_prompts()
            self._settle()

    # --- stages work -------------------------------------------------------------------------------------------

    async def take(
        self,
        stage: Stage,
        *,
        groups: int | None = None,
        max_tokens: int | None = None,
        rank: int = 0,
        ranks: int = 0,
    ) -> Rows:
        """The stage's next rows, under a lease of `lease_s`.

        groups       groups at once; None: the options' number (by step: prompts_per_step)
        max_tokens   hard cap on their tokens, by whole rows or groups
        rank, ranks  the part of one of `ranks` data-parallel readers: each round's rows are divided among them,
                     balanced by tokens (`max_tokens` then caps each part); a part may hold no row
        Raises TakeTimeout after `wait_s`, DockClosed when the dock is closed or nothing is left to take.
        """
        want = self._control.want(stage.name, groups, max_tokens, (rank, ranks))

        def look() -> Rows | None:
            self._expire()
            return self._control.look_take(stage.name, want, self._clock())

        why = partial(explain.why_take, self._control, stage, want)
        rows = await self._until(stage.name, look, f"stage {stage.name!r}", lambda: why(self._clock()))
        self._arm()
        return rows

    async def stream(self, stage: Stage, **want: Any) -> AsyncIterator[Rows]:
        """Takes, one after another, until the dock is closed or the flow is over. `want`: as in `take`."""
        while True:
            try:
                rows = await self.take(stage, **want)
            except DockClosed:
                return
            yield rows

    async def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """Columns of rows in their order; views of the stored tensors where rows lie side by side.

        Raises UnknownField for a column that is not there yet (naming row, column and the stage that writes it),
        RowGone for rows that have left.
        """
        with self._lock:
            return self._exchange.fetch(rows, fields)

    async def put(self, batch: Batch, rows: Rows | None = None) -> None:
        """Write columns of rows (`rows`: of use to docks in other processes). A cell's first complete write wins.

        A write to a row that left under its reader's hands (dropped by another stage, or trained after the lease had
        expired) is passed over and counted; to any other unknown row it is RowGone. Waits for room.
        """
        await self._write("put", lambda: self._exchange.put(batch))

    async def finish(self, rows: Rows, outcome: Outcome) -> None:
        """Acknowledge a lease: its rows are done for the stage, those in `outcome.dropped` leave the flow, those in
        `outcome.later` are free again, beside others or when nothing else can go on.

        After the lease's deadline it counts only for rows that nobody else has taken since. Raises TooManyDropped
        when more groups were lost since the last retirement than the options allow; so do all waits from then on.
        """
        with self._lock:
            done, later = rows.split(outcome.later)
            self._control.finish(done, outcome.dropped)
            if len(later):
                self._control.give_back(rows.stage, rows.lease, later=True)
            self._settle()
            self._control.raise_failure()

    async def drop(self, rows: Rows, reason: str) -> None:
        """Rows leave the flow, counted under `reason`."""
        with self._lock:
            self._control.drop(rows, reason)
            self._settle()
            self._control.raise_failure()

    async def give_back(self, rows: Rows) -> None:
        """A reader cannot go on: the rows of its lease are free for another one at once."""
        with self._lock:
            self._control.give_back(rows.stage, rows.lease)
            self._settle()

    async def retire(self, rows: Rows) -> None:
        """Trained rows leave: their bytes are freed everywhere and their groups' slots are open. Never suspends."""
        with self._lock:
            self._control.retire(rows)
            self._settle()

    async def close(self) -> None:
        """End: streams stop, slots are refused, waiting takes raise DockClosed. Readers at work may still fetch, put
        and finish, so that a run ends without an error in its last stages.
        """
        with self._lock:
            self._control.closed = True
            self._waits.wake_all()
            if self._timer is not None:
                self._timer[1].cancel()

    # --- looking in, from any thread ---------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Metrics under their declared names (dock/...)."""
        with self._lock:
            return explain.statistics(self._control, self._clock(), self._exchange.stores.nbytes)

    def describe(self) -> str:
        """Who waits for what, and where every row is; several lines."""
        if not self._lock.acquire(timeout=1.0):
            return "dock: busy"
        try:
            now = self._clock()
            lines = explain.describe(self._control, now, self._exchange.stores.nbytes)
            for key in (SLOT, ROOM, *self._control.flow.stages):
                ages = [explain.seconds(now - since) for since in self._waits.waiting(key)]
                lines += [f"  waiting: {key.strip('@')} since {age}" for age in ages]
            return "\n".join(lines)
        finally:
            self._lock.release()

    def state_dict(self) -> dict[str, Any]:
        """A snapshot, also in mid-step; leases become free. Tensors, lists, numbers and strings only."""
        with self._lock:
            return snapshot.save(self._exchange)

    async def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """A snapshot of a dock of either kind; the files of one in processes lie in `folder`. Never suspends."""
        if "control" not in state:
            return self.load_state_dict(state)
        with self._lock:
            snapshot.load_files(self._exchange, state, snapshot.files_of(state, folder))
            self._settle()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into a dock that has admitted nothing. Raises CheckpointError when graph or group size differ."""
        with self._lock:
            snapshot.load(self._exchange, dict(state))
            self._settle()

    # --- waiting -----------------------------------------------------------------------------------------------

    async def _until(self, key: str, look: Callable[[], Any], who: str, why: Callable[[], str]) -> Any:
        """The first answer of `look` that is not None, asked anew whenever `key` is woken."""
        began = self._clock()
        while True:
            with self._lock:
                self._control.raise_failure()
                answer = look()
                if answer is not None:
                    return answer
                waiter = self._waits.join(key, began)
            await self._sleep(key, waiter, who, why)

    async def _sleep(self, key: str, waiter: Waiter, who: str, why: Callable[[], str]) -> None:
        left = waiter.since + self.options.wait_s - self._clock()
        try:
            await self._waits.sleep(key, waiter, asyncio.get_running_loop().time() + left)
        except TimeoutError:
            with self._lock:
                reason = why()
            raise TakeTimeout(
                f"{who} waited {explain.seconds(self.options.wait_s)}: {reason}", "raise dock.wait_s if this is normal"
            ) from None

    async def _write(self, what: str, attempt: Callable[[], bool]) -> None:
        """Try, and wait for a slot or room until it works. A producer that waits when the dock closes just ends."""

        def look() -> bool | None:
            if attempt():
                self._settle()
                return True
            return True if self._control.closed else None

        def why() -> str:
            if what == "admit" and not self._control.has_slot:
                return explain.why_slot(self._control, (), self._clock())
            return explain.why_room([(w.place, w.nbytes, w.capacity) for w in self._exchange.stores.warehouses])

        await self._until(ROOM, look, what, why)

    def _settle(self) -> None:
        """After every change: free, look for rest, wake whoever may go on, find out whether the run has failed."""
        for key in self._exchange.settle():
            self._waits.wake(key)

    def _expire(self) -> None:
        if self._control.expire(self._clock()):
            self._settle()

    def _arm(self) -> None:
        """One timer for the lease that is overdue next."""
        loop = asyncio.get_running_loop()
        if self._control.closed or (self._timer is not None and self._timer[0] is loop):
            return
        with self._lock:
            deadline = self._control.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - self._clock()) + 0.001
            self._timer = (loop, loop.call_later(delay, self._on_timer))

    def _on_timer(self) -> None:
        self._timer = None
        with self._lock:
            self._expire()
        self._arm()


class ThreadClient:
    """The dock for a thread outside the event loop: the same calls, blocking."""

    def __init__(self, dock: Dock, loop: asyncio.AbstractEventLoop) -> None:
        self._dock = dock
        self._loop = loop

    def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """See Dock.fetch."""
        return asyncio.run_coroutine_threadsafe(self._dock.fetch(rows, fields), self._loop).result()

    def put(self, batch: Batch) -> None:
        """See Dock.put; its wait for room has the dock's deadline."""
        if running_loop() is self._loop:
            raise DockError("ThreadClient was called inside the dock's own event loop", "await dock.put there")
        asyncio.run_coroutine_threadsafe(self._dock.put(batch), self._loop).result()
