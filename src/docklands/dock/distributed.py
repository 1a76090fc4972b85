"""The transfer dock over processes: the same calls as Dock, in the driver and in every worker.

Ids and metadata go to the control process, bytes straight between this process and the warehouses: rows carry their
places. A stage's output goes to the warehouse that holds the row. The driver that admits prompts keeps them until their
group has left the flow, so that a group whose warehouse was lost can be made anew under the same ids.

Legend: B rows of a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.graph import Graph, rows_text
from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Stage
from docklands.dock import control_messages as c
from docklands.dock import wire_messages as m
from docklands.dock.control_client import ControlClient
from docklands.dock.distributed_look import DockAddress, Outlook
from docklands.dock.exchange import checked_group, partial_write, partial_writes
from docklands.dock.flow import Flow, verdict
from docklands.dock.options import DockOptions
from docklands.dock.table import unique_ids
from docklands.dock.warehouse_client import AsyncWarehouseClient, ClientOptions
from docklands.dock.wire_net import Peer
from docklands.errors import DockClosed, DockError, RowGone, UnknownField, WarehouseLost

log = logging.getLogger("docklands.dock")

REMEMBERED = 1 << 17
"""Rows whose places a client remembers at most; others it asks for."""


class DistributedDock(Outlook):
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
        self._prompts: dict[int, Batch] = {}
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

    # --- prompts come in ---------------------------------------------------------------------------------------

    async def slot(self) -> bool:
        """See Dock.slot."""
        reply, _ = await self._call(c.Slot())
        return reply.value

    async def admit(self, batch: Batch, place: int | None = None) -> None:
        """See Dock.admit. `place`: the warehouse beside whoever will work on the rows; None: in turn."""
        batch, group_id = checked_group(self.flow, batch)
        call = c.Admit(group_id, -1 if place is None else place)
        reply, _ = await self._call(call, [batch.row_ids.data])
        for group in reply.gone:
            self._prompts.pop(group, None)
        self._prompts[group_id] = batch
        birth = m.Birth(reply.order, group_id, reply.place)
        await self.warehouses.put(batch, reply.place, birth)

    async def end_of_prompts(self) -> None:
        """See Dock.end_of_prompts."""
        await self._call(c.End())

    def _on_push(self, message: c.Again | c.Moved, frames: Sequence[memoryview]) -> None:
        """The control asks for a lost group's prompts, or says where a warehouse is."""
        if isinstance(message, c.Moved):
            peer = Peer(message.endpoint, message.public_key)
            if message.place in self._peers and self._peers[message.place] != peer:
                self._peers[message.place] = peer
                self.warehouses.redirect(message.place, peer)
            return
        rows = np.frombuffer(frames[0], np.int64).copy() if len(frames) == 1 else np.zeros(0, np.int64)
        task = asyncio.get_running_loop().create_task(self._admit_again(message, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit_again(self, again: c.Again, row_ids: np.ndarray) -> None:
        batch = self._prompts.get(again.group_id)
        if batch is None:
            return
        lost = batch.select(np.isin(batch.row_ids, row_ids))
        try:
            await self.warehouses.put(lost, again.place, m.Birth(again.order, again.group_id, again.place))
            await self._call(c.Admit(again.group_id, loss=again.loss), [batch.row_ids.data])
        except (DockError, WarehouseLost) as error:
            log.error("dock: group %d could not be admitted again: %s", again.group_id, error)

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
        """See Dock.take. The wait is at the control process: one message out, one back."""
        call = c.Take(stage.name, groups or 0, max_tokens or 0, rank, ranks)
        rows = await self.control.take(call, self.options.wait_s)
        self._remember(rows.row_ids, rows.places)
        return rows

    async def stream(self, stage: Stage, **want: Any) -> AsyncIterator[Rows]:
        """See Dock.stream."""
        while True:
            try:
                rows = await self.take(stage, **want)
            except DockClosed:
                return
            yield rows

    async def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """See Dock.fetch. Raises WarehouseLost when a warehouse is away for too long, or came back without the rows."""
        for field in fields:
            self.flow.check_field(field)
        self._remember(rows.row_ids, rows.places)
        try:
            return await self.warehouses.get(rows.row_ids, rows.places, tuple(fields), rows.stage)
        except (UnknownField, RowGone) as error:
            if rows.lease and self._given(rows.stage, fields):
                raise WarehouseLost(
                    f"stage {rows.stage!r} cannot read its rows: {error.message}",
                    "their warehouse has lost them, or they have left meanwhile: give them back",
                ) from None
            if isinstance(error, RowGone):
                raise
            column = next((f.name for f in fields if f" {f.name} " in error.message), "")
            writer = self.flow.writer.get(column, "prompts")
            raise UnknownField(error.message, f"the stage {writer!r} writes it") from None

    async def put(self, batch: Batch) -> None:
        """See Dock.put. Rows that left under their reader's hands are passed over and counted."""
        for field in batch.fields:
            self.flow.check_field(field)
        if not unique_ids(batch.row_ids):
            raise DockError(f"a put names a row twice: {rows_text(batch.row_ids.tolist())}")
        for stage, given, lacking in partial_writes(self.flow, batch):
            raise partial_write(stage, given, lacking)
        places = await self._where(batch.row_ids)
        here = places >= 0
        self.ignored_puts += int(np.count_nonzero(~here)) * len(batch.fields)
        if not here.any():
            return
        part, places = (batch, places) if here.all() else (batch.select(here), places[here])
        stage = next((self.flow.writer[field.name] for field in batch.fields if field.name in self.flow.writer), "")
        found = await self.warehouses.put(part, places.astype(np.int32), stage=stage)
        self.ignored_puts += found.ignored + len(found.gone) * len(batch.fields)
        if len(found.gone):
            self._forget(found.gone)
            await self._where(found.gone)  # RowGone, unless they left under a reader or are made anew

    async def finish(self, rows: Rows, outcome: Outcome) -> None:
        """See Dock.finish. The control process waits for the notices of what was put."""
        reasons = {int(row): str(reason) for row, reason in outcome.dropped.items()}
        await self._end(rows, c.Finish(rows.stage, rows.lease, reasons))

    async def drop(self, rows: Rows, reason: str) -> None:
        """See Dock.drop."""
        await self._end(rows, c.Drop(rows.stage, rows.lease, reason))

    async def retire(self, rows: Rows) -> None:
        """See Dock.retire. Once it returns, these rows are never trained again, whatever dies."""
        await self._end(rows, c.Retire(rows.stage, rows.lease))

    async def give_back(self, rows: Rows) -> None:
        """A reader cannot go on (its warehouse was lost): the rows of its lease are free for another one at once."""
        self.control.leases.discard((rows.stage, rows.lease))
        await self._call(c.GiveBack(rows.stage, rows.lease))

    async def close(self) -> None:
        """See Dock.close. Warehouses and control process stay until their launcher stops them."""
        await self._call(c.Close())

    # --- inside ------------------------------------------------------------------------------------------------

    def _given(self, stage: str, fields: Sequence[Field[Any]]) -> bool:
        """Rows that were handed out to a stage had these columns: stages that it waits for wrote them."""
        known, todo = set(self.flow.sources), [stage] if stage in self.flow.stages else []
        while todo:
            writers = {
                self.flow.writer[name] for name in set(self.flow.reads[todo.pop()]) - known if name in self.flow.writer
            }
            known |= {name for writer in writers for name in (*self.flow.writes[writer], verdict(writer))}
            todo += writers
        return all(field.name in known for field in fields)

    async def _end(self, rows: Rows, message: Any) -> None:
        try:
            await self._call(message, [rows.row_ids.data])
        finally:
            self.control.leases.discard((rows.stage, rows.lease))
        if not isinstance(message, c.Finish):
            self._forget(rows.row_ids)

    async def _where(self, row_ids: np.ndarray) -> np.ndarray:
        """Places of rows, int64 [B], -1 for those that left while a reader might be at work on them.

        Raises RowGone for others that are not in the dock.
        """
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

    def _remember(self, row_ids: np.ndarray, places: np.ndarray) -> None:
        self._places.update(zip(row_ids.tolist(), places.tolist()))
        while len(self._places) > REMEMBERED:
            del self._places[next(iter(self._places))]

    def _forget(self, row_ids: np.ndarray) -> None:
        for row in row_ids.tolist():
            self._places.pop(row, None)
