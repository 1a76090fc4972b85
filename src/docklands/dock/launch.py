"""Start, watch and stop the processes of a distributed dock: S warehouses and one control process.

A process that dies is named in the log and started again on the same address with the same keys: a warehouse replays
its log (`wal`) or comes back empty (`none`: its rows are made anew), the control process replays its journal and asks
the warehouses what they hold. With `replica` every warehouse has a copy that takes over its rows instead. Clients take
their lines up again by themselves. How a process is started, here or on another node, is up to a starter (start.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from docklands.core.graph import Graph
from docklands.dock.control.links import Warehouse
from docklands.dock.control.messages import graph_meta
from docklands.dock.control.server import ControlOptions
from docklands.dock.distributed import DockAddress
from docklands.dock.rules.flow import Flow
from docklands.dock.rules.options import DockOptions
from docklands.dock.start import Child, Program, Spawn, Where, placed, start
from docklands.dock.supervise import START_S, STOP_S, Part, Supervisor
from docklands.dock.warehouse.arena import sweep
from docklands.dock.warehouse.store import WarehouseOptions
from docklands.dock.wire.format import column_meta
from docklands.dock.wire.net import Keys, Peer, make_keys
from docklands.errors import ConfigError, WorkerLost

log = logging.getLogger("docklands.dock.launch")

Durability = Literal["none", "wal", "replica"]


class Launcher(Supervisor):
    """The processes of one dock. Use it as `with Launcher(...) as launcher`.

    folder        for logs, journal and snapshots; every launch has its own subfolder
    spawn         starts a process; see start.py for those of other nodes
    max_restarts  of one part; after that it stays dead, and its clients get WarehouseLost or ControlLost
    host          address of this node that the processes listen on
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
        self.host = "127.0.0.1"
        self.folder = Path(folder).resolve() / f"dock-{self.run}"
        self.deaths: list[str] = []
        self.parts: dict[str, Part] = {}
        self.spawn, self._max_restarts = spawn, max_restarts
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._watchers: list[threading.Thread] = []
        self._serving: list[str] = []
        self._copies: dict[str, str] = {}

    def __enter__(self) -> Launcher:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def spread(self, host: str, warehouses: int, spawn: Spawn) -> None:
        """Before `start`: the address of this node that is listened on, how many warehouses, and who starts them."""
        self.host, self.spawn = host, spawn
        self.options = replace(self.options, warehouses=warehouses)

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
        module, places = "docklands.dock.warehouse.server", range(self.options.warehouses)
        self._serving = [f"warehouse {place}" for place in places]
        made = [self._warehouse(place, allowed) for place in places]
        if self.durability == "replica":
            self._copies = {self._serving[place]: f"copy {place}" for place in places}
            for place in places:
                copy = self._warehouse(place, [*allowed, made[place].public_key])
                self._begin(f"copy {place}", module, msgspec.structs.replace(copy, second=True))
            self._settle([f"copy {place}" for place in places])
            copies = [self.parts[f"copy {place}"].options for place in places]
            made = [
                msgspec.structs.replace(options, replica=copy.endpoint, replica_key=copy.public_key)
                for options, copy in zip(made, copies)
            ]
        for place in places:
            self._begin(self._serving[place], module, made[place])
        self._settle(self._serving)
        self._begin("control", "docklands.dock.control.server", self._control(own))
        self._settle(["control"])
        at = (f"{place} {self.parts[name].options.endpoint[6:]}" for place, name in enumerate(self._serving))
        log.info("warehouses stand at %s", ", ".join(at))
        for part in list(self.parts.values()):
            self._begin_watch(part)
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
        sweep()  # a warehouse that was killed, and not yet started again, has left its arena
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.suffix != ".log":  # a flow that has ended needs no log and no journal
                path.unlink(missing_ok=True)

    # --- inside ------------------------------------------------------------------------------------------------

    def _warehouse(self, place: int, allowed: list[str]) -> WarehouseOptions:
        keys, flow = make_keys(), Flow(self.graph)
        return WarehouseOptions(
            endpoint=f"tcp://{self.host}:*",
            place=place,
            columns=[column_meta(field) for field in self.graph.fields],
            readers={column: list(stages) for column, stages in flow.told.items()},
            run=self.run,
            public_key=keys.public,
            secret_key=keys.secret,
            allowed=allowed,
            capacity=self.options.capacity_bytes,
            spill_bytes=self.options.spill_bytes,
            fsync=self.options.fsync,
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
            endpoint=f"tcp://{self.host}:*",
            journal=str(self.folder / "journal"),
            parent=os.getpid(),
        )


__all__ = ["START_S", "Child", "Durability", "Launcher", "Program", "Spawn", "Where", "placed", "start"]
