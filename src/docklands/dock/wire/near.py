"""Lines within one node: a stream socket of the kernel in place of ZeroMQ over TCP, with one thread fewer per end.

A server that listens with a key pair (net.py) listens also on an abstract Unix socket, whose name follows from its
public key. So whoever knows where a server is finds it here too, if it is on this node: abstract names belong to a
network namespace, leave nothing in the file system, and end with their process. Both ends look at the user of the other
one (SO_PEERCRED) and talk to none but their own; a client says its public key, which must be on the server's list.

The stream begins with the client's hello, the server's answer and the client's proof: each end shows that it has the
secret key of the public one that the other knows it by (proof.py), over fresh numbers of both. What comes before is
never read as a message. Then messages follow, both ways.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from docklands.dock.wire.proof import CLIENT, PROOF, SERVER, holds, proof, shared
from docklands.dock.wire.stream import Stream, made

HELLO = struct.Struct(f"<8s16s40s{PROOF}s")
"""Magic, identity, public key, a fresh number."""
ANSWER = struct.Struct(f"<1s{PROOF}s{PROOF}s")
"""YES or NO, a fresh number, the server's proof."""
MAGIC = b"DKNEAR2\n"
YES, NO = b"Y", b"N"
RETRY_S, RETRIES_S = 0.02, 1.0
"""Between two tries to reach a server that has gone: first, and at most."""
FALL_S = 3.0
"""A server that has come back, and is not found here for so long, is talked to over TCP."""
CREDENTIALS = struct.Struct("3i")


def name_of(public_key: str) -> bytes:
    """The abstract name of the server with that key."""
    return b"\0docklands-" + hashlib.sha256(public_key.encode()).hexdigest()[:40].encode()


def same_user(sock: socket.socket) -> bool:
    """The process at the other end is this user's."""
    _, user, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return user == os.getuid()


def possible() -> bool:
    """This system has what it takes."""
    return all(hasattr(module, name) for module, name in ((socket, "SO_PEERCRED"), (select, "epoll"), (os, "eventfd")))


