"""A second warehouse that has every row of the first: it is told of each put and free before the first answers.

The first one sends what it is about to store, in order, and holds back its replies and notices until the second has
acknowledged. When the line to the second is lost and back it is sent everything anew, since another process may answer
there; every message is idempotent. While the second is away for longer than `lost_s`, the first goes on alone and
counts it: a lost copy must not stop the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from docklands.dock.warehouse import messages as m
from docklands.dock.wire.format import CALL, Buffer, renumbered
from docklands.dock.wire.lines import connect
from docklands.dock.wire.net import UP, Keys, Peer
from docklands.errors import WireError

COPY = 1 << 48
"""First number of the messages that hold what was there before the line."""


class Replica:
    """The line to the second warehouse.

    everything  gives all records of the first one, as frames
    sent        number of the last message that the first one's answers have to wait for
    failures    messages that the second one refused
    behind      messages that the second one has not acknowledged, those with what was there before included
    """

    def __init__(
        self, peer: Peer, keys: Keys | None, lost_s: float, everything: Callable[[], Iterable[Sequence[Buffer]]]
    ) -> None:
        self._context = zmq.Context()
        self.line = connect(self._context, peer, keys)
        self.lost_s = lost_s
        self.sent = 0
        self.failures = 0
        self._everything = everything
        self._pending: dict[int, Sequence[Buffer]] = {}
        self._copying: dict[int, Sequence[Buffer]] = {}
        self._full: list[int] = []
        self._ups = 0
        self.look()

    @property
    def acked(self) -> int:
        """All up to this number are stored over there, or not waited for."""
        return self.sent if self.alone else min(self._pending, default=self.sent + 1) - 1

    @property
    def behind(self) -> int:
        return len(self._pending) + len(self._copying) + (self.line.state != UP or self._ups != self.line.ups)

    @property
    def alone(self) -> bool:
        """The second warehouse has been away for too long to wait for it."""
        return self.line.state != UP and time.monotonic() - self.line.down_since >= self.lost_s

    @property
    def timeout_s(self) -> float | None:
        """When patience with a lost line ends. None: look only when something comes."""
        if not self._pending or self.line.state == UP or self.alone:
            return None
        return max(0.0, self.line.down_since + self.lost_s - time.monotonic()) + 0.001

    def forward(self, frames: Sequence[Buffer]) -> None:
        """One more put or free."""
        self.sent += 1
        if self.alone:
            self._pending.clear()  # it is sent everything when it is back
            return
        self._pending[self.sent] = frames
        if self.line.state == UP and self._ups == self.line.ups:
            self._send(self.sent, frames)

    def look(self) -> None:
        """Take in what has come; over a new line send everything anew."""
        self.line.look()
        for frames in self.line.receive():
            try:
                _, number, reply = m.REPLIES.unpack(frames[0] if frames else b"")
            except WireError:
                self.failures += 1
                continue
            self._note(number, reply)
        if self.line.state == UP and self._ups != self.line.ups:
            self._ups = self.line.ups
            self._full.clear()
            self._copying = dict(enumerate(self._everything(), COPY))
            for number, frames in self._copying.items():
                self._send(number, frames)
            for number, frames in self._pending.items():
                self._send(number, frames)

    def close(self) -> None:
        self.line.close()
        self._context.destroy(linger=0)

    def _send(self, number: int, frames: Sequence[Buffer]) -> None:
        self.line.send([renumbered(frames[0], CALL, number), *frames[1:]])

    def _note(self, number: int, reply: Any) -> None:
        if isinstance(reply, m.Full):
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
