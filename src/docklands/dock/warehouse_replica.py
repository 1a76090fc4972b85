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

from docklands.dock import wire_messages as m
from docklands.dock.wire import CALL, Buffer, renumbered
from docklands.dock.wire_net import UP, Connection, Keys, Peer
from docklands.errors import WireError


class Replica:
    """The line to the second warehouse.

    everything  gives all records of the first one, as frames
    sent        number of the last message that the first one's answers have to wait for
    failures    messages that the second one refused
    """

    def __init__(
        self, peer: Peer, keys: Keys | None, lost_s: float, everything: Callable[[], Iterable[Sequence[Buffer]]]
    ) -> None:
        self._context = zmq.Context()
        self.line = Connection(self._context, peer, keys)
        self.lost_s = lost_s
        self.sent = 0
        self.failures = 0
        self._everything = everything
        self._pending: dict[int, Sequence[Buffer]] = {}
        self._full: list[int] = []
        self._ups = 0
        self.look()

    @property
    def acked(self) -> int:
        """All up to this number are stored over there, or not waited for."""
        return self.sent if self.alone else min(self._pending, default=self.sent + 1) - 1

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
            for frames in self._everything():
                self._send(0, frames)
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
                if waiting in self._pending:
                    self._send(waiting, self._pending[waiting])
        else:
            self.failures += isinstance(reply, m.Failure)
            self._pending.pop(number, None)
