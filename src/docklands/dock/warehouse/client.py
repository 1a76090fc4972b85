"""Clients of warehouses: `WarehouseClient` for a thread that may wait, `AsyncWarehouseClient` for an event loop.

Both speak to many warehouses at once and share every rule (warehouse_calls.py). Each call has a deadline. A lost line
is taken up again by itself and what was not answered is said again; a warehouse that stays away for `lost_s` seconds
raises WarehouseLost, a deadline TakeTimeout, both naming the warehouse.

A blocking client belongs to one thread: make one per thread, they are cheap. The asyncio client watches ZeroMQ's file
descriptors itself: zmq.asyncio's sockets cost several futures a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import zmq

from docklands.core.batch import Batch
from docklands.dock.warehouse import calls
from docklands.dock.warehouse.calls import Answer, Ask, LineReset, Steps
from docklands.dock.warehouse.client_base import Client, ClientOptions
from docklands.dock.warehouse.together import Load, Put, Together, loads_of, merged
from docklands.dock.wire.net import DOWN, UP, Peer
from docklands.errors import DockClosed, WarehouseLost


class WarehouseClient(Client):
    """The blocking client, of one thread."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._poller = zmq.Poller()
        for place in self.connections:
            self._watch_line(place)

    def _watch_line(self, place: int) -> None:
        for handle in self.connections[place].handles:
            self._poller.register(handle, zmq.POLLIN)

    def _unwatch(self, place: int) -> None:
        for handle in self.connections[place].handles:
            self._poller.unregister(handle)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> WarehouseClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps, deadline_s: float | None) -> Any:
        end = time.monotonic() + self._deadline(deadline_s)
        try:
            asks = next(steps)
            while True:
                try:
                    answers = self._exchange(asks, end, deadline_s)
                except LineReset as reset:
                    asks = steps.throw(reset)
                else:
                    asks = steps.send(answers)
        except StopIteration as stop:
            return stop.value

    def _exchange(self, asks: Sequence[Ask], end: float, deadline_s: float | None) -> list[Answer]:
        """Say everything, then wait until all of it is answered."""
        places = {ask.place for ask in asks}
        for place in places:
            self.connections[place].look()
            self._check_line(place)
        lives = {place: self.connections[place].ups for place in places}
        pending = {self._send(ask): i for i, ask in enumerate(asks) if ask.build is not None}
        rooms = [ask for ask in asks if ask.build is None]
        answers: list[Answer] = [(None, [])] * len(asks)
        while True:
            for place in places:
                for number, answer in self._receive(place):
                    if number in pending:
                        answers[pending.pop(number)] = answer
                    else:
                        self.sessions[place].unwanted(answer[0])
            rooms = [ask for ask in rooms if self.sessions[ask.place].rooms <= ask.rooms]
            if not pending and not rooms:
                return answers
            waiting = [asks[i].place for i in pending.values()] + [ask.place for ask in rooms]
            self._sleep(waiting, end, deadline_s)
            for place in set(waiting):
                self.connections[place].look()
                self._check_line(place, lives[place])

    def _sleep(self, waiting: Sequence[int], end: float, deadline_s: float | None) -> None:
        """Until a message, a change of a line, or the next deadline. TakeTimeout when that is over."""
        now = time.monotonic()
        if now >= end:
            raise self._late(waiting, deadline_s)
        down = [self.connections[place].down_since for place in waiting if self.connections[place].state == DOWN]
        wake = min([end, *(since + self.options.lost_s for since in down)])
        self._poller.poll(int(max(0.0, wake - now) * 1000) + 1)


NOT_YET: Answer = (None, [])
"""What stands for an answer that has not come."""


