"""Generators in worker processes: what an interrupt finds them at, and that visits make the samples of whole calls."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docklands.algorithms.stages import ROLLOUT
from docklands.config.schema import EnvSection, RolloutSection
from docklands.core.batch import Batch
from docklands.core.protocols import Rows, Sampling
from docklands.dock.rules.options import DockOptions
from docklands.fleet.generation import ROLE, GenerationShard, GenerationSpec
from docklands.fleet.host import Setup
from docklands.fleet.local_carrier import LocalCarrier
from docklands.fleet.workers import Workers
from docklands.models import load
from docklands.parallel import Layout
from tests.dock_processes import client, launcher
from tests.e2e.runs import ROOT
from tests.e2e.test_long_tail import GRAPH
from tests.rollout_cases import admitted

WARM = ROOT / "assets" / "mix6-warm"
GROUPS, SAMPLES = 3, 4


class Held(GenerationShard):
    """A generator with the warm weights, whose rows come only when it has been told to stop."""

    def fill(self) -> None:
        self.engine.hold(dict(load(WARM).named_parameters()), 0)

    def slow(self) -> None:
        fetch = self.reader.fetch

        def late(*arguments: Any) -> Batch:
            print("fetching", flush=True)
            assert self._stop.wait(120)
            return fetch(*arguments)

        self.reader.fetch = late  # type: ignore[method-assign]


def spec() -> GenerationSpec:
    section = RolloutSection(max_response_tokens=12, max_batch=8)
    return GenerationSpec(Layout(), WARM, WARM, section, EnvSection(), 3, "float32", longest_prompt=16)


@pytest.fixture
def workers(tmp_path: Path) -> Any:
    made = Workers(Setup(Layout(), wait_s=60, log=tmp_path / "log"), LocalCarrier())
    yield made
    made.close()


async def with_rows(workers: Workers, folder: Path, work: Any) -> Any:
    """work(rows of all groups), while the dock has them."""
    options = DockOptions(prompts_per_step=GROUPS, group_size=SAMPLES, wait_s=60.0)
    with launcher(GRAPH, options, folder) as made:
        async with client(made) as dock:
            batch = admitted([f"{number}83920=" for number in range(GROUPS)], SAMPLES)
            for group in range(GROUPS):
                await dock.admit(batch.select(np.arange(group * SAMPLES, (group + 1) * SAMPLES)))
            rows = await dock.take(ROLLOUT)
            await asyncio.to_thread(workers.connect, dock)
            found = await asyncio.to_thread(work, rows)
            return found, await dock.fetch(rows, ROLLOUT.writes) if found is not None else None


@pytest.mark.parametrize("method", ["run_stage", "visit"])
def test_an_abort_that_comes_while_rows_are_fetched_is_not_lost(workers: Workers, tmp_path: Path, method: str) -> None:
    workers.make(ROLE, Held, spec())
    workers.call(ROLE, "slow")
    asked: list[list[int]] = []

    def work(rows: Rows) -> None:
        threading.Timer(0.5, workers.urgent, (ROLE, "abort")).start()
        found = workers.call(ROLE, method, ROLLOUT, rows)[0]
        outcome = found if method == "run_stage" else found.outcome
        asked.append([sorted(outcome.later), sorted(rows.row_ids.tolist())])  # type: ignore[list-item]

    asyncio.run(asyncio.wait_for(with_rows(workers, tmp_path / "dock", work), 240))
    assert asked[0][0] == asked[0][1]


def test_visits_make_the_samples_of_whole_calls(workers: Workers, tmp_path: Path) -> None:
    """Groups that join while others run, an evaluation and new weights of the same values in between."""
    workers.make(ROLE, Held, spec())
    workers.call(ROLE, "fill")

    def whole(rows: Rows) -> Any:
        return workers.call(ROLE, "run_stage", ROLLOUT, rows)[0]

    def by_visits(rows: Rows) -> Any:
        ended: list[int] = []
        for group in range(GROUPS):
            workers.urgent(ROLE, "nudge")
            part = rows.select(np.arange(group * SAMPLES, (group + 1) * SAMPLES))
            ended += workers.call(ROLE, "visit", ROLLOUT, part)[0].ended
            assert len(ended) < (group + 1) * SAMPLES, "some are under way when held-out prompts come"
            assert (
                len(workers.call(ROLE, "rollout", admitted(["46+31="], SAMPLES), Sampling(12), 0)[0].batch) == SAMPLES
            )
            workers.call(ROLE, "fill")
        nothing = rows.select(np.zeros(0, np.int64))
        for _ in range(100):
            ended += workers.call(ROLE, "visit", ROLLOUT, nothing)[0].ended
        return sorted(ended) == sorted(rows.row_ids.tolist())

    async def both() -> None:
        _, first = await with_rows(workers, tmp_path / "a", whole)
        all_ended, second = await with_rows(workers, tmp_path / "b", by_visits)
        assert all_ended
        for field in first.fields:
            assert [str(row) for row in first[field]] == [str(row) for row in second[field]], field.name

    asyncio.run(asyncio.wait_for(both(), 240))
