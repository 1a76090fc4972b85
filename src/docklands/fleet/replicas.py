"""Generators with processes of their own: independent replicas, each a world, each with a pump.

A replica takes groups as it has room for them (generation.GenerationShard.visit), so the longest sample of one makes no
other wait, and the work is shared by load. It may die, be found hanging, be started again, join or leave while trainers
and the other replicas go on: its unfinished groups are given back to the dock, which hands them to whoever has room.

    starting -> standing (has its objects, publishes with the others) -> holding (has the version of the moment) -> gone
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID
from docklands.core.protocols import Rows, Sampling
from docklands.core.stage import Result
from docklands.errors import WorkerLost
from docklands.fleet.generation import ROLE, SYNC, GenerationShard, GenerationSpec, SyncSpec
from docklands.fleet.local_backend import Device
from docklands.fleet.publishing import Member
from docklands.fleet.supervise import Restarts

if TYPE_CHECKING:
    from docklands.fleet.publishing import PartySync
    from docklands.fleet.workers import Workers

WISHES = "fleet.json"
"""In the run directory: how many replicas are wanted now."""
LOOK_S = 0.05
"""Seconds between two looks at whether one holds weights again."""


class Replica:
    """One replica, as the driver sees it. `workers` are others after each restart.

    hand, inbox  groups that its processes have, and that they get with the next visit, by lease
    free         samples that could join
    whole        nothing can join what it is at work on (generation.Visit)
    holds        it has the version of the moment
    joining      it came in mid-run, and has not held weights yet
    """

    def __init__(self, number: int, make: Callable[[Replica], Workers], owner: Replicas) -> None:
        self.number, self._make, self._owner = number, make, owner
        self.device = Device(f"rollout.{number}")
        self.workers = make(self)
        self.holds = asyncio.Event()
        self.stands = self.leaving = self.visiting = self.whole = self.joining = False
        self.empty()

    def empty(self) -> None:
        """Nothing in hand."""
        self.hand: dict[int, Rows] = {}
        self.inbox: list[Rows] = []
        self.free = 1
        self.room, self.stirred = asyncio.Event(), asyncio.Event()
        self.room.set()
        self._owner.moved()

    async def start(self, spec: GenerationSpec, sync: SyncSpec) -> None:
        """See `begin`. A caller that is cancelled waits for no room and no process."""
        starting = asyncio.ensure_future(self.device.call(self.begin, spec, sync))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.workers.give_up()
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()  # heard
            raise

    def begin(self, spec: GenerationSpec, sync: SyncSpec) -> None:
        """Start the processes and make what they need. Blocks. Raises what that raises."""
        self.workers.make(ROLE, GenerationShard, spec)
        self.workers.make(SYNC, Member, sync)
        self.stands = True

    def again(self) -> None:
        """Other processes in the place of lost ones. Blocks until those are gone."""
        self.stands = False
        self.workers.close()
        self.workers = self._make(self)

    def stop_soon(self) -> None:
        """Something has happened to it: its pump should look. From any thread."""
        loop = self._owner.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.stirred.set)

    def leave(self) -> None:
        """Take nothing more, end what it has, and go."""
        self.leaving = True
        self.room.clear()
        self.stirred.set()
        if not self.stands:
            self.workers.give_up()

    def has_weights(self) -> None:
        """Of the moment."""
        self.joining = False
        if not self.holds.is_set():
            self.holds.set()
            self.stirred.set()

    def nudge(self) -> None:
        """A visit is under way, and more has come: it should end soon."""
        self.workers.urgent(ROLE, "nudge")

    def call(self, method: str, *args: Any) -> list[Any]:
        """On all ranks."""
        return self.workers.call(ROLE, method, *args)

    def got(self, rows: Rows) -> None:
        """A group for it."""
        self.inbox.append(rows)
        self.free -= len(rows)
        self.stirred.set()
        if self.free <= 0:
            self.room.clear()

    def has_room(self, samples: int) -> None:
        """After a visit; what came meanwhile is in the inbox."""
        self.free = samples - sum(len(rows) for rows in self.inbox)
        if self.free > 0 and not self.leaving:
            self.room.set()

    def close(self) -> None:
        """End its processes."""
        if not self.stands:
            self.workers.give_up()
        self.workers.close()
        self.device.close()


class Replicas:
    """The resource of the role "rollout": all replicas.

    make      (number of its first worker, told when one hangs) -> the processes of a replica, not yet started
    restarts  how often a lost one may be started again
    version   that was published last
    wishes    file that says how many are wanted (WISHES); None: as many as there are
    drains    before each publish, instead of going on under new weights (fleet.publish)
    """

    def __init__(
        self,
        make: Callable[[int, Callable[[], None]], Workers],
        specs: tuple[GenerationSpec, SyncSpec],
        number: int,
        restarts: Restarts,
    ) -> None:
        """Start `number` replicas, all at once. Raises what one of them raises."""
        self._make, self.specs = make, specs
        self.restarts = restarts
        self.members: dict[int, Replica] = {}
        self.version = -1
        self.sync: PartySync | None = None
        self.wishes: Path | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.drains = self.stopped = False
        self._holders, self._draining = 0, False
        self._moved = asyncio.Event()
        first = [self.add() for _ in range(number)]
        pool = ThreadPoolExecutor(number)
        starts = [pool.submit(replica.begin, *specs) for replica in first]
        try:
            for start in starts:
                start.result()
        except BaseException:
            for replica in first:  # before anything waits: a second Ctrl-C may end the waiting
                replica.workers.give_up()
            self.close()
            raise
        finally:
            pool.shutdown(wait=False)

    @property
    def spec(self) -> GenerationSpec:
        """What generators are made of; its layout: of one replica."""
        return self.specs[0]

    def add(self) -> Replica:
        """Another one, not yet started, under the lowest free number."""
        number = next(i for i in range(len(self.members) + 1) if i not in self.members)
        size = self.spec.layout.world_size
        replica = Replica(number, lambda replica: self._make(number * size, replica.stop_soon), self)
        self.members[number] = replica
        return replica

    async def end(self, replica: Replica) -> None:
        """One fewer; its processes end between two publishes."""
        if self.sync is not None:
            await self.sync.leave(replica)
        self.members.pop(replica.number, None)

    def standing(self) -> list[Replica]:
        """Those that publish, by number."""
        return [replica for _, replica in sorted(self.members.items()) if replica.stands and not replica.workers.lost]

    @asynccontextmanager
    async def held(self, publish: bool = False) -> AsyncIterator[None]:
        """No visit begins meanwhile. publish: where that was chosen, all that was begun ends first."""
        self._holders += 1
        try:
            if publish and self.drains:
                self._draining = True
                self.moved()
                await self._until(lambda: not any(replica.hand for replica in self.members.values()))
            yield
        finally:
            self._draining = self._draining and not publish
            self._holders -= 1
            self.moved()

    def able(self) -> list[Replica]:
        """Those that have the version of the moment."""
        return [replica for replica in self.standing() if replica.holds.is_set()]

    async def any_able(self) -> None:
        """Until there is one: all may be being started again. WorkerLost where nobody starts any."""
        while not self.able():
            if self.loop is None:
                raise self._nobody()
            await asyncio.sleep(LOOK_S)

    def _nobody(self) -> WorkerLost:
        lost = (replica.workers.lost for replica in self.members.values())
        return next(filter(None, lost), WorkerLost("no generator stands", "their logs say why"))

    async def turn(self, replica: Replica) -> bool:
        """Wait until a visit may begin; -> whether new groups may join it."""
        await self._until(lambda: not self._holders or (self._draining and bool(replica.hand)))
        return not self._draining

    def moved(self) -> None:
        """What `_until` may wait for has changed: a hand, or whether visits are held."""
        self._moved.set()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._moved.clear()
            await self._moved.wait()

    # --- rows that are not in the dock ------------------------------------------------------------------------

    def rollout(self, batch: Batch, sampling: Sampling, visit: int = 0) -> Result:
        """See RolloutWorker: for evaluation. Groups are dealt to those that hold weights, and those of a lost one again
        to the others. WorkerLost when none is left.
        """
        found: list[Result] = []
        left = [batch]
        while any(map(len, left)):
            able, asked = self.able(), Batch.concat(left)
            if not able:
                raise self._nobody()
            turn = np.unique(asked[GROUP_ID].numpy(), return_inverse=True)[1] % len(able)
            dealt = [(replica, asked.select(turn == index)) for index, replica in enumerate(able[: turn.max() + 1])]
            left = []
            with ThreadPoolExecutor(len(able)) as pool:
                calls = [pool.submit(replica.call, "rollout", part, sampling, visit) for replica, part in dealt]
            for (replica, part), answer in zip(dealt, calls):
                try:
                    found += filter(None, answer.result())
                except WorkerLost:
                    left.append(part)
                    replica.stop_soon()
        batches = [part.batch for part in found if part.batch is not None and len(part.batch)]
        dropped = {row: why for part in found for row, why in part.dropped.items()}
        return Result(Batch.concat(batches) if batches else None, dropped, {})

    def describe(self) -> str:
        """For a stuck run; see Workers.describe."""
        return "\n".join(replica.workers.describe() for _, replica in sorted(self.members.items()))

    def abort(self) -> None:
        """End running rollouts soon, from any thread."""
        self.stopped = True
        for replica in self.members.values():
            replica.workers.urgent(ROLE, "abort")

    def close(self) -> None:
        """End all processes."""
        with ThreadPoolExecutor(max(1, len(self.members))) as pool:
            list(pool.map(Replica.close, self.members.values()))
