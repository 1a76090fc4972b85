"""Lines within a node: messages as they were sent, strangers outside, servers that come back, malformed bytes."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import zmq
from zmq.utils import z85

from docklands.dock.wire import near, net
from docklands.dock.wire.lines import NearLine, connect
from docklands.dock.wire.near import ANSWER, HELLO, MAGIC, NO, YES, Door, name_of, reach
from docklands.dock.wire.net import DOWN, REFUSED, UP, Connection, Keys, Listener, Peer, make_keys
from docklands.dock.wire.proof import CLIENT, PROOF, SERVER, holds, proof, shared
from docklands.dock.wire.stream import ALIGN, HEAD, Stream, made


class Ends:
    """A server, and clients of it, in one thread."""

    def __init__(self) -> None:
        self.keys, self.mine = make_keys(), make_keys()
        self.context = zmq.Context()
        self.listener = Listener("tcp://127.0.0.1:*", self.keys, [self.mine.public])
        self.peer = Peer(self.listener.endpoint, self.keys.public)
        self.lines: list[Connection | NearLine] = []

    def line(self, keys: Keys | None = None) -> NearLine:
        line = connect(self.context, self.peer, keys or self.mine)
        assert isinstance(line, NearLine)
        self.lines.append(line)
        return line

    def serve(self, answer: Callable[[list[memoryview]], list[memoryview]] = list) -> None:
        for client, frames in self.listener.receive(timeout_s=0.02):
            self.listener.send(client, answer(frames))

    def lose(self, line: NearLine) -> str:
        """End the server, until the line has noticed; where it listened."""
        endpoint = self.listener.endpoint
        self.listener.close()
        end = time.monotonic() + 20.0
        while line.state != DOWN:
            assert time.monotonic() < end
            line.has_message()
            line.look()
        return endpoint

    def until(self, done: Callable[[], object]) -> None:
        end = time.monotonic() + 20.0
        while not done():
            assert time.monotonic() < end, "it did not come"
            self.serve()
            for line in self.lines:
                line.has_message()
                line.look()

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self.listener.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_messages_come_back_as_they_were_sent(ends: Ends) -> None:
    """Of any size, also larger than the kernel's buffers, with empty frames, in order, aligned for every dtype."""
    rng = np.random.default_rng(0)
    sizes = [[0], [1, 0, 7], [100_000, 3], [6 << 20, 1, 5 << 20], [8] * 1500, [65_536], []]
    sent = [[rng.bytes(size) for size in message] for message in sizes]
    line, found = ends.line(), []
    for message in sent:
        line.send(message)

    def all_back() -> bool:
        found.extend(line.receive())
        return len(found) == len(sent)

    ends.until(all_back)
    assert [[bytes(frame) for frame in message] for message in found] == sent
    values = [torch.frombuffer(frame, dtype=torch.uint8) for message in found for frame in message if len(frame) > 8]
    assert all(value.data_ptr() % 8 == 0 for value in values)


