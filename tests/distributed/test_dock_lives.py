"""Lives of rows: what is made of rows that were lost, and of those that were made anew, over real processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from docklands.core.fields import REF_LOGPROBS, TOKEN_IDS
from docklands.core.protocols import Outcome, Rows
from docklands.dock.control import messages as c
from docklands.dock.launch import Launcher
from docklands.fleet.replica_role import together
from tests.dock_parts import (
    ADVANTAGE_STAGE,
    GROUP,
    PLAIN,
    REF,
    REWARD_STAGE,
    ROLLOUT,
    UPDATE,
    group,
    options,
    run,
    written,
)  # fmt: skip
from tests.dock_processes import client, launcher, stats_at_rest, values_of


def test_what_a_slow_reader_made_of_lost_rows_never_comes_beside_the_new_ones(tmp_path: Path) -> None:
    async def main(made: Launcher):
        async with client(made) as dock, client(made, "slow") as slow:
            await dock.admit(group(0))
            rows = await dock.take(ROLLOUT)
            await dock.complete(rows, written(ROLLOUT, rows.row_ids))
            old = await slow.take(REF)
            made.kill("warehouse 0")
            again = await dock.take(ROLLOUT)
            await slow.complete(old, written(REF, old.row_ids))
            assert slow.ignored_puts == GROUP
            await dock.complete(again, written(ROLLOUT, again.row_ids, salt=1000))
            anew = await slow.take(REF)
            await slow.complete(anew, written(REF, anew.row_ids, salt=1000))
            for of in (REWARD_STAGE, ADVANTAGE_STAGE):
                rows = await dock.take(of)
                await dock.complete(rows, written(of, rows.row_ids, salt=1000))
            got = await dock.fetch(await dock.take(UPDATE), (TOKEN_IDS, REF_LOGPROBS))
            return values_of(got, TOKEN_IDS), values_of(got, REF_LOGPROBS)

    with launcher(PLAIN, options(1, lease_s=60.0), tmp_path, durability="none") as made:
        tokens, logprobs = run(main(made))
    assert [row[0] for row in tokens] == [row[0] for row in logprobs] and tokens[0][0] >= 1000


def test_another_client_writes_what_it_made_of_rows_that_were_made_anew(tmp_path: Path) -> None:
    """As in a fleet: the driver takes and finishes, a worker's client fetches and puts."""

    async def main(made: Launcher):
        async with client(made) as dock, client(made, "worker") as worker:
            await dock.admit(group(0))
            await dock.take(ROLLOUT)
            made.kill("warehouse 0")
            again = await dock.take(ROLLOUT)
            assert again.lives is not None and (again.lives > 0).all()
            half = again.select(np.arange(len(again)))
            await worker.fetch(half, ROLLOUT.reads)
            await worker.put(written(ROLLOUT, half.row_ids))
            assert worker.ignored_puts == 0
            await dock.finish(again, Outcome())
            return len(await dock.take(REF))

    with launcher(PLAIN, options(1, lease_s=60.0), tmp_path, durability="none") as made:
        assert run(main(made)) == GROUP


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 0]])
def test_rows_of_several_leases_keep_their_lives(order: list[int]) -> None:
    """A worker reads them as one; only some of them have been made anew."""
    ids = np.arange(3)
    first = Rows(ids, ids, ids, ids.astype(np.int32), ROLLOUT.name, 7)
    anew = replace(first, row_ids=ids + 3, lease=8, lives=np.array([5, 6, 7]))
    joined = together([(first, anew)[at] for at in order], ROLLOUT)
    if 1 not in order:
        assert joined.lives is None
        return
    picked = joined.select(np.flatnonzero(np.isin(joined.row_ids, [2, 4])))
    assert picked.lives is not None
    assert dict(zip(picked.row_ids.tolist(), picked.lives.tolist())) == {2: 0, 4: 6}


def test_a_group_that_left_while_its_prompts_were_asked_for_does_not_come_back(tmp_path: Path) -> None:
    """Rows are trained from what was read before their warehouse died, and retired before their prompts come again."""

    async def main(made: Launcher):
        async with client(made) as dock:
            await dock.admit(group(0))
            rows = await dock.take(ROLLOUT)
            await dock.drop(rows, "error: trained")
            while (await dock.stats())["dock/bytes"]:
                await asyncio.sleep(0.01)
            dock._keep(0, group(0))  # it has not heard that they are gone
            dock._on_push(c.Again(0, 0, 0, GROUP, 7), [rows.row_ids.data])
            await asyncio.gather(*dock._tasks)
            stats = await stats_at_rest(dock)
            assert stats["dock/in_flight"] == stats["dock/bytes"] == 0 and not dock._prompts
            await dock.admit(group(1))
            return (await dock.take(ROLLOUT)).group_ids.tolist()

    with launcher(PLAIN, options(1), tmp_path) as made:
        assert run(main(made)) == [1] * GROUP
