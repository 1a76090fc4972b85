"""The windowed update: slow groups are overtaken, within the bound on staleness; ranks share a round."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dock_parts import GROUP, PLAIN, REF, ROLLOUT, UPDATE, admit_all, options, pump, run, work, written

from docklands.core.protocols import Outcome
from docklands.dock import Dock


async def slow_flow(dock: Dock, groups: int, seed: int) -> list[list[int]]:
    """Eight rollout readers of random slowness, one of every other stage; the groups of every update."""
    chance = random.Random(seed)
    steps: list[list[int]] = []
    born: dict[int, int] = {}

    async def rollout() -> None:
        async for rows in dock.stream(ROLLOUT):
            for group in rows.group_ids.tolist():
                born[group] = len(steps)
            for _ in range(chance.choice((0, 1, 3, 40, 150))):
                await asyncio.sleep(0)
            await work(dock, ROLLOUT, rows)

    async def no_pause() -> None:
        await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(admit_all(dock, groups))
        for _ in range(8):
            tasks.create_task(rollout())
        for stage in PLAIN.upstream_of("update")[1:]:
            tasks.create_task(pump(dock, stage, [], lambda *_: {}, no_pause))
        async for rows in dock.stream(UPDATE):
            found = list(dict.fromkeys(rows.group_ids.tolist()))
            assert all(len(steps) - born[group] <= dock.options.max_staleness for group in found)
            steps.append(found)
            await dock.retire(rows)
        await dock.close()
    return steps


def overtaken(steps: list[list[int]]) -> Counter[int]:
    """Group -> updates that took a younger group while it was in flight and not taken."""
    counts: Counter[int] = Counter()
    done: set[int] = set()
    for step in steps:
        counts.update(group for group in range(max(step)) if group not in done and group not in step)
        done.update(step)
    return counts


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.integers(1, 4),
    staleness=st.integers(1, 4),
    share=st.floats(0, 1),
    groups=st.integers(0, 40),
    seed=st.integers(0, 9999),
)
def test_a_group_is_overtaken_in_so_many_updates_at_most_and_never_too_stale(prompts, staleness, share, groups, seed):
    overtake = round(share * staleness)
    given_options = options(prompts, max_staleness=staleness, overtake=overtake, groups_per_take=1, deterministic=False)
    assert given_options.window == (staleness - overtake + 1) * prompts
    steps = run(slow_flow(Dock(PLAIN, given_options), groups, seed))
    assert sorted(group for step in steps for group in step) == list(range(groups))
    assert max(overtaken(steps).values(), default=0) <= overtake


async def in_visits(dock: Dock, groups: int, seed: int) -> tuple[list[list[int]], int]:
    """One reader of rollouts that ends some groups and leaves the others for later; -> the groups of every update, and
    visits of what was left alone while an update was possible.
    """
    chance = random.Random(seed)
    steps: list[list[int]] = []
    left: dict[int, int] = {}
    alone = [0]

    async def rollout() -> None:
        async for rows in dock.stream(ROLLOUT):
            found = dict.fromkeys(rows.group_ids.tolist())
            begun = [group for group in found if group in left]
            alone[0] += len(begun) == len(found) and dock._control.controllers["update"].can_take(2, False)
            for group in found:
                left.setdefault(group, chance.choice((0, 0, 0, 1, 3)))
            later = [row for row, group in zip(rows.row_ids.tolist(), rows.group_ids.tolist()) if left[group]]
            ended = rows.row_ids[~np.isin(rows.row_ids, later)]
            if len(ended):
                await dock.put(written(ROLLOUT, ended))
            for group in found:
                left[group] -= left[group] > 0
            await dock.finish(rows, Outcome(later=later))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(admit_all(dock, groups))
        tasks.create_task(rollout())
        for stage in PLAIN.upstream_of("update")[1:]:
            tasks.create_task(pump(dock, stage, [], lambda *_: {}, partial(asyncio.sleep, 0)))
        async for rows in dock.stream(UPDATE):
            steps.append(list(dict.fromkeys(rows.group_ids.tolist())))
            await asyncio.sleep(0)
            await dock.retire(rows)
        await dock.close()
    return steps, alone[0]


@settings(max_examples=15, deadline=None)
@given(staleness=st.integers(1, 4), share=st.floats(0, 1), take=st.integers(0, 1), seed=st.integers(0, 9999))
def test_what_a_visit_left_waits_for_others_and_never_for_ever(staleness, share, take, seed):
    overtake = round(share * staleness)
    given_options = options(2, max_staleness=staleness, overtake=overtake, deterministic=False)
    given_options = replace(given_options, groups_per_take=take * given_options.window)
    steps, alone = run(in_visits(Dock(PLAIN, given_options), 41, seed))
    assert sorted(group for step in steps for group in step) == list(range(41))
    assert max(overtaken(steps).values(), default=0) <= overtake
    assert alone == 0, "the tail would have held the device while an update was possible"


def test_slow_groups_are_overtaken_only_where_it_is_allowed() -> None:
    found = []
    for overtake in (0, 1, 2):
        given_options = options(2, max_staleness=4, overtake=overtake, groups_per_take=1, deterministic=False)
        found.append(max(overtaken(run(slow_flow(Dock(PLAIN, given_options), 60, 3))).values(), default=0))
    assert found == [0, 1, 2]


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 5),
    cap=st.one_of(st.none(), st.integers(5, 60)),
    groups=st.integers(1, 9),
    deterministic=st.booleans(),
    seed=st.integers(0, 999),
)
def test_ranks_at_any_pace_take_every_row_once_and_keep_the_cap(ranks, cap, groups, deterministic, seed):
    """Each rank asks when it likes; some let their part lapse, and it comes again."""
    chance = random.Random(seed)
    now = [0.0]

    async def main() -> None:
        dock = Dock(PLAIN, options(groups, lease_s=100.0, deterministic=deterministic), clock=lambda: now[0])
        await admit_all(dock, groups)
        await work(dock, ROLLOUT, await dock.take(ROLLOUT))
        seen: Counter[int] = Counter()
        while dock._control.controllers["ref"].census().done < groups * GROUP:
            rank = chance.randrange(ranks)
            take = asyncio.ensure_future(dock.take(REF, rank=rank, ranks=ranks, max_tokens=cap))
            await asyncio.sleep(0)
            if not take.done():
                take.cancel()
                now[0] += 101.0  # what other ranks have not come for is free again
                dock._on_timer()
                continue
            rows = take.result()
            assert cap is None or rows.lengths.sum() <= cap
            if chance.random() < 0.2:
                now[0] += 101.0
                dock._on_timer()
                continue
            seen.update(rows.row_ids.tolist())
            if len(rows):
                await dock.put(written(REF, rows.row_ids))
                await dock.finish(rows, Outcome())
        assert seen == Counter(range(groups * GROUP))
        assert not dock._control.controllers["ref"].leases

    run(main())
