"""The control process's lines to the warehouses: notices in, rows to free out.

After every (re)connection: subscribe, ask for the inventory, hold the notices back until it is there, then compare it
with what the controllers believe (recover.py). So a notice that was lost with a line, a warehouse that came back empty
and one that replayed its log are one case.

Legend: B rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from docklands.core.graph import rows_text
from docklands.dock.control import messages as c
from docklands.dock.control.desk import NOTICES, Desk
from docklands.dock.control.recover import align
from docklands.dock.rules.control import SLOT
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.arena import start_ticks
from docklands.dock.warehouse.notices import notices_from
from docklands.dock.wire.format import CALL, PUSH, Buffer, int64s
from docklands.dock.wire.lines import Line, connect
from docklands.dock.wire.net import UP, Keys, Peer
from docklands.errors import WireError

log = logging.getLogger("docklands.dock.rules.control")

HELLO, SUBSCRIBE, FREE, INVENTORY = 1, 2, 3, 4
"""Call numbers; those of inventories go on from the last."""


class Warehouse(msgspec.Struct, frozen=True):
    """Where a warehouse listens."""

    endpoint: str
    public_key: str = ""


@dataclass
class Link:
    """One line.

    pid   of the warehouse process; told: of the one whose inventory came last
    held  notices that came before the inventory; None once it is there
    """

    line: Line
    ups: int = 0
    pid: int = 0
    told: int = 0
    asked: int = 0
    held: list[tuple[m.Notices, list[memoryview]]] | None = field(default_factory=list)
    rebuilt: bool = False


class Links:
    """Lines to all warehouses. rebuilt: the control has been rebuilt from its journal, without columns."""

    def __init__(self, desk: Desk, warehouses: Sequence[Warehouse], keys: Keys | None, rebuilt: bool) -> None:
        self.desk = desk
        desk.mute = set(range(len(warehouses)))
        self._keys = keys
        self._losses = desk.epoch << 32  # an answer to an earlier process counts for nothing
        self._context = zmq.Context()
        peers = [Peer(w.endpoint, w.public_key) for w in warehouses]
        self.links = [Link(connect(self._context, peer, keys), rebuilt=rebuilt) for peer in peers]

    @property
    def handles(self) -> list[Any]:
        return [handle for link in self.links for handle in link.line.handles]

    def read(self, ready: Container[Any] | None) -> None:
        """Take in what the warehouses say. ready: sockets that have something; None: look at all."""
        for place, link in enumerate(self.links):
            if ready is not None and not any(handle in ready for handle in link.line.handles):
                continue
            if link.line.look() and link.line.state != UP:
                log.warning("dock: the line to warehouse %d at %s is down", place, link.line.peer.endpoint)
            if link.line.state == UP and link.ups != link.line.ups:
                self._greet(place, link)
            for frames in link.line.receive():
                try:
                    kind, number, message = m.REPLIES.unpack(frames[0] if frames else b"")
                    if kind == PUSH and isinstance(message, m.Notices):
                        self._notices(place, link, message, frames[1:])
                    elif isinstance(message, m.Welcome):
                        link.pid = message.pid
                    elif isinstance(message, m.Inventoried) and number == INVENTORY + link.asked:
                        self._inventory(place, link, message, frames[1:])
                    elif isinstance(message, m.Failure):
                        log.warning("dock: warehouse %d refused a call: %s", place, message.message)
                except WireError as error:
                    log.warning("dock: a bad message from warehouse %d: %s", place, error)

    def move(self, place: int, warehouse: Warehouse) -> tuple[Line, Line] | None:
        """The rows of a place are served elsewhere from now on: (old line, new one); None if they are already."""
        link = self.links[place]
        peer = Peer(warehouse.endpoint, warehouse.public_key)
        if link.line.peer == peer:
            return None
        log.warning("dock: the rows of warehouse %d are served at %s from now on", place, peer.endpoint)
        old = link.line
        link.line, link.ups, link.held, link.told = connect(self._context, peer, self._keys), 0, [], 0
        return old, link.line

    def addresses(self) -> list[Any]:
        """Where the warehouses are, to be pushed to a client."""
        peers = [link.line.peer for link in self.links]
        return [
            [c.REPLIES.pack(PUSH, 0, c.Moved(place, peer.endpoint, peer.public_key))]
            for place, peer in enumerate(peers)
        ]

    def free(self, rows: Sequence[tuple[int, np.ndarray]]) -> None:
        """Rows are gone. A warehouse that is away hears of them when it is back, from its inventory."""
        for place, row_ids in rows:
            link = self.links[place]
            if link.held is None and link.line.state == UP and not self.desk.frozen:
                self._say(link, FREE, m.Free(), [np.ascontiguousarray(row_ids).data])

    def close(self) -> None:
        for link in self.links:
            link.line.close()
        self._context.destroy(linger=0)

    def _greet(self, place: int, link: Link) -> None:
        """A new line: everything from the start."""
        link.ups, link.held = link.line.ups, []
        self._say(link, HELLO, m.Hello("control", os.getpid(), start_ticks(os.getpid())))
        self._say(link, SUBSCRIBE, m.Subscribe([]))
        self._ask_inventory(place, link)

    def refresh(self, rebuilt: bool) -> None:
        """Ask every warehouse what it holds: frees were held back, or (`rebuilt`) a state was loaded."""
        for place, link in enumerate(self.links):
            link.rebuilt = link.rebuilt or rebuilt
            if link.line.state == UP and link.ups == link.line.ups:
                link.held = link.held or []
                self._ask_inventory(place, link)

    def _ask_inventory(self, place: int, link: Link) -> None:
        """Only the answer to the last question counts: an earlier one may be of before a restore."""
        link.asked += 1
        self._say(link, INVENTORY + link.asked, m.Inventory(place))

    def _say(self, link: Link, number: int, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> None:
        link.line.send([m.CALLS.pack(CALL, number, message), *frames])

    def _notices(self, place: int, link: Link, message: m.Notices, frames: list[memoryview]) -> None:
        if link.held is not None:
            link.held.append((message, frames))
            return
        notices, ended = notices_from(message, frames)
        self.desk.control.notice(notices)
        for lease in ended:
            self.desk.ended(lease)
        self.desk.wake(NOTICES)

    def _inventory(self, place: int, link: Link, message: m.Inventoried, frames: list[memoryview]) -> None:
        """Compare, then catch up with what came meanwhile."""
        rows = message.rows
        if rows < 0 or len(frames) != 1 + len(message.columns) or any(f.nbytes != rows for f in frames[1:]):
            raise WireError("malformed message: an inventory of the wrong size")
        table = int64s(frames[0], 7 * rows).reshape(7, rows)
        have = {n: np.frombuffer(f, np.uint8).astype(bool) for n, f in zip(message.columns, frames[1:])}
        same = not link.rebuilt and 0 < link.told == link.pid
        lost, vain = align(self.desk.control, place, (table[0], have, table[5]), link.rebuilt, same)
        link.rebuilt = False
        self._note_lives(table[0], table[6], lost)
        for client in self.desk.clients.values():  # whoever could not admit a lost group again is asked once more
            client.asked = {group: loss for group, loss in client.asked.items() if group not in self.desk.lost}
        for stage, lease in message.ended:
            self.desk.over(stage, lease)
        if link.told and link.told != link.pid:
            log.warning("dock: warehouse %d was restarted (pid %d, then %d)", place, link.told, link.pid)
        link.told = self.desk.heard[place] = link.pid
        held, link.held = link.held or [], None
        for notices, buffers in held:
            self._notices(place, link, notices, buffers)
        self.desk.stale.discard(place)
        self.desk.mute.discard(place)
        self.desk.wake(NOTICES)
        self.desk.wake(SLOT)
        self.free([(place, vain)] if len(vain) else [])
        if len(lost):
            ids = rows_text(self.desk.control.roster.row_id[lost].tolist())
            log.warning("dock: warehouse %d lost %d rows, they are made anew: %s", place, len(lost), ids)
            roster = self.desk.control.roster
            self.desk.lost |= dict.fromkeys(roster.group_id[roster.blocks_of(lost)].tolist(), self._losses)

    def _note_lives(self, row_ids: np.ndarray, lives: np.ndarray, lost: np.ndarray) -> None:
        """Lives of the rows that a warehouse has, and a new one for the rows (slots) that it has lost."""
        roster, known = self.desk.control.roster, self.desk.lives
        later = (lives > 0) & (roster.find(row_ids) >= 0)
        for row, life in zip(row_ids[later].tolist(), lives[later].tolist()):
            known[row] = max(life, known.get(row, 0))
        if len(lost):
            self._losses = 1 + max(self._losses, max(known.values(), default=0))  # a snapshot may bring later ones
            known |= dict.fromkeys(roster.row_id[lost].tolist(), self._losses)

    def again(self) -> list[tuple[bytes, list[Any]]]:
        """Whoever can admit lost groups is asked for their prompts, once per loss and connection; (client, frames)."""
        pushes: list[tuple[bytes, list[Any]]] = []
        roster, desk = self.desk.control.roster, self.desk
        for group_id in [group for group in desk.lost if group not in roster.by_group]:
            del desk.lost[group_id]
        for client, held in desk.clients.items() if desk.lost else ():
            for group_id in held.groups & desk.lost.keys():
                loss = desk.lost[group_id]
                if held.asked.get(group_id) == loss:
                    continue
                held.asked[group_id] = loss
                block = roster.by_group[group_id]
                row_ids = roster.rows_of(block)
                again = c.Again(int(roster.order[block]), group_id, int(roster.place[block]), len(row_ids), loss)
                pushes.append((client, [c.REPLIES.pack(PUSH, 0, again), row_ids.data]))
        return pushes
