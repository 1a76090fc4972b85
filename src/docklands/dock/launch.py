"""Start, watch and stop the processes of a distributed dock on this machine: S warehouses and one control process.

A process that dies is named in the log and started again on the same address with the same keys: a warehouse replays
its log (`wal`) or comes back empty (`none`: its rows are made anew), the control process replays its journal and asks
the warehouses what they hold. With `replica` every warehouse has a copy that takes over its rows instead. Clients take
their lines up again by themselves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from docklands.core.graph import Graph
from docklands.dock import control_messages as c
from docklands.dock.control_client import ask_once
from docklands.dock.control_links import Warehouse
from docklands.dock.control_messages import graph_meta
from docklands.dock.control_server import ControlOptions
from docklands.dock.distributed import DockAddress
from docklands.dock.flow import Flow
from docklands.dock.options import DockOptions
from docklands.dock.warehouse_store import WarehouseOptions
from docklands.dock.wire import column_meta
from docklands.dock.wire_net import Keys, Peer, make_keys
from docklands.errors import ConfigError, ControlLost, WorkerLost

log = logging.getLogger("docklands.dock.launch")

Durability = Literal["none", "wal", "replica"]

START_S, STOP_S = 120.0, 10.0
"""Deadlines for a process to listen, and to end."""


class Child(Protocol):
    """A process that was started."""

    pid: int

    def announced(self, deadline_s: float) -> dict[str, Any]:
        """What it says once it listens: endpoint, pid. Raises WorkerLost when it ends or says nothing."""
        ...

    def wait(self, deadline_s: float | None = None) -> int | None:
        """Its exit code, negative for a signal; None at the deadline."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Spawn = Callable[[str, msgspec.Struct, Path], Child]
"""(module to run, its options, file for what it writes to its standard error) -> the process."""


