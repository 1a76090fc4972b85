"""Watching the processes of a dock: who dies is named and started again, who has a copy is replaced by it, and the rows
of a warehouse whose node leaves are moved to another one that lives."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from docklands.dock.control import messages as c
from docklands.dock.control.client import ask_once
from docklands.dock.control.links import Warehouse
from docklands.dock.start import Child, Spawn
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.client import ClientOptions, WarehouseClient
from docklands.dock.wire.net import Keys, Peer, make_keys
from docklands.errors import ControlLost, DockError, DocklandsError, WorkerLost

log = logging.getLogger("docklands.dock.launch")

START_S, STOP_S = 120.0, 10.0
"""Deadlines for a process to listen, and to end."""
PAUSE_S, PAUSES_S = 0.1, 5.0
"""Before one that did not start is started again: at first, and at most. What it lacks may be room on a full disk."""


@dataclass
class Part:
    """One process of the dock, through all of its lives. leaving: it is to end, and not to be started again."""

    name: str
    module: str
    options: Any
    child: Child
    restarts: int = 0
    leaving: bool = False


class Supervisor:
    """Base of Launcher, which sets these.

    folder   for logs and journal; deaths: what died, in words, in order
    parts    by name; _serving: place -> name of the part that serves its rows
    _copies  name of a serving part -> name of the part that has its rows too; _made: copies made after a death
    """

    folder: Path
    deaths: list[str]
    parts: dict[str, Part]
    _serving: list[str]
    _copies: dict[str, str]
    _made: int = 0
    spawn: Spawn
    _max_restarts: int
    _stopping: threading.Event
    _lock: threading.Lock
    _watchers: list[threading.Thread]
    _clients: Keys

    def kill(self, name: str) -> int:
        """SIGKILL a part, for tests and drills; its pid."""
        with self._lock:
            child = self.parts[name].child
        child.kill()
        return child.pid

    def drain(self, place: int, to: int) -> None:
        """Move the rows of a place into the warehouse that serves another one, and end the process that held them.

        For a node that leaves. The flow goes on meanwhile: what is put is sent along until everything is there. Raises
        DockError when the two are one or there is no room, TakeTimeout and WarehouseLost when they do not answer.
        """
        source, target = self._part(place), self._part(to)
        if source is target:
            raise DockError(f"drain: warehouses {place} and {to} are one process already")
        peer = Peer(target.options.endpoint, target.options.public_key)
        peers = {0: Peer(source.options.endpoint, source.options.public_key), 1: peer}
        wanted = ClientOptions(name="launcher", deadline_s=START_S, lost_s=START_S, share=False)
        with WarehouseClient(peers, self._clients, wanted) as client:
            here, there = (client.ask(at, m.Stats()).values["bytes"] for at in (0, 1))
            capacity = target.options.capacity
            if capacity and here + there > capacity and not target.options.spill_bytes:
                raise DockError(
                    f"drain: {here} bytes of warehouse {place} and {there} of warehouse {to} are more than {capacity}",
                    "drain into another one, or raise dock.capacity_mib",
                )
            client.ask(1, m.Allow([source.options.public_key]))
            client.ask(0, m.Replicate(peer.endpoint, peer.public_key))
        log.warning("dock: the rows of warehouse %d move to %s", place, target.name)
        self._move(place, target)
        if source.name not in self._serving:
            for name in (source.name, self._copies.pop(source.name, "")):
                if name in self.parts:
                    self._dismiss(self.parts[name])

    # --- inside ------------------------------------------------------------------------------------------------

    def _part(self, place: int) -> Part:
        if not 0 <= place < len(self._serving):
            raise DockError(f"there is no warehouse {place}", f"there are {len(self._serving)}")
        return self.parts[self._serving[place]]

    def _dismiss(self, part: Part) -> None:
        """End a part for good."""
        part.leaving = True
        part.child.terminate()
        if part.child.wait(STOP_S) is None:
            part.child.kill()

    def _begin(self, name: str, module: str, options: Any) -> Part:
        if self._stopping.is_set():
            raise WorkerLost(f"the dock was stopped before its {name} was started")
        child = self.spawn(module, options, self._errors(name))
        part = self.parts[name] = Part(name, module, options, child)
        return part

    def _settle(self, names: list[str]) -> None:
        """Wait until parts listen, and fix their addresses."""
        for name in names:
            part = self.parts[name]
            found = part.child.announced(START_S)
            part.options = msgspec.structs.replace(part.options, endpoint=found["endpoint"])

    def _errors(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '.')}.log"

    def _begin_watch(self, part: Part) -> None:
        watcher = threading.Thread(target=self._watch, args=(part,), name=f"watch {part.name}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _watch(self, part: Part) -> None:
        """Start a part again whenever it dies."""
        pause = 0.0
        while True:
            pid, code = part.child.pid, part.child.wait()
            if self._stopping.is_set() or part.leaving:
                return
            how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
            what = f"{part.name} (pid {pid}) {part.child.lost or how}"
            self.deaths.append(what)
            if self._promote(part, what):
                return
            part.restarts += 1
            if part.restarts > self._max_restarts:
                log.error("dock: %s; it is not started again after %d times", what, self._max_restarts)
                return
            log.error("dock: %s; it is started again%s", what, f" in {pause:g} s" if pause else "")
            self._stopping.wait(pause)
            with self._lock:
                if self._stopping.is_set():
                    return
                part.child = self.spawn(part.module, part.options, self._errors(part.name))
            try:
                self._arrived(part, part.child.announced(START_S)["endpoint"])
                pause = 0.0
            except (DocklandsError, OSError) as error:
                pause = min(2 * pause or PAUSE_S, PAUSES_S)
                log.error("dock: %s did not start again: %s", part.name, error)
                part.child.kill()

    def _arrived(self, part: Part, endpoint: str) -> None:
        """A part listens again. One that has come to another node is made known. Raises what that raises."""
        if endpoint == part.options.endpoint:
            return
        log.warning("dock: %s is at %s from now on", part.name, endpoint)
        part.options = msgspec.structs.replace(part.options, endpoint=endpoint)
        for place in [place for place, name in enumerate(self._serving) if name == part.name]:
            self._move(place, part)
        for first in [self.parts[first] for first, copy in self._copies.items() if copy == part.name]:
            self._send_along(first.options, Peer(endpoint, part.options.public_key))

    def _promote(self, part: Part, what: str) -> bool:
        """A warehouse with a copy is not started again: the copy serves its rows, and gets a copy itself."""
        copy = self.parts.get(self._copies.pop(part.name, ""))
        if copy is None:
            return False
        log.error("dock: %s; its copy (pid %d) serves its rows, which have no second copy now", what, copy.child.pid)
        for place in [place for place, name in enumerate(self._serving) if name == part.name]:
            self._move(place, copy)
        with contextlib.suppress(KeyError):
            del self.parts[part.name]
        try:
            self._copy(copy)
        except (DocklandsError, OSError) as error:
            if not self._stopping.is_set():
                log.error("dock: %s goes on without a copy: %s", copy.name, error)
        return True

    def _copy(self, served: Part) -> None:
        """A new process that gets everything that a warehouse has. Raises WorkerLost, WarehouseLost, TakeTimeout."""
        keys, old = make_keys(), served.options
        self._made += 1
        address = old.endpoint.rpartition(":")[0]
        allowed = [*dict.fromkeys([*old.allowed, old.public_key])]
        own = {"endpoint": f"{address}:*", "public_key": keys.public, "secret_key": keys.secret, "allowed": allowed}
        options = msgspec.structs.replace(old, **own, replica="", replica_key="", second=True)
        name = f"copy {old.place} ({self._made})"
        part = self._begin(name, served.module, options)
        self._settle([name])
        self._begin_watch(part)
        self._send_along(old, Peer(part.options.endpoint, part.options.public_key))
        self._copies[served.name] = name
        log.warning("dock: the rows of %s have a second copy again (pid %d)", served.name, part.child.pid)

    def _send_along(self, first: Any, to: Peer) -> None:
        """A warehouse, by its options, is to send everything that it has and gets to another one."""
        wanted = ClientOptions(name="launcher", deadline_s=START_S, lost_s=STOP_S, share=False)
        with WarehouseClient({0: Peer(first.endpoint, first.public_key)}, self._clients, wanted) as client:
            client.ask(0, m.Replicate(to.endpoint, to.public_key))

    def _move(self, place: int, to: Part) -> None:
        """The rows of a place are served by another part from now on."""
        control = self.parts["control"]
        with self._lock:
            self._serving[place] = to.name
            named = [Warehouse(self.parts[n].options.endpoint, self.parts[n].options.public_key) for n in self._serving]
            control.options = msgspec.structs.replace(control.options, warehouses=named)
        self._tell(c.Move(place, to.options.endpoint, to.options.public_key))

    def _tell(self, message: msgspec.Struct) -> None:
        """Say something to the control process until it has heard it; if it is away, it may hear it after a restart."""
        options = self.parts["control"].options
        end = time.monotonic() + START_S
        while time.monotonic() < end and not self._stopping.is_set():
            with contextlib.suppress(ControlLost):
                ask_once(Peer(options.endpoint, options.public_key), self._clients, message, 1.0)
                return
        log.error("dock: the control process did not hear of %s", message)