def reach(public_key: str) -> socket.socket | None:
    """A socket to the server with that key, if it is on this node and of this user."""
    if not public_key or not possible():
        return None
    sock = made(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.connect(name_of(public_key))
        if same_user(sock):
            return sock
    except OSError:
        pass
    sock.close()
    return None


class Door:
    """The server's end: clients of this node, each with its stream.

    admits  whether a client with that public key may come in
    gone    clients that have left since the list was last emptied; denied: how many were not let in
    """

    def __init__(self, keys: tuple[str, str], admits: Callable[[str], bool], most: int) -> None:
        """keys: public and secret. Raises OSError where another process has the name."""
        public_key, self._secret_key = keys
        self._admits, self._most = admits, most
        self._sock = made(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            self._sock.bind(name_of(public_key))
            self._sock.listen(128)
        except OSError:
            self._sock.close()
            raise
        self._epoll = select.epoll()
        self._epoll.register(self._sock.fileno(), select.EPOLLIN)
        self._streams: dict[int, Stream] = {}
        self._names: dict[int, bytes] = {}
        self._asked: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._clients: dict[bytes, Stream] = {}
        self._fresh: dict[Stream, None] = {}
        self.gone: list[bytes] = []
        self.denied = 0

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return self._epoll.fileno()

    def receive(self) -> list[tuple[bytes, list[memoryview]]]:
        """Take in what has come: (client, frames) of every message."""
        found: list[tuple[bytes, list[memoryview]]] = []
        for fd, events in self._epoll.poll(0):
            stream = self._streams.get(fd)
            if stream is None:
                self._accept()
                continue
            if events & select.EPOLLOUT:
                stream.flush()
                self._watch(stream)
            messages = stream.receive()
            while stream.preface and not stream.ended:
                messages = self._check(fd, stream) if fd in self._asked else self._greet(fd, stream)
            if messages:
                found += [(self._names[fd], frames) for frames in messages]
            if stream.ended:
                self._drop(fd)
        return found

    def send(self, client: bytes, frames: Sequence[Any]) -> bool:
        """One message, which leaves with the next `flush`; False: that client is not here."""
        stream = self._clients.get(client)
        if stream is None or stream.ended:
            return False
        stream.send(frames)
        self._fresh[stream] = None
        return True

    def flush(self) -> None:
        """Hand to the kernel what has been said since this was last called, one call for each client."""
        for stream in self._fresh:
            stream.flush()
            if stream.pending:
                self._watch(stream)
        self._fresh.clear()

    def close(self, linger_s: float) -> None:
        """End, after a while for what is still to be sent."""
        self.flush()
        end = time.monotonic() + linger_s
        while any(s.pending and not s.ended for s in self._streams.values()) and time.monotonic() < end:
            self._epoll.poll(0.01)
            for stream in self._streams.values():
                stream.flush()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._clients.clear()
        self._sock.close()
        self._epoll.close()

    def _watch(self, stream: Stream) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(stream.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if stream.pending else 0))

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EMFILE, errno.ENFILE):
                    raise
                return
            if not same_user(sock):
                self.denied += 1
                sock.close()
                continue
            self._streams[sock.fileno()] = Stream(made(sock), self._most, HELLO.size)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _greet(self, fd: int, stream: Stream) -> list[list[memoryview]]:
        """A client says who it is: let it prove that."""
        magic, client, key, number = HELLO.unpack(stream.preface)
        try:
            secret = shared(self._secret_key, key.decode()) if magic == MAGIC and self._admits(key.decode()) else b""
        except ValueError:  # no text, or no key
            secret = b""
        if not secret:
            stream.write([ANSWER.pack(NO, b"", b"")])
            stream.flush()
            return self._deny(stream)
        mine = os.urandom(PROOF)
        self._asked[fd] = client, secret, client + number + mine
        stream.write([ANSWER.pack(YES, mine, proof(secret, SERVER, client, number, mine))])
        stream.flush()
        return stream.proceed(PROOF)

    def _check(self, fd: int, stream: Stream) -> list[list[memoryview]]:
        """It is let in if it has proved its key; its first messages."""
        client, secret, facts = self._asked.pop(fd)
        if not holds(stream.preface, secret, CLIENT, facts):
            return self._deny(stream)
        self._names[fd] = client
        old, self._clients[client] = self._clients.get(client), stream
        if old is not None:  # it has come again before its old stream was seen to end
            self._drop(old.sock.fileno())
        return stream.proceed()

    def _deny(self, stream: Stream) -> list[list[memoryview]]:
        self.denied += 1
        stream.ended = True
        return []

    def _drop(self, fd: int) -> None:
        stream, client = self._streams.pop(fd), self._names.pop(fd, None)
        self._asked.pop(fd, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        stream.close()
        if client is not None and self._clients.get(client) is stream:
            del self._clients[client]
            self.gone.append(client)


class Reach:
    """The client's end of one line: its stream, and a thread that looks for the server while that is away.

    Two descriptors say when to look: `data` when something has come, `news` when the line has changed. `events` are the
    changes since they were last taken: True (it is there), False (it has gone), None (it does not let this key in).

    keys      this client's public and secret key
    elsewhere the server listens for other nodes; if it does so for FALL_S seconds and not here, `given_up` is set
    """

    def __init__(
        self, sock: socket.socket, public_key: str, keys: tuple[str, str], elsewhere: Callable[[], bool], most: int
    ) -> None:
        self._public_key, self._keys, self._elsewhere, self._most = public_key, keys, elsewhere, most
        self._identity = os.urandom(16)
        self._epoll = select.epoll()
        self.data, self.news = self._epoll.fileno(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.messages: list[list[memoryview]] = []
        self.given_up = self._nudged = False
        self._events: list[bool | None] = []
        self._early: list[list[Any]] | None = []
        self._found: socket.socket | None = None
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._stream: Stream | None = None
        self._in = False
        self._begin(sock)

    def send(self, frames: Sequence[Any]) -> None:
        """One message, which leaves with the next `flush`. Until the server has let this client in it is kept; later,
        without a line, it is lost.
        """
        if self._early is not None:
            self._early.append(list(frames))
        elif self._stream is not None and self._in:
            self._stream.send(frames)

    def flush(self) -> None:
        """Hand to the kernel what has been said."""
        if self._stream is not None and self._stream.pending:
            self._stream.flush()
            if self._stream.pending:
                self._watch(self._stream)

    def pump(self) -> None:
        """Take in what has come, and send on."""
        stream = self._stream
        if stream is None:
            return
        if stream.pending:
            stream.flush()
            self._watch(stream)
        self.messages += stream.receive()
        if stream.preface:
            self.messages += self._answered(stream)
        if stream.ended:
            with contextlib.suppress(OSError):
                self._epoll.unregister(stream.sock.fileno())
            stream.close()
            self._stream = None
            if not self._refused:
                self._tell(False)
                threading.Thread(target=self._seek, name="dock near", daemon=True).start()

    def _answered(self, stream: Stream) -> list[list[memoryview]]:
        """The server lets this client in, if it is the one that it should be: prove the own key. Its first messages."""
        word, number, said = ANSWER.unpack(stream.preface)
        secret = shared(self._keys[1], self._public_key)
        facts = self._identity + self._number + number
        if word != YES or not holds(said, secret, SERVER, facts):
            self._refused = stream.ended = True
            self._tell(None)
            return []
        stream.write([proof(secret, CLIENT, facts)])
        for frames in self._early or ():
            stream.send(frames)
        self._in, self._early = True, None
        stream.flush()
        self._watch(stream)
        self._tell(True)
        return stream.proceed()

    def changes(self) -> list[bool | None]:
        """Take the events; and the new stream, if there is one."""
        if not self._nudged or self._closing.is_set():
            return []
        self._nudged = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)
        with self._lock:
            found, self._found = self._found, None
        if found is not None:
            self._begin(found)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End; what the kernel has taken still arrives."""
        with self._lock:
            self._closing.set()
            for sock in (self._stream, self._found):
                if sock is not None:
                    sock.close()
            self._stream = self._found = None
            self._epoll.close()
            os.close(self.news)

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def also(self, descriptors: Sequence[int]) -> list[list[Any]]:
        """`data` tells of these, too; what was said and never sent."""
        for descriptor in descriptors:
            self._epoll.register(descriptor, select.EPOLLIN)
        early, self._early = self._early or [], None
        return early

    def nudge(self) -> None:
        """`news` can be read. The mark comes last: it may be missed for a moment, but never stays behind."""
        os.eventfd_write(self.news, 1)
        self._nudged = True

    def _begin(self, sock: socket.socket) -> None:
        self._stream = Stream(sock, self._most, ANSWER.size)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._in = self._refused = False
        self._number = os.urandom(PROOF)
        self._stream.write([HELLO.pack(MAGIC, self._identity, self._keys[0].encode(), self._number)])
        self._stream.flush()

    def _watch(self, stream: Stream) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(stream.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if stream.pending else 0))

    def _tell(self, event: bool | None) -> None:
        self._events.append(event)
        self.nudge()

    def _seek(self) -> None:
        """On a thread of its own: until the server is there again, or listens only for others."""
        wait, there = RETRY_S, 0.0
        while not self._closing.wait(wait):
            wait = min(2 * wait, RETRIES_S)
            found = reach(self._public_key)
            if found is None:
                there = (there or time.monotonic()) if self._elsewhere() else 0.0
                if not there or time.monotonic() - there < FALL_S:
                    continue
            with self._lock:  # a descriptor that was closed may be another one's by now
                if self._closing.is_set():
                    return found.close() if found is not None else None
                self._found, self.given_up = found, found is None
                self.nudge()
            return None
