"""Whole flows through the dock, with random drops, sizes and speeds: always to the end, always in the same takes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dock_parts import FILTERED, GROUP, PLAIN, flow, options, run

from docklands.core.protocols import Rows
from docklands.dock import Dock


def drops_by(seed: int, share: float):
    """Rows fail in `reward` and `ref`, groups are filtered, as a function of ids alone."""

    def unlucky(*key: object) -> bool:
        return random.Random(f"{seed} {key}").random() < share

    def drops(stage: str, rows: Rows) -> dict[int, str]:
        if stage == "filter":
            return {int(r): "equal" for r, g in zip(rows.row_ids, rows.group_ids) if unlucky("filter", int(g))}
        if stage in ("reward", "ref"):
            return {int(r): f"{stage}: failed" for r in rows.row_ids if unlucky(stage, int(r))}
        return {}

    return drops


def uneven(seed: int):
    """A pause of a random number of turns of the event loop."""
    chance = random.Random(seed)

    async def pause() -> None:
        for _ in range(chance.choice((0, 0, 1, 2, 5, 13))):
            await asyncio.sleep(0)

    return pause


@pytest.mark.slow
@settings(max_examples=20)
@given(
    graph=st.sampled_from([PLAIN, FILTERED]),
    prompts=st.integers(1, 4),
    staleness=st.integers(0, 2),
    per_take=st.integers(0, 4),
    groups=st.integers(0, 14),
    share=st.sampled_from([0.0, 0.2, 0.6]),
    seed=st.integers(0, 10**6),
)
def test_fixed_takes_do_not_depend_on_speed(graph, prompts, staleness, per_take, groups, share, seed):
    settings_ = options(
        prompts,
        max_staleness=staleness,
        groups_per_take=min(per_take, prompts * (staleness + 1)),
        warehouses=1 + seed % 3,
    )
    takes = []
    for speed in range(3):
        dock = Dock(graph, settings_)
        seen = run(flow(dock, groups, drops_by(seed, share), uneven(speed)))
        takes.append({stage.name: [rows for name, rows in seen if name == stage.name] for stage in graph.stages})
        stats = dock.stats()
        assert stats["dock/in_flight"] == stats["dock/bytes"] == 0
        trained = Counter(row for rows in takes[-1]["update"] for row in rows)
        lost = sum(value for name, value in stats.items() if name.startswith("dock/dropped/"))
        assert set(trained.values()) <= {1}
        assert len(trained) + lost == groups * GROUP
        for rows in takes[-1].values():
            assert max(Counter(row for take in rows for row in take).values(), default=1) == 1
    assert takes[0] == takes[1] == takes[2]


@settings(max_examples=15)
@given(
    graph=st.sampled_from([PLAIN, FILTERED]),
    prompts=st.integers(1, 4),
    staleness=st.integers(0, 2),
    groups=st.integers(0, 14),
    share=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 10**6),
)
def test_eager_takes_reach_the_end_and_keep_the_staleness_bound(graph, prompts, staleness, groups, share, seed):
    dock = Dock(graph, options(prompts, max_staleness=staleness, groups_per_take=1, deterministic=False))
    seen = run(flow(dock, groups, drops_by(seed, share), uneven(seed)))
    steps_done, born = 0, {}
    for stage, rows in seen:
        if stage == "rollout":
            born |= dict.fromkeys(rows, steps_done)
        if stage == "update":
            assert all(steps_done - born[row] <= staleness for row in rows)
            steps_done += 1
    trained = Counter(row for stage, rows in seen if stage == "update" for row in rows)
    lost = sum(value for name, value in dock.stats().items() if name.startswith("dock/dropped/"))
    assert set(trained.values()) <= {1}
    assert len(trained) + lost == groups * GROUP
    assert dock.stats()["dock/bytes"] == 0
