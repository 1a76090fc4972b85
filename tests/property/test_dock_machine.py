"""Random work, crashes and restores against a model of the dock in plain dicts and lists."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.dock_parts import FILTERED, GROUP, group, options, rows_of, written

from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Stage
from docklands.dock import Dock

STAGES = {stage.name: stage for stage in FILTERED.stages}
NAMES = list(STAGES)
AFTER = {  # who waits, directly or not, for whom; written out by hand
    "rollout": {"reward", "filter", "ref", "advantage", "update"},
    "reward": {"filter", "ref", "advantage", "update"},
    "filter": {"ref", "advantage", "update"},
    "ref": {"update"},
    "advantage": {"update"},
    "update": set(),
}
NEEDS = {  # which stages must be through with a row
    "rollout": set(),
    "reward": {"rollout"},
    "filter": {"reward"},
    "ref": {"rollout", "filter"},
    "advantage": {"reward", "rollout", "filter"},
    "update": {"rollout", "advantage", "ref", "filter"},
}


@dataclass
class ModelRow:
    """state: stage -> 'free', 'done' or a lease number; lease: stage -> last lease; salt: stage -> first put."""

    group: int
    state: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(NAMES, "free"))
    lease: dict[str, int] = field(default_factory=dict)
    salt: dict[str, int] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    alive: bool = True
    acks: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Held:
    """A reader: its rows, and whether the lease is still good."""

    rows: Rows
    stage: str
    deadline: float
    live: bool = True
    salt: int = 0


class DockMachine(RuleBasedStateMachine):
    """Every rule does one thing to the dock and to the model, and compares."""

    @initialize(
        exact=st.booleans(), prompts=st.integers(1, 3), staleness=st.integers(0, 1), warehouses=st.integers(1, 2)
    )
    def start(self, exact, prompts, staleness, warehouses):
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.exact = exact
        self.prompts = prompts
        self.window = prompts * (staleness + 1)
        self.options = options(prompts, max_staleness=staleness, warehouses=warehouses, deterministic=exact)
        self.dock = Dock(FILTERED, self.options, clock=lambda: self.now)
        self.rows: dict[int, ModelRow] = {}
        self.groups: list[int] = []  # in order of admission
        self.held: list[Held] = []
        self.allowed = dict.fromkeys(NAMES, 0)
        self.next_group = 0
        self.salts = 0
        self.trained: list[int] = []
        self.lost: set[int] = set()
        self.everything: dict[int, ModelRow] = {}

    # --- the model ---------------------------------------------------------------------------------------------

    def run(self, call):
        return self.loop.run_until_complete(call)

    def in_flight(self) -> int:
        return len({row.group for row in self.rows.values() if row.alive})

    def is_ready(self, row: ModelRow, stage: str) -> bool:
        """Columns count from the put on, a filter's verdict from its acknowledgement."""
        return all(row.state["filter"] == "done" if n == "filter" else n in row.salt for n in NEEDS[stage])

    def pending(self, stage: str) -> list[tuple[int, list[int]]]:
        """(group, rows still to take) in order of admission."""
        found = []
        for index in self.groups:
            ids = [i for i in rows_of(index).tolist() if i in self.rows]
            open_ = [i for i in ids if self.rows[i].state[stage] == "free" and stage not in self.rows[i].hidden]
            if open_:
                found.append((index, open_))
        return found

    def expected(self, stage: str, groups: int) -> list[int]:
        """The rows that a take must hand out; none: it must wait."""
        pending = self.pending(stage)
        whole = [all(self.is_ready(self.rows[i], stage) for i in ids) for _, ids in pending]
        if self.exact or STAGES[stage].by == "step":
            limit = min(groups, self.allowed[stage], max(1, len(pending))) if self.allowed[stage] else groups
            enough = len(pending) >= limit and all(whole[:limit])
            return [i for _, ids in pending[:limit] for i in ids] if enough else []
        if STAGES[stage].by == "group":
            chosen = [ids for (_, ids), ready in zip(pending, whole) if ready]
        else:
            chosen = [[i for i in ids if self.is_ready(self.rows[i], stage)] for _, ids in pending]
        return [i for ids in [ids for ids in chosen if ids][:groups] for i in ids]

    def settle(self) -> None:
        """Remove what nobody holds; then, at rest, allow short takes."""
        for i, row in list(self.rows.items()):
            holds = [isinstance(s, int) or (s == "free" and n not in row.hidden) for n, s in row.state.items()]
            if not row.alive and not any(holds):
                del self.rows[i]
        self.groups = [g for g in self.groups if any(i in self.rows for i in rows_of(g).tolist())]
        leased = any(isinstance(s, int) for row in self.rows.values() for s in row.state.values())
        if not self.exact or leased or self.in_flight() < self.window:
            return
        if any(self.expected(stage, self.prompts) for stage in NAMES):
            return
        for stage in NAMES[:-1]:
            pending = self.pending(stage)
            if pending and all(self.is_ready(self.rows[i], stage) for _, ids in pending for i in ids):
                self.allowed[stage] = len(pending)

    def leave(self, ids: list[int], by: str | None) -> None:
        for i in ids:
            row = self.rows.get(i)
            if row is None:
                continue
            row.alive = False
            row.hidden |= set(NAMES) if by is None or not self.exact else AFTER[by] | {by}

    def acknowledge(self, held: Held, dropped: set[int]) -> None:
        """Rows that are still this reader's to acknowledge."""
        lease = held.rows.lease
        mine = [i for i in held.rows.row_ids.tolist() if i in self.rows and self.owner(i, held.stage) == lease]
        done = [i for i in mine if i in dropped or not STAGES[held.stage].writes or held.stage in self.rows[i].salt]
        for i in done:
            row = self.rows[i]
            row.state[held.stage] = "done"
            if i not in dropped:
                row.acks[held.stage] = row.acks.get(held.stage, 0) + 1
        gone = [i for i in done if i in dropped]
        self.lost |= {i for i in gone if self.rows[i].alive}
        self.leave(gone, held.stage)

    def owner(self, i: int, stage: str) -> int | None:
        """The last lease on a row that is not done: still running, or expired with nobody after it."""
        return None if self.rows[i].state[stage] == "done" else self.rows[i].lease.get(stage)

    # --- rules -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.in_flight() < self.window)
    @rule()
    def admit(self):
        assert self.run(self.dock.slots())
        index, self.next_group = self.next_group, self.next_group + 1
        self.run(self.dock.admit(group(index)))
        self.groups.append(index)
        for i in rows_of(index).tolist():
            self.rows[i] = self.everything[i] = ModelRow(index)
        self.settle()

    @precondition(lambda self: self.groups)
    @rule()
    def admit_again(self):
        """The same ids change nothing, and a full window is a wait."""
        self.run(self.dock.admit(group(self.groups[-1])))
        if self.in_flight() >= self.window:
            self.must_wait(self.dock.slots())
            self.must_wait(self.dock.admit(group(self.next_group)))

    def must_wait(self, call) -> None:
        async def look():
            task = asyncio.ensure_future(call)
            for _ in range(3):
                await asyncio.sleep(0)
            assert not task.done()
            task.cancel()

        self.run(look())

    @rule(stage=st.sampled_from(NAMES), groups=st.integers(1, 2))
    def take_or_wait(self, stage, groups):
        self.take_rows(stage, self.size(stage, groups))

    def size(self, stage: str, groups: int) -> int:
        return self.prompts if stage == "update" else min(groups, self.window)

    @precondition(lambda self: any(self.expected(name, self.prompts) for name in NAMES))
    @rule(pick=st.integers(0, 10**6), groups=st.integers(1, 3))
    def take(self, pick, groups):
        """A stage that has something to take."""
        if able := [name for name in NAMES if self.expected(name, self.size(name, groups))]:
            name = able[pick % len(able)]
            self.take_rows(name, self.size(name, groups))

    def take_rows(self, stage: str, groups: int) -> Held | None:
        expected = self.expected(stage, groups)
        if not expected:
            self.must_wait(self.dock.take(STAGES[stage], groups=groups))
            return None
        rows = self.run(self.dock.take(STAGES[stage], groups=groups))
        assert rows.row_ids.tolist() == expected
        assert rows.group_ids.tolist() == [i // GROUP for i in expected]
        for i in expected:
            self.rows[i].state[stage] = self.rows[i].lease[stage] = rows.lease
        self.allowed[stage] = 0
        self.salts += 1
        held = Held(rows, stage, self.now + self.options.lease_s, salt=self.salts * 1000)
        self.held.append(held)
        return held

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 10**6), drop=st.sampled_from([0, 0, 0, 1, 2]), crash=st.integers(0, 5))
    def work(self, pick, drop, crash):
        """A reader fetches, writes and acknowledges, or dies after writing; its lease may have expired long ago."""
        held = self.held[pick % len(self.held)]
        if held.stage != "update":
            self.process(held, self.choose(held, pick, drop), crash == 5)

    @precondition(lambda self: not self.held and any(self.expected(name, self.prompts) for name in NAMES))
    @rule()
    def healthy_step(self):
        """Every stage takes what it may and does its work, and the update trains a step."""
        for name in NAMES:
            while held := self.take_rows(name, self.prompts):
                self.retire_rows(held) if name == "update" else self.process(held, set())

    def choose(self, held: Held, pick: int, drop: int) -> set[int]:
        ids = held.rows.row_ids.tolist()
        if held.stage == "filter":
            return {i for i in ids if drop and (i // GROUP + pick) % 2}
        return set(random.Random(pick).sample(ids, min(drop, len(ids))))

    def process(self, held: Held, dropped: set[int], crash: bool = False) -> None:
        stage: Stage = STAGES[held.stage]
        ids = held.rows.row_ids
        if held.live:
            self.check_values(held)
        kept = ids[~np.isin(ids, list(dropped))]
        if stage.writes and len(kept):
            self.run(self.dock.put(written(stage, kept, held.salt)))
            for i in kept.tolist():
                if i in self.rows:
                    self.rows[i].salt.setdefault(held.stage, held.salt)
            self.settle()
        if crash:
            return
        self.run(self.dock.finish(held.rows, Outcome(dict.fromkeys(dropped, "bad luck: of the draw"))))
        self.acknowledge(held, dropped)
        self.held.remove(held)
        self.settle()

    def check_values(self, held: Held) -> None:
        """What a reader sees is what was written first."""
        reads = STAGES[held.stage].reads
        batch = self.run(self.dock.fetch(held.rows, reads))
        for writer in STAGES.values():
            for column in set(reads) & set(writer.writes):
                for i, value in zip(held.rows.row_ids.tolist(), batch[column]):
                    first = written(writer, np.array([i]), self.rows[i].salt[writer.name])[column][0]
                    assert value == first if column.is_json else bool((value == first).all())

    @precondition(lambda self: any(h.stage == "update" and h.live for h in self.held))
    @rule()
    def retire(self):
        held = next(h for h in self.held if h.stage == "update" and h.live)
        self.check_values(held)
        self.retire_rows(held)

    def retire_rows(self, held: Held) -> None:
        ids = held.rows.row_ids.tolist()
        alive = [i for i in ids if i in self.rows and self.rows[i].alive]
        self.run(self.dock.retire(held.rows))
        self.trained += alive
        self.leave(alive, None)
        for i in ids:
            if i in self.rows and self.owner(i, "update") == held.rows.lease:
                self.rows[i].state["update"] = "done"
                self.rows[i].acks["update"] = self.rows[i].acks.get("update", 0) + 1
        self.held.remove(held)
        self.settle()

    @precondition(lambda self: self.held)
    @rule(seconds=st.sampled_from([1.0, 30.0, 70.0]))
    def time_passes(self, seconds):
        """Readers that took too long lose their rows."""
        self.now += seconds
        self.loop.call_soon(self.dock._on_timer)  # the timer itself runs by the real clock
        self.run(asyncio.sleep(0))
        for held in self.held:
            if held.live and held.deadline <= self.now:
                held.live = False
                for i in held.rows.row_ids.tolist():
                    if i in self.rows and self.rows[i].state[held.stage] == held.rows.lease:
                        self.rows[i].state[held.stage] = "free"
        self.settle()

    @precondition(lambda self: any(h.live for h in self.held))
    @rule(pick=st.integers(0, 10**6), drop=st.sampled_from([0, 1]))
    def overtaken(self, pick, drop):
        """A reader stalls, another one takes its rows, and then both go on."""
        live = [held for held in self.held if held.live]
        old = live[pick % len(live)]
        self.time_passes(seconds=70.0)
        new = self.take_rows(old.stage, self.prompts)
        for held in filter(None, [old, new] if pick % 2 else [new, old]):
            drops = self.choose(held, pick, drop)
            self.retire_rows(held) if held.stage == "update" else self.process(held, drops)

    @precondition(lambda self: self.rows)
    @rule()
    def snapshot(self):
        """The process dies and another one goes on from the snapshot; readers of the old one are strangers."""
        state = self.dock.state_dict()
        self.dock = Dock(FILTERED, self.options, clock=lambda: self.now)
        self.dock.load_state_dict(state)
        for row in self.rows.values():
            row.state = {name: "free" if isinstance(s, int) else s for name, s in row.state.items()}
            row.lease.clear()
        self.held.clear()
        self.allowed = dict.fromkeys(NAMES, 0)
        self.settle()

    # --- always ------------------------------------------------------------------------------------------------

    @invariant()
    def bounds_and_counts(self):
        stats = self.dock.stats()
        assert stats["dock/in_flight"] == self.in_flight() <= self.window
        assert (stats["dock/bytes"] == 0) == (not self.rows)
        for stage in NAMES:
            leased = sum(isinstance(row.state[stage], int) for row in self.rows.values())
            assert stats[f"dock/{stage}/leased"] == leased
        assert all(count == 1 for row in self.everything.values() for count in row.acks.values())

    def teardown(self):
        """Every row reaches the end: once trained, or lost with a reason; then nothing is left."""
        if not hasattr(self, "dock"):
            return
        for held in list(self.held):
            self.retire_rows(held) if held.stage == "update" else self.process(held, set())
        self.run(self.dock.end_of_prompts())
        for _ in range(200):
            if not self.rows:
                break
            for name, stage in STAGES.items():
                if self.pending(name):
                    self.drain(name, stage)
        assert not self.rows
        assert sorted(self.trained) == sorted(set(self.everything) - self.lost)
        for i in self.trained:
            assert self.everything[i].acks == dict.fromkeys(NAMES, 1)
        stats = self.dock.stats()
        assert stats["dock/bytes"] == stats["dock/in_flight"] == 0
        assert sum(v for k, v in stats.items() if k.startswith("dock/dropped/")) == len(self.lost)
        self.loop.close()

    def drain(self, name: str, stage: Stage) -> None:
        """One take at the end of prompts; only whether it comes is left to the dock."""

        async def attempt():
            task = asyncio.ensure_future(self.dock.take(stage))
            await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                return None
            return None if task.exception() else task.result()

        if (rows := self.run(attempt())) is None:
            return
        for i in rows.row_ids.tolist():
            self.rows[i].state[name] = self.rows[i].lease[name] = rows.lease
        held = Held(rows, name, self.now + 60.0, salt=0)
        self.held.append(held)
        self.retire_rows(held) if name == "update" else self.process(held, set())


TestDockMachine = pytest.mark.slow(DockMachine.TestCase)
TestDockMachine.settings = settings(max_examples=60, stateful_step_count=60)
