"""Looking in and going on: snapshots, statistics, descriptions, threads."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.dock_parts import (
    ADVANTAGE_STAGE,
    FILTERED,
    GROUP,
    PLAIN,
    REF,
    REWARD_STAGE,
    ROLLOUT,
    UPDATE,
    flow,
    group,
    options,
    rows_of,
    run,
    started,
    work,
    written,
)

from docklands.core.batch import Jagged
from docklands.core.fields import (
    ADVANTAGE,
)
from docklands.core.protocols import Outcome
from docklands.dock import Dock, ThreadClient
from docklands.dock.control.recover import Journal
from docklands.dock.rules.control import Control
from docklands.dock.rules.messages import Notice
from docklands.errors import CheckpointError, DockError
from docklands.obs.names import find


def test_a_snapshot_in_mid_step_goes_on_as_the_original_would():
    """Through torch.save and a weights-only load; rows, columns, done bits and counts are kept, leases are free."""

    async def main():
        dock = await started(FILTERED, 4, warehouses=2, max_staleness=1, groups_per_take=2)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        rows = await dock.take(REWARD_STAGE)
        await work(dock, REWARD_STAGE, rows, {int(rows.row_ids[1]): "error"})
        leased = await dock.take(FILTERED["filter"])
        file = io.BytesIO()
        torch.save(dock.state_dict(), file)
        file.seek(0)
        copy = Dock(FILTERED, options(4, warehouses=2, max_staleness=1, groups_per_take=2))
        copy.load_state_dict(torch.load(file, weights_only=True))
        freed = {"dock/filter/leased": 0, "dock/filter/ready": 0, "dock/bytes": 0}
        assert copy.stats() | freed == dock.stats() | freed
        assert 0 < copy.stats()["dock/bytes"] <= dock.stats()["dock/bytes"]  # chunks hold dropped rows, copies do not
        again = await copy.take(FILTERED["filter"])
        assert again.row_ids.tolist() == leased.row_ids.tolist()
        await copy.finish(leased, Outcome(dict.fromkeys(leased.row_ids.tolist(), "stale")))  # not this dock's lease
        assert "dock/dropped/stale" not in copy.stats()
        ends = []
        for one, held in ((dock, leased), (copy, again)):
            await work(one, FILTERED["filter"], held)
            ends.append(await flow_on(one))
        assert ends[0] == ends[1]
        assert copy.stats()["dock/bytes"] == 0

    run(main())


async def flow_on(dock: Dock) -> list[tuple[str, list[int], str]]:
    """Everything that is still to come, with a digest of the values that each stage reads."""
    await dock.end_of_prompts()
    seen = []
    for of in dock.graph.stages * 3:
        async for rows in dock.stream(of) if of.name in ("rollout", "update") else once(dock, of):
            batch = await dock.fetch(rows, of.reads)
            values = [c.values if isinstance(c, Jagged) else c for c in (batch[f] for f in of.reads)]
            text = json.dumps([v.tolist() if isinstance(v, torch.Tensor) else v for v in values])
            seen.append((of.name, rows.row_ids.tolist(), text))
            if of.name == "update":
                await dock.retire(rows)
            else:
                await work(dock, of, rows)
    return seen


async def once(dock: Dock, of):
    """Takes that can be answered at once."""
    while True:
        take = asyncio.ensure_future(dock.take(of))
        await asyncio.sleep(0)
        if not take.done() or take.exception():
            take.cancel()
            return
        yield take.result()


def test_a_snapshot_of_another_run_is_refused():
    async def main():
        dock = await started()
        state = dock.state_dict()
        with pytest.raises(CheckpointError, match="made with another stages: only ") as caught:
            Dock(FILTERED, options(2)).load_state_dict(state)
        assert "only here" in caught.value.message and "rollout(" not in caught.value.message  # the stages both have
        with pytest.raises(CheckpointError, match="before anything was admitted"):
            dock.load_state_dict(state)
        with pytest.raises(CheckpointError, match="another group_size: 4 there, 5 here"):
            Dock(PLAIN, options(2, group_size=5)).load_state_dict(state)
        with pytest.raises(CheckpointError, match="format 7"):
            Dock(PLAIN, options(2)).load_state_dict({**state, "format": 7})

    run(main())


def test_every_statistic_is_a_declared_metric_and_adds_up():
    def drops(name, rows):
        return {int(r): "reward_error: boom" for r in rows.row_ids if name == "reward" and r % 5 == 0}

    dock = Dock(FILTERED, options(2))
    run(flow(dock, 6, drops))
    stats = dock.stats()
    for name in stats:
        assert find(name) is not None, name
    lost = 5
    assert stats["dock/dropped/reward_error"] == lost
    assert stats["dock/rollout/puts"] == stats["dock/rollout/fetches"] == 3
    ids = np.arange(24)
    tokens = int(sum(1 + i % 5 for i in ids))
    texts = sum(len(json.dumps(f"text {i} 0")) for i in ids)
    assert stats["dock/rollout/bytes_in"] == tokens * (4 + 1 + 4) + 24 * 3 * 8 + texts
    assert stats["dock/reward/bytes_in"] == (24 - lost) * 4
    assert stats["dock/reward/bytes_out"] == texts
    assert stats["dock/advantage/bytes_in"] == 4 * (24 - lost)
    assert stats["dock/fetches"] == 3 * 6


def test_describe_shows_where_rows_are_and_who_waits():
    async def main():
        dock = await started()
        await dock.take(REWARD_STAGE)
        waiting = asyncio.ensure_future(dock.take(ADVANTAGE_STAGE))
        await asyncio.sleep(0.01)
        text = dock.describe()
        waiting.cancel()
        return text

    text = run(main())
    assert "dock: 2 of 2 groups in flight, 2 admitted, 0 retired" in text
    assert "  reward: 0 ready, 8 leased (oldest lease 0.0 s), 0 done, 0 waiting" in text
    assert "  advantage: 0 ready, 0 leased, 0 done, 8 waiting for reward 8" in text
    assert "  waiting: advantage since 0.0 s" in text


def test_threads_fetch_and_put_while_others_look_in():
    """Stage work on four threads, a snapshot and a description on a fifth, the loop on the first."""

    async def main():
        dock = Dock(PLAIN, options(4, groups_per_take=1, deterministic=False))
        client = ThreadClient(dock, asyncio.get_running_loop())
        stop = threading.Event()
        looks = []

        def look_in():
            while not stop.is_set():
                state, text = dock.state_dict(), dock.describe()
                looks.append((len(state["ledger"]["orders"]), text.startswith("dock: ")))

        def compute(of, rows):
            batch = client.fetch(rows, of.reads)
            client.put(written(of, batch.row_ids))

        async def pump(of):
            async for rows in dock.stream(of):
                await asyncio.to_thread(compute, of, rows)
                await dock.finish(rows, Outcome())

        async def admit():
            for index in range(24):
                await dock.admit(group(index))
            await dock.end_of_prompts()

        watcher = threading.Thread(target=look_in)
        watcher.start()
        trained = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(admit())
                for of in (ROLLOUT, ROLLOUT, REWARD_STAGE, REF, ADVANTAGE_STAGE):
                    tasks.create_task(pump(of))
                async for rows in dock.stream(UPDATE):
                    batch = await dock.fetch(rows, [ADVANTAGE])
                    assert batch[ADVANTAGE].tolist() == rows.row_ids.tolist()
                    trained += rows.row_ids.tolist()
                    await dock.retire(rows)
        finally:
            stop.set()
            watcher.join()
        assert sorted(trained) == list(range(96))
        assert len(looks) > 3 and all(ok for _, ok in looks)
        with pytest.raises(DockError, match="inside the dock's own event loop"):
            client.put(written(ROLLOUT, rows_of(0)))
        return dock.stats()["dock/bytes"]

    assert run(main()) == 0


async def all_but_group_1(dock: Dock) -> None:
    """Every stage before the update as far as it goes; group 1 stays without an advantage."""
    for of in dock.graph.upstream_of("update"):
        while dock.stats()[f"dock/{of.name}/ready"]:
            rows = await asyncio.wait_for(dock.take(of, groups=1), 10)
            if of is not ADVANTAGE_STAGE or 1 not in rows.group_ids:
                await work(dock, of, rows)


def test_a_restored_dock_knows_who_was_overtaken() -> None:
    """overtake 1: group 1 has been overtaken once before the snapshot, so it is the next or nobody is."""
    windowed = options(1, max_staleness=2, overtake=1, groups_per_take=1, deterministic=False)

    async def main() -> None:
        dock = Dock(PLAIN, windowed)
        await dock.admit(group(0))
        await dock.admit(group(1))
        for following in (2, 3):
            await all_but_group_1(dock)
            await dock.retire(await asyncio.wait_for(dock.take(UPDATE), 10))
            await dock.admit(group(following))
        fresh, restored = Dock(PLAIN, windowed), Dock(PLAIN, windowed)
        state = dock.state_dict()
        restored.load_state_dict(state)
        for controller in state["controllers"].values():
            del controller["overtaken"]
        fresh.load_state_dict(state)  # a snapshot of before: it shows that somebody is there to overtake
        found = []
        for one in (fresh, restored):
            await all_but_group_1(one)
            found.append(one._control.controller("update").can_take(1, False))
        assert found == [True, False]

    run(main())


def test_a_journal_leads_to_who_was_overtaken(tmp_path: Path) -> None:
    """Group 0 was passed over by a take that has been retired: the process that comes next must know."""
    windowed = options(1, max_staleness=2, overtake=1, groups_per_take=1, deterministic=False)
    control = Control(PLAIN, windowed)
    journal = Journal(tmp_path / "journal", control)
    for index in (0, 1):
        control.admit(rows_of(index), index)
    control.notice([Notice("update", rows_of(1), tuple(control.flow.reads["update"]), np.full(GROUP, 3))])
    taken = control.look_take("update", control.want("update", None, None), 0.0)
    assert taken is not None and set(taken.group_ids.tolist()) == {1}
    control.retire(taken)
    control.settle()
    journal.close()
    again = Control(PLAIN, windowed)
    Journal(tmp_path / "journal", again).close()
    assert [one.controller("update").state_dict()["overtaken"].tolist() for one in (control, again)] == [
        [1] * GROUP
    ] * 2


def test_a_journal_that_finds_no_room_to_be_made_smaller_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docklands.dock.control.recover.COMPACT_BYTES", 1)
    control = Control(PLAIN, options(2))
    journal = Journal(tmp_path / "journal", control)
    control.admit(rows_of(0), 0)
    in_the_way = tmp_path / f".journal.{os.getpid()}.new"
    in_the_way.mkdir()
    before = (tmp_path / "journal").stat().st_size
    journal.turn()
    in_the_way.rmdir()
    assert (tmp_path / "journal").stat().st_size == before
    control.admit(rows_of(1), 1)
    journal.turn()
    journal.close()
    again = Control(PLAIN, options(2))
    Journal(tmp_path / "journal", again).close()
    assert sorted(again.roster.by_group) == [0, 1]
