"""The dock's waits: no CPU, deadlines that say why, token budgets, the end, nothing left behind."""

from __future__ import annotations

import asyncio
import selectors

import numpy as np
import pytest
from tests.dock_parts import (
    ADVANTAGE_STAGE,
    GROUP,
    PLAIN,
    REF,
    REWARD_STAGE,
    ROLLOUT,
    UPDATE,
    admit,
    admit_all,
    flow,
    group,
    options,
    raised,
    run,
    step,
    work,
)

from docklands.dock import Dock
from docklands.errors import ConfigError, DockClosed, DockError, TakeTimeout
from docklands.run.loop import admit as admit_prompts

STAGES = (ROLLOUT, REWARD_STAGE, REF, ADVANTAGE_STAGE)


def test_a_waiting_take_never_wakes_the_event_loop():
    class Counted(selectors.DefaultSelector):
        """Every return of `select` is one turn of the event loop."""

        turns = 0

        def select(self, timeout: float | None = None):
            self.turns += 1
            return super().select(timeout)

    async def main():
        dock = Dock(PLAIN, options(2))
        await admit(dock, 0)
        tasks = [asyncio.ensure_future(dock.take(stage)) for stage in (*STAGES, UPDATE)]
        await asyncio.sleep(0.05)
        before = selector.turns
        await asyncio.sleep(0.5)
        waited, done = selector.turns - before, [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        return waited, done

    selector = Counted()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        turns, done = runner.run(main())
    assert not any(done)  # one group of the two that a step needs: nobody has work
    assert turns <= 3  # the end of the test's own sleep


def test_a_timeout_says_what_is_missing_and_who_has_it():
    async def main():
        now = [100.0]
        dock = Dock(PLAIN, options(2, wait_s=0.05, lease_s=1000), clock=lambda: now[0])
        await admit(dock, 0, 1)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        await work(dock, REF, await dock.take(REF))
        await dock.take(REWARD_STAGE)
        now[0] = 131.0
        return str(await raised(TakeTimeout, dock.take(UPDATE))), str(await raised(TakeTimeout, dock.slots()))

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
        waits = str(await raised(TakeTimeout, dock.take(ROLLOUT)))
        assert "1 of 2 groups are in flight: the prompt source is late" in waits
        await admit(dock, 1)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        await dock.take(REWARD_STAGE)
        now[0] = 131.0
        return str(await raised(TakeTimeout, dock.take(ADVANTAGE_STAGE)))

    assert "reward is missing on 8 rows: 8 leased by reward since 31 s" in run(main())


def test_close_ends_streams_slots_and_waits_but_lets_readers_finish():
    async def main():
        dock = Dock(PLAIN, options(1))
        await admit(dock, 0)
        rows = await dock.take(ROLLOUT)

        async def read() -> int:
            return len([rows async for rows in dock.stream(REWARD_STAGE)])

        stream, slot = asyncio.ensure_future(read()), asyncio.ensure_future(dock.slots())
        take, late = asyncio.ensure_future(dock.take(REF)), asyncio.ensure_future(dock.admit(group(1)))
        await asyncio.sleep(0.01)
        await dock.close()
        assert await stream == 0
        assert await slot == 0
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


@pytest.mark.slow
def test_a_thousand_steps_leave_nothing_behind():
    async def main():
        dock = Dock(PLAIN, options(2, lease_s=0.5))
        sizes = []
        for index in range(1000):
            await admit(dock, 2 * index, 2 * index + 1)
            rows = await step(dock)
            await dock.retire(rows)
            control, stores = dock._exchange.control, dock._exchange.stores
            tables = [w._rows for w in stores.warehouses]
            held = [len(w._chunks) for w in stores.warehouses] + [len(t) for t in (*tables, control.roster)]
            held += [len(c.leases) + c.pending + len(c.released) for c in control.controllers.values()]
            held += [len(control.roster.by_group), control.ledger.dead, stores.nbytes]
            assert set(held) == {0}
            sizes.append([*(len(table["row_id"]) for table in tables), control.roster.blocks])
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


def test_a_dock_that_closes_between_slot_and_admission_leaves_the_group_with_the_prompts() -> None:
    """In another process it can: the producer just ends, and a checkpoint written afterwards still has the prompt."""
    dock = Dock(PLAIN, options(2))

    class Closing:
        counted = 0

        def next_groups(self, most: int):
            dock._control.closed = True
            return group(0)

        def admitted(self) -> None:
            self.counted += 1

    prompts = Closing()
    run(admit_prompts(prompts, dock))  # type: ignore[arg-type]
    assert prompts.counted == 0
