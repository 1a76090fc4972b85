"""A second warehouse that has every row of the first: it is told of each put and free before the first answers.

The first one sends what it is about to store, in order, and holds back its replies and notices until the second has
acknowledged. When the line to the second is lost and back it is asked what it has, told to forget what the first does
not have any more, and sent everything anew, since another process may answer there; every message is idempotent. While
the second is away, or silent with something to answer, for longer than `lost_s`, the first goes on alone and counts it:
a lost copy must not stop the run. Silence ends with the next answer, and all begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from docklands.dock.warehouse import messages as m
from docklands.dock.wire.format import CALL, Buffer, renumbered
from docklands.dock.wire.lines import connect
from docklands.dock.wire.net import UP, Keys, Peer
from docklands.errors import WireError

COPY = 1 << 48
"""First number of the messages that hold what was there before the line."""
ASKED = COPY - 1
"""Number of the question what the second one has."""


@dataclass(frozen=True)
class Mine:
    """What the first warehouse has.

    everything  all its records, as frames
    outdated    of the second one's inventory, the rows that it has to forget
    """

    everything: Callable[[], Iterable[Sequence[Buffer]]]
    outdated: Callable[[m.Inventoried, Sequence[Buffer]], np.ndarray]


class Replica:
    """The line to the second warehouse.

    sent        number of the last message that the first one's answers have to wait for
    failures    messages that the second one refused
    behind      messages that the second one has not acknowledged, those with what was there before included
    """

    def __init__(self, peer: Peer, keys: Keys | None, lost_s: float, mine: Mine) -> None:
        self._context = zmq.Context()
        self.line = connect(self._context, peer, keys)
        self.lost_s = lost_s
        self.sent = 0
        self.failures = 0
        self._mine = mine
        self._pending: dict[int, Sequence[Buffer]] = {}
        self._copying: dict[int, Sequence[Buffer]] = {}
        self._full: list[int] = []
        self._ups = 0
        self._silent, self._heard = False, 0.0
        self.look()

    @property
    def acked(self) -> int:
        """All up to this number are stored over there, or not waited for."""
        return self.sent if self.alone else min(self._pending, default=self.sent + 1) - 1

    @property
    def behind(self) -> int:
        new = self.line.state != UP or self._ups != self.line.ups or self._silent
        return len(self._pending) + len(self._copying) + new

    @property
    def alone(self) -> bool:
        """The second warehouse has been away or silent for too long to wait for it."""
        away = self.line.state != UP and time.monotonic() - self.line.down_since >= self.lost_s
        return away or self._silent

    @property
    def timeout_s(self) -> float | None:
        """When patience with a lost line or a silent peer ends. None: look only when something comes."""
        if not (self._pending or self._copying) or self.alone:
            return None
        since = self._heard if self.line.state == UP else self.line.down_since
        return max(0.0, since + self.lost_s - time.monotonic()) + 0.001

    def forward(self, frames: Sequence[Buffer]) -> None:
        """One more put or free."""
        self.sent += 1
        if self.alone:
            self._pending.clear()  # it is sent everything when it is back
            return
        if not self._pending and not self._copying:
            self._heard = time.monotonic()
        self._pending[self.sent] = frames
        if self.line.state == UP and self._ups == self.line.ups and ASKED not in self._copying:
            self._send(self.sent, frames)

    def look(self) -> None:
        """Take in what has come; over a new line, and after silence, begin anew."""
        self.line.look()
        for frames in self.line.receive():
            self._heard = time.monotonic()
            self._ups = 0 if self._silent else self._ups
            try:
                _, number, reply = m.REPLIES.unpack(frames[0] if frames else b"")
            except WireError:
                self.failures += 1
                continue
            self._note(number, reply, frames[1:])
        if self.line.state == UP and self._ups != self.line.ups:
            self._ups, self._silent, self._heard = self.line.ups, False, time.monotonic()
            self._full.clear()
            self._copying = {ASKED: [m.CALLS.pack(CALL, ASKED, m.Inventory())]}
            self._send(ASKED, self._copying[ASKED])
        elif self.line.state == UP and (self._pending or self._copying):
            if time.monotonic() - self._heard >= self.lost_s:
                self._silent = True
                for waiting in (self._pending, self._copying, self._full):
                    waiting.clear()

    def close(self) -> None:
        self.line.close()
        self._context.destroy(linger=0)

    def _send(self, number: int, frames: Sequence[Buffer]) -> None:
        self.line.send([renumbered(frames[0], CALL, number), *frames[1:]])

    def _copy(self, outdated: np.ndarray) -> None:
        """Send everything, after the rows that are to be forgotten; then what has come meanwhile."""
        forget = [[m.CALLS.pack(CALL, COPY, m.Free()), outdated.data]] if len(outdated) else []
        self._copying = dict(enumerate([*forget, *self._mine.everything()], COPY))
        for number, frames in (*self._copying.items(), *self._pending.items()):
            self._send(number, frames)

    def _note(self, number: int, reply: Any, buffers: Sequence[Buffer]) -> None:
        if number == ASKED:
            if self._copying.pop(ASKED, None):
                asked = isinstance(reply, m.Inventoried)
                self._copy(self._mine.outdated(reply, buffers) if asked else np.zeros(0, np.int64))
        elif isinstance(reply, m.Full):
            self._full.append(number)
        elif isinstance(reply, m.Room):
            full, self._full = self._full, []
            for waiting in full:
                frames = self._pending.get(waiting) or self._copying.get(waiting)
                if frames:
                    self._send(waiting, frames)
        else:
            self.failures += isinstance(reply, m.Failure)
            self._pending.pop(number, None)
            self._copying.pop(number, None)
