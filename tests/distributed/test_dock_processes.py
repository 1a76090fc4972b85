"""The distributed dock with real processes: whole flows, waits, leases, snapshots."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from docklands.core.protocols import Outcome
from docklands.dock.launch import Launcher, Program
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.arena import SHM
from docklands.errors import ConfigError, DockClosed, DockError, RowGone, TakeTimeout, UnknownField, WorkerLost
from tests.dock_parts import (
    ADVANTAGE_STAGE,
    FILTERED,
    GROUP,
    PLAIN,
    REF,
    REWARD_STAGE,
    ROLLOUT,
    UPDATE,
    group,
    options,
    raised,
    rows_of,
    run,
    step,
    written,
)
from tests.dock_processes import client, flow, launcher, stats_at_rest, values_of


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Launcher]:
    """A dock of two warehouses, two groups a step."""
    with launcher(PLAIN, options(2, warehouses=2, max_staleness=1, lease_s=30.0), tmp_path) as made:
        yield made


def test_a_flow_through_three_clients_trains_every_row_once(tmp_path: Path) -> None:
    def drops(stage, rows):
        if stage == "filter":
            return {int(r): "equal" for r, g in zip(rows.row_ids, rows.group_ids) if g % 5 == 0}
        return {int(r): "error: unlucky" for r in rows.row_ids if stage == "reward" and r % 11 == 0}

    async def main(made: Launcher):
        async with AsyncExitStack() as stack:
            docks = [await stack.enter_async_context(client(made, f"client {i}")) for i in range(3)]
            events = await flow(docks, 12, drops)
            return events, await stats_at_rest(docks[1]), docks[2].describe()

    with launcher(FILTERED, options(2, warehouses=2, max_staleness=1), tmp_path) as made:
        events, stats, text = run(main(made))
    rows = set(range(12 * GROUP))
    lost = {r for r in rows if r // GROUP % 5 == 0 or r % 11 == 0}
    trained = Counter(row for stage, ids in events if stage == "update" for row in ids)
    assert trained == Counter(rows - lost)
    assert stats["dock/bytes"] == stats["dock/in_flight"] == 0
    assert stats["dock/dropped/error"] + stats["dock/dropped/equal"] == len(lost)
    assert stats["dock/rollout/puts"] == 12 and stats["dock/rollout/bytes_in"] > 0
    assert "dock: 0 of 4 groups in flight, 12 admitted" in text
    assert made.deaths == []


def test_puts_of_one_moment_leave_together(two: Launcher) -> None:
    """Four puts are one message to each warehouse; who reads them finds every value; the late one of a row counts."""

    async def main():
        async with client(two) as dock:
            for number in range(4):
                await dock.admit(group(number))
            taken = [await dock.take(ROLLOUT, groups=2) for _ in range(2)]
            parts = [rows.select(rows.group_ids == number) for rows in taken for number in sorted(set(rows.group_ids))]
            batches = [written(ROLLOUT, rows.row_ids) for rows in parts]
            await asyncio.gather(*(dock.put(batch, rows) for batch, rows in zip(batches, parts)))
            for rows in taken:
                await dock.finish(rows, Outcome())
            stats = await dock.counts()
            read = await dock.take(REF, groups=4)
            found = await dock.fetch(read, ROLLOUT.writes)
            await asyncio.gather(dock.put(batches[0], parts[0]), dock.put(batches[0], parts[0]))  # there already
            return stats["dock/rollout/puts"], dock.ignored_puts, batches, found

    puts, ignored, batches, found = run(main())
    assert puts == 2 and ignored == 2 * GROUP * len(ROLLOUT.writes)
    assert set(found.row_ids) == {row for batch in batches for row in batch.row_ids}
    for batch in batches:
        at = np.flatnonzero(np.isin(found.row_ids, batch.row_ids))
        for field in ROLLOUT.writes:
            assert values_of(found.select(at), field) == values_of(batch, field)


def test_the_takes_are_those_of_the_dock_in_one_process(two: Launcher) -> None:
    from docklands.dock import Dock
    from tests.dock_parts import flow as local_flow

    async def main():
        async with client(two) as dock:
            return await flow([dock], 7)

    def by_stage(events):
        return {s.name: [ids for name, ids in events if name == s.name] for s in PLAIN.stages}

    assert by_stage(run(main())) == by_stage(run(local_flow(Dock(PLAIN, two.options), 7)))


def test_waits_are_answered_by_events_and_end_at_their_deadline(tmp_path: Path) -> None:
    async def main(made: Launcher):
        async with client(made) as dock, client(made, "worker") as worker:
            await dock.admit(group(0))
            await dock.admit(group(1))
            rows = await worker.take(ROLLOUT)
            assert sorted(set(rows.places.tolist())) == [0, 1]
            waiting = asyncio.ensure_future(worker.take(REF))
            slot = asyncio.ensure_future(dock.slots())
            await worker.put(written(ROLLOUT, rows.row_ids))
            await dock.finish(rows, Outcome())  # another client than the one that put: causality is kept
            again = await waiting
            assert again.lengths.tolist() == [1 + int(r) % 5 for r in again.row_ids]
            assert not slot.done()
            text = str(await raised(TakeTimeout, worker.take(UPDATE)))
            assert "stage 'update' waited 0.5 s: a step is 2 groups" in text
            assert "ref_logprobs is missing on 8 rows: 8 leased by ref" in text
            assert "2 of 2 groups are in flight" in str(await raised(TakeTimeout, slot))
            stream = asyncio.ensure_future(anext(worker.stream(ADVANTAGE_STAGE), None))
            await asyncio.sleep(0.05)
            await dock.close()
            assert await stream is None
            await raised(DockClosed, dock.take(REWARD_STAGE))

    with launcher(PLAIN, options(2, warehouses=2, wait_s=0.5), tmp_path) as made:
        run(main(made))


def test_what_cannot_be_right_is_refused_as_in_one_process(two: Launcher) -> None:
    async def main():
        async with client(two) as dock:
            await dock.admit(group(0))
            await dock.admit(group(0))
            await dock.admit(group(1))
            rows = await dock.take(ROLLOUT)
            full = written(ROLLOUT, rows.row_ids)
            assert "without rollout_logprobs" in str(await raised(DockError, dock.put(full.only(ROLLOUT.writes[:2]))))
            assert "row 0 has no token_ids" in str(await raised(UnknownField, dock.fetch(rows, REF.reads)))
            assert "'rollout' writes it" in str(await raised(UnknownField, dock.fetch(rows, REF.reads)))
            assert "not in the dock: 99" in str(await raised(RowGone, dock.put(written(ROLLOUT, np.array([99])))))
            await dock.put(full)
            with pytest.raises(DockError, match="dropped rows that it was not given: 77"):
                await dock.finish(rows, Outcome({77: "?"}))
            await dock.finish(rows, Outcome())
            with pytest.raises(DockError, match="take of 9 groups"):
                await dock.take(REF, groups=9)
            with pytest.raises(DockError, match="4 of its rows are in flight"):
                await dock.admit(group(0).with_({PLAIN.sources[1]: [5] * GROUP}))

    run(main())


def test_a_client_that_dies_gives_its_rows_back_at_once(two: Launcher) -> None:
    """Its line breaks without a word; the lease would last 30 seconds."""

    async def main():
        async with client(two) as dock:
            await dock.admit(group(0))
            await dock.admit(group(1))
            doomed = client(two, "doomed")
            await doomed.open()
            lost = await doomed.take(ROLLOUT)
            waiting = asyncio.ensure_future(dock.take(ROLLOUT))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await doomed.leave()
            rows = await asyncio.wait_for(waiting, 25.0)
            assert rows.row_ids.tolist() == lost.row_ids.tolist() and rows.lease != lost.lease
            assert (await dock.stats())["dock/expired_leases"] == 1

    run(main())


def test_ranks_share_a_round_balanced_by_tokens(tmp_path: Path) -> None:
    async def main(made: Launcher):
        async with client(made) as dock:
            for index in range(8):
                await dock.admit(group(index))
            rows = await dock.take(ROLLOUT)
            await dock.put(written(ROLLOUT, rows.row_ids))
            await dock.finish(rows, Outcome())
            parts = await asyncio.gather(*(dock.take(REF, rank=r, ranks=4) for r in range(4)))
            tokens = [int(part.lengths.sum()) for part in parts]
            assert max(tokens) - min(tokens) <= 5
            assert sorted(r for part in parts for r in part.row_ids.tolist()) == list(range(32))
            for part in parts:
                await dock.put(written(REF, part.row_ids))
                await dock.finish(part, Outcome())
            await dock.end_of_prompts()
            assert (await dock.stats())["dock/ref/done"] == 32

    with launcher(PLAIN, options(8), tmp_path) as made:
        run(main(made))


def test_a_snapshot_in_mid_step_goes_on_in_other_processes(tmp_path: Path) -> None:
    dock_options = options(2, warehouses=2, max_staleness=1)

    async def first(made: Launcher):
        async with client(made) as dock:
            for index in range(4):
                await dock.admit(group(index))
            rows = await dock.take(ROLLOUT)
            await dock.put(written(ROLLOUT, rows.row_ids))
            await dock.finish(rows, Outcome())
            held = await dock.take(REWARD_STAGE)
            state = await dock.snapshot("step-7")
            return state, held, {p.name: p.read_bytes() for p in made.folder.glob("step-7.*")}

    async def second(made: Launcher, state, held, files):
        for name, data in files.items():
            (made.folder / name).write_bytes(data)
        async with client(made) as dock:
            await dock.restore(state)
            again = await dock.take(REWARD_STAGE)
            assert again.row_ids.tolist() == held.row_ids.tolist()
            await dock.give_back(again)
            return await flow([dock], 0)

    with launcher(PLAIN, dock_options, tmp_path) as made:
        state, held, files = run(first(made))
        assert len(files) == 2
    with launcher(PLAIN, dock_options, tmp_path) as made:
        events = run(second(made, state, held, files))
    assert Counter(r for stage, ids in events if stage == "update" for r in ids) == Counter(range(4 * GROUP))
    assert [ids for stage, ids in events if stage == "rollout"] == [list(range(8, 16))]
    assert rows_of(0).tolist() == list(range(GROUP))


@pytest.mark.slow
def test_a_thousand_steps_leave_memory_as_it_was(tmp_path: Path) -> None:
    """Of every process, and of the driver; nothing is in the arenas but the slabs in hand."""

    async def main(made: Launcher) -> list[list[int]]:
        family = [psutil.Process(part.child.pid) for part in made.parts.values()] + [psutil.Process()]
        sizes: list[list[int]] = []
        async with client(made) as dock:
            for index in range(1000):
                await dock.admit(group(index))
                await dock.retire(await step(dock))  # type: ignore[arg-type]
                if index in (199, 999):
                    sizes.append([process.memory_info().rss for process in family])
            stats = await stats_at_rest(dock)
        assert stats["dock/bytes"] == stats["dock/in_flight"] == 0
        assert len(dock._places) == 0 and len(dock._prompts) <= 1
        return sizes

    with launcher(PLAIN, options(1, warehouses=2), tmp_path, durability="wal") as made:
        early, late = run(main(made))
        logs = [(made.folder / name).stat().st_size for name in ("journal", "wal.0", "wal.1")]
    assert all(after - before < 3 << 20 for before, after in zip(early, late)), (early, late)
    assert max(logs) < 40 << 20


@pytest.mark.slow
def test_the_programs_start_by_their_commands_and_end_without_a_trace(tmp_path: Path) -> None:
    """`python -m docklands.dock.warehouse.server -` and `... control.server -`, as on any machine."""

    async def main(made: Launcher):
        async with client(made) as dock:
            return await flow([dock], 2)

    with Launcher(PLAIN, options(1, warehouses=1), tmp_path) as made:
        events = run(main(made))
        pids = [part.child.pid for part in made.parts.values()]
    assert [ids for stage, ids in events if stage == "update"] == [rows_of(0).tolist(), rows_of(1).tolist()]
    assert made.deaths == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(SHM.glob(f"docklands-{made.run}-*"))


def test_a_program_that_does_not_start_says_why(tmp_path: Path) -> None:
    class Odd(msgspec.Struct):
        endpoint: int = 3

    child = Program("docklands.dock.control.server", Odd(), tmp_path / "log")
    with pytest.raises(WorkerLost, match=r"control.server \(pid \d+\) did not start: docklands: control options -: "):
        child.announced(60.0)
    assert child.wait(20.0) == 2
    with pytest.raises(ConfigError, match="durability 'raid'"):
        Launcher(PLAIN, options(1), tmp_path, durability="raid")  # type: ignore[arg-type]


def test_rows_of_this_node_are_read_without_a_word_to_their_warehouse(two: Launcher) -> None:
    """Once a client has mapped the shared memory, its takes say where rows lie; what it reads there is counted, too."""

    async def asked(dock) -> int:
        return sum([(await dock.warehouses.ask(place, m.Stats())).values.get("gets", 0) for place in (0, 1)])

    async def main() -> None:
        async with client(two) as dock, client(two, "other") as other:
            await dock.admit(group(0))
            await dock.admit(group(1))
            rows = await dock.take(ROLLOUT)
            await dock.complete(rows, written(ROLLOUT, rows.row_ids))
            ref = await dock.take(REF)
            half = ref.select(np.arange(2, 7))  # of both warehouses
            fetched, borrowed = await dock.fetch(half, REF.reads), await dock.borrow(half, REF.reads)
            right = values_of(written(ROLLOUT, half.row_ids), REF.reads[0])
            assert values_of(fetched, REF.reads[0]) == values_of(borrowed.batch, REF.reads[0]) == right
            borrowed.check()
            assert await asked(dock) == 0
            other_batch = await other.fetch(ref, REF.reads)  # who has not taken them asks
            assert values_of(other_batch, REF.reads[0]) == values_of(written(ROLLOUT, ref.row_ids), REF.reads[0])
            assert await asked(dock) == 2
            other.lent(dock.homes(half))  # unless it is told; also of rows in another order than they lie in
            again = await other.fetch(half.select(np.array([4, 0])), REF.reads)
            assert values_of(again, REF.reads[0]) == values_of(written(ROLLOUT, again.row_ids), REF.reads[0])
            dock.read_there(ref, *other.read_here(ref))
            assert await asked(dock) == 2
            await dock.complete(ref, written(REF, ref.row_ids))
            stats = await dock.stats()
            tokens = sum(1 + row % 5 for row in half.row_ids.tolist())
            assert stats["dock/ref/fetches"] == 4 + 2 * 2
            ask = sum(1 + row % 5 for row in [*again.row_ids.tolist(), *ref.row_ids.tolist()])
            assert stats["dock/ref/bytes_out"] == 4 * (2 * tokens + ask)
            assert not dock._nearby.get(("ref", ref.lease))
            await dock.admit(group(2))
            alone = await dock.take(ROLLOUT, groups=1)  # in one warehouse: its put says that the lease has ended
            await dock.put(written(ROLLOUT, alone.row_ids), alone)
            said = dock.control._number
            await dock.finish(alone, Outcome())
            assert dock.control._number == said and len(await dock.take(REF, groups=1)) == len(alone)
            assert (await dock.stats())["dock/rollout/leased"] == 0

    run(main())


def test_completions_are_under_way_together_and_their_errors_come_out(two: Launcher) -> None:
    async def main() -> None:
        async with client(two) as dock:
            for index in range(4):
                await dock.admit(group(index))
            rows = await dock.take(ROLLOUT, groups=4)
            await dock.complete(rows, written(ROLLOUT, rows.row_ids))
            parts = [await dock.take(REF, groups=1) for _ in range(4)]
            async with dock.completions(2) as done:
                for part in parts[:3]:
                    await done.add(part, written(REF, part.row_ids))
                    assert len(done._tasks) <= 2
            assert not done._tasks
            counts = await dock.stats()
            assert counts["dock/ref/puts"] == 3
            with pytest.raises(DockError, match="names a row twice"):
                async with dock.completions() as done:
                    twice = np.concatenate([parts[3].row_ids, parts[3].row_ids])
                    await done.add(parts[3], written(REF, twice))
            await dock.complete(parts[3], written(REF, parts[3].row_ids))  # nothing has come of it

    run(main())


def test_a_half_that_is_said_twice_does_not_take_the_other_with_it(two: Launcher) -> None:
    """And rows that a stream has fetched ahead are free once it is left."""

    async def main():
        async with client(two) as dock:
            for i in range(2):
                await dock.admit(group(i))
            stream = dock.stream(ROLLOUT, ahead=1, groups=1)
            first = await anext(stream)
            while (await dock.stats())["dock/rollout/leased"] < 2 * GROUP:
                await asyncio.sleep(0.02)
            await stream.aclose()
            await dock.give_back(first)
            assert (await dock.stats())["dock/rollout/leased"] == 0
            rows = await step(dock)
            one, other = (rows.select(np.arange(GROUP) + start) for start in (0, GROUP))
            for _ in range(2):  # the second time as after a lost answer
                await dock.retire(one)
            assert (await dock.stats())["dock/in_flight"] == 1
            assert len(await dock.fetch(other, UPDATE.reads)) == GROUP
            await dock.retire(other)
            return await stats_at_rest(dock)

    assert run(main())["dock/in_flight"] == 0
