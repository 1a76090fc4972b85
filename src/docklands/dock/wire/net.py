"""Sockets of the dock: a server's ROUTER and a client's connection, ZeroMQ with CurveZMQ keys.

A server has a key pair and a list of the client keys that it lets in (ZAP, RFC 27); whoever has no such key gets no
answer, not even to a greeting. It listens on one address or one named interface, never on all of them. ipc:// sockets
need no keys: the permissions of the file say who may connect.

Nobody polls: both ends sleep in the kernel until a message, a change of the connection or a deadline.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import zmq
from zmq.backend import Socket as BareSocket
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from docklands.dock.wire.format import LIMITS, Limits
from docklands.dock.wire.near import Door, possible
from docklands.errors import ConfigError

ZAP = "inproc://zeromq.zap.01"
COPY_BELOW = 16 << 10
"""Frames smaller than this are copied into the message: cheaper than the bookkeeping of a shared one."""
BEAT_MS, BEATS_MS = 2_000, 8_000
"""A peer is asked for a sign of life this often, and given up after that long without one."""
NAME_S = 2.0
"""A server waits so long for the name of the process before it to be free."""
STANDARD_INPUT = -1
"""Instead of a parent's process number."""
UP, DOWN, REFUSED = "up", "down", "refused"


@dataclass(frozen=True)
class Keys:
    """A CurveZMQ key pair, Z85 text."""

    public: str
    secret: str = field(repr=False)


def make_keys() -> Keys:
    """A new key pair."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


@dataclass(frozen=True)
class Peer:
    """A server as its clients know it. public_key "": ipc, without keys. near: the short way will do (lines.py)."""

    endpoint: str
    public_key: str = ""
    near: bool = True


def check_endpoint(endpoint: str, keyed: bool) -> None:
    """ConfigError for an address that would listen everywhere, or that anybody could talk to."""
    kind, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if kind not in ("tcp", "ipc") or not rest:
        raise ConfigError(f"dock: endpoint {endpoint!r}", "use tcp://ADDRESS:PORT or ipc://PATH")
    if kind == "tcp" and host in ("", "*", "0.0.0.0", "::"):
        raise ConfigError(f"dock: endpoint {endpoint!r} listens on every interface", "name an address or an interface")
    if kind == "tcp" and not keyed:
        raise ConfigError(f"dock: endpoint {endpoint!r} has no key", "make a pair with wire_net.make_keys()")


def set_common(socket: zmq.Socket) -> None:
    """Settings of both ends: nothing is lost in a full queue, a silent peer is noticed, closing never waits."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, 0),
        (zmq.HEARTBEAT_IVL, BEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, BEATS_MS),
        (zmq.HEARTBEAT_TTL, BEATS_MS),
        (zmq.IPV6, 0),
    ):
        socket.setsockopt(option, value)


EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
SNDMORE, NOBLOCK = int(zmq.SNDMORE), int(zmq.NOBLOCK)
"""As plain numbers, for the bare socket: pyzmq's own makes enums of them, at more than the cost of a call."""


def has_message(socket: zmq.Socket) -> bool:
    """A receive would not block. Asking is cheaper than being refused."""
    return bool(int(BareSocket.get(socket, EVENTS)) & READABLE)


def send(socket: zmq.Socket, head: Sequence[bytes], frames: Sequence[Any]) -> None:
    """One message; large frames without a copy."""
    last = len(frames) - 1
    for part in head:
        BareSocket.send(socket, part, SNDMORE)
    for i, frame in enumerate(frames):
        small = memoryview(frame).nbytes < COPY_BELOW
        BareSocket.send(socket, frame, 0 if i == last else SNDMORE, copy=small)


def receive(socket: zmq.Socket) -> list[memoryview]:
    """The frames of a message that is here."""
    frames = []
    more = True
    while more:
        frame = BareSocket.recv(socket, NOBLOCK, copy=False)
        frames.append(frame.buffer)
        more = frame.more
    return frames


