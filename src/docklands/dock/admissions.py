"""How prompts come into a distributed dock: groups are admitted, and admitted again when their warehouse was lost.

Who admits prompts keeps them until their group has left the flow, so that a group can be made anew under the same ids.

Legend: B rows of a call, G groups of a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from docklands.core.batch import Batch
from docklands.dock.control import messages as c
from docklands.dock.exchange import checked_groups
from docklands.dock.look import Outlook
from docklands.dock.warehouse import messages as m
from docklands.dock.wire.net import Peer
from docklands.errors import DockError, WarehouseLost

log = logging.getLogger("docklands.dock")


class Kept:
    """A group's prompts: rows start..stop of a batch, cut out when they are wanted."""

    def __init__(self, batch: Batch, start: int = 0, stop: int | None = None) -> None:
        self._batch, self._start, self._stop = batch, start, len(batch) if stop is None else stop

    @property
    def batch(self) -> Batch:
        if self._stop - self._start == len(self._batch):
            return self._batch
        return self._batch.select(np.arange(self._start, self._stop))


class Admissions(Outlook):
    """Base of DistributedDock, which sets these."""

    _prompts: dict[int, Kept]
    _peers: dict[int, Peer]
    beside: Callable[[Sequence[int]], Sequence[int]] | None
    _tasks: set[asyncio.Task[None]]

    async def slots(self) -> int:
        """See Dock.slots."""
        reply, _ = await self._call(c.Slot())
        return reply.groups

    async def admit(self, batch: Batch, place: int | None = None) -> None:
        """See Dock.admit.

        place  the warehouse beside whoever will work on the rows; None: as `beside` says of the groups, or in turn
        """
        batch, groups = checked_groups(self.flow, batch)
        size = len(batch) // len(groups)
        here = place if place is not None else list(self.beside(groups)) if self.beside else -1
        call = c.Admit(groups, here)
        reply, _ = await self._call(call, [batch.row_ids.data])
        for group in reply.gone:
            self._prompts.pop(group, None)
        for at, group in enumerate(groups):
            self._prompts[group] = Kept(batch, at * size, (at + 1) * size)
        if len(set(reply.places)) == 1:
            birth = m.Birth(reply.orders, groups, reply.places[0])
            await self.warehouses.put(batch, reply.places[0], birth)
            return
        places = np.array(reply.places)
        puts = []
        for where in np.unique(places).tolist():
            here = np.nonzero(places == where)[0]
            birth = m.Birth([reply.orders[i] for i in here], [groups[i] for i in here], where)
            rows = (here[:, None] * size + np.arange(size)).ravel()
            puts.append(self.warehouses.put(batch.select(rows), where, birth))
        await asyncio.gather(*puts)

    def addresses(self) -> list[str]:
        """Of the nodes of the warehouses, by place, as far as this client has heard."""
        return [self._peers[place].endpoint.partition("://")[2].rpartition(":")[0] for place in range(self.places)]

    def near_to(self, address: str) -> list[int]:
        """Places of the warehouses on the node with this address; none if all are: there is nothing to choose."""
        here = [place for place, at in enumerate(self.addresses()) if at == address]
        return here if len(here) < self.places else []

    async def end_of_prompts(self) -> None:
        """See Dock.end_of_prompts."""
        await self._call(c.End())

    def _keep(self, group: int, batch: Batch) -> None:
        self._prompts[group] = Kept(batch)

    def _on_push(self, message: c.Again | c.Moved, frames: Sequence[memoryview]) -> None:
        """The control asks for a lost group's prompts, or says where a warehouse is."""
        if isinstance(message, c.Moved):
            peer = Peer(message.endpoint, message.public_key)
            if message.place in self._peers and self._peers[message.place] != peer:
                self._peers[message.place] = peer
                self.warehouses.redirect(message.place, peer)
            return
        rows = np.frombuffer(frames[0], np.int64).copy() if len(frames) == 1 else np.zeros(0, np.int64)
        task = asyncio.get_running_loop().create_task(self._admit_again(message, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit_again(self, again: c.Again, row_ids: np.ndarray) -> None:
        kept = self._prompts.get(again.group_id)
        if kept is None:
            return
        batch = kept.batch
        lost = batch.select(np.isin(batch.row_ids, row_ids))
        try:
            birth = m.Birth([again.order], [again.group_id], again.place, life=again.loss)
            await self.warehouses.put(lost, again.place, birth)
            reply, _ = await self._call(c.Admit([again.group_id], loss=again.loss), [batch.row_ids.data])
            if again.group_id in reply.gone:  # it has left meanwhile
                self._prompts.pop(again.group_id, None)
                await self.warehouses.free(lost.row_ids, again.place)
        except (DockError, WarehouseLost) as error:
            log.error("dock: group %d could not be admitted again: %s", again.group_id, error)
