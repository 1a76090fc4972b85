"""Puts that leave together: those that come while another one of the same stage is under way to the same warehouse.

A lone put waits for nobody. Of a producer that has many of them at a time, all but the first cost the warehouse, the
control process and the client hardly more than one: their columns are written end to end, in one message.

Legend: B rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.dock.rules.table import unique_ids
from docklands.dock.wire.format import ColumnMeta, Part, parts_of
from docklands.errors import DockClosed, DockError, WarehouseLost

MOST = 4 << 20
"""Bytes of puts that leave together, at most."""


@dataclass(frozen=True)
class Load:
    """Columns of rows, as they are sent."""

    row_ids: np.ndarray
    parts: Sequence[Part]

    @property
    def columns(self) -> list[ColumnMeta]:
        return [part.meta for part in self.parts]

    @property
    def nbytes(self) -> int:
        return sum(values.numel() for part in self.parts for values, _ in part.pieces)

    @staticmethod
    def of(batch: Batch) -> Load:
        return Load(batch.row_ids, parts_of(batch))

    @staticmethod
    def joined(loads: Sequence[Load]) -> Load:
        """Loads of the same columns as one, whose columns have several pieces."""
        if len(loads) == 1:
            return loads[0]
        parts = []
        for same in zip(*(load.parts for load in loads)):
            lengths = [part.lengths for part in same if part.lengths is not None]
            pieces = [piece for part in same for piece in part.pieces]
            parts.append(Part(same[0].meta, np.concatenate(lengths) if lengths else None, pieces))
        return Load(np.concatenate([load.row_ids for load in loads]), parts)


def loads_of(batch: Batch, places: int | np.ndarray) -> dict[int, Load]:
    """What goes to each place."""
    if isinstance(places, int):
        return {places: Load.of(batch)}
    at = split(batch.row_ids, places)
    return {place: Load.of(batch if len(rows) == len(batch) else batch.select(rows)) for place, rows in at.items()}


def split(row_ids: np.ndarray, places: int | np.ndarray) -> dict[int, np.ndarray]:
    """place -> positions of its rows."""
    if isinstance(places, int) or (len(places) and (places == places[0]).all()):  # as they mostly are
        return {places if isinstance(places, int) else int(places[0]): np.arange(len(row_ids))}
    return {place: np.nonzero(places == place)[0] for place in np.unique(places).tolist()}


@dataclass(frozen=True)
class Put:
    """What became of a put. seqs: place -> number of the notice that tells of it; gone: rows that are not there."""

    seqs: dict[int, int]
    ignored: int
    gone: np.ndarray


def merged(parts: Sequence[Put]) -> Put:
    """What became of a put to several places."""
    seqs = {place: seq for part in parts for place, seq in part.seqs.items()}
    return Put(
        seqs,
        sum(part.ignored for part in parts),
        np.concatenate([np.zeros(0, np.int64), *(part.gone for part in parts)]),
    )


@dataclass(frozen=True)
class Waiting:
    """A put that has not left yet. end: its deadline, by the event loop's clock."""

    load: Load
    end: float
    found: asyncio.Future[Put]

    def give(self, what: Put) -> None:
        if not self.found.done():
            self.found.set_result(what)


Send = Callable[[int, str, Load, float, bool], Awaitable["Put | None"]]


class Together:
    """Puts of one client, in one event loop.

    send  place, stage, load, deadline by the loop's clock -> what became of it; the last argument: None instead of
          waiting for room
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queues: dict[tuple[int, str], deque[Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, place: int, load: Load, stage: str, end: float) -> asyncio.Future[Put]:
        """What will become of it, or what `send` raises for this load."""
        line = place, stage
        waiting = Waiting(load, end, asyncio.get_running_loop().create_future())
        queue = self._queues.get(line)
        if queue is not None:
            queue.append(waiting)
        else:  # it leaves with those of the tasks that are to run in this round of the loop, too
            queue = self._queues[line] = deque([waiting])
            self._begin(self._go_on(line, queue))
        return waiting.found

    async def close(self) -> None:
        """End; puts that wait get DockClosed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _go_on(self, line: tuple[int, str], queue: deque[Waiting]) -> None:
        """Until nobody waits."""
        some: list[Waiting] = []
        try:
            while queue:
                some = portion(queue)
                if some:
                    await self._leave(line, some)
                some = []  # each has its answer, or a task of its own
        except Exception as error:  # a fault: nobody is left waiting for ever
            give((*some, *queue), error)
            raise
        finally:
            del self._queues[line]
            give((*some, *queue), closed())

    async def _leave(self, line: tuple[int, str], some: Sequence[Waiting]) -> None:
        """Some puts in one message; each for itself if there is no room for all of them, one is refused, or late.

        Who waits for room holds up nobody: what comes behind may be what room is made of.
        """
        load = Load.joined([waiting.load for waiting in some])
        try:
            found = await self._send(*line, load, min(waiting.end for waiting in some), True)
        except DockError as error:
            if len(some) == 1 or isinstance(error, WarehouseLost | DockClosed):
                return give(some, error)
            found = None
        if found is None:
            for waiting in some:
                self._begin(self._alone(line, waiting))
        elif len(some) == 1:
            some[0].give(found)
        else:
            for number, waiting in enumerate(some):
                waiting.give(share(found, waiting.load, first=number == 0))

    async def _alone(self, line: tuple[int, str], waiting: Waiting) -> None:
        try:
            found = await self._send(*line, waiting.load, waiting.end, False)
            assert found is not None
            waiting.give(found)
        except DockError as error:
            give([waiting], error)
        except Exception as error:
            give([waiting], error)
            raise
        finally:
            give([waiting], closed())


def portion(queue: deque[Waiting]) -> list[Waiting]:
    """The next puts that can leave together: of the same columns and different rows. Who gave up is passed over."""
    some: list[Waiting] = []
    left, columns = MOST, None
    while queue:
        load = queue[0].load
        left -= load.nbytes
        if some and (left < 0 or load.columns != columns):
            break
        columns = load.columns
        if not queue[0].found.done():
            some.append(queue[0])
        queue.popleft()
    if len(some) > 1 and not unique_ids(np.concatenate([waiting.load.row_ids for waiting in some])):
        queue.extendleft(reversed(some[1:]))
        del some[1:]
    return some


def share(found: Put, load: Load, first: bool) -> Put:
    """What became of one of several puts; the first one has the cells that were there already."""
    gone = found.gone[np.isin(found.gone, load.row_ids)] if len(found.gone) else found.gone
    return Put(found.seqs, found.ignored if first else 0, gone)


def give(some: Sequence[Waiting], error: Exception) -> None:
    """Raise it where they are waited for."""
    for waiting in some:
        if not waiting.found.done():
            waiting.found.set_exception(error)


def closed() -> DockClosed:
    return DockClosed("the client of the warehouses has been closed")
