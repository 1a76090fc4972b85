"""The control process: `python -m docklands.dock.control.server OPTIONS.json`.

It holds the ledger and the controllers of all stages, hears from the warehouses what is ready, and answers the clients.
The options are ControlOptions as JSON (`-`: from standard input). One line of JSON on standard output says when it
listens: {"endpoint", "public_key", "pid"}. It ends on a Quit call, SIGTERM or SIGINT.

A turn of its only thread: sleep until a message, a change of a line or a deadline; take note of what warehouses tell;
answer the calls; let whoever may go on go on; tell the warehouses what is free. An idle process uses no CPU.

A client that dies is noticed by its line: each one that matters is asked for a sign, which ZeroMQ refuses to send where
nobody is. Its leases are given back at once.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from docklands.dock.control import messages as c
from docklands.dock.control.desk import Desk
from docklands.dock.control.links import Links, Warehouse
from docklands.dock.control.parking import Reply
from docklands.dock.control.recover import Journal
from docklands.dock.rules.control import Control
from docklands.dock.rules.options import DockOptions
from docklands.dock.wire import command
from docklands.dock.wire.format import CALL, LIMITS, PUSH, REPLY, Buffer, check_size
from docklands.dock.wire.net import Keys, Listener, Parent, has_message
from docklands.errors import ConfigError, WireError

log = logging.getLogger("docklands.dock.rules.control")

PROBE_S = (0.0, 0.1, 0.5)
"""After a line broke: when to look who has gone. ZeroMQ needs a moment to forget the peer."""


class ControlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a control process is started with.

    warehouses  by place: endpoint, public key
    parent      pid of a process whose end ends this one too; 0: none
    journal     path of its journal; "": a restarted process knows nothing but what the warehouses hold
    """

    graph: c.GraphMeta
    dock: DockOptions
    warehouses: list[Warehouse]
    endpoint: str = "tcp://127.0.0.1:*"
    public_key: str = ""
    secret_key: str = ""
    allowed: list[str] = []
    journal: str = ""
    parent: int = 0


class Stopped(BaseException):
    """A signal asks the process to end."""


