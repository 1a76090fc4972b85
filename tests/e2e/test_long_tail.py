"""The long tail: lognormal lengths, one sample in 32 twenty times longer. Replicas that take groups as they have room
need little more than the least possible number of decode steps: where all samples run at once, where each slot has a
few, and where it has very many. In between, when the last samples to begin may be the longest and last as long as all
work divided by the slots, nobody who does not know lengths can promise it: no deterministic schedule stays below
2 - 1/slots (Shmoys, Wein, Williamson, "Scheduling parallel machines on-line", 1995). There replicas are held to what
one queue in front of all slots needs (list scheduling: Graham 1969).

Time is counted in decode steps: the event loop's clock moves by one for each step that a replica makes, so the figures
are the same on any machine. Dock, pumps, rollouts and engines are the real ones; only their processes are this one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from docklands.algorithms.stages import ROLLOUT, run_update
from docklands.config.schema import RolloutSection
from docklands.core.batch import Batch
from docklands.core.fields import (
    ADMITTED,
    COMPLETION,
    ENV_REWARD,
    FINISH_REASON,
    LOSS_MASK,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    WEIGHT_VERSIONS,
)
from docklands.core.graph import Graph
from docklands.core.protocols import Outcome, Request, Rows
from docklands.core.stage import Stage
from docklands.dock import Dock, DockOptions
from docklands.fleet.generation import Visit
from docklands.fleet.local_backend import Device
from docklands.fleet.replica_role import ReplicaRole
from docklands.fleet.replicas import Replicas
from docklands.fleet.supervise import Restarts
from docklands.rollout import RolloutWorker
from docklands.rollout.live import LiveRollout
from docklands.rollout.queue import LiveQueue, largest
from tests import rollout_cases as cases
from tests.train_cases import ACTOR

SAMPLES, LONGEST = 4, 400
WRITES = (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS, WEIGHT_VERSIONS, FINISH_REASON, COMPLETION, ENV_REWARD)
UPDATE = Stage("update", "actor", (*WRITES,), (), run_update, "step")
GRAPH = Graph((ROLLOUT, UPDATE), (replace(ACTOR, reads=WRITES),), ADMITTED)


class StepClock(asyncio.SelectorEventLoop):
    """Where all wait, the clock moves to the next that is due."""

    def __init__(self) -> None:
        super().__init__()
        self.now, select = 0.0, self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return select(0.0 if timeout is not None else None)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Lengths(LiveRollout):
    """Samples as long as they were drawn, by row."""

    table: np.ndarray

    def begin(self, batch: Batch) -> list[Request]:
        def exact(request: Request) -> Request:
            count = int(self.table[request.request_id])
            return replace(request, sampling=replace(request.sampling, max_tokens=count, min_tokens=count))

        return [exact(request) for request in super().begin(batch)]


class Beside(Dock):
    """A dock in this process, asked as one with warehouses on nodes is."""

    def near_to(self, _: str) -> Sequence[int]:
        return ()

    async def take(self, stage: Stage, *, near: Sequence[int] = (), **want: Any) -> Rows:
        return await super().take(stage, **want)


class Here:
    """A replica's processes, in this one. steps: that its engine has made."""

    lost, lines = None, (SimpleNamespace(address="127.0.0.1"),)

    def __init__(self, slots: int, table: np.ndarray, seed: int) -> None:
        section = RolloutSection(max_batch=slots, max_response_tokens=LONGEST, kv_block_tokens=16)
        self.engine = cases.engine(cases.model(), **section.model_dump(include={"max_batch", "kv_block_tokens"}))
        worker = RolloutWorker([self.engine], cases.tokenizer(), None, section, seed)
        self.queue = LiveQueue(largest(slots, 4, worker.sampling, 40))
        self.live = Lengths(worker, self.queue)
        self.live.table = table
        self.slots, self.rows = slots, []
        self.dock: Any = None

    def make(self, *_: Any) -> None: ...

    def close(self) -> None: ...

    def urgent(self, *_: Any) -> None:
        self.queue.nudge()

    async def visit(self, rows: Rows) -> list[Visit]:
        batch = await self.dock.fetch(rows, ROLLOUT.reads) if len(rows) else None
        for _ in self.engine.visiting(self.queue, self.live.begin(batch) if batch is not None else []):
            await asyncio.sleep(1.0)
        result = self.live.ended()
        if result.batch is not None and len(result.batch):
            await self.dock.put(result.batch)
        done = [] if result.batch is None else result.batch.row_ids.tolist()
        self.rows += done
        return [Visit(done, Outcome(metrics=result.metrics), (), self.slots - self.queue.unfinished)]


