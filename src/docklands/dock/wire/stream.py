"""Messages over a connected stream socket of this node: frames that are aligned where they are received.

message  frames (uint32), bytes of all of them (uint64), the size of each (uint64), then the frames, each filled up to a
         multiple of ALIGN bytes: so a frame is aligned for every dtype

Nothing blocks: what the kernel does not take at once is kept, and sent when it does.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

HEAD = struct.Struct("<IQ")
ALIGN = 64
PADDING = bytes(ALIGN)
FRAMES = (1 << 16) + 2
"""Frames of a message at most."""
PIECE, PARTS = 1 << 16, 512
"""Bytes of a read, and buffers of a write, at most."""
BUFFER = 1 << 20
"""Bytes that the kernel is asked to hold for each direction."""


def made(sock: socket.socket) -> socket.socket:
    """A socket with the settings of both ends."""
    sock.setblocking(False)
    for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, side, BUFFER)
    return sock


class Stream:
    """Messages over one connected socket. most: bytes of a message; preface: bytes that come before the first one.

    preface  once they are here; nothing more is read until `proceed` is called
    ended    the other end has gone, or has sent what is no message
    """

    def __init__(self, sock: socket.socket, most: int, preface: int) -> None:
        self.sock = sock
        self.ended = False
        self.preface = b""
        self._most, self._expected = most, preface
        self._rest = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self._sizes: tuple[int, ...] = ()
        self._out: deque[memoryview] = deque()

    @property
    def pending(self) -> bool:
        """Something is still to be sent."""
        return bool(self._out)

    def send(self, frames: Sequence[Any]) -> None:
        """One message, to be handed to the kernel by `flush`, with others. Large frames are not copied."""
        views = [memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(b"") for frame in frames]
        sizes = [view.nbytes for view in views]
        parts: list[Any] = [HEAD.pack(len(sizes), sum(map(padded, sizes))) + struct.pack(f"<{len(sizes)}Q", *sizes)]
        for view, size in zip(views, sizes):
            parts.append(view)
            if size % ALIGN:
                parts.append(PADDING[size % ALIGN :])
        self.write(parts)

    def write(self, parts: Sequence[Any]) -> None:
        """Bytes as they are."""
        if sum(map(len, parts)) < PIECE:
            self._out.append(memoryview(b"".join(parts)))
        else:
            self._out.extend(memoryview(part) for part in parts if len(part))

    def flush(self) -> None:
        """Hand to the kernel what it takes."""
        out = self._out
        while out and not self.ended:
            try:
                some = [out[i] for i in range(min(len(out), PARTS))]
                sent = self.sock.send(some[0]) if len(some) == 1 else self.sock.sendmsg(some)
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            while sent and sent >= out[0].nbytes:
                sent -= out.popleft().nbytes
            if sent:
                out[0] = out[0][sent:]

    def proceed(self, preface: int = 0) -> list[list[memoryview]]:
        """After a preface: there is another one of so many bytes, or (0) messages follow; those that are here."""
        found: list[list[memoryview]] = []
        self.preface, self._expected = b"", preface
        self._parse(found)
        return found

    def receive(self) -> list[list[memoryview]]:
        """Every message that is here whole."""
        found: list[list[memoryview]] = []
        while not self.ended and not self.preface:
            try:
                if self._body is not None:
                    count = self.sock.recv_into(memoryview(self._body)[self._filled :])
                    self._filled += count
                    more = self._filled == len(self._body)
                    if more:
                        found.append(cut(memoryview(self._body), self._sizes))
                        self._body = None
                else:
                    data = self.sock.recv(PIECE)
                    count = len(data)
                    self._rest += data
                    more = count == PIECE
                    self._parse(found)
                    more = more or self._body is not None
            except BlockingIOError:
                break
            except OSError:
                count = more = 0
            if not count:
                self.ended = True
            if not more:
                break
        return found

    def close(self) -> None:
        """Also for those that this process has forked."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _parse(self, found: list[list[memoryview]]) -> None:
        """Take whole messages out of what has been read; begin the last one, if it is not whole."""
        rest, at = self._rest, 0
        if self._expected:
            if len(rest) >= self._expected:
                self.preface = bytes(rest[: self._expected])
                del rest[: self._expected]
            return
        while len(rest) - at >= HEAD.size:
            count, nbytes = HEAD.unpack_from(rest, at)
            if count > FRAMES or nbytes > self._most:
                self.ended = True
                return
            start = at + HEAD.size + 8 * count
            if len(rest) < start:
                break
            sizes = struct.unpack_from(f"<{count}Q", rest, at + HEAD.size)
            if sum(map(padded, sizes)) != nbytes:
                self.ended = True
                return
            body = rest[start : start + nbytes]
            at = start + len(body)
            if len(body) < nbytes:
                self._filled, self._sizes = len(body), sizes
                self._body = body + bytes(nbytes - len(body))
                break
            found.append(cut(memoryview(body), sizes))
        del rest[:at]


def padded(size: int) -> int:
    """Bytes that a frame takes."""
    return -(-size // ALIGN) * ALIGN


def cut(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The frames of a message's body."""
    frames, at = [], 0
    for size in sizes:
        frames.append(body[at : at + size])
        at += padded(size)
    return frames