class Context:
    """One ZeroMQ context, and so one thread that moves bytes, for all lines of a process while somebody holds it."""

    _lock = threading.Lock()
    _held: ClassVar[dict[int, tuple[zmq.Context, int]]] = {}
    """By process: a child that was forked has none of its parent's."""

    @classmethod
    def hold(cls) -> zmq.Context:
        with cls._lock:
            context, count = cls._held.get(os.getpid()) or (zmq.Context(), 0)
            cls._held[os.getpid()] = context, count + 1
            return context

    @classmethod
    def let_go(cls) -> None:
        """All sockets of whoever held it are closed."""
        with cls._lock:
            context, count = cls._held.pop(os.getpid(), (None, 0))
            if context is not None and count > 1:
                cls._held[os.getpid()] = context, count - 1
            elif context is not None:
                context.destroy(linger=0)


class Listener:
    """A server's socket: calls in, each with the client that it is from, replies and pushes out.

    What is sent to clients of this node leaves at the next `receive`, all of a client's together.

    ready  what could be read when `receive` last woke

    Raises ConfigError when it cannot listen there.
    """

    def __init__(self, endpoint: str, keys: Keys | None, allowed: Iterable[str] = (), limits: Limits = LIMITS) -> None:
        check_endpoint(endpoint, keys is not None)
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._allowed: set[bytes] = set()
        self.allow(allowed)
        self.denied = 0
        self.ready: dict[Any, int] = {}
        self._door: Door | None = None
        self.socket = self._context.socket(zmq.ROUTER)
        set_common(self.socket)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.RCVHWM, 64)
        self.socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.nbytes)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            self.socket.setsockopt(zmq.ZAP_DOMAIN, b"dock")
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"dock: cannot listen on {endpoint}: {error.strerror}") from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        for socket in (self.socket, self._zap):
            self._poller.register(socket, zmq.POLLIN)
        self._door = self._open_door(keys, 2 * limits.nbytes) if keys is not None and possible() else None
        if self._door is not None:
            self._poller.register(self._door.fileno(), zmq.POLLIN)

    def _open_door(self, keys: Keys, most: int) -> Door | None:
        """Let clients of this node come the short way; None where that cannot be."""
        end = time.monotonic() + NAME_S
        while True:
            try:
                return Door((keys.public, keys.secret), self._admits, most)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                    return None
                time.sleep(0.05)

    def _admits(self, public_key: str) -> bool:
        try:
            return z85.decode(public_key) in self._allowed
        except (ValueError, KeyError, struct.error):
            return False

    @property
    def refused(self) -> int:
        """Clients that were not let in."""
        return self.denied + (self._door.denied if self._door else 0)

    def left(self) -> list[bytes]:
        """Clients of this node that have gone since this was last asked. Of others nothing is known here."""
        if self._door is None or not self._door.gone:
            return []
        gone, self._door.gone = self._door.gone, []
        return gone

    def watch(self, socket: Any) -> None:
        """Wake also when this socket (or file descriptor) can be read."""
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: Any) -> None:
        """Do not wait for this socket any more."""
        self._poller.unregister(socket)

    def allow(self, keys: Iterable[str]) -> None:
        """Let clients with these public keys in. Raises ConfigError for what is not a key."""
        for key in keys:
            try:
                found = z85.decode(key)
            except (ValueError, KeyError, struct.error):
                found = b""
            if len(found) != 32:
                raise ConfigError(f"dock: {key[:60]!r} is not a public key", "it has 40 characters, see make_keys()")
            self._allowed.add(found)

    def receive(self, most: int = 64, timeout_s: float | None = None) -> list[tuple[bytes, list[memoryview]]]:
        """Sleep until something comes, then up to `most` messages: (client, frames). May be empty after a wake-up."""
        if self._door is not None:
            self._door.flush()
        self.ready = dict(self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000))))
        found: list[tuple[bytes, list[memoryview]]] = []
        if self._zap in self.ready:
            self._answer_zap()
        if self._door is not None and self._door.fileno() in self.ready:
            found += self._door.receive()
        while self.socket in self.ready and len(found) < most and has_message(self.socket):
            client, *frames = receive(self.socket)
            found.append((bytes(client), frames))
        return found

    def send(self, client: bytes, frames: Sequence[Any]) -> None:
        """To one client; silently nothing if it has gone, unless the socket is told to say so."""
        if self._door is None or not self._door.send(client, frames):
            send(self.socket, [client], frames)

    def close(self) -> None:
        """End, after at most half a second for replies that are on their way."""
        if self._door is not None:
            self._door.close(0.5)
        self._context.destroy(linger=500)

    def _answer_zap(self) -> None:
        """Let in who has a key on the list."""
        while has_message(self._zap):
            version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart(zmq.NOBLOCK)
            good = mechanism == b"CURVE" and credentials[:1] and credentials[0] in self._allowed
            self.denied += not good
            status = [b"200", b"OK"] if good else [b"400", b"not on the list"]
            self._zap.send_multipart([version, request, *status, b"", b""])


