"""Our side: the product's own client, control process and warehouses with keys on the loopback.

Option: COUNT of warehouses/puts of the producer that are under way at a time (0: those of all chunks), then any of
  tcp         without shared memory
  copy        readers take copies instead of views of shared memory
  sequential  one call after the other, as the peers are driven
  eager       takes of what is ready, up to a hand-out, instead of exactly one (dock.deterministic: false)

As in the loop, prompts enter while there are slots for them (with their group ids: the only column that the peers do
not carry), a rollout stage takes 512 rows, puts their tokens and log-probs chunk by chunk, none waiting for the one
before it, and acknowledges them; ref and reward take a hand-out each, read, write and acknowledge; the actor takes a
step, reads it in micro-batches and retires it. Prompts and every stage have a client of their own, as each is a process
of its own in a real run. Takes are of exactly a hand-out, in order of admission (dock.deterministic, as by default);
192 groups at most are in flight. A reader looks into every page of what it is given, so that a view of shared memory
costs what it costs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

from dock_flow_parts.flow import ALL, LOGPROBS, REF, REWARD, TOKENS, Column, Work, side  # noqa: E402
from docklands.core.batch import Batch, Jagged, offsets_of  # noqa: E402
from docklands.core.fields import (  # noqa: E402
    GROUP_ID,
    REF_LOGPROBS,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    Field,
)
from docklands.core.fields import REWARD as REWARD_FIELD  # noqa: E402
from docklands.core.graph import Graph  # noqa: E402
from docklands.core.protocols import Outcome, Rows  # noqa: E402
from docklands.core.stage import Learner, Stage  # noqa: E402
from docklands.dock.distributed import DistributedDock  # noqa: E402
from docklands.dock.launch import Launcher, Program  # noqa: E402
from docklands.dock.rules.options import DockOptions  # noqa: E402
from docklands.dock.warehouse.chunks import join  # noqa: E402

FIELDS: dict[str, Field[Any]] = {
    TOKENS: TOKEN_IDS,
    LOGPROBS: ROLLOUT_LOGPROBS,
    REF: REF_LOGPROBS,
    REWARD: REWARD_FIELD,
}
WINDOW = 192
"""Groups in flight at most."""
AT_ONCE = 64
"""Groups that enter in one call at most, as the loop's prompts (run/prompts.py), and that the rollout is handed."""
PAGE = 4096


def nothing(*_: Any) -> None:
    """Stages are run by the bench."""


ROLLOUT = Stage("rollout", "rollout", (GROUP_ID,), (TOKEN_IDS, ROLLOUT_LOGPROBS), nothing, "group")
REF_STAGE = Stage("ref", "ref", (TOKEN_IDS,), (REF_LOGPROBS,), nothing, "sample")
REWARD_STAGE = Stage("reward", "reward", (TOKEN_IDS,), (REWARD_FIELD,), nothing, "sample")
UPDATE = Stage("update", "update", tuple(FIELDS.values()), (), nothing, "step")
GRAPH = Graph(
    (ROLLOUT, REF_STAGE, REWARD_STAGE, UPDATE),
    (Learner("actor", "actor", UPDATE.reads, nothing),),  # type: ignore[arg-type]
    (GROUP_ID,),
)


