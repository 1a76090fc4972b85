"""The dock over time: order, groups, drops, filters, the window, lost readers."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
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
    admit,
    flow,
    group,
    options,
    rows_of,
    run,
    step,
    work,
    written,
)

from docklands.core.protocols import Outcome, Rows
from docklands.dock import Dock
from docklands.errors import DockClosed, TooManyDropped

STAGES = (ROLLOUT, REWARD_STAGE, REF, ADVANTAGE_STAGE)


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


def test_a_cap_of_tokens_never_splits_a_group():
    """Groups of 10 and 11 tokens; 16 would hold two rows of the second one, too."""

    async def main():
        dock = Dock(PLAIN, options(2, deterministic=False))
        await admit(dock, 0, 1)
        for of in (ROLLOUT, REWARD_STAGE):
            await work(dock, of, await dock.take(of, groups=2))
        rows = await dock.take(ADVANTAGE_STAGE, groups=2, max_tokens=16)
        assert rows.row_ids.tolist() == list(range(GROUP)) and rows.lengths.sum() == 10
        assert len(await dock.take(ADVANTAGE_STAGE, groups=2, max_tokens=16)) == GROUP

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


def test_pitfall_29_groups_that_failed_say_how():
    def drops(stage: str, rows: Rows) -> dict[int, str]:
        return {int(r): f"env_error: down {r}" for r in rows.row_ids} if stage == "rollout" else {}

    with pytest.raises(ExceptionGroup) as caught:
        run(flow(Dock(FILTERED, options(2, max_dropped_groups_per_step=5)), 1000, drops))
    assert "env_error 6; the first failure: env_error: down 0" in str(caught.value.exceptions[0])


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
        slot = asyncio.ensure_future(dock.slots())
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
        slot = asyncio.ensure_future(dock.slots())
        await dock.retire(await step(dock))
        await asyncio.sleep(0)
        assert not slot.done()
        await dock.retire(await step(dock))
        assert await slot == 0
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
        assert 0.15 < time.monotonic() - began
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


def test_a_group_that_was_trained_in_part_counts_as_trained():
    async def main():
        dock = Dock(PLAIN, options(1, total_groups=1, max_dropped_groups_per_step=1))
        await admit(dock, 0)
        rows = await step(dock)
        await dock.retire(rows.select(np.array([0, 1])))
        assert dock.stats()["dock/in_flight"] == 1
        await dock.drop(rows.select(np.array([2, 3])), "spoilt")
        assert dock.stats()["dock/in_flight"] == dock.stats()["dock/bytes"] == 0
        assert "1 admitted, 1 retired, 0 dropped" in dock.describe()
        assert await dock.slots() == 0

    run(main())
