"""The index of rows, the roster and the queues' pure parts against dicts and exhaustive counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.dock.rules.sampler import divide, fit
from docklands.dock.rules.table import IdIndex, Roster, RowTable
from docklands.errors import DockError

IDS = st.integers(-(2**63), 2**63 - 1)
CLOSE = st.integers(0, 40).map(lambda i: i * 16)  # ids that meet in a small table


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.one_of(CLOSE, IDS), max_size=30)), max_size=25))
def test_an_index_is_a_dict(changes) -> None:
    index, model, last = IdIndex(), {}, 0
    for add, ids in changes:
        chosen = [i for i in ids if (i in model) != add]
        row_ids = np.array(chosen, np.int64)
        if add:
            index.insert(row_ids, np.arange(last, last + len(chosen)))
            model.update(zip(chosen, range(last, last + len(chosen))))
            last += len(chosen)
        else:
            index.remove(row_ids)
            for i in chosen:
                del model[i]
        asked = np.array([*ids, *model, 7], np.int64)
        assert index.find(asked).tolist() == [model.get(i, -1) for i in asked.tolist()]
        assert len(index) == len(model)


def test_an_index_does_not_grow_with_what_has_passed_through_it() -> None:
    index = IdIndex()
    for first in range(0, 100_000, 100):
        ids = np.arange(first, first + 100)
        index.insert(ids, np.arange(100))
        assert index.find(ids).tolist() == list(range(100))
        index.remove(ids)
    assert len(index._keys) <= 1024


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60), st.integers(1, 5))
def test_a_roster_keeps_groups_side_by_side_and_reuses_its_blocks(events, size) -> None:
    roster, model, order, most = Roster(size), {}, 0, 0
    for what, group in events:
        if what < 2 and group not in model:
            row_ids = np.arange(group * size, group * size + 1 + order % size)
            slots = roster.enter(row_ids[None], [group], [order], [group % 3])[0]
            assert (np.diff(slots) == 1).all()
            model[group] = (order, row_ids.tolist())
            order += 1
        elif what >= 2 and group in model:
            gone = model[group][1][: 1 + what % 2]
            roster.leave(roster.find(np.array(gone, np.int64)))
            model[group] = (model[group][0], [row for row in model[group][1] if row not in gone])
            if not model[group][1]:
                del model[group]
        most = max(most, len(model))
        assert sorted(roster.by_group) == sorted(model)
        in_order = [row for _, rows in sorted(model.values()) for row in rows]
        assert roster.row_id[roster.used].tolist() == in_order
        for group_id, block in roster.by_group.items():
            assert roster.rows_of(block).tolist() == model[group_id][1]
            assert roster.order[block] == model[group_id][0] and roster.place[block] == group_id % 3
    assert roster.blocks <= 2 * max(1, most)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 50), max_size=12)), max_size=30))
def test_a_table_forgets_what_was_removed(changes) -> None:
    table, model = RowTable("value"), {}
    for add, ids in changes:
        chosen = np.array([i for i in ids if (i in model) != add], np.int64)
        if add:
            slots = table.add(chosen)
            assert (table["value"][slots] == 0).all()
            table["value"][slots] = chosen * 3
            model.update((i, 3 * i) for i in chosen.tolist())
        else:
            table.remove(table.find(chosen))
            for i in chosen.tolist():
                del model[i]
        slots = table.slots
        assert dict(zip(table["row_id"][slots].tolist(), table["value"][slots].tolist())) == model


LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=80)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 5), st.one_of(st.none(), st.integers(50, 900)))
def test_parts_of_ranks_are_whole_capped_balanced_and_start_with_the_oldest(lengths, ranks, group, cap) -> None:
    tokens = np.array(lengths)
    units = np.arange(len(tokens)) // group
    sums = np.bincount(units, tokens).astype(int)
    if cap is not None and sums[0] > cap:
        with pytest.raises(DockError, match=f"has {sums[0]} tokens, the budget of a take is {cap}"):
            divide(tokens, units, ranks, cap)
        return
    parts = divide(tokens, units, ranks, cap)
    loads = [int(tokens[part].sum()) for part in parts]
    taken = np.sort(np.concatenate(parts))
    assert len(parts) == ranks and taken.tolist() == list(range(len(taken)))  # a prefix: the oldest, none twice
    assert all(set(units[part]).isdisjoint(units[other]) for part in parts for other in parts if part is not other)
    assert cap is None or max(loads) <= cap
    if cap is None:
        assert len(taken) == len(tokens)
    placed = sums[: units[taken[-1]] + 1]
    assert max(loads) <= placed.sum() / ranks + (1 - 1 / ranks) * placed.max() + 1e-9  # Graham 1966


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 2000))
def test_a_fit_is_the_longest_prefix_under_the_cap(lengths, group, cap) -> None:
    tokens, units = np.array(lengths), np.arange(len(lengths)) // group
    ends = [i + 1 for i in range(len(units)) if i + 1 == len(units) or units[i] != units[i + 1]]
    good = [end for end in ends if tokens[:end].sum() <= cap]
    if good:
        assert fit(tokens, units, cap) == good[-1]
    else:
        with pytest.raises(DockError, match="the budget of a take"):
            fit(tokens, units, cap)


def test_one_long_row_in_32_is_within_the_bound() -> None:
    """Pitfall 34's lengths: 1 of 32 is 20 times as long."""
    tokens = np.where(np.arange(512) % 32 == 0, 2000, 100)
    parts = divide(tokens, np.arange(512), 8, None)
    loads = [int(tokens[part].sum()) for part in parts]
    assert max(loads) <= 1.15 * tokens.sum() / 8
