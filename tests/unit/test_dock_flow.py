"""The dock over time: who gets what when, lost readers, drops, deadlines, the end."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from docklands.core.protocols import Outcome, Rows
from docklands.dock import Dock
from docklands.errors import ConfigError, DockClosed, DockError, TakeTimeout, TooManyDropped
from tests.dock_parts import (
    ADVANTAGE_STAGE,
    FILTER,
    FILTERED,
    GROUP,
    PLAIN,
    REF,
    REWARD_STAGE,
    ROLLOUT,
    UPDATE,
    admit_all,
    flow,
    group,
    options,
    rows_of,
    run,
    work,
    written,
)

STAGES = (ROLLOUT, REWARD_STAGE, REF, ADVANTAGE_STAGE)


async def step(dock: Dock) -> Rows:
    """Every stage once, up to the update's take."""
    for stage in dock.graph.upstream_of("update"):
        await work(dock, stage, await dock.take(stage))
    return await dock.take(UPDATE)


async def admit(dock: Dock, *indices: int) -> None:
    for index in indices:
        await dock.admit(group(index))


def test_rows_come_in_order_of_admission_then_sample_index():
    async def main():
        dock = Dock(PLAIN, options(2))
        shuffled = group(7).select(np.array([2, 0, 3, 1]))
        await dock.admit(shuffled)
        await dock.admit(group(3))
        rows = await dock.take(ROLLOUT)
        assert rows.row_ids.tolist() == [*rows_of(7).tolist(), *rows_of(3).tolist()]
        assert rows.group_ids.tolist() == [7] * GROUP + [3] * GROUP
        assert rows.lengths.tolist() == [0] * 8
        assert rows.stage == "rollout" and rows.lease > 0
        await work(dock, ROLLOUT, rows)
        assert (await dock.take(REF)).lengths.tolist() == [1 + int(r) % 5 for r in rows.row_ids]

    run(main())


def test_pitfall_13_groups_are_explicit():
    """Two groups of one prompt stay two groups; texts that differ by sample do not split a group."""

    async def main():
        dock = Dock(PLAIN, options(2))
        await dock.admit(group(0, prompt_id=5))
        await dock.admit(group(1, prompt_id=5).with_({PLAIN.sources[4]: [{"prompt": f"p{k}"} for k in range(GROUP)]}))
        rows = await step(dock)
        assert rows.group_ids.tolist() == [0] * GROUP + [1] * GROUP
        await dock.retire(rows)
        assert dock.stats()["dock/in_flight"] == 0

    run(main())


def test_a_by_group_stage_waits_for_the_whole_group():
    async def main():
        dock = Dock(PLAIN, options(1, deterministic=False))
        await admit(dock, 0)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        rows = await dock.take(REWARD_STAGE)
        await dock.put(written(REWARD_STAGE, rows.row_ids[:3]))
        waiting = asyncio.ensure_future(dock.take(ADVANTAGE_STAGE))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await dock.put(written(REWARD_STAGE, rows.row_ids[3:]))
        assert len(await waiting) == GROUP

    run(main())


def test_a_group_goes_on_without_its_dropped_rows():
    async def main():
        dock = Dock(PLAIN, options(1))
        await admit(dock, 0)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        await work(dock, REWARD_STAGE, await dock.take(REWARD_STAGE), {2: "error: judge is down", 3: "error: again"})
        await work(dock, REF, await dock.take(REF))
        rows = await dock.take(ADVANTAGE_STAGE)
        assert rows.row_ids.tolist() == [0, 1]
        await work(dock, ADVANTAGE_STAGE, rows)
        rows = await dock.take(UPDATE)
        assert rows.row_ids.tolist() == [0, 1]
        assert dock.stats()["dock/dropped/error"] == 2
        await dock.retire(rows)
        assert dock.stats()["dock/bytes"] == 0

    run(main())


def test_a_filter_gates_every_later_stage():
    """`ref` does not read what `filter` decides on, and still spends nothing on filtered rows."""

    async def main():
        dock = Dock(FILTERED, options(2))
        await admit(dock, 0, 1)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        await work(dock, REWARD_STAGE, await dock.take(REWARD_STAGE))
        assert dock.stats()["dock/ref/ready"] == 0
        rows = await dock.take(FILTER)
        await work(dock, FILTER, rows, {int(row): "all_0" for row in rows_of(0)})
        assert dock.stats()["dock/ref/ready"] == GROUP
        assert dock.stats()["dock/in_flight"] == 1
        await admit(dock, 2)  # the dropped group's slot is free at once

    run(main())


