"""The control's rules under crashes: its own, a warehouse's, a reader's; late notices, snapshots, against plain sets.

Real parts: Control, its journal in a file, Warehouse. Between them a list of notices stands for the network: it is
delivered late, and lost with a crash.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.dock_parts import FILTERED, GROUP, group, options, rows_of, written

from docklands.core.batch import Batch
from docklands.core.protocols import Rows
from docklands.dock.control.recover import Journal, align, packed, unpacked
from docklands.dock.rules.control import Control
from docklands.dock.rules.messages import Notice
from docklands.dock.warehouse.arena import SHM
from docklands.dock.warehouse.chunks import Warehouse
from docklands.errors import DockClosed

STAGES = {stage.name: stage for stage in FILTERED.stages}
NAMES = list(STAGES)


@dataclass(eq=False)
class Held:
    """A reader and its rows. live: the control still knows of the lease."""

    rows: Rows
    live: bool = True


class ControlMachine(RuleBasedStateMachine):
    """Every rule is one event; what must never happen is checked where it would."""

    steps = 0
    """Of all examples so far."""

    @initialize(
        exact=st.booleans(),
        prompts=st.integers(1, 3),
        staleness=st.integers(0, 2),
        keeps=st.booleans(),
        wide=st.booleans(),
    )
    def start(self, exact: bool, prompts: int, staleness: int, keeps: bool, wide: bool) -> None:
        overtake = min(1, staleness) if wide and not exact else 0
        self.options = options(
            prompts, max_staleness=staleness, warehouses=2, deterministic=exact, groups_per_take=1, overtake=overtake
        )
        self.keeps = keeps  # a warehouse keeps its rows through a crash (durability wal)
        self.folder = tempfile.TemporaryDirectory(dir=SHM)  # without the disk's waits
        self.now = 0.0
        self.lives = 0
        self.network: list[tuple[int, Notice]] = []
        self.held: list[Held] = []
        self.next_group = 0
        self.trained: set[int] = set()
        self.dropped: set[int] = set()
        self.unsent: list[int] = []
        self.begin(None)
        self.stores = [self.empty(place) for place in range(2)]

    # --- parts -------------------------------------------------------------------------------------------------

    def empty(self, place: int) -> Warehouse:
        flow = self.control.flow
        return Warehouse(place, tuple(flow.fields.values()), flow.told)

    def begin(self, state: dict[str, Any] | None) -> None:
        """A control process: from its journal, or (with `state`) from a snapshot and a new journal."""
        if state is not None:
            self.lives += 1
        self.control = Control(FILTERED, self.options)
        path = Path(self.folder.name) / f"journal.{self.lives}"
        self.journal = Journal(path, self.control)
        if state is not None:
            self.control.load_state_dict(state)
            self.journal.compact()
        for controller in self.control.controllers.values():
            controller.begin_epoch(self.journal.epoch)

    def settle(self) -> None:
        for place, row_ids in self.control.settle():
            for held in self.held:  # what a reader has in hand stays where it is
                assert not (held.live and np.isin(row_ids, held.rows.row_ids).any())
            self.stores[place].free(row_ids)

    def sources(self, index: int) -> None:
        """Store a group's source columns, of the rows that are still in the flow."""
        batch = group(index)
        slots = self.control.roster.find(batch.row_ids)
        batch = batch.select(slots >= 0)
        if len(batch):
            place = int(self.control.ledger.places(batch.row_ids)[0])
            new = batch.row_ids[self.stores[place]._rows.find(batch.row_ids) < 0]
            self.stores[place].add(new)
            self.write(place, batch)

    def write(self, place: int, batch: Batch) -> None:
        notices = self.stores[place].write(batch, self.stores[place].plan(batch))
        self.network += [(place, notice) for notice in notices]

    def compare(self, place: int, rebuilt: bool) -> None:
        """An inventory arrives; lost rows are admitted again."""
        self.network = [(at, notice) for at, notice in self.network if at != place]
        store = self.stores[place]
        slots = store._rows.slots
        row_ids = store._rows["row_id"][slots]
        have = {name: np.isin(row_ids, ids) for name, ids in store.inventory().items()}
        lost, vain = align(self.control, place, (row_ids, have, store._rows["length"][slots]), rebuilt)
        assert not np.isin(self.control.roster.row_id[lost], list(self.trained | self.dropped)).any()
        store.free(vain)
        self.settle()
        roster = self.control.roster
        for index in roster.group_id[roster.blocks_of(lost)].tolist():
            if index not in self.unsent:
                self.sources(index)

    # --- the flow ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.control.has_slot)
    @rule(late=st.integers(0, 3))
    def admit(self, late: int) -> None:
        """A prompt enters; its source columns come at once or later."""
        index = self.next_group
        self.next_group += 1
        self.control.admit(rows_of(index), index)
        self.settle()
        self.unsent.append(index)
        if late:
            self.send()

    @precondition(lambda self: self.unsent)
    @rule()
    def send(self) -> None:
        self.sources(self.unsent.pop(0))

    @precondition(lambda self: self.network)
    @rule(count=st.integers(1, 30))
    def deliver(self, count: int) -> None:
        now, self.network = self.network[:count], self.network[count:]
        self.control.notice([notice for _, notice in now])
        self.settle()

    @rule(stage=st.sampled_from(NAMES), cap=st.sampled_from([None, None, 20]))
    def take(self, stage: str, cap: int | None) -> None:
        self.take_rows(stage, cap)

    def take_rows(self, stage: str, cap: int | None) -> bool:
        if stage == "update":
            cap = None
        elif cap is not None and stage != "reward":
            cap = 40
        try:
            rows = self.control.look_take(stage, self.control.want(stage, None, cap), self.now, "reader")
        except DockClosed:
            return False
        self.settle()
        if rows is None:
            return False
        self.check_take(stage, rows, cap)
        self.held.append(Held(rows))
        return True

    def check_take(self, stage: str, rows: Rows, cap: int | None) -> None:
        ids = rows.row_ids.tolist()
        assert len(set(ids)) == len(ids) and not self.trained.intersection(ids)
        others = {r for held in self.held if held.live and held.rows.stage == stage for r in held.rows.row_ids.tolist()}
        assert not others.intersection(ids)  # one reader at a time
        assert cap is None or rows.lengths.sum() <= cap
        if not self.options.deterministic:
            assert not self.dropped.intersection(ids)
        names = [field.name for field in STAGES[stage].reads]
        for place in set(rows.places.tolist()):
            assert self.stores[place].absent(rows.row_ids[rows.places == place], names) == {}
        if STAGES[stage].by != "sample":  # whole groups: whoever is left out has left, or is through with the stage
            for index in set(rows.group_ids.tolist()):
                out = [r for r in rows_of(index).tolist() if r not in ids and r not in self.dropped | self.trained]
                assert not out or self.options.deterministic or stage in ("rollout", "advantage", "filter", "update")
        if stage == "update":
            assert len(set(rows.group_ids.tolist())) <= self.options.prompts_per_step

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 10**6), fate=st.sampled_from(["ack", "ack", "ack", "put", "die"]), drop=st.integers(0, 5))
    def work(self, pick: int, fate: str, drop: int) -> None:
        """A reader writes and acknowledges; or only writes; or dies."""
        held = self.held[pick % len(self.held)]
        if fate == "die":
            self.held.remove(held)
            self.control.give_back(held.rows.stage, held.rows.lease)
            self.settle()
        elif held.rows.stage == "update":
            if fate == "ack":
                self.retire(held)
        else:
            self.process(held, fate == "ack", {int(r) for r in held.rows.row_ids if drop == 5 and (r + pick) % 3 == 0})

    @precondition(lambda self: len(self.held) < 4)
    @rule(upto=st.sampled_from([2, 4, 6, 6]))
    def healthy(self, upto: int) -> None:
        """Every stage, or the first ones, does what there is to do; the update trains a step."""
        while self.unsent:
            self.send()
        for name in NAMES[:upto]:
            self.deliver(len(self.network))
            while self.take_rows(name, None):
                held = self.held[-1]
                self.retire(held) if name == "update" else self.process(held, True, set())

    def process(self, held: Held, acknowledge: bool, dropped: set[int]) -> None:
        stage = STAGES[held.rows.stage]
        for place in range(2):
            ids = held.rows.row_ids[~np.isin(held.rows.row_ids, list(dropped))]
            ids = ids[(self.stores[place]._rows.find(ids) >= 0)]
            if stage.writes and len(ids):
                self.write(place, written(stage, ids))
        if not acknowledge:
            return
        if self.control.lacks_columns(held.rows, dict.fromkeys(dropped, "x")):
            self.deliver(len(self.network))  # the control process waits for the notices
        self.held.remove(held)
        if self.control.lacks_columns(held.rows, dict.fromkeys(dropped, "x")):
            self.control.give_back(held.rows.stage, held.rows.lease)
            return self.settle()
        before = self.alive()
        self.control.finish(held.rows, dict.fromkeys(dropped, "bad luck"))
        self.dropped |= before - self.alive()
        self.settle()

    def alive(self) -> set[int]:
        roster = self.control.roster
        slots = roster.used
        return set(roster.row_id[slots[self.control.ledger.alive(slots)]].tolist())

    def retire(self, held: Held) -> None:
        self.held.remove(held)
        before = self.alive()
        self.control.retire(held.rows)
        left = before - self.alive()
        assert not left & self.trained
        self.trained |= left
        self.settle()

    @precondition(lambda self: self.held)
    @rule(seconds=st.sampled_from([10.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.control.expire(self.now)
        self.settle()
        for held in self.held:
            held.live = held.live and held.rows.lease in self.control.controllers[held.rows.stage].leases

    # --- crashes -----------------------------------------------------------------------------------------------

    @rule()
    def control_dies(self) -> None:
        """Notices under way are lost with it; readers go on and do not know."""
        dead = self.control
        before = {name: self.known(name) for name in NAMES}
        self.journal.close()
        self.begin(None)
        assert self.alive_of(dead) == self.alive() and self.control.ledger.in_flight == dead.ledger.in_flight
        assert vars(self.control.ledger)["dropped"] == vars(dead.ledger)["dropped"]
        for held in self.held:
            held.live = False
        for place in range(2):
            self.compare(place, rebuilt=True)
        here = set(self.control.roster.row_id[self.control.roster.used].tolist())
        for name in NAMES:
            for was, is_ in zip(before[name], self.known(name)):
                assert was & here <= is_

    def known(self, stage: str) -> tuple[set[int], set[int]]:
        """Rows that are done for a stage, and rows that are ready for it or beyond."""
        controller, roster = self.control.controllers[stage], self.control.roster
        slots = roster.used
        done = controller._state[slots] & 3 == 3
        ready = controller._missing[slots] & controller._need == 0
        return set(roster.row_id[slots[done]].tolist()), set(roster.row_id[slots[done | ready]].tolist())

    def alive_of(self, control: Control) -> set[int]:
        mine, self.control = self.control, control
        try:
            return self.alive()
        finally:
            self.control = mine

    @rule(place=st.integers(0, 1))
    def warehouse_dies(self, place: int) -> None:
        """It comes back with its rows or without, and the notices under way are lost."""
        if not self.keeps:
            self.stores[place] = self.empty(place)
            for held in self.held:
                held.live = held.live and not (held.rows.places == place).any()
        self.compare(place, rebuilt=False)

    @rule()
    def snapshot(self) -> None:
        """Another run goes on from the control's state and the warehouses' bytes. Its readers are new."""
        state = unpacked(packed(self.control.state_dict()))
        self.journal.close()
        self.held.clear()
        self.begin(state)
        for place in range(2):
            self.compare(place, rebuilt=True)

    # --- always, and at the end --------------------------------------------------------------------------------

    @invariant()
    def bounds(self) -> None:
        ControlMachine.steps += 1
        assert self.control.ledger.in_flight <= self.options.window
        assert not self.trained & self.dropped
        assert not self.alive() & (self.trained | self.dropped)

    def teardown(self) -> None:
        """The flow goes to its end: every row was trained once, or lost with a reason, and nothing is left."""
        if not hasattr(self, "control"):
            return
        self.held.clear()
        self.now += 1000.0
        self.control.expire(self.now)
        while self.unsent:
            self.send()
        self.control.end_of_prompts()
        for _ in range(400):
            self.deliver(len(self.network))
            if not len(self.control.roster):
                break
            for name in NAMES:
                while self.take_rows(name, None):
                    held = self.held[-1]
                    self.retire(held) if name == "update" else self.process(held, True, set())
        assert not len(self.control.roster) and not any(len(store) for store in self.stores)
        assert self.trained | self.dropped == set(range(self.next_group * GROUP))
        assert self.control.ledger.in_flight == 0
        self.journal.close()
        self.folder.cleanup()


@pytest.mark.slow
class TestControlMachine(ControlMachine.TestCase):
    """Ten thousand steps at least, counted."""

    settings = settings(max_examples=190, stateful_step_count=90, deadline=None)

    def runTest(self) -> None:
        super().runTest()
        assert ControlMachine.steps >= 10_000, ControlMachine.steps
