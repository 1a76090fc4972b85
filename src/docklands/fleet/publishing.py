"""Publishing to generators that are worlds of their own: they come and go, and the trainers do not notice.

Trainers and the generators of the moment meet in one process group beside their worlds, a *party*; the plan
(sync/publish.py) runs over it. The party is made anew when its members change. When a member dies during a publish,
every other one hears of it at once (whoever gives up closes its lines, and so on from one to the next), drops the
party, and goes back to its own world, which is whole; the driver then publishes to those that are left. A newcomer gets
the version of the moment from the trainers, in a party of its own, while the other generators go on.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from docklands.errors import DocklandsError, SyncError, WorkerLost, reason_of
from docklands.fleet.generation import ROLE, SYNC, SyncSpec, train_state
from docklands.fleet.host import BACKENDS, Context
from docklands.fleet.local_backend import LocalRole
from docklands.fleet.reader import agree
from docklands.obs.metrics import Metrics

if TYPE_CHECKING:
    from docklands.fleet.engines import RemoteEngine
    from docklands.fleet.replicas import Replica, Replicas
    from docklands.fleet.workers import Workers
    from docklands.sync.publish import Publisher, Route, SumCount

log = logging.getLogger("docklands.fleet")


@dataclass(frozen=True)
class Party:
    """Who publishes together.

    number    of the party in this run
    address, port  of the store where its members meet
    size      ranks in all: the trainers', then each replica's
    replicas  how many
    """

    number: int
    address: str
    port: int
    size: int
    replicas: int


# --- in the workers ------------------------------------------------------------------------------------------------


def join_group(context: Context, party: Party, rank: int) -> Any:
    """A process group that is not made of ranks of this process's world. This process is `rank` there.

    torch makes such groups for its own default one; `new_group` knows only ranks of that. (The same few lines are what
    other systems of this kind lean on.)
    """
    wait = timedelta(seconds=context.setup.wait_s)
    store = TCPStore(party.address, party.port, is_master=False, timeout=wait, wait_for_workers=False)
    name: Any = f"party {party.number}"
    group, _ = distributed_c10d._new_process_group_helper(
        party.size, rank, [], BACKENDS[context.setup.device], store, name, timeout=wait
    )
    # torch finds a process's place in a group by its rank in the default group: this one's, swapped with its own
    places = {place: place for place in range(party.size)}
    mine = dist.get_rank()
    places[mine], places[rank] = rank, mine
    distributed_c10d._world.pg_group_ranks[group] = places  # type: ignore[index]
    dist.barrier(group)  # all are connected: from here on a death is heard
    return group


class Member:
    """The object "sync" in a process that trains, or generates apart."""

    def __init__(self, context: Context, spec: SyncSpec) -> None:
        self.context, self.spec = context, spec
        self.publisher: Publisher | None = None
        self._party: Party | None = None
        self._group: Any = None

    def publish(self, party: Party, first: int, version: int) -> SumCount:
        """This process's part in publishing `version`; `first`: rank in the party of its world's rank 0.

        SyncError on every rank of its world, when one has failed.
        """
        found, error = {}, None
        try:
            if party != self._party:
                self._join(party, first)
            assert self.publisher is not None
            found = self.publisher.publish(version)
        except DocklandsError as failure:
            error = failure
        except (RuntimeError, ValueError) as failure:  # torch.distributed's own
            error = SyncError(f"publishing version {version} failed: {reason_of(failure)}", "is a process of it dead?")
        if error is not None:
            # What hangs on the traceback are messages under way; with them the lines would stay open.
            error = error.with_traceback(None)
            error.__cause__ = error.__context__ = None
            self._leave()
        agree(self.context.mesh.world if self.context.mesh else None, error)
        return found

    def for_generation(self) -> None:
        """See Publisher; nothing is swapped where generators are apart."""

    generated = for_generation

    def for_training(self, update: bool = True) -> None:
        """Likewise."""

    def _join(self, party: Party, first: int) -> None:
        self._leave()
        self._group = join_group(self.context, party, first + self.context.rank)
        route = self._route(party)
        if self.publisher is None:
            from docklands.sync.publish import Publisher

            objects, setup = self.context.objects, self.context.setup
            trainer = train_state(self.context) if "actor" in objects else None
            generator = objects[ROLE].engine if ROLE in objects else None
            self.publisher = Publisher(
                route, self.spec.section, trainer, generator, device=self.context.device, timeout_s=setup.wait_s
            )
        else:
            self.publisher.take(route)
        self._party = party

    def _route(self, party: Party) -> Route:
        from docklands.sync.publish import Route

        made, training = self.spec.generation, self.spec.training
        assert training is not None
        generation = replace(made.layout, dp=made.layout.dp * party.replicas)
        dtype = getattr(torch, made.dtype)
        return Route(made.shape(), training, generation, dtype, True, self.spec.temperature, self._group)

    def _leave(self) -> None:
        """Close this process's lines to the others of the party."""
        group, self._group, self._party = self._group, None, None
        if group is not None:
            if self.publisher is not None:
                self.publisher.forget()
            dist.destroy_process_group(group)
            del group
            gc.collect()


