"""A talk with the desk of a control process, without the process."""

from __future__ import annotations

import msgspec
import numpy as np

from docklands.dock.control import messages as c
from docklands.dock.control.desk import Desk
from docklands.dock.rules.control import Control
from docklands.dock.rules.messages import Notice
from tests.dock_parts import GROUP, PLAIN, options, rows_of

A, B = b"client a", b"client b"


class Talk:
    """A desk whose clock and network are in the test's hands."""

    def __init__(self, **more) -> None:
        self.now = 100.0
        self.desk = Desk(Control(PLAIN, options(1, warehouses=1, **more)), 1, lambda: self.now)
        self.number = 0

    def say(self, client: bytes, message: msgspec.Struct, rows: np.ndarray | None = None, number: int = 0):
        """The replies of this turn: (client, reply)."""
        self.number = number or self.number + 1
        self.desk.call(client, self.number, message, [] if rows is None else [rows.tobytes()])
        return self.turn()

    def turn(self):
        self.desk.expire()
        self.desk.settle()
        found, self.desk.outbox = self.desk.outbox, []
        return [(client, reply) for client, _, (reply, _) in found]

    def ready(self, group: int, *columns: str) -> None:
        told = self.desk.control.flow.told
        for column in columns:
            for stage in told[column]:
                self.desk.control.notice([Notice(stage, rows_of(group), (column,), np.full(GROUP, 3))])


def admitted(*groups: int, **more) -> Talk:
    talk = Talk(**more)
    talk.say(A, c.Join("a"))
    for group in groups:
        talk.say(A, c.Admit([group]), rows_of(group))
        talk.ready(group, *talk.desk.control.flow.sources)
    return talk