def test_what_is_said_between_two_turns_leaves_in_one_call(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ends.line()
    ends.until(lambda: line.state == UP)
    calls = []
    flush = Stream.flush
    monkeypatch.setattr(Stream, "flush", lambda self: (calls.append(self.pending), flush(self))[1])
    for number in range(5):
        line.post([bytes([number])])
    assert not calls
    line.flush()
    assert calls == [True]
    found: list[list[memoryview]] = []
    ends.until(lambda: found.extend(line.receive()) or len(found) == 5)
    assert [bytes(frames[0]) for frames in found] == [bytes([n]) for n in range(5)]


def test_a_key_that_is_not_on_the_list_gets_nothing(ends: Ends) -> None:
    stranger = connect(ends.context, ends.peer, make_keys())
    ends.lines.append(stranger)
    heard = []
    stranger.send([b"let me in"])
    ends.until(lambda: heard.extend(ends.listener.left()) or stranger.state == REFUSED)
    assert not stranger.receive() and not heard and ends.listener.refused == 1 and stranger.ups == 0


def test_another_user_neither_gets_in_nor_is_talked_to(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects from another user's process is turned away; one that has taken the name is not spoken to."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(name_of(ends.keys.public))
    monkeypatch.setattr(near.os, "getuid", lambda: os.geteuid() + 1)
    assert reach(ends.keys.public) is None
    ends.until(lambda: ends.listener.refused == 2)
    assert sock.recv(1) == b"" and not ends.listener.left()
    sock.close()
    if os.geteuid() == 0:  # and with a real one
        monkeypatch.undo()
        child = os.fork()
        if not child:
            os.setuid(65534)
            os._exit(0 if reach(ends.keys.public) is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        ends.until(lambda: ends.listener.refused == 3)


def test_a_server_that_comes_back_is_found_again(ends: Ends) -> None:
    line = ends.line()
    ends.until(lambda: line.state == UP)
    name, endpoint = line.handles, ends.lose(line)
    line.send([b"lost"])
    ends.listener = Listener(endpoint, ends.keys, [ends.mine.public])
    ends.until(lambda: line.ups == 2)
    assert line.state == UP and line.handles == name, "whoever waits for its descriptors may go on"
    line.send([b"again"])
    found: list[list[memoryview]] = []
    ends.until(lambda: found.extend(line.receive()) or found)
    assert [bytes(frames[0]) for frames in found] == [b"again"]


def test_a_server_that_comes_back_without_its_door_is_talked_to_over_tcp(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ends.line()
    ends.until(lambda: line.state == UP)
    name, endpoint = line.handles, ends.lose(line)
    monkeypatch.setattr(near, "FALL_S", 0.1)
    monkeypatch.setattr(net, "possible", lambda: False)
    ends.listener = Listener(endpoint, ends.keys, [ends.mine.public])
    poller = zmq.Poller()
    for handle in name:
        poller.register(handle, zmq.POLLIN)

    def back() -> bool:  # as a client does: look only where a descriptor says so
        ready = dict(poller.poll(0))
        if name[0] in ready:
            line.has_message()
        if name[1] in ready:
            line.look()
        return line.ups == 2

    lines, ends.lines = ends.lines, []
    ends.until(back)
    ends.lines = lines
    assert line.state == UP and line.far and line.handles == name
    line.send([b"again", bytes(100_000)])
    found: list[list[memoryview]] = []
    ends.until(lambda: found.extend(line.receive()) or found)
    assert [bytes(frame) for frame in found[0]] == [b"again", bytes(100_000)]
    ends.lose(line)


def test_who_lacks_the_secret_of_a_key_on_the_list_gets_nothing(ends: Ends) -> None:
    """A process of the same user that knows both public keys; and a server that only claims to be one."""
    thief = ends.line(Keys(ends.mine.public, make_keys().secret))
    thief.send([b"let me in"])
    ends.until(lambda: thief.state == REFUSED)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(name_of(ends.keys.public))
    sock.settimeout(20.0)
    sock.send(HELLO.pack(MAGIC, bytes(16), ends.mine.public.encode(), bytes(PROOF)) + bytes(PROOF) + good(b"let me in"))
    before = ends.listener.refused
    ends.until(lambda: ends.listener.refused > before)
    assert len(sock.recv(1000)) == ANSWER.size and sock.recv(1000) == b"" and not ends.listener.left()
    sock.close()
    claimed = make_keys()
    door = Door((claimed.public, make_keys().secret), lambda key: key == ends.mine.public, 1 << 20)
    line = connect(ends.context, Peer("tcp://127.0.0.1:9", claimed.public), ends.mine)
    line.send([b"a secret"])
    heard = []
    ends.lines.append(line)
    ends.until(lambda: heard.extend(door.receive()) or line.state == REFUSED)
    assert not heard and not thief.receive() and isinstance(line, NearLine)
    door.close(0.0)


def test_both_ends_make_the_same_secret_and_it_is_that_of_curve25519() -> None:
    """A vector of RFC 7748, section 5.2."""
    scalar = "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4"
    point = "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c"
    product = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert shared(*(z85.encode(bytes.fromhex(x)).decode() for x in (scalar, point))).hex() == product
    one, other = make_keys(), make_keys()
    assert shared(one.secret, other.public) == shared(other.secret, one.public) != shared(one.secret, one.public)
    for bad in ("", "x" * 35, z85.encode(bytes(32)).decode()):
        with pytest.raises(ValueError, match="key"):
            shared(one.secret, bad)


def test_a_client_that_has_gone_is_named(ends: Ends) -> None:
    lines = [ends.line(), ends.line()]
    ends.until(lambda: all(line.state == UP for line in lines))
    heard = []
    lines[0].send([b"who am I"])
    for client, _ in ends.listener.receive(timeout_s=5.0):
        heard.append(client)
    lines[0].close()
    ends.until(lambda: heard.extend(ends.listener.left()) or len(heard) == 2)
    assert heard[0] == heard[1] and lines[1].state == UP


def test_a_line_to_somewhere_else_goes_over_tcp(ends: Ends) -> None:
    """Whoever is told not to take the short way, and who finds no such server on this node."""
    for peer in (
        Peer(ends.peer.endpoint, ends.peer.public_key, near=False),
        Peer("tcp://127.0.0.1:9", make_keys().public),
    ):
        line = connect(ends.context, peer, ends.mine)
        assert isinstance(line, Connection)
        line.close()


def good(*frames: bytes) -> bytes:
    left, right = socket.socketpair()
    stream = Stream(made(left), 1 << 20, 0)
    stream.send(frames)
    stream.flush()
    data = right.recv(1 << 20)
    stream.close()
    right.close()
    return data


class Visitor:
    """A client by hand."""

    def __init__(self, door: Door, keys: Keys, mine: Keys, name: bytes) -> None:
        sock = reach(keys.public)
        assert sock is not None
        self.sock, self.door, self.client = sock, door, name.ljust(16)
        self.hello = HELLO.pack(MAGIC, self.client, mine.public.encode(), bytes(PROOF))
        self.secret = shared(mine.secret, keys.public)

    def come_in(self) -> None:
        """Say the hello, and prove the key."""
        self.sock.send(self.hello)
        for _ in range(2):
            assert self.door.receive() == []
        word, number, said = ANSWER.unpack(self.sock.recv(ANSWER.size))
        facts = self.client + bytes(PROOF) + number
        assert word == YES and holds(said, self.secret, SERVER, facts)
        self.sock.send(proof(self.secret, CLIENT, facts))


def test_bytes_that_are_no_message_end_their_line_only() -> None:
    """2,000 random, cut and changed streams: each is dropped or understood, and others are served on."""
    keys, mine = make_keys(), make_keys()
    door = Door((keys.public, keys.secret), lambda key: key == mine.public, 1 << 20)
    rng = random.Random(1)
    whole = good(b"hello", b"", bytes(300))
    friend = Visitor(door, keys, mine, b"friend")
    friend.come_in()
    understood = dropped = 0
    try:
        for number in range(2000):
            guest = Visitor(door, keys, mine, b"%06d" % number)
            if rng.random() < 0.8:
                guest.come_in()
                data = bytearray(whole if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 200)))
            else:
                data = bytearray(guest.hello if rng.random() < 0.7 else rng.randbytes(HELLO.size)) + whole
            for _ in range(rng.randrange(4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            guest.sock.send(data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.3 else data)
            for _ in range(3):
                for _, frames in door.receive():
                    understood += 1
                    assert sum(map(len, frames)) < 1 << 20
            guest.sock.close()
            door.receive()
            dropped += len(door.gone)
            door.gone.clear()
        for bad in (HEAD.pack(1 << 20, 0), HEAD.pack(1, 1 << 40), HEAD.pack(1, 64) + struct.pack("<Q", 1 << 63)):
            guest = Visitor(door, keys, mine, b"badone")
            guest.come_in()
            guest.sock.send(bad)
            for _ in range(3):
                assert door.receive() == []
            guest.sock.settimeout(5.0)
            assert guest.sock.recv(10) == b"", "the line is ended"
            guest.sock.close()
        friend.sock.send(whole)
        [(client, frames)] = door.receive()
        assert client == b"friend".ljust(16) and [len(frame) for frame in frames] == [5, 0, 300]
    finally:
        friend.sock.close()
        door.close(0.0)
    assert understood > 200 and dropped > 200 and door.denied > 100 and NO != YES


def test_frames_are_filled_up_to_the_alignment() -> None:
    assert len(good(b"x")) == HEAD.size + 8 + ALIGN and len(good(bytes(ALIGN))) == HEAD.size + 8 + ALIGN
