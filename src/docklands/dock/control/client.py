"""A client of the control process, for an event loop: any number of calls at a time, each with a deadline.

A lost line is taken up again by itself; then the client joins anew, naming the leases that it knows of, and says again
what was not answered. A control process that stays away for `lost_s` seconds raises ControlLost.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from docklands import errors
from docklands.core.protocols import Rows
from docklands.dock.control import messages as c
from docklands.dock.warehouse.messages import Failure
from docklands.dock.wire.format import CALL, PUSH, REPLY, Buffer
from docklands.dock.wire.lines import connect
from docklands.dock.wire.net import DOWN, REFUSED, UP, Context, Keys, Peer
from docklands.errors import ControlLost, DockClosed, DockError, DocklandsError, TakeTimeout, WireError

LIVES = 4096
"""Leases of which a client knows the lives of rows, at most."""

Answer = tuple[Any, list[memoryview]]


@dataclass
class Call:
    """What has been said and not been answered."""

    number: int
    message: msgspec.Struct
    frames: Sequence[Buffer]
    future: asyncio.Future[Answer]


class ControlClient:
    """One line to the control process, of one event loop; made inside it.

    groups   asked at every joining: the groups that this client can admit again
    on_push  called with (Again or Moved, frames) when the control asks for prompts, or says where a warehouse is
    leases   (stage, lease) in this client's hands -> how many rows it was given
    """

    def __init__(
        self,
        peer: Peer,
        keys: Keys | None,
        name: str = "",
        lost_s: float = 30.0,
        groups: Callable[[], list[int]] = list,
        on_push: Callable[[c.Again | c.Moved, list[memoryview]], None] | None = None,
    ) -> None:
        self.name = name or f"pid {os.getpid()}"
        self.lost_s = lost_s
        self.leases: dict[tuple[str, int], int] = {}
        self.lives: dict[tuple[str, int], dict[int, int]] = {}
        self.epoch = 0
        self.bad_messages = 0
        self._groups, self._on_push = groups, on_push
        self._loop = asyncio.get_running_loop()
        self._line = connect(Context.hold(), peer, keys)
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._ups = 0
        self._closed = self._looking = False
        data, news = self._line.filenos
        self._loop.add_reader(data, self._readable)
        self._loop.add_reader(news, self._changed)
        self._changed()  # ZeroMQ signals a descriptor only after somebody has found it empty
        self._watch()

    async def call(self, message: msgspec.Struct, frames: Sequence[Buffer] = (), deadline_s: float = 60.0) -> Answer:
        """Say something and wait for its answer.

        Raises what the control process raised, TakeTimeout at the deadline, ControlLost, DockClosed after `close`.
        """
        return await self.answer(self.say(message, frames), deadline_s)

    def say(self, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> Call:
        """Say something; `answer` must be awaited, or `unsay` called. Raises DockClosed after `close`."""
        if self._closed:
            raise DockClosed("the client of the control process has been closed")
        self._changed()
        self._number += 1
        call = self._calls[self._number] = Call(self._number, message, frames, self._loop.create_future())
        if self._line.state == UP:
            self._say(call)
        return call

    async def answer(self, call: Call, deadline_s: float = 60.0) -> Answer:
        """See `call`."""
        timer = self._loop.call_later(deadline_s, self._late, call, deadline_s)
        try:
            reply, buffers = await call.future
        finally:
            timer.cancel()
            self.unsay(call)
            del call  # its error holds this frame: a circle that would keep the client's sockets
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply, buffers

    def unsay(self, call: Call) -> None:
        """Nobody waits for the answer any more."""
        self._calls.pop(call.number, None)

    def _late(self, call: Call, deadline_s: float) -> None:
        if not call.future.done():
            what, where = type(call.message).__name__, self._line.peer.endpoint
            said = f"no answer to {what} within {deadline_s:g} s from the control process at {where}"
            call.future.set_exception(TakeTimeout(said, "it is busy, or the network between is cut"))

    async def take(self, message: c.Take, wait_s: float) -> tuple[Rows, dict[str, list[int]]]:
        """Rows under a lease, which this client then holds; and their homes, see Taken."""
        call = self.say(message)
        try:
            reply, frames = await self.answer(call, wait_s + self.lost_s)
        except asyncio.CancelledError:  # it may have been answered in this very round: these rows are nobody's
            if call.future.done() and not call.future.cancelled() and call.future.exception() is None:
                self._unwanted(call.future.result()[0])
            raise
        rows = c.rows_from(reply, frames)
        self.note_lives(rows)
        return rows, reply.homes

    def note_lives(self, rows: Rows) -> None:
        """Rows that this client, or another one, has taken: what is made of them says of which life they were."""
        if rows.lives is not None and rows.lease:
            known = self.lives.setdefault((rows.stage, rows.lease), {})
            known |= zip(rows.row_ids.tolist(), rows.lives.tolist())
            while len(self.lives) > LIVES:  # of leases that ended elsewhere
                del self.lives[next(iter(self.lives))]

    def _unwanted(self, message: Any) -> None:
        """Rows that nobody waits for any more are free for another reader at once."""
        if isinstance(message, c.Taken) and message.lease:
            self.leases.pop((message.stage, message.lease), None)
            if not self._closed:
                self._send(0, c.GiveBack(message.stage, message.lease))

    def lives_of(self, stage: str, lease: int) -> dict[int, int]:
        """row -> its life when it was taken, if it was not the first; lease 0: when it was last taken."""
        if lease or not self.lives:
            return self.lives.get((stage, lease), {})
        return {row: life for (of, _), rows in self.lives.items() if of == stage for row, life in rows.items()}

    def forget(self, held: tuple[str, int]) -> None:
        """A lease has ended."""
        self.leases.pop(held, None)
        self.lives.pop(held, None)

    def join(self) -> None:
        """Say again who is here: the groups that it can admit have changed. Before the first line: that says it too."""
        if self._line.state == UP:
            self._send(0, c.Join(self.name, self._groups(), sorted(self.leases)))

    async def close(self) -> None:
        """End; calls that wait get DockClosed."""
        if self._closed:
            return
        self._closed = True
        for descriptor in self._line.filenos:
            self._loop.remove_reader(descriptor)
        self._fail(DockClosed("the client of the control process has been closed"))
        self._line.flush()
        self._line.close()
        Context.let_go()

    # --- the line ----------------------------------------------------------------------------------------------

    def _say(self, call: Call) -> None:
        self._send(call.number, call.message, call.frames)

    def _send(self, number: int, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> None:
        """What is said in one round of the loop, and by the tasks that it has begun, leaves together."""
        self._line.post([c.CALLS.pack(CALL, number, message), *frames])
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._loop.call_soon, self._flush)

    def _flush(self) -> None:
        """Sending may use up the descriptor's edge: look afterwards, once for all, whether something has come."""
        self._looking = False
        if not self._closed:
            self._line.flush()
            if self._line.edge:
                self._readable()

    def _readable(self) -> None:
        """Give out what has come. ZeroMQ's descriptor tells of changes only, so read until there is nothing."""
        for frames in self._line.receive() if not self._closed else ():
            try:
                kind, number, message = c.REPLIES.unpack(frames[0] if frames else b"")
            except WireError:
                self.bad_messages += 1
                continue
            if isinstance(message, c.Again | c.Moved):
                if self._on_push is not None:
                    self._on_push(message, frames[1:])
            elif kind == PUSH or isinstance(message, c.Joined):
                self.epoch = getattr(message, "epoch", self.epoch)
            else:
                self._answered(number, message, frames[1:])

    def _answered(self, number: int, message: Any, frames: list[memoryview]) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.future.done():
            if isinstance(message, c.Taken) and message.lease:
                self.leases[message.stage, message.lease] = message.rows
            call.future.set_result((message, frames))
        else:
            self._unwanted(message)

    def _changed(self) -> None:
        """Something happened to the line: after a new start, say everything again."""
        if self._closed or not self._line.look():
            return
        if self._line.state == UP and self._ups != self._line.ups:
            self._ups = self._line.ups
            self.join()
            for call in self._calls.values():
                self._say(call)
        elif self._line.state == REFUSED:
            self._fail(
                ControlLost(
                    f"the control process at {self._line.peer.endpoint} does not let this process in",
                    "its list of allowed keys lacks this client's public key",
                )
            )
        else:
            self._watch()

    def _watch(self) -> None:
        """When the line has been down for too long, whoever waits hears of it."""
        wait = self._line.down_since + self.lost_s - time.monotonic()
        self._loop.call_later(max(0.0, wait) + 0.01, self._give_up)

    def _give_up(self) -> None:
        if self._closed or self._line.state != DOWN:
            return
        if time.monotonic() - self._line.down_since < self.lost_s:  # it was up in between
            return self._watch()
        self._fail(
            ControlLost(
                f"the dock's control process at {self._line.peer.endpoint} has been away for {self.lost_s:g} s",
                "its supervisor should have started it again: see its log",
            )
        )
        self._loop.call_later(self.lost_s, self._give_up)  # calls that are made meanwhile

    def _fail(self, error: DockError) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(error)


