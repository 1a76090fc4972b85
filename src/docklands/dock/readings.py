"""How a client of a distributed dock reads rows: where they lie, if they are on this node, or from their warehouses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.protocols import Rows
from docklands.dock.admissions import Admissions
from docklands.dock.rules.flow import verdict
from docklands.dock.warehouse.calls import Borrowed
from docklands.dock.warehouse.nearby import Nearby
from docklands.errors import RowGone, UnknownField, WarehouseLost

REMEMBERED = 1 << 17
"""Rows whose places a client remembers at most; others it asks for."""


class Readings(Admissions):
    """Base of DistributedDock, which sets these.

    _places    row -> its warehouse, of some rows
    _nearby    (stage, lease) -> where its rows lie in shared memory; _read_here: what was read there, fetches and bytes
    """

    _places: dict[int, int]
    _nearby: dict[tuple[str, int], Nearby]
    _read_here: dict[tuple[str, int], tuple[int, int]]

    async def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """See Dock.fetch. Raises WarehouseLost when a warehouse is away for too long, or came back without the rows."""
        found = self._read_nearby(rows, fields, copy=True)
        return await self._read(rows, fields, self.warehouses.get) if found is None else found.batch

    async def borrow(self, rows: Rows, fields: Sequence[Field[Any]]) -> Borrowed:
        """As `fetch`, without a copy where the warehouse is on this machine: a view of its memory.

        The bytes are those of the rows until the rows leave the flow, which they do not while the lease lasts. Call
        `check` after use: it raises RowGone if they left all the same, and what was made of them is void.
        """
        found = self._read_nearby(rows, fields, copy=False)
        return await self._read(rows, fields, self.warehouses.borrow) if found is None else found

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
