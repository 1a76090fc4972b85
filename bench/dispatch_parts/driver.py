"""A peer: our own loop with the rows in one Ray actor and the driver between (driver-centric dispatch as in MindSpeed
RL, arXiv 2507.19017, the section on the sample flow).

The same pumps, roles, device lease and worker processes as ours.py; what differs is that the dock, the same one, is
in a Ray actor, and that no worker knows it: the driver gets from the actor what a stage reads, sends it to the workers
with the call, gets what they write in the answer, and puts it to the actor.

How it is kept fast: one call of the actor for each hand-out (a take brings the columns along, divided for the workers;
with it goes what was written under the stage's lease before, and its acknowledgement). Jagged numpy arrays, of which
both ends use views; up to 2 MB Ray carries them in its messages, which made 64 rows at a time a third cheaper, larger
ones in shared memory. Both workers are called at once, over pipes, in pickles of protocol 5. (As Ray's actors they took
as much CPU time for whole steps, and about 1.4 times as much for 64 rows at a time, in rough measurements.)
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from dispatch_parts import work  # noqa: E402
from dispatch_parts.central import BENCH, ray  # noqa: E402
from dispatch_parts.ours import GRAPH, LEARNER, STAGES, Model, Ours  # noqa: E402
from dispatch_parts.work import WORKERS, Case  # noqa: E402
from docklands.core.batch import Batch, Jagged  # noqa: E402
from docklands.core.graph import UPDATE  # noqa: E402
from docklands.core.protocols import Outcome, Rows  # noqa: E402
from docklands.core.stage import Learner, Stage  # noqa: E402
from docklands.dock.dock import Dock, InProcess  # noqa: E402
from docklands.dock.rules.options import DockOptions  # noqa: E402
from docklands.errors import DockClosed  # noqa: E402
from docklands.fleet.host import Context, Setup  # noqa: E402
from docklands.fleet.local_backend import Device, LocalRole  # noqa: E402
from docklands.fleet.local_carrier import LocalCarrier  # noqa: E402
from docklands.fleet.workers import Workers  # noqa: E402
from docklands.parallel.layout import Layout  # noqa: E402
from docklands.run.loop import pump  # noqa: E402
from docklands.train.share import rows_of_replicas  # noqa: E402

NAMED = {field.name: field for stage in STAGES for field in (*stage.reads, *stage.writes)}
REMOTE = ("rollout", "reference", "actor")
"""Roles that live in the workers."""
Sent = tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray | None]]]
"""A batch on its way: row ids; name -> (values, offsets or None)."""
Key = tuple[str, int]
Done = tuple[Key, list[Sent], Outcome]
"""A lease (its stage and number) to acknowledge: what was written under it goes along."""

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # Ray's are not, nobody writes


def sent(batch: Batch) -> Sent:
    """Nothing is copied; token columns have one array of offsets."""
    columns: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    tokens: np.ndarray | None = None
    for field in batch.fields:
        column = batch[field]
        offsets = column.offsets if isinstance(column, Jagged) else None
        if field.is_token:
            offsets = tokens = offsets if tokens is None else tokens
        columns[field.name] = (column.values if isinstance(column, Jagged) else column).numpy(), offsets
    return batch.row_ids, columns


def received(given: Sent) -> Batch:
    """What was sent, not copied either."""
    row_ids, found = given
    columns = {
        NAMED[name]: torch.from_numpy(values) if offsets is None else Jagged(torch.from_numpy(values), offsets)
        for name, (values, offsets) in found.items()
    }
    return Batch.made(row_ids, columns)


class Keeper:
    """The actor: a dock and the leases that the driver speaks of."""

    def __init__(self, case: Case) -> None:
        groups = case.chunk * WORKERS // case.group
        self._dock = Dock(GRAPH, DockOptions(case.prompts, case.group, groups_per_take=groups))
        self._leased: dict[Key, Rows] = {}

    async def admit(self, given: Sent) -> None:
        await self._dock.admit(received(given))

    async def take(self, name: str, parts: int, done: Done | None) -> tuple[Rows, list[Sent]] | None:
        """Put what was written and acknowledge the lease that it was written under, if any; then rows, and what the
        stage reads of each part of them. None: the dock is closed.
        """
        if done is not None:
            key, written, outcome = done
            for given in written:
                await self._dock.put(received(given))
            await self._dock.finish(self._leased.pop(key), outcome)
        stage = GRAPH[name]
        try:
            rows = await self._dock.take(stage)
        except DockClosed:
            return None
        self._leased[name, rows.lease] = rows
        chosen = [rows.select(piece) for piece in rows_of_replicas(rows.lengths, rows.group_ids, parts)]
        return rows, [sent(await self._dock.fetch(each, stage.reads)) for each in chosen]

    async def retire(self, key: Key) -> None:
        await self._dock.retire(self._leased.pop(key))

    async def close(self) -> None:
        await self._dock.close()


class Between(InProcess):
    """The dock, as loop and roles see it."""

    def __init__(self, case: Case) -> None:
        self._keeper: Any = ray.remote(num_cpus=0)(Keeper).remote(case)
        self._read: dict[Key, list[Sent]] = {}
        self._written: dict[Key, list[Sent]] = {}
        self._done: dict[str, Done] = {}

    async def admit(self, batch: Batch) -> None:
        await self._keeper.admit.remote(sent(batch))

    async def take(self, stage: Stage) -> Rows:
        parts = WORKERS if stage.role in REMOTE else 1
        found = await self._keeper.take.remote(stage.name, parts, self._done.pop(stage.name, None))
        if found is None:
            raise DockClosed("the dock is closed")
        rows, self._read[stage.name, found[0].lease] = found
        return rows

    stream = Dock.stream  # of takes, until DockClosed

    def parts(self, rows: Rows) -> list[Sent]:
        return self._read.pop((rows.stage, rows.lease))

    async def fetch(self, rows: Rows, _: Any) -> Batch:
        return received(self.parts(rows)[0])

    async def put(self, batch: Batch | list[Sent], rows: Rows) -> None:  # goes with `finish`
        self._written[rows.stage, rows.lease] = [sent(batch)] if isinstance(batch, Batch) else batch

    async def finish(self, rows: Rows, outcome: Outcome) -> None:
        """Goes with the stage's next take, which a pump asks for at once."""
        written = self._written.pop((rows.stage, rows.lease))
        self._done[rows.stage] = (rows.stage, rows.lease), written, Outcome(outcome.dropped, {}, outcome.later)

    async def retire(self, rows: Rows) -> None:
        await self._keeper.retire.remote((rows.stage, rows.lease))

    async def close(self) -> None:
        await self._keeper.close.remote()


