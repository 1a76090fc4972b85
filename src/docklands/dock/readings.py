"""How a client of a distributed dock takes rows, and reads them where they lie, if they are on this node, or from their
warehouses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.protocols import Rows
from docklands.core.stage import Stage
from docklands.dock.admissions import Admissions
from docklands.dock.control import messages as c
from docklands.dock.rules.flow import verdict
from docklands.dock.warehouse.calls import Borrowed
from docklands.dock.warehouse.nearby import Nearby
from docklands.errors import RowGone, UnknownField, WarehouseLost

REMEMBERED = 1 << 17
"""Rows whose places a client remembers at most; others it asks for."""


class Readings(Admissions):
    """Base of DistributedDock, which sets these.

    _places    row -> its warehouse, of some rows; _taken: (stage, lease) -> rows that are not among them yet
    _nearby    (stage, lease) -> where its rows lie in shared memory; _read_here: what was read there, fetches and bytes
    """

    _places: dict[int, int]
    _taken: dict[tuple[str, int], Rows]
    _nearby: dict[tuple[str, int], Nearby]
    _read_here: dict[tuple[str, int], tuple[int, int]]

    async def take(
        self,
        stage: Stage,
        *,
        groups: int | None = None,
        max_tokens: int | None = None,
        rank: int = 0,
        ranks: int = 0,
        near: Sequence[int] = (),
    ) -> Rows:
        """See Dock.take. The wait is at the control process: one message out, one back.

        near  places on the node of whoever will work on the rows: what lies there comes first (see `near_to`)
        """
        part = rank, ranks
        call = c.Take(stage.name, groups or 0, max_tokens or 0, *part, homes=self.warehouses.local, near=list(near))
        rows, homes = await self.control.take(call, self.options.wait_s)
        if rows.lease:
            self._taken[rows.stage, rows.lease] = rows
            if homes:
                self._nearby[rows.stage, rows.lease] = Nearby(rows, homes)
        return rows

    async def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """See Dock.fetch. Raises WarehouseLost when a warehouse is away for too long, or came back without the rows."""
        found = self.read_nearby(rows, fields)
        return await self._read(rows, fields, self.warehouses.get) if found is None else found

    def read_nearby(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch | None:
        """As `fetch` where no warehouse has to be asked, without waiting, on any thread; else None."""
        found = self._read_nearby(rows, fields, copy=True)
        return None if found is None else found.batch

    def borrow_nearby(self, rows: Rows, fields: Sequence[Field[Any]]) -> Borrowed | None:
        """As `borrow` where no warehouse has to be asked, without waiting, on any thread; else None."""
        return self._read_nearby(rows, fields, copy=False)

    async def borrow(self, rows: Rows, fields: Sequence[Field[Any]]) -> Borrowed:
        """As `fetch`, without a copy where the warehouse is on this machine: a view of its memory.

        The bytes are those of the rows until the rows leave the flow, which they do not while the lease lasts. Call
        `check` after use: it raises RowGone if they left all the same, and what was made of them is void.
        """
        found = self._read_nearby(rows, fields, copy=False)
        return await self._read(rows, fields, self.warehouses.borrow) if found is None else found

    def homes(self, rows: Rows) -> Rows:
        """Rows of a lease in this client's hands, for another process, which need not ask where they lie."""
        near = self._nearby.get((rows.stage, rows.lease))
        return rows if near is None else replace(rows, homes=near.source)

    def lent(self, rows: Rows) -> None:
        """A lease that another client holds is worked on here. One at a time."""
        held = rows.stage, rows.lease
        self._nearby = {held: Nearby(*rows.homes)} if rows.homes else {}
        self._read_here = {}
        self.control.note_lives(rows)

    def read_here(self, rows: Rows) -> tuple[int, int]:
        """Fetches and bytes that no warehouse has seen, since the rows were `lent`."""
        return self._read_here.pop((rows.stage, rows.lease), (0, 0))

    def read_there(self, rows: Rows, count: int, nbytes: int) -> None:
        """What others have read so under a lease of this client's: told with its acknowledgement."""
        held = rows.stage, rows.lease
        if count and held in self.control.leases:
            before = self._read_here.get(held, (0, 0))
            self._read_here[held] = before[0] + count, before[1] + nbytes

    def _read_nearby(self, rows: Rows, fields: Sequence[Field[Any]], copy: bool) -> Borrowed | None:
        """Rows of a lease that this client holds, from shared memory; None: ask their warehouses."""
        held = rows.stage, rows.lease
        near = self._nearby.get(held)
        found = near.read(self.warehouses.sessions, rows.row_ids, fields, copy) if near else None
        if near is not None and found is not None:
            count, nbytes = self._read_here.get(held, (0, 0))
            self._read_here[held] = count + near.places(rows.row_ids), nbytes + found.nbytes
        return found

    async def _read(self, rows: Rows, fields: Sequence[Field[Any]], call: Callable[..., Awaitable[Any]]) -> Any:
        for field in fields:
            self.flow.check_field(field)
        self._remember(rows.row_ids, rows.places)
        self.control.note_lives(rows)
        try:
            return await call(rows.row_ids, rows.places, tuple(fields), rows.stage)
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

    def _remember(self, row_ids: np.ndarray, places: np.ndarray) -> None:
        self._places.update(zip(row_ids.tolist(), places.tolist()))
        while len(self._places) > REMEMBERED:
            del self._places[next(iter(self._places))]
