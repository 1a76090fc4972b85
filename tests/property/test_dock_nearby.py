"""Rows that are read where they lie: right values or no answer, whatever was freed, recycled or forgotten meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dock_parts import PLAIN, ROLLOUT, UPDATE, group, options, written
from tests.dock_processes import values_of

from docklands.core.batch import Batch
from docklands.core.protocols import Rows
from docklands.core.stage import Stage
from docklands.dock.rules.addresses import RUN, Addresses
from docklands.dock.rules.control import Control
from docklands.dock.rules.flow import Flow
from docklands.dock.warehouse import calls
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.calls import Session
from docklands.dock.warehouse.nearby import Nearby
from docklands.dock.warehouse.notices import notices_from, notices_message
from docklands.dock.warehouse.store import Store, WarehouseOptions
from docklands.dock.warehouse.together import loads_of
from docklands.dock.wire.format import Limits, column_meta
from docklands.errors import DockClosed, RowGone

READERS = {stage.name: stage for stage in PLAIN.stages if stage is not ROLLOUT}
CLIENT = b"producer"


class Node:
    """Control, one warehouse and one client of a node, without processes or sockets. seen: how reads went."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        readers = {column: list(stages) for column, stages in Flow(PLAIN).told.items()}
        columns = [column_meta(field) for field in PLAIN.fields]
        self.store = Store(WarehouseOptions(place=0, columns=columns, readers=readers, shared_bytes=12 << 20))
        self.control = Control(PLAIN, options(1, max_staleness=5, deterministic=False, lease_s=5.0))
        self.session = Session("test")
        self.session.greeted(self.say(*self.session.greet())[0], 1)
        self.sessions = {0: self.session}
        self.groups, self.now = 0, 0.0
        self.taken: list[tuple[Stage, Rows, Nearby]] = []
        self.seen: Counter[str] = Counter()

    def say(self, message: Any, frames: list[Any]) -> tuple[Any, list[memoryview]]:
        reply, buffers = self.store.answer(CLIENT, message, [memoryview(bytearray(frame)) for frame in frames])
        outbox, self.store.outbox = self.store.outbox, []
        if outbox:
            self.control.notice(notices_from(*notices_message(0, (1, 1), outbox))[0])
        for place, row_ids in self.control.settle():
            assert place == 0
            self.store.free(row_ids)
        return reply, [memoryview(bytearray(buffer)) for buffer in buffers]

    def put(self, batch: Batch, birth: m.Birth | None = None) -> None:
        steps = calls.put(self.sessions, loads_of(batch, 0), calls.Why(birth))
        try:
            asks = next(steps)
            while True:
                asks = steps.send([self.say(*ask.build(self.session)) for ask in asks])  # type: ignore[misc]
        except StopIteration:
            pass

    # --- what may happen ---------------------------------------------------------------------------------------

    def admit(self) -> None:
        if self.control.slots:
            batch = group(self.groups)
            new = self.control.admit(batch.row_ids, self.groups)
            self.put(batch, m.Birth(new.order, new.group_id, 0))
            self.groups += 1

    def take(self) -> None:
        stage = self.random.choice(PLAIN.stages)
        try:
            rows = self.control.look_take(stage.name, self.control.want(stage.name, None, None), self.now)
        except DockClosed:
            return
        if rows is not None:
            near = Nearby(rows, self.control.homes(rows))
            self.taken.append((stage, rows, near))
            if stage is not ROLLOUT:
                assert self.read(stage, rows, near), "freshly taken rows are found"

    def write(self) -> None:
        """A part of a lease's rows, in any order, or all of them."""
        if not self.taken:
            return
        stage, rows, _ = self.random.choice(self.taken)
        ids = rows.row_ids[self.control.roster.find(rows.row_ids) >= 0]
        if stage is UPDATE or not len(ids):
            return
        if self.random.random() < 0.1:
            ids = np.array(self.random.sample(ids.tolist(), self.random.randint(1, len(ids))))
        self.put(written(stage, ids))

    def end(self) -> None:
        if not self.taken:
            return
        stage, rows, _ = self.random.choice(self.taken)
        if stage is UPDATE:
            self.control.retire(rows)
        elif not self.control.lacks_columns(rows, {}) and rows.lease in self.control.controller(stage).leases:
            self.control.finish(rows, {})
        self.say(m.Stats(), [])

    def expire(self) -> None:
        self.now += self.random.choice([0.5, 6.0])
        self.control.expire(self.now)

    def drop(self) -> None:
        if self.taken and self.random.random() < 0.3:
            _, rows, _ = self.random.choice(self.taken)
            here = rows.row_ids[self.control.ledger.alive(self.control.roster.find(rows.row_ids))]
            self.control.drop_rows(dict.fromkeys(here.tolist(), "bad luck"), None)
            self.say(m.Stats(), [])

    def slab(self) -> None:
        """The producer goes on to another slab, so that the one before it can be given to others."""
        if self.session.writer is not None:
            self.session._done = [self.session.writer.generation]
            self.session.writer = None

    def forget(self) -> None:
        """The control process hears an inventory: it knows no address any more."""
        if self.random.random() < 0.1:
            self.control.addresses.forget(self.control.roster.used)

    def look(self) -> None:
        """Read again what was taken once, however long ago."""
        if self.taken:
            self.read(*self.random.choice(self.taken))

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, stage: Stage, rows: Rows, near: Nearby) -> bool:
        if not len(rows) or stage is ROLLOUT:
            return True
        start = self.random.randrange(len(rows))
        stretch = np.arange(start, self.random.randint(start + 1, len(rows)))
        here_and_there = self.random.sample(range(len(rows)), self.random.randint(1, len(rows)))
        part = rows.select(self.random.choice([stretch, np.array(here_and_there), np.sort(here_and_there)]))
        fields = [field for field in stage.reads if not field.is_json]
        found = near.read(self.sessions, part.row_ids, fields, self.random.random() < 0.5) if fields else None
        if found is None:
            self.seen["asked"] += 1
            gone = (self.control.roster.find(rows.row_ids) < 0).any()
            return bool(gone or not fields or not homes_known(self.control, rows, fields))
        for field in fields:
            assert values_of(found.batch, field) == expected(field, part.row_ids), (stage.name, field)
        found.check()
        self.seen["read"] += 1
        return True