class Server:
    """One control behind one socket. Raises ConfigError when it cannot listen, CheckpointError for a bad journal."""

    def __init__(self, options: ControlOptions) -> None:
        self.options = options
        if len(options.warehouses) != options.dock.warehouses:
            raise ConfigError(f"control: {len(options.warehouses)} warehouses are named, {options.dock.warehouses} set")
        control = Control(c.graph_of(options.graph), options.dock)
        self.desk = Desk(control, len(options.warehouses), time.monotonic)
        self.desk.pid = os.getpid()
        path, fsync = Path(options.journal), options.dock.fsync
        self.journal = Journal(path, control, fsync) if options.journal else None
        if self.journal:
            self.desk.epoch = self.journal.epoch
        for controller in control.controllers.values():
            controller.begin_epoch(self.desk.epoch)
        keys = Keys(options.public_key, options.secret_key) if options.secret_key else None
        self.listener = Listener(options.endpoint, keys, options.allowed)
        self.listener.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.listener.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.listener.watch(self.monitor)
        rebuilt = self.journal is not None and self.journal.replayed
        self.links = Links(self.desk, options.warehouses, keys, rebuilt)
        for handle in self.links.handles:
            self.listener.watch(handle)
        self.turns = self.bad_messages = 0
        self._probes: list[float] = []
        self._loading = False

    def serve(self) -> None:
        """Turns until the end."""
        parent = Parent(self.options.parent, self.listener)
        while self.desk.running and not parent.gone:
            self.turn()

    def turn(self) -> None:
        """Sleep, then do what has come."""
        calls = self.listener.receive(timeout_s=self._sleep_s())
        self.links.read(None if calls else self.listener.ready)  # what a client has heard of counts before its call
        for client, frames in calls:
            self._call(client, frames)
        for client in self.listener.left():
            if client in self.desk.clients:
                log.warning("dock: client %s has gone", self.desk.leave(client))
        self.turns += 1
        if self.desk.stale and not self._loading and self.journal:
            self.journal.compact()
        if self.desk.thawed or (self.desk.stale and not self._loading):
            self.links.refresh(rebuilt=bool(self.desk.stale))
        self.desk.thawed, self._loading = False, bool(self.desk.stale)
        self._move()
        self._probe()
        self.desk.expire()
        freed = self.desk.settle()
        if self.journal:
            self.journal.turn()
        self.links.free(freed)
        for push in self.links.again():
            self._send(*push)
        outbox, self.desk.outbox = self.desk.outbox, []
        for client, number, (message, buffers) in outbox:
            self._send(client, [c.REPLIES.pack(REPLY, number, message), *buffers])

    def close(self) -> None:
        """Leave nothing behind but the journal."""
        self.links.close()
        self.listener.socket.disable_monitor()
        self.listener.close()
        if self.journal:
            self.journal.close()

    def _move(self) -> None:
        """Go to where a warehouse is now, and tell the clients."""
        moves, self.desk.moves = self.desk.moves, []
        for move in moves:
            lines = self.links.move(move.place, Warehouse(move.endpoint, move.public_key))
            if lines is not None:
                old, new = lines
                for handle in old.handles:
                    self.listener.unwatch(handle)
                old.close()
                for handle in new.handles:
                    self.listener.watch(handle)
        joined, self.desk.joined = list(self.desk.clients) if moves else self.desk.joined, []
        for client in joined:
            for frames in self.links.addresses():
                self._send(client, frames)

    def _sleep_s(self) -> float | None:
        waits = [at for at in (self.desk.next_deadline(), *self._probes) if at is not None]
        if self.journal and (due := self.journal.due_s) is not None:
            waits.append(time.monotonic() + due)
        return max(0.0, min(waits) - time.monotonic()) + 0.001 if waits else None

    def _call(self, client: bytes, frames: Sequence[Buffer]) -> None:
        """A message that is not a call at all is counted and gets a Failure under number 0."""
        number = 0
        try:
            if not frames:
                raise WireError("malformed message: no frames")
            check_size(frames, LIMITS)
            kind, number, message = c.CALLS.unpack(frames[0])
            if kind != CALL:
                raise WireError("malformed message: not a call")
        except WireError as error:
            self.bad_messages += 1
            reply: Reply = c.Failure("WireError", error.message, error.hint), []
            self.desk.outbox.append((client, number, reply))
            return
        self.desk.call(client, number, message, frames[1:])

    def _send(self, client: bytes, frames: Sequence[Any]) -> bool:
        """Whether the client is there."""
        try:
            self.listener.send(client, frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _probe(self) -> None:
        """Find out who has gone after lines broke."""
        if not self._probes and self.monitor not in self.listener.ready:
            return
        now = time.monotonic()
        while has_message(self.monitor):
            recv_monitor_message(self.monitor)
            self._probes = [now + wait for wait in PROBE_S]
        if not self._probes or self._probes[0] > now:
            return
        self._probes = [at for at in self._probes if at > now]
        beat = [c.REPLIES.pack(PUSH, 0, c.Beat())]
        for client in list(self.desk.clients):
            if not self._send(client, beat):
                log.warning("dock: client %s has gone", self.desk.leave(client))


def serve(options: ControlOptions, started: Any = None) -> None:
    """Run a control in this process until it is told to end. started: called with the Server once it listens."""

    def stop(*_: Any) -> None:
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        server = Server(options)
    except Stopped:
        return
    try:
        gc.freeze()  # what is here stays: no collection has to look at all that torch has made
        if started is not None:
            started(server)
        server.serve()
    except Stopped:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        server.close()


def announce(server: Server) -> None:
    """The line that says where the control listens."""
    found = {"endpoint": server.listener.endpoint, "public_key": server.options.public_key, "pid": os.getpid()}
    print(json.dumps(found), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit code."""
    return command.run("control.server", ControlOptions, lambda options: serve(options, announce), arguments)


if __name__ == "__main__":
    sys.exit(main())
