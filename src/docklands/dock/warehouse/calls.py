"""What a client of warehouses says and makes of the answers, without a socket: generators that a driver runs.

A generator yields lists of `Ask` and is sent the list of their answers; it returns the call's result. So the blocking
client and the asyncio client (warehouse_client.py) share every rule. When a line was lost and is back, the driver
throws `LineReset`: the generator greets anew and says again what was not answered; every call is idempotent.

Legend: B rows.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from docklands import errors
from docklands.core.batch import Batch, Jagged
from docklands.core.fields import Field
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.arena import Extent, Mapped, SlabWriter, start_ticks, writable
from docklands.dock.warehouse.chunks import join
from docklands.dock.warehouse.together import Load, Put, split
from docklands.dock.wire.format import (
    Buffer,
    Home,
    Limits,
    Part,
    batch_of,
    decode_parts,
    encode_parts,
    int64s,
)
from docklands.errors import DockError, DocklandsError, RowGone, WireError

SLAB = 4 << 20
"""Bytes of a slab at least: so that it is leased once for many puts."""
AHEAD = 16 << 20
"""Bytes at most of a slab that is leased before there is anything to be written to it."""

Answer = tuple[Any, list[memoryview]]


class LineReset(BaseException):
    """The connection to a warehouse was lost and is back: what was not answered must be said again."""


@dataclass(frozen=True)
class Ask:
    """One message to one warehouse, made when it is sent. rooms: no message, wait for more Room pushes than that."""

    place: int
    build: Callable[[Session], tuple[Any, list[Buffer]]] | None = None
    rooms: int = -1


Steps = Generator[list[Ask], list[Answer], Any]


@dataclass
class Session:
    """What a client knows of one warehouse since its last greeting.

    ups    the life of the line that the greeting belongs to; asked: in which the last one was sent
    rooms  Room pushes so far; full_at: how many there had been when a put was last answered Full
    """

    name: str
    share: bool = True
    welcome: m.Welcome | None = None
    ups: int = -1
    asked: int = 0
    rooms: int = 0
    full_at: int = -1
    arenas: list[Mapped] = field(default_factory=list)
    writer: SlabWriter | None = None
    _paths: list[str] = field(default_factory=list)
    _file: mmap.mmap | None = None
    _done: list[int] = field(default_factory=list)
    _asked: list[int] | None = None

    @property
    def local(self) -> bool:
        """The warehouse's shared memory is mapped here."""
        return bool(self.arenas)

    def greet(self) -> tuple[m.Hello, list[Buffer]]:
        return m.Hello(self.name, os.getpid(), start_ticks(os.getpid())), []

    def greeted(self, welcome: m.Welcome, ups: int) -> None:
        """Map what the warehouse shares; if that cannot be done it is on another node, and bytes are sent."""
        old = {arena.nonce for arena in self.arenas}
        self.welcome, self.ups, self._asked = welcome, ups, None
        if self.share and {arena.nonce for arena in welcome.arenas} != old:
            self.writer, self._file, self._done = None, None, []
            try:
                self.arenas = [Mapped(arena.path, arena.nonce) for arena in welcome.arenas]
                self._paths = [arena.path for arena in welcome.arenas]
            except WireError:
                self.arenas = []

    def lease(self, nbytes: int) -> m.Lease | None:
        """The call for a slab, if `nbytes` do not fit into the one that there is."""
        if not self.local or (self.writer is not None and self.writer.left >= nbytes):
            return None
        return m.Lease(max(SLAB, nbytes), list(self._done))

    def leased(self, slab: m.Slab, told: Sequence[int] = ()) -> None:
        """Write there from now on; the slab before it is finished once this call's put is answered.

        told  finished slabs that the warehouse has been told of with this call; others may have ended meanwhile
        """
        self._done = [number for number in self._done if number not in told]
        if self.writer is not None:
            self._done.append(self.writer.generation)
        self.writer = None
        if slab.nbytes:
            try:
                self._file = self._file or writable(self._paths[0])
                self.writer = SlabWriter(self._file, Extent(slab.generation, slab.offset, slab.nbytes))
            except (OSError, ValueError):  # the warehouse has just died: the put will find out
                self.writer = None

    def ahead(self, parts: Sequence[Part]) -> m.Lease | None:
        """What goes with a put that has been written: the call for a slab, if another put like it would not fit."""
        nbytes = room_of(parts)
        if self.writer is None or self._asked is not None or self.writer.left >= nbytes or nbytes > AHEAD:
            return None
        self._asked = list(self._done)
        return m.Lease(max(SLAB, nbytes), self._asked)

    def stored(self, answer: Any) -> None:
        """A put has been answered, perhaps with the slab that was asked for."""
        slab = answer.slab if isinstance(answer, m.Stored) else m.Slab(0, 0, 0)
        if slab is None:
            return
        told, self._asked = self._asked or [], None
        if self.writer is not None and self.writer.left >= slab.nbytes:  # another one came meanwhile, or there is none
            self._done += [slab.generation] if slab.nbytes else []
        elif slab.nbytes:
            self.leased(slab, told)

    def unwanted(self, answer: Any) -> None:
        """Nobody waits for this answer any more: a slab is given back."""
        if isinstance(answer, m.Slab) and answer.nbytes:
            self._done.append(answer.generation)

    def place(self, *pieces: Tensor) -> Home | None:
        """Move values into the slab, end to end, if there is room."""
        if self.writer is None or self.writer.left < sum(values.numel() for values in pieces):
            return None
        return self.writer.write(*pieces)

    def find(self, home: Home, nbytes: int) -> Tensor:
        arena, generation, offset = home
        if not 0 <= arena < len(self.arenas):
            raise WireError(f"malformed message: a reference to arena {arena}")
        return self.arenas[arena].view(generation, offset, nbytes)

    def check(self, home: Home) -> None:
        if home[0] >= len(self.arenas):  # another process serves its rows by now, on another node
            raise RowGone("rows were in the shared memory of a warehouse that has gone")
        self.arenas[home[0]].check(home[1], home[2])


