"""The distributed dock of one run: its processes start, here or where a starter puts them, when it is opened, and end
when it is left.

While it is open, FOLDER/address.json says where it is, for `docklands dock top`; whoever can read that file can talk to
the dock, so only its owner can.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from docklands.core.graph import Graph
from docklands.dock.distributed import DistributedDock, DockAddress
from docklands.dock.launch import Durability, Launcher
from docklands.dock.rules.options import DockOptions
from docklands.dock.snapshot import check_shape, files_of, to_files
from docklands.dock.start import Spawn
from docklands.errors import CheckpointError, ControlLost

ADDRESS = "address.json"
SNAPSHOT = "dock"
"""Name of the warehouses' files in a checkpoint: dock.0, dock.1, ..."""


class HostedDock(DistributedDock):
    """Processes and client of a dock. folder: for logs, journals and the address; durability: see launch.py."""

    def __init__(self, graph: Graph, options: DockOptions, folder: Path, durability: Durability = "none") -> None:
        super().__init__(graph, options, None, "driver")
        self._folder = folder
        self._file = folder / ADDRESS
        self.launcher = Launcher(graph, options, folder, durability)

    def spread(self, host: str, warehouses: int, spawn: Spawn | None = None) -> None:
        """Before `open`: the address of this node that its processes listen on, how many warehouses there are, and a
        starter that puts them on other nodes too; if it has a `close`, that is called in the end.
        """
        self.launcher.spread(host, warehouses, spawn or self.launcher.spawn)
        self.options = self.launcher.options

    async def open(self) -> None:
        """Start the processes and connect. Raises WorkerLost when one does not start."""
        for left in self._folder.glob("dock-*/*"):  # of a driver that was killed
            if left.suffix != ".log":
                left.unlink(missing_ok=True)
        self._known = await asyncio.to_thread(self.launcher.start)
        write_address(self._file, self._known)
        await super().open()

    async def leave(self) -> None:
        """Disconnect, and end the processes."""
        self._file.unlink(missing_ok=True)
        if hasattr(self, "warehouses"):
            await super().leave()
        await asyncio.to_thread(self.launcher.stop)
        close = getattr(self.launcher.spawn, "close", None)
        if callable(close):
            await asyncio.to_thread(close)

    async def save(self) -> tuple[dict[str, Any], list[Path]]:
        """A snapshot in mid-step: the control's state, and a file of each warehouse. Raises CheckpointError when one
        wrote its file where it cannot be seen from here.
        """
        state = await self.snapshot(SNAPSHOT)
        files = [self.launcher.folder / f"{SNAPSHOT}.{place}" for place in range(self.places)]
        for file, address in zip(files, self.addresses()):
            if not file.is_file():
                raise CheckpointError(
                    f"the warehouse on node {address} has written {file}, which is not to be seen on this node",
                    "the run directory must be on a file system that all nodes share",
                )
        return state, files

    async def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """A snapshot of a dock of either kind, with any number of warehouses; its files, if any, lie in `folder`."""
        mine = self.launcher.folder
        if "control" not in state:
            check_shape(self.flow, self.options, dict(state))
            state = await asyncio.to_thread(to_files, self.flow, state, mine, SNAPSHOT, self.places)
            files = files_of(state, mine)
        else:
            files = files_of(state, folder)
        for file in files if files[0].parent != mine else ():
            await asyncio.to_thread(shutil.copyfile, file, self.launcher.folder / file.name)
        try:
            await self.restore(state)
        finally:
            for file in files:
                (self.launcher.folder / file.name).unlink(missing_ok=True)


def write_address(path: Path, address: DockAddress) -> None:
    """For the eyes of the owner only."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(address))


def read_address(folder: Path) -> DockAddress:
    """Where the dock of a running job is. Raises ControlLost when there is none."""
    try:
        return msgspec.json.decode((folder / ADDRESS).read_bytes(), type=DockAddress)
    except (OSError, msgspec.MsgspecError):
        raise ControlLost(
            f"no dock is running in {folder}",
            "a run has one while it trains with dock.transport=processes",
        ) from None