def ask_once(peer: Peer, keys: Keys | None, message: msgspec.Struct, deadline_s: float) -> Any:
    """One question over a line of its own, blocking, from any thread; the reply.

    Raises what the control process raised, and ControlLost when it does not answer in time.
    """
    context = zmq.Context()
    line = connect(context, peer, keys)
    poller = zmq.Poller()
    for handle in line.handles:
        poller.register(handle, zmq.POLLIN)
    try:
        line.send([c.CALLS.pack(CALL, 1, message)])
        end = time.monotonic() + deadline_s
        while (left := end - time.monotonic()) > 0 and line.state != REFUSED:
            poller.poll(int(min(left, 0.5) * 1000))
            line.look()
            for frames in line.receive():
                kind, number, reply = c.REPLIES.unpack(frames[0])
                if kind == REPLY and number == 1:
                    if isinstance(reply, Failure):
                        raise error_of(reply)
                    return reply
    finally:
        line.close()
        context.destroy(linger=0)
    raise ControlLost(
        f"no answer within {deadline_s:g} s from the dock's control process at {peer.endpoint}", "is it there?"
    )


def error_of(reply: Failure) -> DocklandsError:
    """The error that the control process raised."""
    kind = getattr(errors, reply.kind, DockError)
    known = isinstance(kind, type) and issubclass(kind, DocklandsError)
    return (kind if known else DockError)(reply.message, reply.hint)
