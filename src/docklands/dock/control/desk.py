"""What a control process does with a call: calls in, replies out, no socket. A call that must wait is parked
(control_parking.py) under what may wake it: a stage, a slot, the notices of the warehouses.

Legend: B rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from docklands.core.protocols import Rows
from docklands.dock.control import messages as c
from docklands.dock.control import recover
from docklands.dock.control.parking import Attempt, Parked, Parking, Reply, failure
from docklands.dock.rules import explain
from docklands.dock.rules.control import SLOT, Control
from docklands.dock.rules.ledger import where
from docklands.dock.rules.messages import Ended
from docklands.dock.rules.table import NO_ROWS, unique_ids
from docklands.dock.wire.format import Buffer, int64s
from docklands.errors import DockClosed, DockError, DocklandsError, TakeTimeout, WireError

log = logging.getLogger("docklands.dock.rules.control")

NOTICES = "@notices"
"""Key of those that wait for what a warehouse has to tell."""
GRACE_S = 10.0
"""A finish waits so long for the notices of its columns."""


@dataclass
class Client:
    """Who has joined.

    groups  admitted by it and in flight; gone: those that left and it was not told yet
    asked   groups that it was asked to admit again, after which loss
    """

    name: str
    groups: set[int] = field(default_factory=set)
    gone: list[int] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)


class Clients:
    """Who is there, and what they have admitted: base of Desk, which sets these."""

    control: Control
    clients: dict[bytes, Client]
    lost: dict[int, int]
    mute: set[int]
    frozen: set[bytes]
    thawed: bool
    places: int
    _parking: Parking
    clock: Callable[[], float]

    def _park(
        self, client: bytes, number: int, key: str, attempt: Attempt, wait: tuple[float, Attempt], want: Any = None
    ) -> None:
        """The call waits under `key`. wait: seconds, and the answer after them."""
        self._parking.park(key, Parked(client, number, want, attempt, self.clock() + wait[0], wait[1]))

    def _admit(self, client: bytes, number: int, message: c.Admit, row_ids: np.ndarray) -> Reply | None:
        """All groups of the call, or none yet."""
        control, groups = self.control, message.group_ids
        if not groups or len(row_ids) % len(groups) or len(set(groups)) != len(groups):
            raise DockError(f"admission of {len(groups)} groups with {len(row_ids)} rows", "groups are of one size")
        if len(groups) > control.options.window:
            raise DockError(f"{len(groups)} groups at once, at most {control.options.window} are in flight")
        places = message.place if isinstance(message.place, list) else [message.place] * len(groups)
        if len(places) != len(groups) or not all(-1 <= place < self.places for place in places):
            raise DockError(f"admission to warehouse {', '.join(map(str, places))} of {self.places}")
        at = dict(zip(groups, places))
        parts, wanted = row_ids.reshape(len(groups), -1), 1

        def attempt() -> Reply | None:
            control.raise_failure()
            if control.closed and not message.loss:  # what was lost of those that are here may be in a snapshot yet
                raise DockClosed("the dock is closed: no group is admitted any more")
            if message.loss and not control.roster.by_group.keys() >= set(groups):  # they have left meanwhile
                return c.Admitted([], [], groups), []
            nonlocal wanted
            if (self.mute and not message.loss) or 1 < wanted > control.slots:  # wanted: what lacked a slot before
                return None
            new = list(zip(groups, parts))
            if not control.unknown(groups, row_ids):
                new = [(group, rows) for group, rows in new if not control.known(rows, group)]
            if len(new) > control.slots:
                wanted = len(new)
                return None
            control.admit_all(new, [at[group] for group, _ in new])
            return self._admitted(client, message), []

        wait = late("admit", self, partial(explain.why_slot, self.control, self.mute))
        return attempt() or self._park(client, number, SLOT, attempt, wait)

    def _admitted(self, client: bytes, message: c.Admit) -> c.Admitted:
        """Groups are here, and this client has their prompts."""
        roster, groups = self.control.roster, message.group_ids
        owner = self.clients.setdefault(client, Client("unknown"))
        owner.groups.update(groups)
        if message.loss and self.lost.get(groups[0]) == message.loss:
            del self.lost[groups[0]]
        gone, owner.gone = owner.gone, []
        blocks = [roster.by_group[group] for group in groups]
        return c.Admitted(roster.order[blocks].tolist(), roster.place[blocks].tolist(), gone)

    def _note_gone(self, groups: list[int]) -> None:
        """Prompts of groups that have left need not be kept by whoever admitted them."""
        for client in self.clients.values():
            mine = client.groups.intersection(groups)
            client.gone += mine
            client.groups -= mine

    def join(self, client: bytes, message: c.Join) -> None:
        """A client is there, or there again after its line was lost."""
        here = self.control.roster.by_group
        known = self.clients[client] = Client(message.client, {group for group in message.groups if group in here})
        known.gone = [group for group in message.groups if group not in here]
        kept = {(stage, lease) for stage, lease in message.leases}
        for stage, controller in self.control.controllers.items():
            for lease in [n for n, held in controller.leases.items() if held.owner == client.hex()]:
                if (stage, lease) not in kept:
                    self.control.give_back(stage, lease)

    def leave(self, client: bytes) -> str:
        """A client has gone: its rows are free at once, its calls are forgotten. Its name and what it held."""
        count = 0
        for stage, controller in self.control.controllers.items():
            for lease in [n for n, held in controller.leases.items() if held.owner == client.hex()]:
                count += controller.leases[lease].left
                self.control.give_back(stage, lease)
        self._parking.forget(client)
        self.thaw(client)
        return f"{self.clients.pop(client).name}: {count} leased rows are free again"

    def thaw(self, client: bytes) -> None:
        """A client saves no longer: what it has kept from being freed is looked at again."""
        if client in self.frozen:
            self.frozen.remove(client)
            self.thawed = self.thawed or not self.frozen


class Desk(Clients):
    """The control, its clients, and the calls that wait.

    outbox  (client, call number, reply) to be sent
    stale   warehouses that have to say what they hold before a loaded state counts
    mute    those that never have: before, no group enters, or what is put to them meanwhile would count as lost
    heard   process id of each warehouse that has said what it holds
    moves   warehouses to be served elsewhere; joined: clients that have to hear where they are
    lost    groups of which a warehouse has lost rows whole, with the number of the loss, until they are there again
    lives   row -> its life, of those that were lost and made anew (warehouse/lives.py)
    frozen  clients that are saving: nothing is freed meanwhile; thawed: the last one is through
    """

    def __init__(self, control: Control, places: int, clock: Callable[[], float]) -> None:
        self.control, self.clock = control, clock
        control.lossy = True
        self.epoch, self.pid = 1, 0
        self.running = True
        self.frozen: set[bytes] = set()
        self.thawed = False
        self.places = places
        self.stale, self.mute, self.heard = set[int](), set[int](), dict[int, int]()
        self.clients: dict[bytes, Client] = {}
        self.outbox: list[tuple[bytes, int, Reply]] = []
        self.lost: dict[int, int] = {}
        self.lives: dict[int, int] = {}
        self._loaded = b""
        self.moves: list[c.Move] = []
        self.joined: list[bytes] = []
        self._parking = Parking()

    # --- calls -------------------------------------------------------------------------------------------------

    def call(self, client: bytes, number: int, message: Any, frames: Sequence[Buffer]) -> None:
        """Answer, or park. Every error of the dock becomes a Failure."""
        try:
            reply = self._answer(client, number, message, frames)
        except DocklandsError as error:
            reply = failure(error)
        if reply is not None:
            self.outbox.append((client, number, reply))

    def _answer(self, client: bytes, number: int, message: Any, frames: Sequence[Buffer]) -> Reply | None:
        control = self.control
        if (read := getattr(message, "read", (0, 0))) > (0, 0):
            control.counters.read(message.stage, *read)
        match message:
            case c.Take():
                return self._take(client, number, message)
            case c.Finish():
                return self._finish(client, number, message, self._named(message, frames))
            case c.Slot():
                return self._slot(client, number)
            case c.Admit():
                return self._admit(client, number, message, ids(frames))
            case c.Retire() | c.Drop():
                rows = self._named(message, frames)
                if rows is None:
                    return c.Yes(False), []
                if isinstance(message, c.Retire):
                    control.retire(rows)
                else:
                    control.drop(rows, message.reason)
                    control.raise_failure()
            case c.GiveBack():
                control.give_back(message.stage, message.lease, message.later)
            case c.Join():
                self.join(client, message)
                self.joined.append(client)
                return c.Joined(self.epoch, self.pid), []
            case c.Load():
                return self._load(client, number, frames)
            case c.Move():
                if not 0 <= message.place < self.places:
                    raise DockError(f"move of warehouse {message.place} of {self.places}")
                self.moves.append(message)
            case c.End():
                control.end_of_prompts()
            case c.Close():
                control.closed = True
            case c.Quit():
                self.running = False
            case _:
                return self._look(client, message, frames)
        return c.Yes(), []

    def _load(self, client: bytes, number: int, frames: Sequence[Buffer]) -> Reply | None:
        """A saved state; answered once it has been compared with what the warehouses hold."""
        if len(frames) != 1:
            raise WireError("malformed message: a load without its state")
        if bytes(frames[0]) != self._loaded:  # else it is said again after its answer was lost
            recover.load(self.control, recover.unpacked(frames[0]))
            for controller in self.control.controllers.values():
                controller.begin_epoch(self.epoch)
            self.stale, self._loaded = set(range(self.places)), bytes(frames[0])

        def attempt() -> Reply | None:
            return None if self.stale else (c.Yes(), [])

        def timeout() -> Reply | None:
            raise TakeTimeout(f"load: warehouses {sorted(self.stale)} did not say what they hold", "are they there?")

        return attempt() or self._park(client, number, NOTICES, attempt, (self.control.options.wait_s, timeout))

    def _look(self, client: bytes, message: Any, frames: Sequence[Buffer]) -> Reply:
        """Calls that change nothing in the flow."""
        now = self.clock()
        match message:
            case c.Where():
                found = where(self.control.ledger, ids(frames))
                return c.There(len(found)), [found.data]
            case c.Look():
                waiting = [f"  waiting: {key.strip('@')} {count}" for key, count in self._parking.counts().items()]
                text = "\n".join([*explain.describe(self.control, now, None), *waiting])
                return c.View(explain.statistics(self.control, now, 0), text), []
            case c.Save():
                self.frozen.add(client)
                state = recover.packed(self.control.state_dict())
                return c.State(len(state), len(self.lost), [self.heard.get(p, 0) for p in range(self.places)]), [state]
            case c.Saved():
                self.thaw(client)
        return c.Yes(), []

    def _slot(self, client: bytes, number: int) -> Reply | None:
        def attempt() -> Reply | None:
            self.control.raise_failure()
            answer = self.control.look_slots()
            return None if answer is None else (c.Slots(answer), [])

        wait = late("slot", self, partial(explain.why_slot, self.control, self.mute))
        return attempt() or self._park(client, number, SLOT, attempt, wait)

    def _take(self, client: bytes, number: int, message: c.Take) -> Reply | None:
        stage = self.control.flow.stage(message.stage)
        part, most = (message.rank, message.ranks), message.max_tokens or None
        want = self.control.want(stage.name, message.groups or None, most, part, message.near)

        def attempt() -> Reply | None:
            self.control.raise_failure()
            rows = self.control.look_take(stage.name, want, self.clock(), client.hex())
            if rows is None:
                return None
            homes = self.control.homes(rows) if message.homes and rows.lease else {}
            lives = [self.lives.get(row, 0) for row in rows.row_ids.tolist()] if self.lives else []
            return c.Taken(stage.name, rows.lease, len(rows), homes, lives), [c.rows_frame(rows)]

        self.expire()
        wait = late(f"stage {stage.name!r}", self, partial(explain.why_take, self.control, stage, want), message.wait_s)
        return attempt() or self._park(client, number, stage.name, attempt, wait, want)

    def _named(self, message: c.Finish | c.Drop | c.Retire, frames: Sequence[Buffer]) -> Rows | None:
        """The rows that an acknowledgement speaks of; None: it does not name them, and its lease has ended."""
        if frames:
            return plain(message, ids(frames))
        slots = self.control.leased(message.stage, message.lease)
        return None if slots is None else plain(message, self.control.roster.row_id[slots])

    def ended(self, what: Ended) -> None:
        """A reader's last put has come, and it is through with its rows. What cannot be so is passed over."""
        self.control.counters.read(what.stage, *what.read)
        rows = Rows(what.row_ids, NO_ROWS, NO_ROWS, NO_ROWS, what.stage, what.lease)
        try:
            self.control.finish(rows, {})
        except DocklandsError as error:
            log.warning("dock: a lease of stage %r cannot end: %s", what.stage, error)

    def over(self, stage: str, lease: int) -> None:
        """A warehouse says that a lease has ended with a put; the notice of it may have been lost with a line."""
        controller = self.control.controllers.get(stage)
        if controller is not None and lease in controller.leases:
            self.ended(Ended(stage, lease, self.control.roster.row_id[controller.held(lease)]))

    def _finish(self, client: bytes, number: int, message: c.Finish, rows: Rows | None) -> Reply | None:
        """Acknowledge once the warehouses have told of the columns: a put comes by another way, within GRACE_S."""
        if rows is None:
            return c.Yes(False), []
        dropped = self.control.still_leased(rows, message.dropped)

        def attempt(last: bool = False) -> Reply | None:
            if not last and self.control.lacks_columns(rows, dropped):
                return None
            self.control.finish(rows, dropped)
            self.control.raise_failure()
            return c.Yes(), []

        return attempt() or self._park(client, number, NOTICES, attempt, (GRACE_S, lambda: attempt(last=True)))

    # --- waiting -----------------------------------------------------------------------------------------------

    def wake(self, key: str) -> None:
        """Try those that wait for `key` again."""
        self.outbox += self._parking.wake(key)

    def settle(self) -> list[tuple[int, np.ndarray]]:
        """After the calls and notices of a turn: wake whoever may go on. Returns (place, row ids) to free."""
        freed: list[tuple[int, np.ndarray]] = []
        while True:
            freed += self.control.settle()
            if self.control.gone:
                self._note_gone(self.control.gone)
            keys = [key for key in self.control.woken() if key in self._parking]
            before = len(self.outbox)
            for key in keys:
                self.wake(key)
            if len(self.outbox) == before:
                break  # nobody could go on, so nothing has changed
        for _, row_ids in freed if self.lives else ():
            for row in row_ids.tolist():
                self.lives.pop(row, None)
        return freed

    def expire(self) -> None:
        """Overdue leases and calls that have waited for too long."""
        now = self.clock()
        self.control.expire(now)
        self.outbox += self._parking.overdue(now)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, seconds of the clock."""
        lease = self.control.next_deadline()
        first = min(self._parking.earliest, math.inf if lease is None else lease)
        return None if first == math.inf else first


def late(who: str, desk: Clients, why: Callable[[float], str], wait_s: float = 0.0) -> tuple[float, Attempt]:
    """Seconds that a call may wait, and what is said at the end."""
    most = desk.control.options.wait_s
    seconds = min(wait_s, most) if wait_s > 0 else most  # also where it is not a number

    def timeout() -> Reply | None:
        text = f"{who} waited {explain.seconds(seconds)}: {why(desk.clock())}"
        raise TakeTimeout(text, "raise dock.wait_s if this is normal")

    return seconds, timeout


def ids(frames: Sequence[Buffer]) -> np.ndarray:
    """The row ids of a call. Raises WireError."""
    if len(frames) != 1 or memoryview(frames[0]).nbytes % 8:
        raise WireError("malformed message: expected one frame of row ids")
    found = int64s(frames[0], memoryview(frames[0]).nbytes // 8)
    if not unique_ids(found):
        raise DockError("a call names a row twice")
    return found


def plain(message: Any, row_ids: np.ndarray) -> Rows:
    """Rows as an acknowledgement names them."""
    return Rows(row_ids, NO_ROWS, NO_ROWS, NO_ROWS, message.stage, message.lease)