class Program:
    """`python -m MODULE -` with its options on standard input. before: words that put it somewhere else, as `nice`."""

    def __init__(self, module: str, options: msgspec.Struct, errors: Path, before: Sequence[str] = ()) -> None:
        self._module, self._errors = module, errors
        with open(errors, "ab") as file:
            self._process = subprocess.Popen(
                [*before, sys.executable, "-m", module, "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the driver, which still has a checkpoint to write
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(options))
            self._process.stdin.close()

    def announced(self, deadline_s: float) -> dict[str, Any]:
        line: list[bytes] = []
        assert self._process.stdout is not None
        reader = threading.Thread(target=lambda pipe: line.append(pipe.readline()), args=(self._process.stdout,))
        reader.daemon = True
        reader.start()
        reader.join(deadline_s)
        if not line or not line[0]:
            tail = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
            raise WorkerLost(f"{self._module} (pid {self.pid}) did not start: {' '.join(tail) or 'it said nothing'}")
        return json.loads(line[0])

    def wait(self, deadline_s: float | None = None) -> int | None:
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@dataclass
class Part:
    """One process of the dock, through all of its lives."""

    name: str
    module: str
    options: Any
    child: Child
    restarts: int = 0


class Launcher:
    """The processes of one dock. Use it as `with Launcher(...) as launcher`.

    folder        for logs, journal and snapshots; every launch has its own subfolder
    max_restarts  of one part; after that it stays dead, and its clients get WarehouseLost or ControlLost
    deaths        what died, in words, in order
    """

    def __init__(
        self,
        graph: Graph,
        options: DockOptions,
        folder: Path,
        durability: Durability = "none",
        spawn: Spawn = Program,
        max_restarts: int = 100,
    ) -> None:
        if durability not in ("none", "wal", "replica"):
            raise ConfigError(f"dock: durability {durability!r}", "choose none, wal or replica")
        self.graph, self.options, self.durability = graph, options, durability
        self.run = secrets.token_hex(6)
        self.folder = Path(folder).resolve() / f"dock-{self.run}"
        self.deaths: list[str] = []
        self.parts: dict[str, Part] = {}
        self._spawn, self._max_restarts = spawn, max_restarts
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._watchers: list[threading.Thread] = []
        self._serving = [f"warehouse {place}" for place in range(options.warehouses)]

    def __enter__(self) -> Launcher:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> DockAddress:
        """Where the dock is. Raises WorkerLost before `start`."""
        if "control" not in self.parts:
            raise WorkerLost("the dock's processes have not been started")
        peers = {name: Peer(p.options.endpoint, p.options.public_key) for name, p in self.parts.items()}
        places = tuple(peers[name] for name in self._serving)
        return DockAddress(peers["control"], places, self._clients)

    def start(self) -> DockAddress:
        """Start everything, warehouses first. Raises WorkerLost when a process does not start."""
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o700)
        self._clients, own = make_keys(), make_keys()
        allowed = [self._clients.public, own.public]
        module, places = "docklands.dock.warehouse_server", range(self.options.warehouses)
        made = [self._warehouse(place, allowed) for place in places]
        if self.durability == "replica":
            for place in places:
                self._begin(f"copy {place}", module, self._warehouse(place, [*allowed, made[place].public_key]))
            self._settle([f"copy {place}" for place in places])
            copies = [self.parts[f"copy {place}"].options for place in places]
            made = [
                msgspec.structs.replace(options, replica=copy.endpoint, replica_key=copy.public_key)
                for options, copy in zip(made, copies)
            ]
        for place in places:
            self._begin(self._serving[place], module, made[place])
        self._settle(self._serving)
        self._begin("control", "docklands.dock.control_server", self._control(own))
        self._settle(["control"])
        for part in self.parts.values():
            watcher = threading.Thread(target=self._watch, args=(part,), name=f"watch {part.name}", daemon=True)
            watcher.start()
            self._watchers.append(watcher)
        return self.address

    def stop(self) -> None:
        """End everything: politely, then by force."""
        self._stopping.set()
        with self._lock:
            children = [part.child for part in self.parts.values()]
        for child in reversed(children):
            child.terminate()
        end = time.monotonic() + STOP_S
        for child in children:
            if child.wait(max(0.0, end - time.monotonic())) is None:
                child.kill()
                child.wait(STOP_S)
        for watcher in self._watchers:
            watcher.join(STOP_S)
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.suffix != ".log":  # a flow that has ended needs no log and no journal
                path.unlink(missing_ok=True)

    def kill(self, name: str) -> int:
        """SIGKILL a part, for tests and drills; its pid."""
        with self._lock:
            child = self.parts[name].child
        child.kill()
        return child.pid

    # --- inside ------------------------------------------------------------------------------------------------

    def _warehouse(self, place: int, allowed: list[str]) -> WarehouseOptions:
        keys, flow = make_keys(), Flow(self.graph)
        return WarehouseOptions(
            place=place,
            columns=[column_meta(field) for field in self.graph.fields],
            readers={column: list(stages) for column, stages in flow.told.items()},
            run=self.run,
            public_key=keys.public,
            secret_key=keys.secret,
            allowed=allowed,
            capacity=self.options.capacity_bytes,
            folder=str(self.folder),
            log=str(self.folder / f"wal.{place}") if self.durability == "wal" else "",
            parent=os.getpid(),
        )

    def _control(self, keys: Keys) -> ControlOptions:
        places = [self.parts[name].options for name in self._serving]
        return ControlOptions(
            graph=graph_meta(self.graph),
            dock=self.options,
            warehouses=[Warehouse(options.endpoint, options.public_key) for options in places],
            public_key=keys.public,
            secret_key=keys.secret,
            allowed=[self._clients.public],
            journal=str(self.folder / "journal"),
            parent=os.getpid(),
        )

    def _begin(self, name: str, module: str, options: Any) -> None:
        if self._stopping.is_set():
            raise WorkerLost(f"the dock was stopped before its {name} was started")
        child = self._spawn(module, options, self._errors(name))
        self.parts[name] = Part(name, module, options, child)

    def _settle(self, names: list[str]) -> None:
        """Wait until parts listen, and fix their addresses."""
        for name in names:
            part = self.parts[name]
            found = part.child.announced(START_S)
            part.options = msgspec.structs.replace(part.options, endpoint=found["endpoint"])

    def _errors(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '.')}.log"

    def _watch(self, part: Part) -> None:
        """Start a part again whenever it dies."""
        while True:
            pid, code = part.child.pid, part.child.wait()
            if self._stopping.is_set():
                return
            how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
            what = f"{part.name} (pid {pid}) was {how}" if code and code < 0 else f"{part.name} (pid {pid}) {how}"
            self.deaths.append(what)
            if self._promote(part, what):
                return
            part.restarts += 1
            if part.restarts > self._max_restarts:
                log.error("dock: %s; it is not started again after %d times", what, self._max_restarts)
                return
            log.error("dock: %s; it is started again", what)
            with self._lock:
                if self._stopping.is_set():
                    return
                part.child = self._spawn(part.module, part.options, self._errors(part.name))
            try:
                part.child.announced(START_S)
            except WorkerLost as error:
                log.error("dock: %s did not start again: %s", part.name, error)
                part.child.kill()

    def _promote(self, part: Part, what: str) -> bool:
        """A warehouse with a copy is not started again: the copy serves its rows from now on, without a copy itself."""
        copy = self.parts.get(part.name.replace("warehouse", "copy"))
        if self.durability != "replica" or copy is None or copy is part:
            return False
        log.error("dock: %s; its copy (pid %d) serves its rows, which have no second copy now", what, copy.child.pid)
        place = self._serving.index(part.name)
        control = self.parts["control"]
        with self._lock:
            self._serving[place] = copy.name
            named = [Warehouse(self.parts[n].options.endpoint, self.parts[n].options.public_key) for n in self._serving]
            control.options = msgspec.structs.replace(control.options, warehouses=named)
        self._tell(c.Move(place, copy.options.endpoint, copy.options.public_key))
        return True

    def _tell(self, message: msgspec.Struct) -> None:
        """Say something to the control process until it has heard it; if it is away, it may hear it after a restart."""
        options = self.parts["control"].options
        end = time.monotonic() + START_S
        while time.monotonic() < end and not self._stopping.is_set():
            with contextlib.suppress(ControlLost):
                ask_once(Peer(options.endpoint, options.public_key), self._clients, message, 1.0)
                return
        log.error("dock: the control process did not hear of %s", message)
