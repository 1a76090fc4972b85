"""What the blocking and the asyncio client of warehouses have in common: the calls, and what a message means."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.dock.rules.messages import Notice
from docklands.dock.warehouse import calls
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.calls import Answer, Ask, LineReset, Session, Steps
from docklands.dock.warehouse.notices import notices_from
from docklands.dock.warehouse.together import loads_of, split
from docklands.dock.wire.format import CALL, LIMITS, PUSH, Limits, check_size
from docklands.dock.wire.lines import connect
from docklands.dock.wire.net import DOWN, REFUSED, UP, Context, Keys, Peer
from docklands.errors import DockError, TakeTimeout, WarehouseLost


@dataclass(frozen=True)
class ClientOptions:
    """Deadlines in seconds. share: use shared memory where a warehouse's arena can be mapped.

    lost_s  a warehouse that is away for so long is lost
    """

    name: str = ""
    deadline_s: float = 60.0
    lost_s: float = 10.0
    share: bool = True
    limits: Limits = LIMITS


class Client:
    """What both clients can do. In the asyncio client every call is awaited.

    peers      place -> where that warehouse listens
    on_notice  called with (place, first, last, notices) for every push of a warehouse that was subscribed to
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        keys: Keys | None = None,
        options: ClientOptions | None = None,
        on_notice: Callable[[int, int, int, list[Notice]], None] | None = None,
    ) -> None:
        self.options = options or ClientOptions()
        self.on_notice = on_notice
        self.bad_messages = 0
        name = self.options.name or f"pid {os.getpid()}"
        self.sessions = {place: Session(name, self.options.share) for place in peers}
        self._context = Context.hold()
        self._keys = keys
        self.connections = {place: connect(self._context, peer, keys) for place, peer in peers.items()}
        self._number = 0

    def _run(self, steps: Steps, deadline_s: float | None) -> Any:
        raise NotImplementedError

    @property
    def local(self) -> bool:
        """The shared memory of a warehouse is mapped here."""
        return any(session.local for session in self.sessions.values())

    def put(
        self,
        batch: Batch,
        places: int | np.ndarray,
        birth: m.Birth | None = None,
        stage: str = "",
        deadline_s: float | None = None,
        ended: tuple[Any, ...] = (0, (0, 0)),
    ) -> Any:
        """Store columns of rows where they belong; waits for room. With `birth` the rows are new. Returns together.Put.

        ended  a lease of the stage that ends with these rows, what was read under it, and the rows' lives (calls.Why)
        """
        return self._store(batch, places, calls.Why(birth, stage, *ended), deadline_s)

    def _store(self, batch: Batch, places: int | np.ndarray, why: calls.Why, deadline_s: float | None) -> Any:
        return self._run(calls.put(self.sessions, loads_of(batch, places), why), deadline_s)

    def get(
        self,
        row_ids: np.ndarray,
        places: int | np.ndarray,
        fields: Sequence[Field[Any]],
        stage: str = "",
        deadline_s: float | None = None,
    ) -> Any:
        """Columns of rows, in their order, in memory of one's own. Returns a Batch.

        Raises RowGone, UnknownField (a row lacks a column), TakeTimeout, WarehouseLost.
        """
        steps = calls.get(self.sessions, row_ids, places, fields, (stage, True, self.options.limits))
        return self._run(_batch(steps), deadline_s)

    def borrow(
        self,
        row_ids: np.ndarray,
        places: int | np.ndarray,
        fields: Sequence[Field[Any]],
        stage: str = "",
        deadline_s: float | None = None,
    ) -> Any:
        """As `get`, but the batch may be a view of shared memory. Returns calls.Borrowed: `check` it after use."""
        steps = calls.get(self.sessions, row_ids, places, fields, (stage, False, self.options.limits))
        return self._run(steps, deadline_s)

    def free(self, row_ids: np.ndarray, places: int | np.ndarray, deadline_s: float | None = None) -> Any:
        """Rows are gone. Returns the number of those that were there."""
        wanted = {place: [row_ids[at].data] for place, at in split(row_ids, places).items()}
        return self._run(_count(calls.ask_all(self.sessions, m.Free(), wanted)), deadline_s)

    def ask(self, place: int, message: msgspec.Struct, deadline_s: float | None = None) -> Any:
        """One call without a batch, such as Stats, Subscribe, Allow, Snapshot, Restore, Shutdown. Returns the reply."""
        return self._run(_only(calls.ask_all(self.sessions, message, {place: []})), deadline_s)

    def inventory(self, place: int, deadline_s: float | None = None) -> Any:
        """Everything that a warehouse holds. Returns calls.Inventory."""
        return self._run(calls.inventory(self.sessions, place), deadline_s)

    def redirect(self, place: int, peer: Peer) -> None:
        """The rows of a place are served by another process from now on: its replica, or a new one elsewhere.

        Calls that wait are said again there.
        """
        self._unwatch(place)
        self.connections[place].close()
        self.connections[place] = connect(self._context, peer, self._keys)
        session = self.sessions[place]
        session.welcome, session.writer, session._done = None, None, []  # its slab is another client's there
        self._watch_line(place)

    def _watch_line(self, place: int) -> None:
        raise NotImplementedError

    def _unwatch(self, place: int) -> None:
        raise NotImplementedError

    # --- what both do with messages ----------------------------------------------------------------------------

    def _send(self, ask: Ask) -> int:
        """Say one thing; its call number."""
        assert ask.build is not None
        session = self.sessions[ask.place]
        message, frames = ask.build(session)
        self._number += 1
        if isinstance(message, m.Hello):
            session.asked = self.connections[ask.place].ups
        self.connections[ask.place].send([m.CALLS.pack(CALL, self._number, message), *frames])
        return self._number

    def _receive(self, place: int) -> list[tuple[int, Answer]]:
        """Answers that are here, by call number; pushes are dealt with."""
        found = []
        session = self.sessions[place]
        for frames in self.connections[place].receive():
            try:
                check_size(frames, self.options.limits)
                kind, number, message = m.REPLIES.unpack(frames[0] if frames else b"")
                if kind == PUSH:
                    self._pushed(place, message, frames[1:])
                    continue
            except DockError:
                self.bad_messages += 1
                continue
            if isinstance(message, m.Full):
                session.full_at = session.rooms
            if isinstance(message, m.Stored | m.Full):  # also if nobody waits for it any more: a slab may come along
                session.stored(message)
            elif isinstance(message, m.Welcome):
                if not self._same_line(place, session.asked):
                    continue  # of a process that has gone since
                session.greeted(message, self.connections[place].ups)
            found.append((number, (message, frames[1:])))
        return found

    def _pushed(self, place: int, message: Any, frames: Sequence[memoryview]) -> None:
        if isinstance(message, m.Room):
            self.sessions[place].rooms += 1
        elif isinstance(message, m.Notices) and self.on_notice is not None:
            self.on_notice(place, message.first, message.last, notices_from(message, frames)[0])

    def _same_line(self, place: int, ups: int) -> bool:
        """What was sent in that life of the line is still under way; what is sent before the first waits for it."""
        return max(ups, 1) == max(self.connections[place].ups, 1)

    def _check_line(self, place: int, since: int | None = None) -> None:
        """LineReset if the greeting or what was sent `since` was said to an earlier connection.

        Raises WarehouseLost if the warehouse stays away.
        """
        session, line = self.sessions[place], self.connections[place]
        if line.state == REFUSED:
            raise WarehouseLost(
                f"warehouse {place} at {line.peer.endpoint} does not let this process in",
                "its list of allowed keys lacks this client's public key",
            )
        if line.state == DOWN and time.monotonic() - line.down_since >= self.options.lost_s:
            raise self._lost(place)
        stale = session.welcome is not None and session.ups != line.ups
        if line.state == UP and (stale or (since is not None and not self._same_line(place, since))):
            session.welcome = None
            raise LineReset

    def _lost(self, place: int) -> WarehouseLost:
        line, session = self.connections[place], self.sessions[place]
        who = f"warehouse {place} at {line.peer.endpoint}"
        if session.welcome is None and not line.ups:
            return WarehouseLost(
                f"{who}: nothing has answered for {self.options.lost_s:g} s", "is it started, and is the address right?"
            )
        pid = f" (pid {session.welcome.pid})" if session.welcome else ""
        return WarehouseLost(
            f"{who}{pid} has gone and did not come back within {self.options.lost_s:g} s",
            "its rows are served again after a restart with a log, or generated anew",
        )

    def _late(self, places: Sequence[int], deadline_s: float | None) -> TakeTimeout:
        names = ", ".join(f"{place} at {self.connections[place].peer.endpoint}" for place in sorted(set(places)))
        full = [place for place in places if self.sessions[place].full_at == self.sessions[place].rooms]
        return TakeTimeout(
            f"no answer within {self._deadline(deadline_s):g} s from warehouse {names}",
            "it is full: rows must be retired first" if full else "it is busy, or the network between is cut",
        )

    def _deadline(self, deadline_s: float | None) -> float:
        return self.options.deadline_s if deadline_s is None else deadline_s

    def _close(self) -> None:
        for line in self.connections.values():
            line.close()
        Context.let_go()


def _batch(steps: Steps) -> Steps:
    return (yield from steps).batch


def _only(steps: Steps) -> Steps:
    return next(iter((yield from steps).values()))[0]


def _count(steps: Steps) -> Steps:
    return sum(reply.rows for reply, _ in (yield from steps).values())