class Exchange:
    """What was said together, and whoever waits until all of it is answered: one future, whatever the number."""

    __slots__ = ("answers", "future", "_left")

    def __init__(self, count: int, future: asyncio.Future[None]) -> None:
        self.answers: list[Answer] = [NOT_YET] * count
        self.future, self._left = future, count

    def give(self, index: int, answer: Answer) -> None:
        self.answers[index] = answer
        self._left -= 1
        if not self._left and not self.future.done():
            self.future.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class AsyncWarehouseClient(Client):
    """The asyncio client, of one event loop; any number of calls at a time."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, dict[int, tuple[Exchange, int]]] = {place: {} for place in self.connections}
        self._rooms: dict[int, list[tuple[Exchange, int]]] = {place: [] for place in self.connections}
        self._together = Together(self._put)
        for place in self.connections:
            self._watch_line(place)

    def _watch_line(self, place: int) -> None:
        line = self.connections[place]
        data, news = line.filenos
        self._loop.add_reader(data, partial(self._readable, place))
        self._loop.add_reader(news, partial(self._line_changed, place))
        line.look()  # ZeroMQ signals a descriptor only after somebody has found it empty

    def _unwatch(self, place: int) -> None:
        for descriptor in self.connections[place].filenos:
            self._loop.remove_reader(descriptor)

    def redirect(self, place: int, peer: Peer) -> None:
        super().redirect(place, peer)
        self._fail(place, LineReset())

    async def _store(self, batch: Batch, places: int | np.ndarray, why: calls.Why, deadline_s: float | None) -> Put:
        """Of several puts at a time to one warehouse, all but the first leave together."""
        if why.birth is not None or why.lease or why.lives:
            return await super()._store(batch, places, why, deadline_s)
        end = self._loop.time() + self._deadline(deadline_s)
        puts = [self._together.put(place, load, why.stage, end) for place, load in loads_of(batch, places).items()]
        return await puts[0] if len(puts) == 1 else merged(await asyncio.gather(*puts))

    async def _put(self, place: int, stage: str, load: Load, end: float, now: bool) -> Put | None:
        return await self._run(
            calls.put(self.sessions, {place: load}, calls.Why(None, stage), now), end - self._loop.time()
        )

    async def close(self) -> None:
        """End; calls that wait get DockClosed."""
        for place in self.connections:
            self._unwatch(place)
            self._fail(place, DockClosed("the client of the warehouses has been closed"))
        await self._together.close()
        self._close()

    async def _run(self, steps: Steps, deadline_s: float | None) -> Any:
        end = self._loop.time() + self._deadline(deadline_s)
        try:
            asks = next(steps)
            while True:
                try:
                    answers = await self._exchange(asks, end, deadline_s)
                except LineReset as reset:
                    asks = steps.throw(reset)
                else:
                    asks = steps.send(answers)
        except StopIteration as stop:
            return stop.value

    async def _exchange(self, asks: Sequence[Ask], end: float, deadline_s: float | None) -> list[Answer]:
        if not asks:
            return []
        for ask in asks:
            self._check_line(ask.place)
        exchange = Exchange(len(asks), self._loop.create_future())
        answers = exchange.answers
        said: list[tuple[int, int]] = []
        timer = self._loop.call_at(end, self._expire, exchange, asks, deadline_s)
        try:
            for index, ask in enumerate(asks):
                if ask.build is not None:
                    said.append((ask.place, self._send(ask)))
                    self._pending[ask.place][said[-1][1]] = exchange, index
                elif self.sessions[ask.place].rooms > ask.rooms:
                    exchange.give(index, (None, []))
                else:
                    self._rooms[ask.place].append((exchange, index))
                if self.connections[ask.place].state == DOWN:
                    self._watch(ask.place)
            for place in {ask.place for ask in asks}:
                if self.connections[place].edge:
                    self._readable(place)
            await exchange.future
        finally:
            timer.cancel()
            for place, number in said:
                self._pending[place].pop(number, None)
            del exchange  # its error holds this frame: a circle that would keep the client's sockets
        return answers

    def _expire(self, exchange: Exchange, asks: Sequence[Ask], deadline_s: float | None) -> None:
        late = [ask.place for ask, answer in zip(asks, exchange.answers) if answer is NOT_YET]
        exchange.fail(self._late(late, deadline_s))

    def _readable(self, place: int) -> None:
        """Give out what has come. ZeroMQ's descriptor tells of changes only, so read until there is nothing."""
        line = self.connections[place]
        if line.edge and not line.has_message():
            return
        self._line_changed(place)  # an answer of a new process to what was said to the old one is none
        for number, answer in self._receive(place):
            exchange, index = self._pending[place].pop(number, (None, 0))
            if exchange is not None:
                exchange.give(index, answer)
            else:
                self.sessions[place].unwanted(answer[0])
        self._wake_rooms(place)

    def _wake_rooms(self, place: int) -> None:
        session = self.sessions[place]
        if self._rooms[place] and session.rooms > session.full_at:
            for exchange, index in self._rooms[place]:
                exchange.give(index, (None, []))
            self._rooms[place].clear()

    def _line_changed(self, place: int) -> None:
        line = self.connections[place]
        if not line.look():
            return
        if line.state == DOWN:
            self._watch(place)
            return
        if line.state == UP and line.ups > 1:  # whatever was said before may be lost
            self.sessions[place].welcome = None
            self._fail(place, LineReset())
            return
        try:
            self._check_line(place)
        except (LineReset, WarehouseLost) as error:
            self._fail(place, error)

    def _watch(self, place: int) -> None:
        """When the line has been down for too long, whoever waits hears of it."""
        line = self.connections[place]
        self._loop.call_later(max(0.0, line.down_since + self.options.lost_s - time.monotonic()), self._give_up, place)

    def _give_up(self, place: int) -> None:
        line = self.connections[place]
        if line.closed or line.state != DOWN:
            return
        if time.monotonic() - line.down_since < self.options.lost_s:  # it was up in between
            self._watch(place)
        else:
            self._fail(place, self._lost(place))

    def _fail(self, place: int, error: BaseException) -> None:
        exchanges = [exchange for exchange, _ in (*self._pending[place].values(), *self._rooms[place])]
        self._pending[place].clear()
        self._rooms[place].clear()
        for exchange in exchanges:
            exchange.fail(error)


__all__ = ["AsyncWarehouseClient", "ClientOptions", "WarehouseClient"]