class Shard:
    """One worker: computes on what it is given, and answers with what it has made."""

    def __init__(self, _: Context, case: Case) -> None:
        self._model = Model(case)

    def run_stage(self, name: str, part: bytes) -> bytes:
        return pickle.dumps(sent(GRAPH[name].run(self._model, received(pickle.loads(part)))), 5)  # type: ignore[arg-type]

    def update(self, part: bytes) -> float:
        return self._model.update(received(pickle.loads(part)), LEARNER)["total"][0]


class SentRole(LocalRole):
    """A role in the workers; the batches go there with the call. resource: a thread for each worker, and them."""

    resource: tuple[list[Device], Workers]
    _dock: Between  # type: ignore[assignment]

    def _call(self, rank: int, method: str, args: tuple[Any, ...], part: Sent) -> Any:
        return self.resource[1].call("model", method, *args, pickle.dumps(part, 5), ranks=[rank])[0]

    async def _call_all(self, method: str, *args: Any, parts: list[Sent]) -> list[Any]:
        calls = zip(self.resource[0], parts)
        return await asyncio.gather(*(t.call(self._call, rank, method, args, p) for rank, (t, p) in enumerate(calls)))

    async def _stage(self, stage: Stage, rows: Rows) -> Outcome:
        found = await self._call_all("run_stage", stage.name, parts=self._dock.parts(rows))
        await self._dock.put([pickle.loads(each) for each in found], rows)
        return Outcome()

    async def _update(self, learner: Learner, rows: Rows) -> dict[str, tuple[float, float]]:
        async with self.lease():
            return {"total": (sum(await self._call_all("update", parts=self._dock.parts(rows))), 1.0)}


class Driver(Ours):
    """Runs a step as our side does."""

    dock: Between  # type: ignore[assignment]

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, Model(case)
        self._folder = tempfile.TemporaryDirectory(prefix="dispatch_driver_")
        self.workers = Workers(Setup(Layout(dp=WORKERS), wait_s=120.0, log=Path(self._folder.name)), LocalCarrier())
        self.workers.make("model", Shard, case)
        self.dock = Between(case)
        self._threads = [Device(f"worker {rank}") for rank in range(WORKERS)]
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._open())

    async def _open(self) -> None:
        shared, remote = Device("workers"), (self._threads, self.workers)
        self.fleet = {name: SentRole(name, remote, self.dock, shared) for name in REMOTE}  # type: ignore[arg-type]
        for name, resource in (("reward", None), ("advantage", self.case.group)):
            self.fleet[name] = LocalRole(name, resource, self.dock, Device(name))  # type: ignore[arg-type]
        self._pumps = [
            asyncio.ensure_future(self.fleet[stage.role].serve(stage, partial(pump, self.dock)))  # type: ignore[arg-type]
            for stage in GRAPH.upstream_of(UPDATE)
        ]

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.close()
        ray.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    os.environ["RAY_max_direct_call_object_size"] = "2000000"
    case, rounds = work.arguments(sys.argv[1:])
    environment = {"env_vars": {"PYTHONPATH": f"{BENCH}:{Path(BENCH).parent / 'src'}"}}
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 1 << 30}
    ray.init(num_cpus=2, runtime_env=environment, **options)
    work.side((driver := Driver(case)).step, case, rounds, driver.close)


if __name__ == "__main__":
    from dispatch_parts.driver import main as run  # under the name that worker processes know its functions by

    run()