@dataclass(frozen=True)
class Inventory:
    """What a warehouse holds. births: order, group_id, place, sample, length and life by name, each int64 [B]."""

    row_ids: np.ndarray
    births: dict[str, np.ndarray]
    have: dict[str, np.ndarray]
    seq: int


class Borrowed:
    """A batch that may lie in shared memory: use it, then `check`. nbytes: of its values."""

    def __init__(self, batch: Batch, checks: Sequence[tuple[Session, Home]], nbytes: int | None = None) -> None:
        self.batch, self._checks = batch, checks
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        if self._nbytes is None:
            columns = [self.batch[field] for field in self.batch.fields]
            values = [column.values if isinstance(column, Jagged) else column for column in columns]
            self._nbytes = sum(v.numel() * v.element_size() for v in values)
        return self._nbytes

    def check(self) -> None:
        """RowGone if rows were freed meanwhile: whatever was made of the batch is void."""
        for session, home in self._checks:
            session.check(home)


def fail(answers: Sequence[Answer]) -> None:
    """Raise the first failure among the answers, as the error that it was in the warehouse."""
    for reply, _ in answers:
        if isinstance(reply, m.Failure):
            kind = getattr(errors, reply.kind, DockError)
            known = isinstance(kind, type) and issubclass(kind, DocklandsError)
            raise (kind if known else DockError)(reply.message, reply.hint)


def greeting(sessions: Mapping[int, Session], places: Sequence[int]) -> Steps:
    """Greet those warehouses that have not been. Their answers are noted by the driver, which knows the line."""
    asks = [Ask(place, Session.greet) for place in places if sessions[place].welcome is None]
    if asks:
        fail((yield asks))


def again(make: Callable[[], Steps]) -> Steps:
    """Run a generator, and run it again after a reset."""
    while True:
        try:
            return (yield from make())
        except LineReset:
            continue


def ask_all(sessions: Mapping[int, Session], message: Any, wanted: Mapping[int, Sequence[Buffer]]) -> Steps:
    """The same message to several warehouses, each with its frames; their answers by place."""

    def once() -> Steps:
        yield from greeting(sessions, list(wanted))
        answers = yield [Ask(place, lambda _, f=frames: (message, list(f))) for place, frames in wanted.items()]
        fail(answers)
        return dict(zip(wanted, answers))

    return again(once)


@dataclass(frozen=True)
class Why:
    """What a put is for: see m.Put. lives: row -> life, of rows that have another one than 0."""

    birth: m.Birth | None = None
    stage: str = ""
    lease: int = 0
    read: tuple[int, int] = (0, 0)
    lives: Mapping[int, int] = field(default_factory=dict)


def put(sessions: Mapping[int, Session], waiting: dict[int, Load], why: Why, now: bool = False) -> Steps:
    """Store columns, at all their places at once; waits where there is no room. Returns a Put.

    now  do not wait for room: None if there was not enough of it
    """
    stored: dict[int, Answer] = {}

    def message(place: int) -> Callable[[Session], tuple[Any, list[Buffer]]]:
        load = waiting[place]

        def build(session: Session) -> tuple[Any, list[Buffer]]:
            meta, buffers = encode_parts(load.row_ids, load.parts, session.place if session.local else None)
            lives = [why.lives.get(row, 0) for row in load.row_ids.tolist()] if why.lives else []
            return m.Put(meta, why.birth, why.stage, why.lease, why.read, lives, session.ahead(load.parts)), buffers

        return build

    def once() -> Steps:
        while waiting:
            here = list(waiting)
            yield from greeting(sessions, here)
            yield from leases(sessions, {place: waiting[place].parts for place in here})
            answers = yield [Ask(place, message(place)) for place in here]
            for place, answer in zip(here, answers):
                if isinstance(answer[0], m.Failure):
                    sessions[place].stored(answer[0])
            fail(answers)
            full = []
            for place, answer in zip(here, answers):
                if isinstance(answer[0], m.Full):
                    full.append(Ask(place, rooms=sessions[place].full_at))
                else:
                    stored[place] = answer
                    del waiting[place]
            if full and now:
                return None
            if full:
                yield full
        gone = [np.frombuffer(frames[0], np.int64) for _, frames in stored.values() if frames and len(frames[0])]
        return Put(
            {place: answer[0].seq for place, answer in stored.items()},
            sum(answer[0].ignored for answer in stored.values()),
            np.concatenate(gone) if gone else np.zeros(0, np.int64),
        )

    return again(once)


