"""A client's line to a server, the short way within the node (near.py), or ZeroMQ over TCP (net.py)."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import zmq

from docklands.dock.wire.format import LIMITS
from docklands.dock.wire.near import Reach, reach
from docklands.dock.wire.net import DOWN, REFUSED, UP, Connection, Keys, Peer

LISTENS_S = 1.0
"""Seconds for a server to take a connection."""


class NearLine:
    """As Connection, to a server on this node. One that comes back, but not here, is talked to over TCP then."""

    def __init__(self, context: zmq.Context, peer: Peer, keys: Keys, found: Any) -> None:
        self.peer = peer
        self.state, self.down_since = DOWN, time.monotonic()
        self.ups = 0
        self._context, self._keys = context, keys
        elsewhere = partial(listens, peer.endpoint)
        self._reach = Reach(found, peer.public_key, (keys.public, keys.secret), elsewhere, 2 * LIMITS.nbytes)
        self._far: Connection | None = None
        self._before = 0

    @property
    def handles(self) -> tuple[int, int]:
        """What can be waited for: messages, changes of the line."""
        return self._reach.data, self._reach.news

    filenos = handles

    @property
    def edge(self) -> bool:
        """See Connection.edge."""
        return self.far

    @property
    def closed(self) -> bool:
        return self._reach.closed

    @property
    def far(self) -> bool:
        """It goes over TCP by now."""
        return self._far is not None

    def send(self, frames: Sequence[Any]) -> None:
        self.post(frames)
        self.flush()

    def post(self, frames: Sequence[Any]) -> None:
        """As `send`, but it may wait for `flush`, and leave with others."""
        (self._far.send if self._far else self._reach.send)(frames)

    def flush(self) -> None:
        self._reach.flush()

    def has_message(self) -> bool:
        """A message is here."""
        if self._far is None:
            self._reach.pump()
            return bool(self._reach.messages)
        if self._far.changed():
            self._reach.nudge()
        return self._far.has_message()

    def receive(self) -> list[list[memoryview]]:
        """Every message that is here, each its frames."""
        if self._far is not None:
            return self._far.receive() if self.has_message() else []
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
        if self._reach.given_up and self._far is None and not self.closed:
            self._far, self._before = Connection(self._context, self.peer, self._keys), self.ups
            for frames in self._reach.also(self._far.filenos):
                self._far.send(frames)
        if self._far is not None:
            self._far.look()
            if self._far.ups or self._far.state != DOWN:  # until it has been there it is down since the near line is
                self.state, self.down_since = self._far.state, self._far.down_since
            self.ups = self._before + self._far.ups
        return before != (self.state, self.ups)

    def close(self) -> None:
        if not self.closed:
            self._reach.close()
            if self._far is not None:
                self._far.close()


def listens(endpoint: str) -> bool:
    """Somebody takes connections at a TCP endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTENS_S).close()
    except (OSError, ValueError):
        return False
    return True


Line = Connection | NearLine


def connect(context: zmq.Context, peer: Peer, keys: Keys | None) -> Line:
    """A line to a server, the short way if it is on this node and can be reached so; else over TCP."""
    found = reach(peer.public_key) if peer.near and keys is not None else None
    return Connection(context, peer, keys) if found is None or keys is None else NearLine(context, peer, keys, found)
