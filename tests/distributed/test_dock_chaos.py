"""kill -9 of warehouses, of the control process, of readers and of everything at once, at random moments.

A run is a flow of 512 rows during which one or two victims die, in the last run everything at once. Processes and
clients go on from run to run, as in a long job, and so does what the deaths have left behind. DOCKLANDS_CHAOS_RUNS runs
of each durability (`make chaos`: 30).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docklands.core.stage import Stage
from docklands.dock.distributed import DistributedDock
from docklands.dock.launch import Launcher
from tests.dock_parts import FILTERED, GROUP, group, options, run
from tests.dock_processes import client, launcher, run_stage, stats_at_rest, take_and_die, warm_up

RUNS = int(os.environ.get("DOCKLANDS_CHAOS_RUNS", "4"))
GROUPS, STEP = 128, 8
RUN_S = 240.0


def filtered(stage: str, rows: Any) -> dict[int, str]:
    """Every eighth group is filtered, so that whole steps are left, and every thirteenth row fails in the reward."""
    if stage == "filter":
        return {int(r): "equal" for r, g in zip(rows.row_ids, rows.group_ids) if g % STEP == 7}
    return {int(r): "error" for r in rows.row_ids if stage == "reward" and r % 13 == 0}


def expected(number: int) -> Counter[int]:
    first = number * GROUPS * GROUP
    return Counter(r for r in range(first, first + GROUPS * GROUP) if r // GROUP % STEP != 7 and r % 13)


class Job:
    """A dock, a driver and a worker, and what they have acknowledged."""

    def __init__(self, made: Launcher, seed: int) -> None:
        self.made, self.chance = made, random.Random(seed)
        self.trained: Counter[int] = Counter()
        self.events = 0
        self.killed: list[str] = []
        self.over = False

    async def runs(self) -> None:
        async with client(self.made, "driver") as driver, client(self.made, "worker") as worker:
            stages = FILTERED.stages
            pumps = [
                asyncio.ensure_future(self.pump(driver if stage.name == "update" else (worker, driver)[i % 2], stage))
                for i, stage in enumerate(stages)
            ]
            try:
                for number in range(RUNS):
                    await asyncio.wait_for(self.run(driver, number), RUN_S)
                    assert not any(pump.done() for pump in pumps)
                await asyncio.wait_for(self.through(driver), RUN_S)
                assert not (await stats_at_rest(driver))["dock/bytes"]
                await driver.close()
                await asyncio.wait_for(asyncio.gather(*pumps), RUN_S)
            finally:
                for pump in pumps:
                    pump.cancel()

    async def through(self, driver: DistributedDock) -> None:
        """Until groups of which all rows are dropped have gone, too: what died last may have had them."""
        while (await driver.counts())["dock/in_flight"]:
            await asyncio.sleep(0.02)

    async def pump(self, dock: DistributedDock, stage: Stage) -> None:
        async for rows in dock.stream(stage):
            if not await run_stage(dock, stage, rows, filtered(stage.name, rows)):
                continue
            self.events += 1
            if stage.name == "update":
                self.trained.update(rows.row_ids.tolist())

    async def run(self, driver: DistributedDock, number: int) -> None:
        """512 rows, and deaths at random moments on their way."""
        victims = self.chance.choices(["warehouse", "warehouse", "control", "reader"], k=self.chance.randint(1, 2))
        self.over = False
        deaths = asyncio.ensure_future(self.deaths(victims if number < RUNS - 1 else ["everything"]))
        for index in range(number * GROUPS, (number + 1) * GROUPS):
            assert await driver.slots()
            await driver.admit(group(index))
        want = expected(number)
        while sum(self.trained[row] for row in want) < len(want):
            await asyncio.sleep(0.005)
        self.over = True
        await deaths
        assert {row: self.trained[row] for row in want} == want, f"run {number} after {self.killed}"
        assert sum(self.trained.values()) == sum(len(expected(n)) for n in range(number + 1))

    async def deaths(self, victims: list[str]) -> None:
        for victim in victims:
            aim = self.events + self.chance.randrange(1, 60)
            while self.events < aim:
                if self.over:
                    return
                await asyncio.sleep(0.002)
            if victim == "reader":
                stage = self.chance.choice(["rollout", "reward", "ref"])
                await take_and_die(self.made, stage, 1.0)
            elif victim == "everything":
                for name in list(self.made.parts):
                    self.made.kill(name)
            else:
                names = [name for name in self.made.parts if name.startswith(victim) or "copy" in name]
                self.made.kill(self.chance.choice(names) if victim == "warehouse" else victim)
            self.killed.append(victim)


@pytest.mark.parametrize("durability", ["none", "wal", "replica"])
def test_whoever_dies_every_row_is_trained_exactly_once(tmp_path: Path, durability: Any) -> None:
    warm_up()
    made_options = options(STEP, warehouses=2, max_staleness=1, groups_per_take=4, deterministic=False, wait_s=120.0)
    with launcher(FILTERED, made_options, tmp_path, durability=durability, max_restarts=1000) as made:
        job = Job(made, RUNS)
        run(job.runs())
    assert len(job.killed) >= RUNS // 2 and job.killed[-1] == "everything" and made.deaths
    how = ("was killed by SIGKILL", "ended with code 255")  # what the forking server says of some that were killed
    assert all(death.endswith(how) for death in made.deaths), made.deaths