def test_pitfall_16_a_barren_environment_stops_with_counts():
    """Every group is filtered: the run ends after a bounded number of groups and says why they went."""

    def drops(stage: str, rows: Rows) -> dict[int, str]:
        if stage != "filter":
            return {}
        return {int(r): "all_1" if g % 3 == 0 else "all_0" for r, g in zip(rows.row_ids, rows.group_ids)}

    dock = Dock(FILTERED, options(2, max_dropped_groups_per_step=5))
    with pytest.raises(ExceptionGroup) as caught:
        run(flow(dock, 1000, drops))
    errors = caught.value.exceptions
    assert all(isinstance(error, TooManyDropped) for error in errors)
    assert "6 groups were dropped since the last step, at most 5 are allowed: all_0 4, all_1 2" in str(errors[0])
    assert dock.stats()["dock/dropped/all_0"] == 4 * GROUP


def test_pitfall_16_the_count_starts_anew_with_each_step():
    def drops(stage: str, rows: Rows) -> dict[int, str]:
        if stage != "filter":
            return {}
        return {int(r): "equal" for r, g in zip(rows.row_ids, rows.group_ids) if g % 2}

    dock = Dock(FILTERED, options(2, max_dropped_groups_per_step=4))
    trained = [rows for stage, rows in run(flow(dock, 24, drops)) if stage == "update"]
    assert [len(rows) for rows in trained] == [2 * GROUP] * 6
    assert dock.stats()["dock/dropped/equal"] == 12 * GROUP


def test_pitfall_22_staleness_0_hands_out_what_one_stage_after_the_other_does():
    async def in_turn() -> list[tuple[str, list[int]]]:
        dock = Dock(PLAIN, options(2))
        seen = []
        for first in (0, 2, 4):
            await admit(dock, first, first + 1)
            for stage in STAGES:
                rows = await dock.take(stage)
                seen.append((stage.name, rows.row_ids.tolist()))
                await work(dock, stage, rows)
            rows = await dock.take(UPDATE)
            seen.append(("update", rows.row_ids.tolist()))
            await dock.retire(rows)
        return seen

    pumped = run(flow(Dock(PLAIN, options(2)), 6))
    assert sorted(pumped) == sorted(run(in_turn()))
    updates = [i for i, (stage, _) in enumerate(pumped) if stage == "update"]
    rollouts = [i for i, (stage, _) in enumerate(pumped) if stage == "rollout"]
    assert all(u < r for u, r in zip(updates, rollouts[1:]))  # no prompt enters before the weights it needs


def test_admission_is_bounded_and_idempotent():
    async def main():
        dock = Dock(PLAIN, options(2, max_staleness=1))
        await admit(dock, 0, 1, 2, 3)
        await admit(dock, 0, 3)
        assert dock.stats()["dock/in_flight"] == 4
        fifth = asyncio.ensure_future(dock.admit(group(4)))
        slot = asyncio.ensure_future(dock.slot())
        await asyncio.sleep(0.01)
        assert not fifth.done() and not slot.done()
        await dock.retire(await step(dock))
        await fifth
        assert await slot
        assert dock.stats()["dock/in_flight"] == 3

    run(main())


def test_no_more_groups_are_admitted_than_will_be_trained():
    async def main():
        dock = Dock(PLAIN, options(2, max_staleness=3, total_groups=4))
        await admit(dock, 0, 1, 2, 3)
        slot = asyncio.ensure_future(dock.slot())
        await dock.retire(await step(dock))
        await asyncio.sleep(0)
        assert not slot.done()
        await dock.retire(await step(dock))
        assert await slot is False
        with pytest.raises(DockClosed, match="nothing is left to take for stage 'update'"):
            await dock.take(UPDATE)

    run(main())


def test_pitfall_27_a_lost_reader_gives_its_rows_back():
    """The reader dies; a waiting one gets its rows at the deadline, by a timer, and the dead one's acks are void."""

    async def main():
        dock = Dock(PLAIN, options(1, lease_s=0.2))
        await admit(dock, 0)
        lost = await dock.take(ROLLOUT)
        began = time.monotonic()
        again = await dock.take(ROLLOUT)
        assert 0.15 < time.monotonic() - began < 2.0
        assert again.row_ids.tolist() == lost.row_ids.tolist() and again.lease != lost.lease
        await dock.put(written(ROLLOUT, again.row_ids, salt=5))
        await dock.put(written(ROLLOUT, lost.row_ids, salt=9))  # the dead one was only slow: the first write stands
        await dock.finish(lost, Outcome({0: "late"}))
        await dock.finish(again, Outcome())
        rows = await dock.take(REF)
        assert rows.row_ids.tolist() == [0, 1, 2, 3]
        assert (await dock.fetch(rows, REF.reads))[REF.reads[0]][1].tolist() == [6, 6]
        stats = dock.stats()
        assert stats["dock/expired_leases"] == 1 and stats["dock/ignored_puts"] == 16

    run(main())