def room_of(parts: Sequence[Part]) -> int:
    """Bytes of a slab that columns take."""
    return sum(values.numel() + 64 for part in parts for values, _ in part.pieces)


def leases(sessions: Mapping[int, Session], parts: Mapping[int, Sequence[Part]]) -> Steps:
    """Slabs where the next puts do not fit into those that there are."""
    wanted = []
    for place, held in parts.items():
        call = sessions[place].lease(room_of(held))
        if call is not None:
            wanted.append((place, call))
    if wanted:
        answers = yield [Ask(place, lambda _, c=call: (c, [])) for place, call in wanted]
        fail(answers)
        for (place, call), (slab, _) in zip(wanted, answers):
            sessions[place].leased(slab, call.done)


def get(
    sessions: Mapping[int, Session],
    row_ids: np.ndarray,
    places: int | np.ndarray,
    fields: Sequence[Field[Any]],
    options: tuple[str, bool, Limits],
) -> Steps:
    """Columns of rows, in their order, from all places at once. Returns Borrowed. options: stage, copy, limits."""
    stage, copy, limits = options
    at = split(row_ids, places) or {0: np.arange(0)}
    named = {field.name: field for field in fields}
    rounds = [0]

    def once() -> Steps:
        while True:
            yield from greeting(sessions, list(at))
            share = rounds[0] < 3  # rows that moved while they were read are asked for again, in the end as bytes
            asks = [Ask(place, message(row_ids[rows], share)) for place, rows in at.items()]
            answers = yield asks
            fail(answers)
            rounds[0] += 1
            try:
                return assembled(list(zip(at, answers)))
            except RowGone:
                if not share:
                    raise

    def message(ids: np.ndarray, share: bool) -> Callable[[Session], tuple[Any, list[Buffer]]]:
        def build(session: Session) -> tuple[Any, list[Buffer]]:
            return m.Get(list(named), share and session.local, stage), [ids.data]

        return build

    def assembled(answers: list[tuple[int, Answer]]) -> Borrowed:
        batches: list[Batch] = []
        checks: list[tuple[Session, Home]] = []
        for place, (reply, frames) in answers:
            session = sessions[place]
            ids, parts = decode_parts(reply.batch, frames, limits, session.find if session.local else None)
            if {part.meta.name for part in parts} != set(named):
                raise WireError(f"warehouse {place} answered with other columns than were asked for")
            homes = {(home[0], home[1]): home for part in parts for _, home in part.pieces if home is not None}
            checks += [(session, home) for home in homes.values()]
            batches.append(batch_of(ids, [own(part) for part in parts] if copy else parts, named))
        found = Borrowed(merged(batches, at, fields), checks)
        if copy:
            found.check()
        return found

    return again(once)


def own(part: Part) -> Part:
    """A part that keeps no view of shared memory. Several pieces are copied when they are joined."""
    if len(part.pieces) != 1 or part.pieces[0][1] is None:
        return part
    return Part(part.meta, part.lengths, [(part.pieces[0][0].clone(), None)])


def merged(batches: Sequence[Batch], at: Mapping[int, np.ndarray], fields: Sequence[Field[Any]]) -> Batch:
    """The rows of several places in the order that was asked for."""
    if len(batches) == 1:
        return batches[0]
    order = np.concatenate(list(at.values()))
    columns = {field: join([batch[field] for batch in batches]) for field in fields}
    return Batch(np.concatenate([batch.row_ids for batch in batches]), columns).select(np.argsort(order))


def inventory(sessions: Mapping[int, Session], place: int) -> Steps:
    """Everything that a warehouse holds of a place. Returns an Inventory."""
    reply, frames = (yield from ask_all(sessions, m.Inventory(place), {place: []}))[place]
    rows = reply.rows
    if not 0 <= rows < 1 << 40 or len(frames) != 1 + len(reply.columns) or any(f.nbytes != rows for f in frames[1:]):
        raise WireError("malformed message: an inventory of the wrong size")
    table = int64s(frames[0], 7 * rows).reshape(7, rows)
    births = {name: table[1 + i] for i, name in enumerate(("order", "group_id", "place", "sample", "length", "life"))}
    have = {name: np.frombuffer(frame, np.uint8).astype(bool) for name, frame in zip(reply.columns, frames[1:])}
    return Inventory(table[0], births, have, reply.seq)
