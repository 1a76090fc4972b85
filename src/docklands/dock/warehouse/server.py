"""A warehouse as a process: `python -m docklands.dock.warehouse.server OPTIONS.json`.

The options are a WarehouseOptions as JSON (`-`: from standard input). One line of JSON on standard output says when it
listens: {"place", "endpoint", "public_key", "pid"}. It ends on a Shutdown call, SIGTERM or SIGINT.

A turn of its only thread: sleep until messages come, answer up to 64 of them, sync the log once, push the notices of
all puts together, then send the replies. So a reply never says what is not yet durable.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from docklands.dock.rules.messages import Ended, Notice
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.arena import SHM, sweep
from docklands.dock.warehouse.notices import notices_message
from docklands.dock.warehouse.records import outdated, records
from docklands.dock.warehouse.replica import Mine, Replica
from docklands.dock.warehouse.store import Reply, Store, WarehouseOptions
from docklands.dock.wire import command
from docklands.dock.wire.format import CALL, PUSH, REPLY, Buffer, check_size
from docklands.dock.wire.net import Keys, Listener, Parent, Peer, check_endpoint
from docklands.errors import ConfigError, DocklandsError, WireError


@dataclass(frozen=True)
class Held:
    """An answer and its notices, until the second warehouse has acknowledged message `number`; 0: it need not."""

    client: bytes
    frames: list[Buffer]
    number: int
    seq: int
    notices: list[Notice]
    ended: list[Ended]


class Server:
    """One warehouse behind one socket.

    Raises ConfigError when it cannot listen, CheckpointError when its log is damaged.
    """

    def __init__(self, options: WarehouseOptions) -> None:
        self.options = options
        sweep(SHM)
        if options.spill_bytes:
            Path(options.folder).mkdir(parents=True, exist_ok=True)
            sweep(Path(options.folder))
        self.store = Store(options)
        self.running = True
        self.turns = 0
        self._subscribers: dict[bytes, set[str]] = {}
        try:
            self.store.open_log()
            keys = Keys(options.public_key, options.secret_key) if options.secret_key else None
            self.listener = Listener(options.endpoint, keys, options.allowed, self.store.limits)
        except DocklandsError:
            self.store.close()
            raise
        self._pushed = self.store.seq
        self._held: list[Held] = []
        self._replica: Replica | None = None
        self._moving: list[tuple[bytes, list[Buffer]]] = []
        if options.replica:
            self._copy_to(Peer(options.replica, options.replica_key))

    def _copy_to(self, peer: Peer) -> None:
        """Another warehouse gets everything from now on, instead of the one that did. Raises WireError."""
        options, old = self.options, self._replica
        keys = Keys(options.public_key, options.secret_key) if options.secret_key else None
        try:
            check_endpoint(peer.endpoint, bool(peer.public_key))
            mine = Mine(lambda: records(self.store), lambda reply, frames: outdated(self.store, reply, frames))
            new = Replica(peer, keys, options.replica_lost_s, mine)
        except (ConfigError, zmq.ZMQError) as error:
            raise WireError(f"no copy can be sent to {peer.endpoint!r}: {error}") from None
        self._release(old.sent if old else 0)
        if old is not None:
            for handle in old.line.handles:
                self.listener.unwatch(handle)
            old.close()
        self._replica, self.store.forward = new, new.forward
        for handle in new.line.handles:
            self.listener.watch(handle)

    def turn(self) -> None:
        """Sleep, then answer what has come."""
        replica, log = self._replica, self.store.log
        waits = [wait for wait in (replica and replica.timeout_s, log and log.due_s) if wait is not None]
        for client, frames in self.listener.receive(timeout_s=min(waits, default=None)):
            replica = self._replica
            sent = replica.sent if replica else 0
            reply = self.call(client, frames)
            if not reply:  # it is answered when another warehouse has everything
                continue
            now = replica.sent if replica else 0
            notices, self.store.outbox = self.store.outbox, []
            ended, self.store.ended = self.store.ended, []
            self._held.append(Held(client, reply, now if now > sent else 0, self.store.seq, notices, ended))
        self.turns += 1
        for client in self.listener.left():
            self._subscribers.pop(client, None)
            self.store.waiting.discard(client)
        if log is not None:
            log.sync()
        replica = self._replica
        if replica is not None:
            replica.look()
            if self._moving and not replica.behind:
                for client, reply in self._moving:
                    self.listener.send(client, reply)
                self._moving.clear()
        self._release(replica.acked if replica else 0)
        self.push_room()

    def _release(self, acked: int) -> None:
        """Push the notices and send the replies of all that the second warehouse, if any, has too."""
        ready = [held for held in self._held if held.number <= acked]
        self._held = [held for held in self._held if held.number > acked]
        self._tell([held for held in ready if held.number] if self._replica is not None else ready)
        for held in ready:
            self.listener.send(held.client, held.frames)

    def _tell(self, told: Sequence[Held]) -> None:
        """Push the notices of several puts together."""
        if told:
            notices = [notice for held in told for notice in held.notices]
            self.push_notices(notices, [lease for held in told for lease in held.ended], told[-1].seq)

    def close(self) -> None:
        """Leave nothing behind."""
        if self._replica is not None:
            self._replica.close()
        self.listener.close()
        self.store.close()

    def call(self, client: bytes, frames: Sequence[Buffer]) -> list[Buffer]:
        """The reply's frames. A message that is not a call at all is counted and gets a Failure under number 0."""
        number = 0
        try:
            if not frames:
                raise WireError("malformed message: no frames")
            check_size(frames, self.store.limits)
            kind, number, message = m.CALLS.unpack(frames[0])
            if kind != CALL:
                raise WireError("malformed message: not a call")
            if isinstance(message, m.Replicate):
                self._copy_to(Peer(message.endpoint, message.public_key))
                done = m.Done(len(self.store.warehouse), self.store.seq)
                self._moving.append((client, [m.REPLIES.pack(REPLY, number, done)]))
                return []
            reply, buffers = self._answer(client, message, frames[1:])
        except WireError as error:
            self.store.count("bad_messages")
            reply, buffers = m.Failure("WireError", error.message, error.hint), []
        return [m.REPLIES.pack(REPLY, number, reply), *buffers]

    def _answer(self, client: bytes, message: Any, frames: Sequence[Buffer]) -> Reply:
        match message:
            case m.Subscribe():
                self._subscribers[client] = set(message.stages)
                return m.Done(len(self.store.warehouse), self.store.seq), []
            case m.Allow():
                try:
                    self.listener.allow(message.keys)
                except ConfigError as error:
                    raise WireError(error.message, error.hint) from None
                return m.Done(0, self.store.seq), []
            case m.Shutdown():
                self.running = False
                return m.Done(0, self.store.seq), []
            case m.Stats():
                reply, buffers = self.store.answer(client, message, frames)
                assert isinstance(reply, m.Figures)
                own = {"turns": self.turns, "denied": self.listener.refused, "subscribers": len(self._subscribers)}
                if self._replica is not None:
                    own |= {"replica_alone": int(self._replica.alone), "replica_failures": self._replica.failures}
                return m.Figures({**reply.values, **own}), buffers
        return self.store.answer(client, message, frames)

    def push_notices(self, notices: Sequence[Notice], ended: Sequence[Ended], last: int) -> None:
        """To every subscriber the notices of its stages up to put `last`, ended leases, and that number in any case."""
        first = self._pushed + 1
        if last < first:
            return
        self._pushed = last
        for client, stages in self._subscribers.items():
            wanted = [notice for notice in notices if not stages or notice.stage in stages]
            message, buffers = notices_message(self.options.place, (first, last), wanted, ended)
            self.listener.send(client, [m.REPLIES.pack(PUSH, 0, message), *buffers])

    def push_room(self) -> None:
        """Wake those whose put found no room, once something has been freed, in memory or on disk."""
        store = self.store
        if store.waiting and store.freed > store.full_at:
            header = m.REPLIES.pack(PUSH, 0, m.Room(store.capacity_left))
            for client in store.waiting:
                self.listener.send(client, [header])
            store.waiting.clear()


def serve(options: WarehouseOptions, started: Callable[[Server], None] | None = None) -> None:
    """Run a warehouse in this process until it is told to end. started: called with the Server once it listens.

    A signal only wakes the poller: an exception raised by a handler could be lost in somebody's destructor.
    """
    torch.set_num_threads(1)
    asked: list[int] = []
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: asked.append(received))
    server = Server(options)
    try:
        server.listener.watch(wake)
        parent = Parent(options.parent, server.listener)
        gc.freeze()  # what is here stays: no collection has to look at all that torch has made
        if started is not None:
            started(server)
        while server.running and not asked and not parent.gone:
            server.turn()
    finally:
        server.close()
        signal.set_wakeup_fd(-1)


def announce(server: Server) -> None:
    """The line that says where the warehouse listens."""
    options = server.options
    found = {"place": options.place, "endpoint": server.listener.endpoint, "public_key": options.public_key}
    print(json.dumps({**found, "pid": os.getpid()}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit code."""
    return command.run("warehouse.server", WarehouseOptions, lambda options: serve(options, announce), arguments)


if __name__ == "__main__":
    sys.exit(main())
