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
from docklands.errors import ConfigError, DockClosed, DockError, DocklandsError, WarehouseLost, WorkerLost
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
        self._returning: set[asyncio.Task[None]] = set()
        self._busy = self._idle = 0.0

    async def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """See LocalRole; no replica visits meanwhile. Done again when all were lost in it, once one is back."""
        while True:
            if self.resource.loop is None:
                await self._revive()
            await self.resource.any_able()
            try:
                async with self.resource.held():
                    return await super().call(name, function, *args)
            except WorkerLost:
                if self.resource.stopped:
                    raise

    async def _revive(self) -> None:
        """What `_live` does for lost replicas, where no stage is served: before the first step, and after the last."""
        for replica in list(self.resource.members.values()):
            if (error := replica.workers.lost) is not None:
                await self._again(replica, error, await self._lost(replica))
                await replica.start(*self.resource.specs)
                await self._catch_up(replica)

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
        self.resource.loop = None  # nobody starts a lost one again

    async def _live(self, replica: Replica, stage: Stage) -> None:
        """A replica from its start to its end, through deaths."""
        members = self.resource.members
        while replica.stands or not replica.leaving:
            try:
                if not replica.stands:
                    await replica.start(*self.resource.specs)
                await self._catch_up(replica)
                await self._pump(replica, stage)
                break
            except DocklandsError as error:
                lost, no_room = isinstance(error, WorkerLost), isinstance(error, ConfigError) and not replica.stands
                if not (lost or no_room or replica.joining):
                    raise
                again = await self._lost(replica)
                if replica.leaving:
                    break
                if no_room or replica.joining:
                    self._go_on_without(replica, error)
                    break
                await self._again(replica, error, again)
        if replica.leaving or not replica.stands:
            await self.resource.end(replica)
            log.info("rollout replica %d has left; there are %d", replica.number, len(members))
        else:  # the dock is closed: nobody is needed any more
            for other in members.values():
                if not other.holds.is_set():
                    other.leave()

    def _go_on_without(self, replica: Replica, error: DocklandsError) -> None:
        """It cannot start, or there is no room for it. WorkerLost when it would have been the only one."""
        if all(other is replica or other.leaving for other in self.resource.members.values()):
            raise WorkerLost(f"no rollout replica is left: {error.message}", error.hint) from error
        log.warning("rollout replica %d cannot join, the others go on: %s", replica.number, error.message)

    async def _catch_up(self, replica: Replica) -> None:
        sync = self.resource.sync
        if sync is not None and not replica.holds.is_set():
            await sync.catch_up(replica)

    async def _lost(self, replica: Replica) -> int:
        """Its groups are free for others at once; -> how many samples it had."""
        began = [*replica.hand.values(), *replica.inbox]
        replica.empty()
        replica.stands = False
        replica.holds.clear()
        for rows in began:
            await self._give_back(rows)
        return sum(map(len, began))

    async def _give_back(self, rows: Rows) -> None:
        with suppress(DockError):  # closed, or its lease has ended by itself
            await self._flow.give_back(rows)

    async def _again(self, replica: Replica, error: DocklandsError, samples: int) -> None:
        """Other processes take its place, if that has not been too often. Raises the error if it has."""
        if not self.resource.restarts.allow(max(0, self.resource.version)):
            raise error
        log.warning("%s", error.message)
        log.warning(
            "rollout replica %d is started again, the others go on; %d of its samples are asked for again",
            replica.number,
            samples,
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
        await replica.stirred.wait()
        replica.stirred.clear()
        await asyncio.sleep(LINGER_S)
        self._idle += time.perf_counter() - began

    async def _take(self, replica: Replica, stage: Stage) -> None:
        """Ask the dock for a group whenever there is room for one more sample."""
        with suppress(DockClosed):
            while True:
                await replica.room.wait()
                near = self._flow.near_to(replica.workers.lines[0].address)
                asked = asyncio.ensure_future(self._flow.take(stage, groups=1, near=near))
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
            task = asyncio.ensure_future(self._give_back(asked.result()))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

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
        self.resource.moved()
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
            self._seen, number = wanted(self.resource.wishes, self._seen)
            members = self.resource.members
            staying = [replica for replica in members.values() if not replica.leaving]
            if number is not None and number != len(staying):
                log.info("%d rollout replicas are wanted, there are %d", number, len(staying))
                for _ in range(number - len(staying)):
                    newcomer = self.resource.add()
                    newcomer.joining = True
                    begin(newcomer)
                for replica in sorted(staying, key=lambda replica: replica.number)[number:]:
                    replica.leave()
            await asyncio.sleep(LOOK_S)


def wanted(path: Path, seen: float | None) -> tuple[float | None, int | None]:
    """When the file was written, and what it says since it was `seen`; None: nothing new, or nothing that is a number
    of replicas.
    """
    changed = seen
    try:
        changed = path.stat().st_mtime
        if changed == seen:
            return seen, None
        number = json.loads(path.read_text(encoding="utf-8"))["generators"]
    except FileNotFoundError:
        return seen, None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s says nothing of how many replicas are wanted: %s", path, error)
        return changed, None
    if not isinstance(number, int) or number < 1:
        log.warning("%s wants %r rollout replicas: a whole number, at least 1", path, number)
        return changed, None
    return changed, number


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
