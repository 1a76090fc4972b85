"""A client's line to a server, the short way within the node (near.py), or ZeroMQ over TCP (net.py)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import zmq

from docklands.dock.wire.format import LIMITS
from docklands.dock.wire.near import HELLO, MAGIC, Reach, reach
from docklands.dock.wire.net import DOWN, REFUSED, UP, Connection, Keys, Peer


class NearLine:
    """As Connection, to a server on this node."""

    def __init__(self, peer: Peer, keys: Keys, found: Any) -> None:
        self.peer = peer
        self.state, self.down_since = DOWN, time.monotonic()
        self.ups = 0
        hello = HELLO.pack(MAGIC, secrets.token_bytes(16), keys.public.encode())
        self._reach = Reach(found, peer.public_key, hello, 2 * LIMITS.nbytes)

    @property
    def handles(self) -> tuple[int, int]:
        """What can be waited for: messages, changes of the line."""
        return self._reach.data, self._reach.news

    filenos = handles

    @property
    def closed(self) -> bool:
        return self._reach.closed

    def send(self, frames: Sequence[Any]) -> None:
        self._reach.send(frames)
        self._reach.flush()

    def post(self, frames: Sequence[Any]) -> None:
        """As `send`, but it may wait for `flush`, and leave with others."""
        self._reach.send(frames)

    def flush(self) -> None:
        self._reach.flush()

    def has_message(self) -> bool:
        """A message is here."""
        self._reach.pump()
        return bool(self._reach.messages)

    def receive(self) -> list[list[memoryview]]:
        """Every message that is here, each its frames."""
        self._reach.pump()
        found, self._reach.messages = self._reach.messages, []
        return found

    def look(self) -> bool:
        """Take note of what happened to the line; whether its state has changed."""
        before = self.state, self.ups
        for there in self._reach.changes():
            if there:
                self.state, self.ups = UP, self.ups + 1
            elif there is None:
                self.state = REFUSED
            elif self.state == UP:
                self.state, self.down_since = DOWN, time.monotonic()
        return before != (self.state, self.ups)

    def close(self) -> None:
        if not self.closed:
            self._reach.close()


Line = Connection | NearLine


def connect(context: zmq.Context, peer: Peer, keys: Keys | None) -> Line:
    """A line to a server, the short way if it is on this node. It is taken up again the way it was made."""
    found = reach(peer.public_key) if peer.near and keys is not None else None
    return Connection(context, peer, keys) if found is None or keys is None else NearLine(peer, keys, found)