def test_a_slow_reader_that_nobody_overtook_still_counts():
    async def main():
        now = [0.0]
        dock = Dock(PLAIN, options(1, lease_s=10), clock=lambda: now[0])
        await admit(dock, 0)
        slow = await dock.take(ROLLOUT)
        now[0] = 11.0
        dock._on_timer()
        assert dock.stats()["dock/rollout/leased"] == 0
        await dock.put(written(ROLLOUT, slow.row_ids))
        await dock.finish(slow, Outcome())
        assert dock.stats()["dock/rollout/done"] == GROUP

    run(main())


def test_a_write_from_an_expired_lease_to_trained_rows_is_counted_not_an_error():
    async def main():
        now = [0.0]
        dock = Dock(PLAIN, options(1, lease_s=10), clock=lambda: now[0])
        await admit(dock, 0)
        slow = await dock.take(ROLLOUT)
        now[0] = 11.0
        rows = await step(dock)
        await dock.retire(rows)
        before = dock.stats()["dock/ignored_puts"]
        await dock.put(written(ROLLOUT, slow.row_ids))
        await dock.finish(slow, Outcome({0: "late"}))
        assert dock.stats()["dock/ignored_puts"] - before == GROUP * 4
        assert dock.stats()["dock/bytes"] == 0 and "dock/dropped/late" not in dock.stats()

    run(main())


def test_rows_dropped_elsewhere_stay_readable_until_their_reader_is_through():
    async def main():
        dock = Dock(PLAIN, options(1, deterministic=False))
        await admit(dock, 0)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        at_ref = await dock.take(REF)
        await work(dock, REWARD_STAGE, await dock.take(REWARD_STAGE), dict.fromkeys(range(GROUP), "error"))
        assert dock.stats()["dock/in_flight"] == 0
        assert dock.stats()["dock/bytes"] > 0
        await work(dock, REF, at_ref)
        assert dock.stats()["dock/bytes"] == 0

    run(main())


def test_a_waiting_take_uses_no_cpu():
    async def main():
        dock = Dock(PLAIN, options(2))
        await admit(dock, 0)
        tasks = [asyncio.ensure_future(dock.take(stage)) for stage in (*STAGES, UPDATE)]
        await asyncio.sleep(0.05)
        used = time.process_time()
        await asyncio.sleep(1.0)
        used = time.process_time() - used
        for task in tasks:
            task.cancel()
        return used

    assert run(main()) < 0.005


def test_a_timeout_says_what_is_missing_and_who_has_it():
    async def main():
        now = [100.0]
        dock = Dock(PLAIN, options(2, wait_s=0.05, lease_s=1000), clock=lambda: now[0])
        await admit(dock, 0, 1)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        await work(dock, REF, await dock.take(REF))
        await dock.take(REWARD_STAGE)
        now[0] = 131.0
        return str(await catch(TakeTimeout, dock.take(UPDATE))), str(await catch(TakeTimeout, dock.slot()))

    take, slot = run(main())
    assert "stage 'update' waited" in take
    assert "a step is 2 groups, 2 groups are pending, 0 of them ready" in take
    assert "advantage is missing on 8 rows: 8 not yet ready for advantage" in take
    assert "2 of 2 groups are in flight" in slot
    assert "reward: 0 ready, 8 leased (oldest lease 31 s)" in slot


def test_a_timeout_names_the_stage_that_holds_the_rows():
    async def main():
        now = [100.0]
        dock = Dock(PLAIN, options(2, wait_s=0.05, lease_s=1000), clock=lambda: now[0])
        await admit(dock, 0)
        waits = str(await catch(TakeTimeout, dock.take(ROLLOUT)))
        assert "1 of 2 groups are in flight: the prompt source is late" in waits
        await admit(dock, 1)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        await dock.take(REWARD_STAGE)
        now[0] = 131.0
        return str(await catch(TakeTimeout, dock.take(ADVANTAGE_STAGE)))

    assert "reward is missing on 8 rows: 8 leased by reward since 31 s" in run(main())


async def catch(kind: type[Exception], call) -> Exception:
    with pytest.raises(kind) as caught:
        await call
    return caught.value