# --- in the driver -------------------------------------------------------------------------------------------------


class PartySync:
    """publish(version) to the generators of the moment; see the module."""

    def __init__(self, replicas: Replicas, role: LocalRole, spec: SyncSpec) -> None:
        """role: the actor's, whose device's lease publishing holds, and with whose metrics its own are told."""
        self._replicas, self._role = replicas, role
        self._engine: RemoteEngine = role.resource
        self._trainers: Workers = self._engine.workers
        self._lock = asyncio.Lock()
        self._store: Any = None
        self._party: Party | None = None
        self._members: list[tuple[int, int]] = []
        self._number = 0
        self.version = -1
        self._trainers.make(SYNC, Member, spec)
        replicas.sync = self

    async def publish(self, version: int) -> None:
        """Every generator holds `version`. One that dies meanwhile is left out. Raises SyncError and its kind."""
        async with self._lock, self._replicas.held(publish=True):
            while True:
                there = self._replicas.standing()
                theirs = [replica.workers for replica in there]
                metrics = await self._role.call("publish", self._once, there, version)
                if metrics is not None:
                    break
            self.version = self._replicas.version = version
            self._engine.changed = False
            self._role.note(metrics.pairs())
            for replica, workers in zip(there, theirs):
                if replica.stands and replica.workers is workers:  # it has not been lost since
                    replica.has_weights()

    async def leave(self, replica: Replica) -> None:
        """End its processes, between two publishes."""
        async with self._lock:
            await asyncio.to_thread(replica.close)

    async def catch_up(self, replica: Replica) -> None:
        """A newcomer gets the version of the moment. When the trainers have left it already, it gets their next,
        unless it leaves before. Raises WorkerLost when it dies meanwhile.
        """
        async with self._lock:
            if self.version >= 0:
                done = await self._role.call("catch_up", self._bring, replica)
                if done:
                    replica.has_weights()
        while not replica.holds.is_set() and not replica.leaving:
            if replica.workers.lost is not None:
                raise replica.workers.lost
            replica.stirred.clear()
            await replica.stirred.wait()

    def _bring(self, replica: Replica) -> bool:
        if self._engine.changed:
            return False
        if self._once([replica], self.version) is None:
            raise replica.workers.lost or WorkerLost(f"generator {replica.number} is lost")
        return True

    def _once(self, replicas: Sequence[Replica], version: int) -> Metrics | None:
        """Publish to these; None: one of them is lost, and none of the others holds the version for certain."""
        if not replicas:
            return Metrics()
        worlds = [self._trainers, *(replica.workers for replica in replicas)]
        sizes = [workers.setup.world_size for workers in worlds]
        party = self._meet(replicas, sum(sizes))
        errors: list[DocklandsError] = []
        metrics = Metrics()

        def one(index: int) -> None:
            try:
                for found in worlds[index].call(SYNC, "publish", party, sum(sizes[:index]), version):
                    metrics.merge(found)
            except WorkerLost as error:
                errors.insert(0, error)
                self._store = None  # whoever waits there for the dead one hears of it
            except DocklandsError as error:
                errors.append(error)

        with ThreadPoolExecutor(len(worlds)) as pool:
            list(pool.map(one, range(len(worlds))))
        if not errors:
            return metrics
        self._party = None
        if self._trainers.lost is not None:
            raise self._trainers.lost
        lost = [replica for replica, workers in zip(replicas, worlds[1:]) if workers.lost is not None]
        if not lost:
            raise errors[0]
        for replica in lost:
            replica.stop_soon()
        return None

    def _meet(self, replicas: Sequence[Replica], size: int) -> Party:
        """The party of these; the last one, when they are the same."""
        members = [(replica.number, id(replica.workers)) for replica in replicas]
        if self._party is None or members != self._members:
            self._number += 1
            self._members = members
            self._store = TCPStore(
                self._trainers.carrier.home, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
            self._party = Party(self._number, self._trainers.carrier.home, self._store.port, size, len(replicas))
        return self._party
