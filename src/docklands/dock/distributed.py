"""The transfer dock over processes: the same calls as Dock, in the driver and in every worker.

Ids and metadata go to the control process, bytes straight between this process and the warehouses: rows carry their
places. A stage's output goes to the warehouse that holds the row. How prompts come in is in admissions.py.

Legend: B rows of a call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.graph import Graph, rows_text
from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Stage
from docklands.dock.admissions import Kept
from docklands.dock.control import messages as c
from docklands.dock.control.client import Call, ControlClient
from docklands.dock.exchange import partial_write, partial_writes
from docklands.dock.look import DockAddress
from docklands.dock.readings import Readings
from docklands.dock.rules.flow import Flow
from docklands.dock.rules.options import DockOptions
from docklands.dock.rules.table import unique_ids
from docklands.dock.warehouse.client import AsyncWarehouseClient, ClientOptions
from docklands.dock.warehouse.nearby import Nearby
from docklands.errors import DockClosed, DockError, RowGone


class DistributedDock(Readings):
    """A client of one dock, in one event loop. Use it as `async with DistributedDock(...) as dock`.

    address  None: known only when it is opened (hosted.py)
    lost_s   seconds for which a warehouse or the control process may be away before calls fail
    """

    def __init__(
        self, graph: Graph, options: DockOptions, address: DockAddress | None, name: str = "", lost_s: float = 30.0
    ) -> None:
        self.graph = graph
        self.options = options
        self.flow = Flow(graph)
        self.ignored_puts = 0
        self._known, self._name, self._lost_s = address, name, lost_s
        self._places: dict[int, int] = {}
        self._taken: dict[tuple[str, int], Rows] = {}
        self._nearby: dict[tuple[str, int], Nearby] = {}
        self._read_here: dict[tuple[str, int], tuple[int, int]] = {}
        self._checked: dict[tuple[Field[Any], ...], str] = {}
        self._over: set[tuple[str, int]] = set()
        self._prompts: dict[int, Kept] = {}
        self.beside = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DistributedDock:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def open(self) -> None:
        """Connect; in the event loop that will use the dock."""
        address = self.address
        self.control = ControlClient(
            address.control, address.keys, self._name, self._lost_s, lambda: list(self._prompts), self._on_push
        )
        wanted = ClientOptions(name=self._name, deadline_s=self.options.wait_s, lost_s=self._lost_s)
        self._peers = dict(enumerate(address.warehouses))
        self.warehouses = AsyncWarehouseClient(self._peers, address.keys, wanted)

    async def leave(self) -> None:
        """Disconnect this client. The dock goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.control.close()
        await self.warehouses.close()

    # --- stages work -------------------------------------------------------------------------------------------

    async def stream(self, stage: Stage, ahead: int = 0, **want: Any) -> AsyncIterator[Rows]:
        """See Dock.stream. ahead: takes that are asked for while the caller is still at work on an earlier one."""
        asked: deque[asyncio.Task[Rows]] = deque()
        try:
            while True:
                while len(asked) <= ahead:
                    asked.append(asyncio.ensure_future(self.take(stage, **want)))
                try:
                    rows = await asked[0]  # it stays in the list until it is here: see below
                except DockClosed:
                    return
                asked.popleft()
                yield rows
        finally:
            for task in asked:
                task.cancel()
            for ahead_of in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(ahead_of, Rows) and ahead_of.lease:  # had come already
                    await self.give_back(ahead_of)

    async def put(self, batch: Batch, rows: Rows | None = None) -> None:
        """See Dock.put. Rows that left under their reader's hands are passed over and counted.

        rows  the leased ones that it was made of, all of them done with it: their places are known, and where they are
              a whole lease in one warehouse, that one tells the control process of both: `finish` has nothing to say
        """
        if rows is None or not (batch.row_ids is rows.row_ids or np.array_equal(batch.row_ids, rows.row_ids)):
            return await self._write(batch, None)
        ends, held = self._may_end(rows, batch), (rows.stage, rows.lease)
        await self._write(batch, rows.places, rows.lease, ends)
        if ends:
            self._let_go(held)
            self._over.add(held)

    async def _write(self, batch: Batch, places: np.ndarray | None, lease: int = 0, ends: bool = False) -> None:
        """places: of the rows, where they are known. lease: under which they were read; `ends`: with this put."""
        stage = self._check_put(batch.fields)
        if not unique_ids(batch.row_ids):
            raise DockError(f"a put names a row twice: {rows_text(batch.row_ids.tolist())}")
        if places is None:
            places = await self._where(batch.row_ids)
        here = places >= 0
        self.ignored_puts += int(np.count_nonzero(~here)) * len(batch.fields)
        if not here.any():
            return
        part, places = (batch, places) if here.all() else (batch.select(here), places[here])
        read = self._read_here.pop((stage, lease), (0, 0)) if ends else (0, 0)
        ended = lease if ends else 0, read, self.control.lives_of(stage, lease)
        place = int(places[0]) if ends else places.astype(np.int32)
        found = await self.warehouses.put(part, place, stage=stage, ended=ended)
        self.ignored_puts += found.ignored + len(found.gone) * len(batch.fields)
        if len(found.gone):
            self._forget(found.gone)
            await self._where(found.gone)  # RowGone, unless they left under a reader or are made anew

    async def finish(self, rows: Rows, outcome: Outcome) -> None:
        """See Dock.finish. The control process waits for the notices of what was put."""
        if (rows.stage, rows.lease) in self._over:
            return self._over.remove((rows.stage, rows.lease))
        done, later = rows.split(outcome.later) if outcome.later else (rows, ())
        if len(done) or not len(later):
            await self._end(done, c.Finish(rows.stage, rows.lease, reasons(outcome)))
        if isinstance(later, Rows) and len(later):
            await self.give_back(later, begun=True)

    async def complete(self, rows: Rows, batch: Batch, outcome: Outcome | None = None) -> None:
        """`put` what a stage made of rows, and `finish` them, in one wait instead of two.

        Where the rows are a whole lease and lie in one warehouse, that one tells the control process of both. Else the
        control process holds the acknowledgement until the warehouses have told it of the columns, so both can be under
        way at once. Raises what the two raise; the rows are not finished when the put has failed.
        """
        outcome = outcome or Outcome()
        same = batch.row_ids is rows.row_ids or np.array_equal(batch.row_ids, rows.row_ids)
        places = rows.places if same else None
        if outcome.later or not len(rows):
            await self._write(batch, places, rows.lease)
            return await self.finish(rows, outcome)
        if same and not outcome.dropped and self._may_end(rows, batch):
            await self._write(batch, places, rows.lease, ends=True)
            return self._let_go((rows.stage, rows.lease))
        message = c.Finish(rows.stage, rows.lease, reasons(outcome))
        said = self._say_end(rows, message)
        try:
            await self._write(batch, places, rows.lease)
        except BaseException:
            self.control.unsay(said)
            raise
        try:
            await self._end(rows, message, said)
        except DockError:  # the put has waited for room longer than an acknowledgement waits for its columns
            await self.finish(rows, outcome)

    def completions(self, most: int = 2) -> Completions:
        """For `complete` calls that are not waited for one by one: `async with dock.completions() as done`."""
        return Completions(self, most)

    async def drop(self, rows: Rows, reason: str) -> None:
        """See Dock.drop."""
        await self._end(rows, c.Drop(rows.stage, rows.lease, reason))

    async def retire(self, rows: Rows) -> None:
        """See Dock.retire. Once it returns, these rows are never trained again, whatever dies."""
        await self._end(rows, c.Retire(rows.stage, rows.lease))

    async def give_back(self, rows: Rows, begun: bool = False) -> None:
        """A reader cannot go on (its warehouse was lost): its rows are free at once, or (begun) beside others."""
        held = rows.stage, rows.lease
        self._let_go(held)
        self._over.discard(held)
        await self._call(c.GiveBack(*held, self._read_here.pop(held, (0, 0)), begun))

    async def close(self) -> None:
        """See Dock.close. Warehouses and control process stay until their launcher stops them."""
        await self._call(c.Close())

    # --- inside ------------------------------------------------------------------------------------------------

    def _check_put(self, fields: tuple[Field[Any], ...]) -> str:
        """The stage that writes these columns; an error for columns that no put may have. Said once per set of them."""
        if fields not in self._checked:
            for field in fields:
                self.flow.check_field(field)
            for stage, given, lacking in partial_writes(self.flow, [field.name for field in fields]):
                raise partial_write(stage, given, lacking)
            writers = (self.flow.writer[field.name] for field in fields if field.name in self.flow.writer)
            self._checked[fields] = next(writers, "")
        return self._checked[fields]

    def _may_end(self, rows: Rows, batch: Batch) -> bool:
        """The put of these rows can end their lease: they are all of it, of the stage that writes, in one warehouse."""
        whole = rows.lease and self.control.leases.get((rows.stage, rows.lease), 0) == len(rows)
        return bool(whole) and self._check_put(batch.fields) == rows.stage and not np.ptp(rows.places)

    def _say_end(self, rows: Rows, message: Any) -> Call:
        """Begin to acknowledge. Rows are named if they are not all of their lease."""
        held = rows.stage, rows.lease
        ids = [np.ascontiguousarray(rows.row_ids).data]
        whole = rows.lease and self.control.leases.get(held, 0) == len(rows)
        read = self._read_here.pop(held, None)
        if read is not None:
            message = msgspec.structs.replace(message, read=read)
        return self.control.say(message, [] if whole else ids)

    async def _end(self, rows: Rows, message: Any, said: Call | None = None) -> None:
        """Acknowledge rows; said: what has been said already."""
        held = rows.stage, rows.lease
        left = abs(self.control.leases.get(held, 0)) - len(rows)
        try:
            said = said or self._say_end(rows, message)
            reply, _ = await self.control.answer(said, self.options.wait_s + self._lost_s)
            if not reply.value:  # the lease has ended meanwhile
                await self._call(message, [np.ascontiguousarray(rows.row_ids).data])
        finally:
            if left > 0:
                self.control.leases[held] = -left  # never again taken for all of its lease: rows are named
            else:
                self._let_go(held)
        if not isinstance(message, c.Finish):
            self._forget(rows.row_ids)

    async def _where(self, row_ids: np.ndarray) -> np.ndarray:
        """Places of rows, int64 [B], -1 for those that left while a reader might be at work on them.

        Raises RowGone for others that are not in the dock.
        """
        while self._taken:  # most takes are never asked about: their rows are noted one by one only now
            _, rows = self._taken.popitem()
            self._remember(rows.row_ids, rows.places)
        found = np.array([self._places.get(row, -2) for row in row_ids.tolist()], np.int64)
        if (found >= 0).all():
            return found
        _, frames = await self._call(c.Where(), [np.ascontiguousarray(row_ids).data])
        found = np.frombuffer(frames[0], np.int64).copy()
        if (found == -2).any():
            raise RowGone(
                f"put to rows that are not in the dock: {rows_text(row_ids[found == -2].tolist())}",
                "they were never admitted, or were retired or dropped before",
            )
        self._remember(row_ids[found >= 0], found[found >= 0])
        return found

    def _let_go(self, held: tuple[str, int]) -> None:
        """A lease has ended."""
        self.control.forget(held)
        self._taken.pop(held, None)
        self._nearby.pop(held, None)

    def _forget(self, row_ids: np.ndarray) -> None:
        for row in row_ids.tolist() if self._places else ():
            self._places.pop(row, None)


class Completions:
    """Calls of `complete` under way, at most so many; the next one waits for the oldest. An error of one is raised by a
    later call, or at the end, which waits for all.
    """

    def __init__(self, dock: DistributedDock, most: int) -> None:
        self._dock, self._most = dock, most
        self._tasks: deque[asyncio.Task[None]] = deque()

    async def __aenter__(self) -> Completions:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._tasks and kind is None:
                await self._tasks.popleft()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def add(self, rows: Rows, batch: Batch, outcome: Outcome | None = None) -> None:
        """See DistributedDock.complete."""
        self._tasks.append(asyncio.ensure_future(self._dock.complete(rows, batch, outcome)))
        while len(self._tasks) > self._most:
            await self._tasks.popleft()


def reasons(outcome: Outcome) -> dict[int, str]:
    """Dropped rows as an acknowledgement names them."""
    return {int(row): str(reason) for row, reason in outcome.dropped.items()}