class Parent:
    """The process that started this one: a server ends with it, however it dies.

    pid 0: there is none; STANDARD_INPUT: on another node, this process's standard input ends with it. Where the system
    has no process descriptors, only the launcher's signal ends a server.
    """

    def __init__(self, pid: int, listener: Listener) -> None:
        self._ended = False
        self._poll = select.poll()
        if pid == STANDARD_INPUT:
            self._poll.register(0, select.POLLIN)
            listener.watch(0)
            return
        if not pid or not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True
        except OSError:  # a kernel or a sandbox without it
            return
        else:
            self._poll.register(fd, select.POLLIN)
            listener.watch(fd)

    @property
    def gone(self) -> bool:
        """It has ended."""
        return self._ended or bool(self._poll.poll(0))


class Connection:
    """A client's socket to one server, with what happens to the line. It reconnects by itself.

    state  UP, DOWN (since `down_since`, seconds of time.monotonic) or REFUSED: the server does not let this key in
    """

    def __init__(self, context: zmq.Context, peer: Peer, keys: Keys | None, identity: bytes = b"") -> None:
        self.peer = peer
        self.state, self.down_since = DOWN, time.monotonic()
        self.ups = 0
        self.socket = context.socket(zmq.DEALER)
        set_common(self.socket)
        self.socket.setsockopt(zmq.ROUTING_ID, identity or secrets.token_bytes(16).replace(b"\0", b"\1"))
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if peer.public_key:
            if keys is None:
                raise ConfigError(f"dock: {peer.endpoint} wants a key", "make a pair with wire_net.make_keys()")
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, peer.public_key.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        wanted = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self.monitor = self.socket.get_monitor_socket(wanted)
        self.socket.connect(peer.endpoint)

    def post(self, frames: Sequence[Any]) -> None:
        """As `send`, but it may wait for `flush`, and leave with others."""
        send(self.socket, [], frames)

    def flush(self) -> None:
        """Let go what was posted. ZeroMQ has its own thread for that."""

    @property
    def handles(self) -> tuple[zmq.Socket, zmq.Socket]:
        """What a ZeroMQ poller can wait for: messages, changes of the line."""
        return self.socket, self.monitor

    @property
    def filenos(self) -> tuple[int, int]:
        """The same as file descriptors, which tell of changes only: look until there is nothing."""
        return self.socket.fileno(), self.monitor.fileno()

    @property
    def edge(self) -> bool:
        """The descriptors tell of changes only, and sending may use one up: look for messages after it."""
        return True

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def send(self, frames: Sequence[Any]) -> None:
        send(self.socket, [], frames)

    def has_message(self) -> bool:
        """A message is here."""
        return has_message(self.socket)

    def receive(self) -> list[list[memoryview]]:
        """Every message that is here, each its frames."""
        found = []
        while has_message(self.socket):
            found.append(receive(self.socket))
        return found

    def changed(self) -> bool:
        """Something has happened to the line: `look`."""
        return has_message(self.monitor)

    def look(self) -> bool:
        """Take note of what happened to the line; whether its state has changed."""
        before = self.state, self.ups
        while self.changed():
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = UP
                self.ups += 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.state = REFUSED
            elif self.state == UP:
                self.state, self.down_since = DOWN, time.monotonic()
        return before != (self.state, self.ups)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