def test_close_ends_streams_slots_and_waits_but_lets_readers_finish():
    async def main():
        dock = Dock(PLAIN, options(1))
        await admit(dock, 0)
        rows = await dock.take(ROLLOUT)

        async def read() -> int:
            return len([rows async for rows in dock.stream(REWARD_STAGE)])

        stream, slot = asyncio.ensure_future(read()), asyncio.ensure_future(dock.slot())
        take, late = asyncio.ensure_future(dock.take(REF)), asyncio.ensure_future(dock.admit(group(1)))
        await asyncio.sleep(0.01)
        await dock.close()
        assert await stream == 0
        assert await slot is False
        assert await late is None
        with pytest.raises(DockClosed):
            await take
        with pytest.raises(DockClosed):
            await dock.admit(group(2))
        await work(dock, ROLLOUT, rows)
        assert dock.stats()["dock/rollout/done"] == GROUP

    run(main())


def test_the_last_takes_are_short_and_then_streams_end():
    seen = run(flow(Dock(PLAIN, options(2)), 5))
    for stage in (*STAGES, UPDATE):
        assert [len(rows) for name, rows in seen if name == stage.name] == [8, 8, 4]


def test_pitfall_35_a_token_budget_is_a_hard_cap():
    """Random lengths, 200 rows: no take is over its budget, nothing is left out, nothing is split needlessly."""
    rng = np.random.default_rng(0)

    async def main(stage, cap):
        dock = Dock(PLAIN, options(50, deterministic=stage is REF))
        await admit(dock, *range(50))
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        await work(dock, REWARD_STAGE, await dock.take(REWARD_STAGE))
        await dock.end_of_prompts()
        got = []
        async for rows in dock.stream(stage, max_tokens=cap):
            assert rows.lengths.sum() <= cap
            if got and stage is REF:
                assert got[-1].lengths.sum() + rows.lengths[0] > cap
            if stage is ADVANTAGE_STAGE:
                assert all((rows.group_ids == g).sum() == GROUP for g in rows.group_ids)
            got.append(rows)
            await work(dock, stage, rows)
        assert sorted(int(r) for rows in got for r in rows.row_ids) == list(range(200))

    for _ in range(5):
        run(main(REF, int(rng.integers(5, 60))))
        run(main(ADVANTAGE_STAGE, int(rng.integers(20, 80))))


def test_one_row_over_the_budget_is_refused():
    async def main():
        dock = Dock(PLAIN, options(1))
        await admit(dock, 1)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        with pytest.raises(DockError, match="the next row has 5 tokens, the budget of a take is 4"):
            await dock.take(REF, max_tokens=4)
        assert len(await dock.take(REF, max_tokens=5)) == 1

    run(main())


def test_a_thousand_steps_leave_nothing_behind():
    async def main():
        dock = Dock(PLAIN, options(2, lease_s=0.5))
        sizes = []
        for index in range(1000):
            await admit(dock, 2 * index, 2 * index + 1)
            rows = await step(dock)
            await dock.retire(rows)
            exchange = dock._exchange
            tables = [exchange.ledger._rows, *(c._rows for c in exchange.transport.controllers.values())]
            tables += [w._rows for w in exchange.transport.warehouses]
            held = [len(w._chunks) for w in exchange.transport.warehouses] + [len(t) for t in tables]
            held += [len(c.leases) + len(c._groups) + len(c._pending) for c in exchange.transport.controllers.values()]
            held += [len(exchange.ledger.groups), len(exchange.ledger.dead), exchange.transport.nbytes]
            assert set(held) == {0}
            sizes.append([len(table["row_id"]) for table in tables])
        assert sizes[0] == sizes[-1]
        assert dock.stats()["dock/puts"] == 1000 * (2 + 4)

    run(main())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"prompts_per_step": 0}, "prompts_per_step is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"lease_s": 0.0}, "lease_s is 0.0"),
        ({"groups_per_take": 9}, "groups_per_take is 9, but only 1 x 2 = 2 groups"),
    ],
)
def test_bad_options_are_one_line(more, says):
    with pytest.raises(ConfigError, match=says):
        options(**({"prompts": 2} if "prompts_per_step" not in more else {}), **more)


def test_a_take_that_can_never_be_answered_is_refused():
    async def main():
        dock = Dock(PLAIN, options(2))
        with pytest.raises(DockError, match="take of 3 groups for stage 'rollout'"):
            await dock.take(ROLLOUT, groups=3)

    run(main())


def test_prompts_may_end_before_any_came():
    async def main():
        dock = Dock(PLAIN, options(2))
        waiting = asyncio.ensure_future(dock.take(UPDATE))
        await asyncio.sleep(0)
        await admit_all(dock, 0)
        with pytest.raises(DockClosed):
            await waiting

    run(main())
