"""What can be known of a distributed dock, and its snapshots: the calls that change nothing in the flow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from docklands.core.batch import Batch
from docklands.dock.control import messages as c
from docklands.dock.control.client import ControlClient, ask_once
from docklands.dock.rules.flow import Flow
from docklands.dock.rules.options import DockOptions
from docklands.dock.snapshot import FORMAT, check_shape, shape_of
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.client import AsyncWarehouseClient
from docklands.dock.wire.net import Keys, Peer
from docklands.errors import DockError, WarehouseLost

LOOK_S = 3.0
"""Seconds that `describe` gives the control process to answer."""
WHOLE_S, AGAIN_S = 60.0, 0.05
"""Seconds that a snapshot waits until the dock is whole, and between two attempts."""
RENAMED = {"gets": "fetches", "ignored_cells": "ignored_puts"}
"""A warehouse's figures by the names of the dock's metrics."""


@dataclass(frozen=True)
class DockAddress:
    """All that a process needs to reach a dock. It can be pickled, and must be kept as secret as its keys.

    warehouses  by place
    """

    control: Peer
    warehouses: tuple[Peer, ...]
    keys: Keys | None


class Outlook:
    """Base of DistributedDock, which sets these."""

    flow: Flow
    options: DockOptions
    control: ControlClient
    warehouses: AsyncWarehouseClient
    _known: DockAddress | None
    _lost_s: float

    @property
    def address(self) -> DockAddress:
        """Where the dock is. Raises DockError before it is known."""
        if self._known is None:
            raise DockError("the dock's processes have not been started", "await dock.open() first")
        return self._known

    @property
    def places(self) -> int:
        """Number of warehouses."""
        return len(self.address.warehouses)

    async def _call(self, message: Any, frames: Sequence[Any] = ()) -> tuple[Any, list[memoryview]]:
        return await self.control.call(message, frames, self.options.wait_s + self._lost_s)

    def _keep(self, group: int, batch: Batch) -> None:
        """This client can admit the group again."""
        raise NotImplementedError

    async def stats(self) -> dict[str, float]:
        """See Dock.stats: the control's counts, and the traffic and bytes of all warehouses."""
        reply, _ = await self._call(c.Look())
        found: dict[str, float] = dict(reply.figures)
        for place in range(self.places):
            figures = (await self.warehouses.ask(place, m.Stats())).values
            for name, value in figures.items():
                stage, _, what = name.rpartition("/")
                metric = f"dock/{stage}/{RENAMED.get(what, what)}" if stage else f"dock/{RENAMED.get(what, what)}"
                if metric in found:
                    found[metric] += value
        return found

    async def counts(self) -> dict[str, float]:
        """See stats."""
        return await self.stats()

    def describe(self) -> str:
        """See Dock.describe; over a line of its own, from any thread."""
        address = self.address
        try:
            return ask_once(address.control, address.keys, c.Look(), LOOK_S).text
        except DockError as error:
            return f"dock: {error}"

    async def here(self, row_ids: np.ndarray) -> np.ndarray:
        """See Dock.here. A warehouse may hold other rows, too, until it has freed them."""
        _, frames = await self._call(c.Where(), [np.ascontiguousarray(row_ids).data])
        return np.frombuffer(frames[0], np.int64) >= 0

    async def snapshot(self, name: str) -> dict[str, Any]:
        """A snapshot, also in mid-step; leases become free. Each warehouse writes its bytes to a file on its own node.

        A process that dies meanwhile is waited for, and what it has lost, until it is there again: nobody could make it
        anew out of the snapshot. Raises WarehouseLost when that takes longer than WHOLE_S.

        name  of the file, in the folder that each warehouse was given
        """
        end = time.monotonic() + WHOLE_S
        while True:
            pids, epoch = await self._pids(), self.control.epoch
            reply, frames = await self._call(c.Save())
            whole = not reply.lost and reply.heard == pids
            try:
                for place in range(self.places) if whole else ():
                    await self.warehouses.ask(place, m.Snapshot(f"{name}.{place}", place))
                if whole and (pids, epoch) == (await self._pids(), self.control.epoch):
                    break
            finally:
                await self._call(c.Saved())
            if time.monotonic() > end:
                raise WarehouseLost(f"the dock was not whole for {WHOLE_S:.0f} s: no snapshot was made")
            await asyncio.sleep(AGAIN_S)
        state = torch.frombuffer(bytearray(frames[0]), dtype=torch.uint8)
        shape = shape_of(self.flow, self.options)
        return {"format": FORMAT, "shape": shape, "file": name, "places": self.places, "control": state}

    async def _pids(self) -> list[int]:
        """Process ids of the warehouses that are there."""
        for place in range(self.places):
            await self.warehouses.ask(place, m.Stats())
        return [w.pid if (w := self.warehouses.sessions[place].welcome) else 0 for place in range(self.places)]

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Into a dock that has admitted nothing, with as many warehouses or others.

        From then on this client is the one that can admit the restored groups again. Raises CheckpointError when graph
        or group size differ.
        """
        check_shape(self.flow, self.options, dict(state))
        files = [f"{state['file']}.{number}" for number in range(state.get("places", self.places))]
        await self._call(c.Save())  # until it knows of them, the control must not free what the warehouses read
        try:
            for place in range(self.places):
                await self.warehouses.ask(place, m.Restore(files[place :: self.places]))
            await self._call(c.Load(), [state["control"].numpy().data])
        finally:
            await self._call(c.Saved())
        sources = tuple(self.flow.fields[name] for name in self.flow.sources)
        for place in range(self.places):
            held = await self.warehouses.inventory(place)
            groups, known = held.births["group_id"], await self.here(held.row_ids)
            for group in np.unique(groups[known]).tolist():
                rows = held.row_ids[known & (groups == group)]
                self._keep(group, await self.warehouses.get(rows, place, sources))
        self.control.join()
