"""The role "rollout" where generators are apart: a pump for each replica; deaths and newcomers in mid-run."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Stage
from docklands.dock.distributed import DistributedDock
from docklands.errors import ConfigError, DockClosed, DockError, WarehouseLost, WorkerLost
from docklands.fleet.generation import Visit
from docklands.fleet.local_backend import Device, LocalRole
from docklands.fleet.replicas import Replica, Replicas
from docklands.fleet.worker_role import merged
from docklands.obs.critical_path import ranges
from docklands.obs.spans import span

log = logging.getLogger("docklands.fleet")

LINGER_S = 0.005
"""An idle replica that gets a group waits so long for more to begin with."""
LOOK_S = 1.0
"""Seconds between two looks at how many replicas are wanted."""


class ReplicaRole(LocalRole):
    """As LocalRole; stages have a pump for each replica (`serve`), and calls are of all of them."""

    resource: Replicas

    def __init__(
        self, resource: Replicas, dock: DistributedDock, device: Device, beat: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__("rollout", resource, dock, device, beat)
        self._flow = dock
        self._seen: float | None = None
        self._busy = self._idle = 0.0

    async def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """See LocalRole; no replica visits meanwhile."""
        await self.resource.any_holds()
        async with self.resource.held():
            return await super().call(name, function, *args)

    def drain(self) -> list[Any]:
        """See LocalRole. Times are a mean over the replicas, which work beside each other."""
        count = max(1, len(self.resource.members))
        times = {"timing_s/gen": (self._busy / count, 1.0), "timing_s/gen/wait": (self._idle / count, 1.0)}
        if self._busy:
            self.note({**times, "fleet/replicas": (float(count), 1.0)})
        self._busy = self._idle = 0.0
        return super().drain()

    # --- the stage ---------------------------------------------------------------------------------------------

    async def serve(self, stage: Stage, pump: Any) -> None:
        """See LocalRole: until the dock is closed, with the replicas of the moment."""
        lives: set[asyncio.Task[None]] = set()
        self.resource.loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:

            def begin(replica: Replica) -> None:
                lives.add(group.create_task(self._live(replica, stage)))

            for replica in list(self.resource.members.values()):
                begin(replica)
            watch = group.create_task(self._watch(begin))
            while lives:
                done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
                lives -= done
            watch.cancel()

    async def _live(self, replica: Replica, stage: Stage) -> None:
        """A replica from its start to its end, through deaths."""
        while True:
            try:
                if not replica.stands:
                    await replica.device.call(replica.begin, *self.resource.specs)
                await self._catch_up(replica)
                await self._pump(replica, stage)
                break
            except WorkerLost as error:
                await self._lost(replica, error)
            except ConfigError as error:  # no room for it: the run goes on with those that there are
                log.warning("rollout replica %d cannot join: %s", replica.number, error.message)
                break
        if replica.leaving or not replica.stands:
            self.resource.members.pop(replica.number, None)
            await asyncio.to_thread(replica.close)
            log.info("rollout replica %d has left; there are %d", replica.number, len(self.resource.members))

    async def _catch_up(self, replica: Replica) -> None:
        sync = self.resource.sync
        if sync is not None and not replica.holds.is_set():
            await sync.catch_up(replica)

    async def _lost(self, replica: Replica, error: WorkerLost) -> None:
        """Its groups are free for others at once; other processes take its place, if that has not been too often."""
        began = [*replica.hand.values(), *replica.inbox]
        replica.empty()
        replica.stands = False
        replica.holds.clear()
        for rows in began:
            with suppress(DockError):  # closed, or its lease has ended by itself
                await self._flow.give_back(rows)
        if not self.resource.restarts.allow(max(0, self.resource.version)):
            raise error
        log.warning("%s", error.message)
        log.warning(
            "rollout replica %d is started again, the others go on; %d of its samples are asked for again",
            replica.number,
            sum(map(len, began)),
        )
        self.note({"fleet/restarts": (1.0, 1.0)})
        await asyncio.to_thread(replica.again)

    async def _pump(self, replica: Replica, stage: Stage) -> None:
        """Visit by visit: groups join as there is room, and are acknowledged as they end."""
        taker = asyncio.ensure_future(self._take(replica, stage))
        taker.add_done_callback(lambda _: replica.stirred.set())
        try:
            while True:
                if replica.workers.lost is not None:
                    raise replica.workers.lost
                if replica.leaving:
                    taker.cancel()
                if not replica.hand and not replica.inbox:
                    if taker.done():
                        return None if taker.cancelled() else taker.result()
                    await self._wait(replica)
                    continue
                fresh = []
                if await self.resource.turn(replica):
                    fresh, replica.inbox = replica.inbox, []
                await self._visit(replica, stage, fresh)
        finally:
            taker.cancel()
            await asyncio.gather(taker, return_exceptions=True)

    async def _wait(self, replica: Replica) -> None:
        """Until there is something to do."""
        began = time.perf_counter()
        async with self.resource.idle(replica):
            await replica.stirred.wait()
        replica.stirred.clear()
        await asyncio.sleep(LINGER_S)
        self._idle += time.perf_counter() - began

    async def _take(self, replica: Replica, stage: Stage) -> None:
        """Ask the dock for a group whenever there is room for one more sample."""
        with suppress(DockClosed):
            while True:
                await replica.room.wait()
                asked = asyncio.ensure_future(self._flow.take(stage, groups=1))
                try:
                    rows = await asyncio.shield(asked)
                except asyncio.CancelledError:
                    asked.add_done_callback(self._return)
                    raise
                replica.got(rows)
                if replica.visiting:
                    replica.nudge()

    def _return(self, asked: asyncio.Future[Rows]) -> None:
        """Rows for a replica that takes none any more."""
        if not asked.cancelled() and asked.exception() is None:
            self._returning = asyncio.ensure_future(self._flow.give_back(asked.result()))

    async def _visit(self, replica: Replica, stage: Stage, fresh: Sequence[Rows]) -> None:
        replica.hand.update({rows.lease: rows for rows in fresh})
        began = time.perf_counter()
        self._beat(stage.name)
        hand = ranges(group for rows in replica.hand.values() for group in rows.group_ids.tolist())
        about = {"rows": sum(map(len, fresh)), "groups": hand}
        with span(f"stage/{stage.name}", role=self.name, rank=replica.number, **about):
            replica.visiting = True
            if replica.whole:  # what it took now would wait here while others have room
                replica.room.clear()
            try:
                visits = await replica.device.call(self._ask, replica, stage, together(fresh, stage))
            finally:
                replica.visiting = False
        self._beat(stage.name)
        self._busy += time.perf_counter() - began
        self._pending.append(merged([visit.outcome for visit in visits]).metrics)
        replica.whole = any(visit.whole for visit in visits)
        replica.has_room(sum(visit.free for visit in visits))
        await self._end(replica, visits)

    def _ask(self, replica: Replica, stage: Stage, rows: Rows) -> list[Visit]:
        replica.workers.connect(self._flow)
        return [visit for visit in replica.call("visit", stage, rows) if visit is not None]

    async def _end(self, replica: Replica, visits: Sequence[Visit]) -> None:
        """Acknowledge what has ended, lease by lease; a lease is one group."""
        ended = {row for visit in visits for row in visit.ended}
        lost = {row for visit in visits for row in visit.lost}
        dropped = {row: why for visit in visits for row, why in visit.outcome.dropped.items()}
        later = {row for visit in visits for row in visit.outcome.later}
        over = []
        for lease, rows in list(replica.hand.items()):
            ids = rows.row_ids.tolist()
            if lost.intersection(ids):
                over.append(self._flow.give_back(replica.hand.pop(lease)))
            elif ended.issuperset(ids):
                mine = Outcome({row: dropped[row] for row in ids if row in dropped}, {}, [r for r in ids if r in later])
                over.append(self._finish(replica.hand.pop(lease), mine))
        await asyncio.gather(*over)

    async def _finish(self, rows: Rows, outcome: Outcome) -> None:
        try:
            await self._flow.finish(rows, outcome)
        except WarehouseLost:  # its rows are made anew
            await self._flow.give_back(rows)

    # --- how many ----------------------------------------------------------------------------------------------

    async def _watch(self, begin: Callable[[Replica], None]) -> None:
        """Start and end replicas as the file of wishes says."""
        while self.resource.wishes is not None:
            wanted = self._wanted(self.resource.wishes)
            members = self.resource.members
            staying = [replica for replica in members.values() if not replica.leaving]
            if wanted is not None and wanted != len(staying):
                log.info("%d rollout replicas are wanted, there are %d", wanted, len(staying))
                for _ in range(wanted - len(staying)):
                    begin(self.resource.add())
                for replica in sorted(staying, key=lambda replica: replica.number)[wanted:]:
                    replica.leave()
            await asyncio.sleep(LOOK_S)

    def _wanted(self, path: Path) -> int | None:
        """What the file says since it has changed; None: nothing new, or nothing that is a number of replicas."""
        try:
            changed = path.stat().st_mtime
            if changed == self._seen:
                return None
            self._seen = changed
            wanted = json.loads(path.read_text(encoding="utf-8"))["generators"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s says nothing of how many replicas are wanted: %s", path, error)
            return None
        if not isinstance(wanted, int) or wanted < 1:
            log.warning("%s wants %r rollout replicas: a whole number, at least 1", path, wanted)
            return None
        return wanted


def together(pieces: Sequence[Rows], stage: Stage) -> Rows:
    """Rows of several leases as one, for a worker to read."""
    if not pieces:
        none = np.zeros(0, np.int64)
        return Rows(none, none, none, np.zeros(0, np.int32), stage.name)
    first, columns = pieces[0], ("row_ids", "group_ids", "lengths", "places")
    joined = {name: np.concatenate([getattr(rows, name) for rows in pieces]) for name in columns}
    lives = [np.zeros(len(rows), np.int64) if rows.lives is None else rows.lives for rows in pieces]
    anew = any(rows.lives is not None for rows in pieces)
    return replace(first, **joined, lives=np.concatenate(lives) if anew else None)