def stand(replicas: int, slots: int, table: np.ndarray, seed: int, dock: Dock) -> tuple[ReplicaRole, list[Here]]:
    """Replicas at work on a dock, and their role."""
    here = [Here(slots, table, seed) for _ in range(replicas)]
    waiting = iter(here)
    one: Any = SimpleNamespace(layout=SimpleNamespace(world_size=1))
    resource = Replicas(lambda *_: next(waiting), (one, one), replicas, Restarts(0))  # type: ignore[arg-type, return-value]
    for replica, process in zip(resource.members.values(), here):
        process.dock = dock
        replica.holds.set()
        replica.device.close()

        async def call(_: Any, __: Any, ___: Any, rows: Rows, process: Here = process) -> list[Visit]:
            return await process.visit(rows)

        replica.device = SimpleNamespace(call=call)  # type: ignore[assignment]
    return ReplicaRole(resource, dock, Device("none")), here  # type: ignore[arg-type]


def prompts(samples: int) -> list[Batch]:
    """Groups to be admitted; row ids from 0 on."""
    batch = cases.admitted([f"{number:03d}=" for number in range(samples // SAMPLES)], SAMPLES)
    rows = Batch(np.arange(samples), {field: batch[field] for field in batch.fields})
    return [rows.select(np.arange(first, first + SAMPLES)) for first in range(0, samples, SAMPLES)]


async def makespan(replicas: int, slots: int, table: np.ndarray, seed: int) -> tuple[float, list[Here]]:
    """Decode steps from the first group to the last, and who did what."""
    dock = Beside(GRAPH, DockOptions(prompts_per_step=len(table) // SAMPLES, group_size=SAMPLES, wait_s=1e6))
    role, here = stand(replicas, slots, table, seed, dock)
    for group in prompts(len(table)):
        await dock.admit(group)
    serving = asyncio.ensure_future(role.serve(ROLLOUT, None))
    await dock.take(UPDATE)
    took = asyncio.get_running_loop().time()
    await dock.close()
    await serving
    role.device.close()
    return took, here


def drawn(samples: int, mean: float, seed: int) -> np.ndarray:
    """Tokens of each sample, int64 [samples]."""
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(np.log(mean), 0.5, samples)
    lengths[draw.permutation(samples)[: samples // 32]] *= 20.0
    return np.clip(lengths, 1, LONGEST).astype(np.int64)


def run(replicas: int, slots: int, table: np.ndarray, seed: int = 7) -> tuple[float, list[Here]]:
    loop = StepClock()
    try:
        return loop.run_until_complete(makespan(replicas, slots, table, seed))
    finally:
        loop.close()


def in_fixed_shares(replicas: int, slots: int, table: np.ndarray) -> float:
    """Decode steps when groups are dealt in turn and a call ends with its longest sample: whole calls of all slots."""
    shares: Sequence[np.ndarray] = [table.reshape(-1, SAMPLES)[index::replicas].ravel() for index in range(replicas)]
    return max(sum(share[i : i + slots].max() for i in range(0, len(share), slots)) for share in shares)


def least(replicas: int, slots: int, table: np.ndarray) -> float:
    """Decode steps that no schedule can do without, if it knew all lengths: the longest sample, all work by all slots.
    A sample's first token comes of its prompt.
    """
    return max((table - 1).sum() / (replicas * slots), (table - 1).max())


def in_one_queue(slots: int, table: np.ndarray) -> int:
    """Decode steps when each sample begins in the slot that is free first, and no slot ever waits."""
    free = [0] * slots
    for length in (table - 1).tolist():
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@pytest.mark.parametrize(("replicas", "slots", "samples"), [(2, 4, 768), (2, 16, 128), (4, 16, 64)])
def test_pitfall_34_the_long_tail_of_one_replica_makes_no_other_wait(replicas: int, slots: int, samples: int) -> None:
    table = drawn(samples, 8.0, samples + replicas)
    took, here = run(replicas, slots, table)
    bound = least(replicas, slots, table)
    print(f"makespan {took:.0f} steps, lower bound {bound:.0f}: {took / bound:.3f}")
    assert 0.98 * bound <= took <= 1.15 * bound, (took, bound)
    assert sorted(row for process in here for row in process.rows) == list(range(samples))
    if samples > 8 * replicas * slots:
        assert in_fixed_shares(replicas, slots, table) > 2.0 * bound, "what this is held against is no easy case"


def test_in_between_replicas_are_as_good_as_one_queue_in_front_of_all_slots() -> None:
    table = drawn(256, 8.0, 5)
    took, _ = run(2, 8, table)
    bound, queue = least(2, 8, table), in_one_queue(16, table)
    print(f"makespan {took:.0f} steps, one queue {queue}, lower bound {bound:.0f}: {took / bound:.3f}")
    assert queue > 1.15 * bound, "an easy case: it belongs above"
    assert took <= 1.05 * queue + SAMPLES, (took, queue)