def expected(field: Any, row_ids: np.ndarray) -> list[Any]:
    writer = next(stage for stage in PLAIN.stages if field in stage.writes)
    return values_of(written(writer, row_ids), field)


def homes_known(control: Control, rows: Rows, fields: list[Any]) -> bool:
    slots = control.roster.find(rows.row_ids)
    names = [field.name for field in fields]
    return set(control.addresses.runs(slots, rows.lengths, rows.places, names)) == set(names)


HAPPENS = ("admit", "admit", "take", "take", "take", "write", "write", "end", "end", "end") + (
    "expire", "drop", "slab", "slab", "slab", "forget", "look", "look", "look", "look",
)  # fmt: skip


def play(seed: int, steps: int) -> tuple[Counter[str], int]:
    node = Node(seed)
    try:
        for _ in range(steps):
            getattr(node, node.random.choice(HAPPENS))()
        return node.seen, node.store.slabs.arenas[0]._last
    finally:
        node.store.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_is_read_nearby_is_right_or_nothing(seed: int) -> None:
    play(seed, 150)


def test_the_play_reads_rows_and_meets_recycled_slabs() -> None:
    """The property is about something: rows are read nearby, addresses get old, slabs are used again."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        seen += play(seed, 200)[0]
    assert seen["read"] > 10 and seen["asked"] > 5, seen


def written_rows(node: Node) -> Rows:
    """What the rollout has written into a slab, taken by the reference."""
    node.admit()
    node.slab()
    rows = node.control.look_take("rollout", node.control.want("rollout", None, None), 0.0)
    assert rows is not None
    node.put(written(ROLLOUT, rows.row_ids))
    node.control.finish(rows, {})
    ref = node.control.look_take("ref", node.control.want("ref", None, None), 0.0)
    assert ref is not None
    return ref


def test_a_view_of_a_slab_that_was_recycled_says_so() -> None:
    node = Node(0)
    try:
        ref = written_rows(node)
        near, fields = Nearby(ref, node.control.homes(ref)), READERS["ref"].reads
        held = near.read(node.sessions, ref.row_ids, fields, copy=False)
        assert held is not None
        held.check()
        node.slab()
        node.control.drop_rows(dict.fromkeys(ref.row_ids.tolist(), "late"), None)
        node.control.give_back("ref", ref.lease)
        node.say(m.Stats(), [])
        for _ in range(4):  # others get the room
            node.admit()
            node.slab()
        with pytest.raises(RowGone, match="freed while they were read"):
            held.check()
        assert near.read(node.sessions, ref.row_ids, fields, copy=True) is None
    finally:
        node.store.close()


@pytest.mark.parametrize("way", ["nearby", "asked"])
def test_a_copy_of_rows_that_are_freed_while_it_is_made_is_given_to_nobody(way: str) -> None:
    node = Node(0)
    try:
        ref = written_rows(node)
        near, fields, find = Nearby(ref, node.control.homes(ref)), READERS["ref"].reads, node.session.find

        def freed_meanwhile(home: Any, nbytes: int) -> Any:
            view = find(home, nbytes)
            node.slab()
            node.control.drop_rows(dict.fromkeys(ref.row_ids.tolist(), "late"), None)
            node.control.give_back("ref", ref.lease)
            node.say(m.Stats(), [])
            node.admit()
            return view

        node.session.find = freed_meanwhile  # type: ignore[method-assign]
        if way == "nearby":
            assert near.read(node.sessions, ref.row_ids, fields, copy=True) is None
        else:
            steps = calls.get(node.sessions, ref.row_ids, 0, fields, ("ref", True, Limits()))
            asks = next(steps)
            with pytest.raises(RowGone):
                while True:
                    asks = steps.send([node.say(*ask.build(node.session)) for ask in asks])
    finally:
        node.store.close()


# --- addresses alone --------------------------------------------------------------------------------------------


WIDTHS = {"tokens": (4, True), "mask": (1, True), "reward": (4, False)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_addresses_are_those_of_a_plain_dict(seed: int) -> None:
    """Puts of rows in any order, slots that are forgotten and used again; runs name every row's address, each once."""
    rng = np.random.default_rng(seed)
    made, model = Addresses(WIDTHS), {name: {} for name in WIDTHS}
    lengths, places = rng.integers(0, 9, 60), rng.integers(0, 2, 60)
    for turn in range(25):
        slots = rng.permutation(60)[: rng.integers(1, 20)]
        if rng.random() < 0.2:
            made.forget(slots)
            for held in model.values():
                for slot in slots.tolist():
                    held.pop(slot, None)
            continue
        gone = rng.random(len(slots)) < 0.1
        named, offset = {}, int(rng.integers(0, 1000))
        for name in WIDTHS:
            if rng.random() < 0.7:
                named[name] = (0, 1 + turn, offset)
                size, by_token = WIDTHS[name]
                at = offset
                for slot, left in zip(slots.tolist(), gone.tolist()):
                    if not left:
                        model[name][slot] = (1 + turn, at)
                    at += size * (int(lengths[slot]) if by_token else 1)
        made.note(np.where(gone, -1, slots), lengths[slots], [(len(slots), named)])
        asked = rng.permutation(60)[: rng.integers(1, 30)]
        found = made.runs(asked, lengths[asked], places[asked], list(WIDTHS))
        for name, (size, by_token) in WIDTHS.items():
            if any(slot not in model[name] for slot in asked.tolist()):
                assert name not in found
                continue
            flat, row = found[name], -1
            starts = flat[::RUN]
            assert starts[0] == 0 and starts == sorted(set(starts))
            for row, slot in enumerate(asked.tolist()):
                if row in starts:
                    at = RUN * starts.index(row)
                    generation, offset = flat[at + 1], flat[at + 2]
                elif row:
                    assert places[slot] == places[asked[row - 1]]
                assert (generation, offset) == model[name][slot]
                offset += size * (int(lengths[slot]) if by_token else 1)