class Ours:
    """The flow through a dock, in one event loop of this process."""

    def __init__(self, option: str) -> None:
        counts, *self.kinds = option.split(",")
        self.places, self.puts = map(int, counts.split("/"))
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="dock_flow_ours_")
        self._launcher: Launcher | None = None
        self.docks: dict[str, DistributedDock] = {}
        self._lap = 0

    def run(self, work: Work, check: bool) -> None:
        """Every row of the work once through all stages."""
        if self._launcher is None:
            self._loop.run_until_complete(self._open(work))
        self._loop.run_until_complete(Lap(self, work, check).run())
        self._lap += 1

    async def _open(self, work: Work) -> None:
        step = work.case.taken // work.case.group
        fixed = "eager" not in self.kinds
        options = DockOptions(step, work.case.group, WINDOW // step - 1, self.places, wait_s=60.0, deterministic=fixed)

        def spawn(module: str, made: Any, errors: Path) -> Program:
            if "tcp" in self.kinds and hasattr(made, "shared_bytes"):
                made = msgspec.structs.replace(made, shared_bytes=0)
            return Program(module, made, errors)

        self._launcher = Launcher(GRAPH, options, Path(self._folder.name), spawn=spawn)
        address = self._launcher.start()
        for name in ("prompts", *(stage.name for stage in GRAPH.stages)):
            self.docks[name] = DistributedDock(GRAPH, options, address, name)
            await self.docks[name].open()

    def dock(self, stage: Stage) -> DistributedDock:
        return self.docks[stage.name]

    @property
    def lap(self) -> int:
        return self._lap

    def close(self) -> None:
        for dock in self.docks.values():
            self._loop.run_until_complete(dock.leave())
        if self._launcher is not None:
            self._launcher.stop()
        self._loop.close()
        self._folder.cleanup()


class Lap:
    """One run of the flow. Row ids go on from lap to lap; those of the work begin at 0."""

    def __init__(self, ours: Ours, work: Work, check: bool) -> None:
        self.ours, self.work, self.case, self.check = ours, work, work.case, check
        self.first = ours.lap * self.case.rows

    async def run(self) -> None:
        if "sequential" in self.ours.kinds:
            for start in range(0, self.case.rows, AT_ONCE * self.case.group):
                stop = min(start + AT_ONCE * self.case.group, self.case.rows)
                await self.admit(start, stop)
                await self.produce(await self.take(ROLLOUT))
                for at in range(start, stop, self.case.hand_out):
                    for stage, name in ((REF_STAGE, REF), (REWARD_STAGE, REWARD)):
                        await self.answer(stage, name, await self.take(stage))
                    if (at + self.case.hand_out) % self.case.taken == 0:
                        await self.train(await self.take(UPDATE))
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.prompts())
            tasks.create_task(self.rollout())
            tasks.create_task(self.worker(REF_STAGE, REF))
            tasks.create_task(self.worker(REWARD_STAGE, REWARD))
            tasks.create_task(self.actor())

    # --- stages ------------------------------------------------------------------------------------------------

    async def prompts(self) -> None:
        start, dock = 0, self.ours.docks["prompts"]
        while start < self.case.rows:
            groups = min(await dock.slots(), AT_ONCE)
            stop = min(start + groups * self.case.group, self.case.rows)
            await self.admit(start, stop)
            start = stop

    async def rollout(self) -> None:
        async for rows in self.stream(ROLLOUT):
            await self.produce(rows)

    async def worker(self, stage: Stage, name: str) -> None:
        async with self.ours.dock(stage).completions() as done:
            async for rows in self.stream(stage):
                await self.read(stage, rows, (TOKENS,))
                await done.add(rows, self.made(rows, name))

    async def actor(self) -> None:
        async for rows in self.stream(UPDATE):
            await self.train(rows)

    async def stream(self, stage: Stage) -> AsyncIterator[Rows]:
        """Takes until this lap's rows are through, one of them ahead of the work."""
        left = self.case.rows
        ahead = asyncio.ensure_future(self.take(stage))
        while left:
            rows = await ahead
            left -= len(rows)
            if left:
                ahead = asyncio.ensure_future(self.take(stage))
            yield rows

    # --- calls -------------------------------------------------------------------------------------------------

    async def take(self, stage: Stage) -> Rows:
        rows = {ROLLOUT: AT_ONCE * self.case.group, UPDATE: self.case.taken}.get(stage, self.case.hand_out)
        groups = min(rows, self.case.rows) // self.case.group
        return await self.ours.dock(stage).take(stage, groups=groups)

    async def admit(self, start: int, stop: int) -> None:
        """Groups enter, all in one warehouse."""
        ids = self.first + np.arange(start, stop)
        batch = Batch(ids, {GROUP_ID: torch.from_numpy(ids // self.case.group)})
        await self.ours.docks["prompts"].admit(batch, start // (AT_ONCE * self.case.group) % self.ours.places)

    async def produce(self, rows: Rows) -> None:
        """Chunk by chunk, none of which waits for another one but by `puts`; then the rows are acknowledged."""
        dock, parts = self.ours.dock(ROLLOUT), rows.minibatches(self.case.chunk)
        most = 1 if "sequential" in self.ours.kinds else self.ours.puts or len(parts)
        gate = asyncio.Semaphore(most)

        async def put(part: Rows) -> None:
            async with gate:
                await dock.put(self.made(part, TOKENS, LOGPROBS), part)

        await asyncio.gather(*map(put, parts))
        await dock.finish(rows, Outcome())

    async def answer(self, stage: Stage, name: str, rows: Rows) -> None:
        """Read the tokens, write a column."""
        await self.read(stage, rows, (TOKENS,))
        await self.ours.dock(stage).complete(rows, self.made(rows, name))

    async def train(self, rows: Rows) -> None:
        """A step, read in micro-batches."""
        for part in rows.minibatches(self.case.micro):
            await self.read(UPDATE, part, ALL)
        await self.ours.dock(UPDATE).retire(rows)

    def made(self, rows: Rows, *names: str) -> Batch:
        return Batch(rows.row_ids, {FIELDS[name]: self.column(rows, name) for name in names})

    def column(self, rows: Rows, name: str) -> Any:
        parts = [column_of(self.work.column(name, start, stop)) for _, start, stop in self.stretches(rows)]
        return parts[0] if len(parts) == 1 else join(parts)

    def stretches(self, rows: Rows) -> list[tuple[int, int, int]]:
        """Where rows of the work follow one another: (position in `rows`, start, stop in the work)."""
        ids = rows.row_ids - self.first
        if ids[-1] - ids[0] == len(ids) - 1 and (len(ids) == 1 or (ids[1:] > ids[:-1]).all()):
            return [(0, int(ids[0]), int(ids[-1]) + 1)]
        cuts = [0, *(np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1).tolist(), len(ids)]
        return [(at, int(ids[at]), int(ids[at]) + end - at) for at, end in pairwise(cuts)]

    async def read(self, stage: Stage, rows: Rows, names: tuple[str, ...]) -> None:
        dock, fields = self.ours.dock(stage), [FIELDS[name] for name in names]
        if "copy" in self.ours.kinds or "tcp" in self.ours.kinds:
            self.look(await dock.fetch(rows, fields), rows, names)
            return
        borrowed = await dock.borrow(rows, fields)
        self.look(borrowed.batch, rows, names)
        borrowed.check()

    def look(self, batch: Batch, rows: Rows, names: tuple[str, ...]) -> None:
        """Into every page; in the first lap, at every byte."""
        for name in names:
            values = values_of(batch[FIELDS[name]])
            np.maximum.reduce(values[:: PAGE // values.itemsize])
            for at, start, stop in self.stretches(rows) if self.check else ():
                before = 0 if name == REWARD else int(rows.lengths[:at].sum())
                count = stop - start if name == REWARD else int(rows.lengths[at : at + stop - start].sum())
                self.work.check(name, start, values[before : before + count] if name != REWARD else values[at:][:count])


def column_of(column: Column) -> Jagged | torch.Tensor:
    values = torch.from_numpy(column.values)
    return values if column.lengths is None else Jagged(values, offsets_of(column.lengths))


def values_of(column: Jagged | torch.Tensor) -> np.ndarray:
    return (column.values if isinstance(column, Jagged) else column).numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    side(Ours, sys.argv[1:])
