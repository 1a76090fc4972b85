"""Our side: the product's own client, control process and warehouses with keys on the loopback.

Option: COUNT of warehouses, then any of
  tcp         without shared memory
  copy        readers take copies instead of views of shared memory
  sequential  one call after the other, as the peers are driven

The producer and every stage have a client of their own, as each is a process of its own in a real run. A chunk is
admitted with its columns (the sources of the graph); rows are taken, read, written, acknowledged and retired through
the control process; the actor takes steps of 256 rows and reads them in micro-batches; 96 groups at most are in
flight. A reader looks into every page of what it is given, so that a view of shared memory costs what it costs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
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
from docklands.core.protocols import Rows  # noqa: E402
from docklands.core.stage import Learner, Stage  # noqa: E402
from docklands.dock.distributed import DistributedDock  # noqa: E402
from docklands.dock.launch import Launcher, Program  # noqa: E402
from docklands.dock.rules.options import DockOptions  # noqa: E402

FIELDS: dict[str, Field[Any]] = {
    TOKENS: TOKEN_IDS,
    LOGPROBS: ROLLOUT_LOGPROBS,
    REF: REF_LOGPROBS,
    REWARD: REWARD_FIELD,
}
STEP, STEPS = 32, 3
"""Groups that the update takes and retires at once, and steps in flight at most."""
PAGE = 4096


def nothing(*_: Any) -> None:
    """Stages are run by the bench."""


REF_STAGE = Stage("ref", "ref", (TOKEN_IDS,), (REF_LOGPROBS,), nothing, "sample")
REWARD_STAGE = Stage("reward", "reward", (TOKEN_IDS,), (REWARD_FIELD,), nothing, "sample")
UPDATE = Stage("update", "update", tuple(FIELDS.values()), (), nothing, "step")
GRAPH = Graph(
    (REF_STAGE, REWARD_STAGE, UPDATE),
    (Learner("actor", "actor", UPDATE.reads, nothing),),  # type: ignore[arg-type]
    (GROUP_ID, TOKEN_IDS, ROLLOUT_LOGPROBS),
)


class Ours:
    """The flow through a dock, in one event loop of this process."""

    def __init__(self, option: str) -> None:
        count, *kinds = option.split(",")
        self.places, self.kinds = int(count), kinds
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
        step = min(STEP, work.case.prompts)
        options = DockOptions(step, work.case.group, STEPS - 1, warehouses=self.places, wait_s=60.0)

        def spawn(module: str, made: Any, errors: Path) -> Program:
            if "tcp" in self.kinds and hasattr(made, "shared_bytes"):
                made = msgspec.structs.replace(made, shared_bytes=0)
            return Program(module, made, errors)

        self._launcher = Launcher(GRAPH, options, Path(self._folder.name), spawn=spawn)
        address = self._launcher.start()
        for name in ("producer", *(stage.name for stage in GRAPH.stages)):
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
        self.groups = self.case.chunk // self.case.group
        self.producer_dock = ours.docks["producer"]

    async def run(self) -> None:
        chunks = range(0, self.case.rows, self.case.chunk)
        if "sequential" in self.ours.kinds:
            for start in chunks:
                await self.produce(start)
                for stage, name in ((REF_STAGE, REF), (REWARD_STAGE, REWARD)):
                    await self.answer(stage, name, await self.ours.dock(stage).take(stage, groups=self.groups))
                stop = start + self.case.chunk
                if stop % (STEP * self.case.group) == 0 or stop >= self.case.rows:
                    await self.train(await self.ours.dock(UPDATE).take(UPDATE))
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.producer(chunks))
            tasks.create_task(self.worker(REF_STAGE, REF))
            tasks.create_task(self.worker(REWARD_STAGE, REWARD))
            tasks.create_task(self.actor())

    # --- stages ------------------------------------------------------------------------------------------------

    async def producer(self, chunks: range) -> None:
        for start in chunks:
            await self.produce(start)

    async def worker(self, stage: Stage, name: str) -> None:
        async with self.ours.dock(stage).completions() as done:
            async for rows in self.stream(stage, groups=self.groups):
                await self.read(stage, rows, (TOKENS,))
                await done.add(rows, self.made(rows, name))

    async def actor(self) -> None:
        async for rows in self.stream(UPDATE):
            await self.train(rows)

    async def stream(self, stage: Stage, **want: Any) -> AsyncIterator[Rows]:
        """Takes until this lap's rows are through, one of them ahead of the work."""
        dock, left = self.ours.dock(stage), self.case.rows
        ahead = asyncio.ensure_future(dock.take(stage, **want))
        while left:
            rows = await ahead
            left -= len(rows)
            if left:
                ahead = asyncio.ensure_future(dock.take(stage, **want))
            yield rows

    # --- calls -------------------------------------------------------------------------------------------------

    async def produce(self, start: int) -> None:
        """A chunk of groups enters with its tokens and log-probs, in the warehouse beside its producer."""
        stop = min(start + self.case.chunk, self.case.rows)
        ids = self.first + np.arange(start, stop)
        columns = {FIELDS[name]: column_of(self.work.column(name, start, stop)) for name in (TOKENS, LOGPROBS)}
        batch = Batch(ids, {GROUP_ID: torch.from_numpy(ids // self.case.group), **columns})
        await self.producer_dock.admit(batch, start // self.case.chunk % self.ours.places)

    async def answer(self, stage: Stage, name: str, rows: Rows) -> None:
        """Read the tokens, write a column."""
        await self.read(stage, rows, (TOKENS,))
        await self.ours.dock(stage).complete(rows, self.made(rows, name))

    async def train(self, rows: Rows) -> None:
        """A step, read in micro-batches."""
        for part in rows.minibatches(self.case.micro):
            await self.read(UPDATE, part, ALL)
        await self.ours.dock(UPDATE).retire(rows)

    def made(self, rows: Rows, name: str) -> Batch:
        start = int(rows.row_ids[0]) - self.first
        return Batch(rows.row_ids, {FIELDS[name]: column_of(self.work.column(name, start, start + len(rows)))})

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
            values.view(np.uint8)[::PAGE].max()
            if self.check:
                self.work.check(name, int(rows.row_ids[0]) - self.first, values)


def column_of(column: Column) -> Jagged | torch.Tensor:
    values = torch.from_numpy(column.values)
    return values if column.lengths is None else Jagged(values, offsets_of(column.lengths))


def values_of(column: Jagged | torch.Tensor) -> np.ndarray:
    return (column.values if isinstance(column, Jagged) else column).numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    side(Ours, sys.argv[1:])
