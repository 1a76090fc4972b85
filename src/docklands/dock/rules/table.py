"""Rows by id: numpy arrays only, so that work on many rows is a few array calls and a row costs bytes, not objects.

Legend: B rows of a call, G rows of a group at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_ROWS = np.empty(0, np.int64)

EMPTY, GONE = -1, -2
KEPT, KEPT_ROWS, KEPT_BLOCKS = 64, 1024, 16
"""Answers that an index keeps, of at most so many rows; answers about blocks that a roster keeps."""


class IdIndex:
    """id -> slot: open addressing with linear probing, a whole array of ids at a time.

    Slots are int32. An entry costs 12 bytes; half of the table at least is kept empty.
    """

    def __init__(self) -> None:
        self._count = 0
        self._kept: dict[bytes, np.ndarray] = {}
        self._make(16)

    def __len__(self) -> int:
        return self._count

    def find(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of ids, -1 for those that are not here, int64 [B]. The same rows are asked for again and again, so
        answers are kept until ids are removed: where all are here the array is one that must not be changed.
        """
        ids = np.ascontiguousarray(row_ids, np.int64)
        if len(ids) > KEPT_ROWS:
            return self._locate(ids)[0]
        key = ids.tobytes()
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        slots, _ = self._locate(ids)
        if len(slots) and slots.min() >= 0:
            self._keep(key, slots)
        return slots

    def _keep(self, key: bytes, slots: np.ndarray) -> None:
        slots.setflags(write=False)
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[key] = slots

    def insert(self, row_ids: np.ndarray, slots: np.ndarray) -> None:
        """New, distinct ids."""
        if self._used + len(row_ids) > len(self._keys) // 2:
            self._rebuild(len(row_ids))
        self._count += len(row_ids)
        self._used += len(row_ids)
        ids, values = np.ascontiguousarray(row_ids, np.int64), np.asarray(slots, np.int32)
        if len(ids) <= KEPT_ROWS:
            self._keep(ids.tobytes(), np.array(slots, np.int64))
        at = self._home(ids)
        while len(ids):
            free = self._slots[at] == EMPTY
            self._keys[at[free]] = ids[free]  # of two ids for one place the last one has it
            won = free & (self._keys[at] == ids)
            self._slots[at[won]] = values[won]
            lost = ~won
            ids, values, at = ids[lost], values[lost], (at[lost] + 1) & self._mask

    def remove(self, row_ids: np.ndarray) -> None:
        """Ids that are here."""
        _, at = self._locate(np.asarray(row_ids, np.int64))
        self._kept.clear()
        self._slots[at] = GONE
        self._count -= len(at)

    def _locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots (-1: not here) and places in the table."""
        at = self._home(ids)
        slots = self._slots[at].astype(np.int64)
        open_ = np.nonzero((slots != EMPTY) & ((self._keys[at] != ids) | (slots == GONE)))[0]
        while len(open_):
            here = (at[open_] + 1) & self._mask
            at[open_] = here
            slots[open_] = self._slots[here]
            open_ = open_[(slots[open_] != EMPTY) & ((self._keys[here] != ids[open_]) | (slots[open_] == GONE))]
        return slots, at

    def _home(self, ids: np.ndarray) -> np.ndarray:
        """Fibonacci hashing: neighbouring ids fall far apart (Knuth, TAOCP 6.4)."""
        return ((ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> self._shift).astype(np.int64)

    def _make(self, capacity: int) -> None:
        self._keys = np.zeros(capacity, np.int64)
        self._slots = np.full(capacity, EMPTY, np.int32)
        self._mask = capacity - 1
        self._shift = np.uint64(65 - capacity.bit_length())
        self._used = 0

    def _rebuild(self, more: int) -> None:
        live = self._slots >= 0
        ids, slots = self._keys[live], self._slots[live]
        capacity = 16
        while capacity < 3 * (len(ids) + more):
            capacity *= 2
        self._make(capacity)
        self._count = 0
        self.insert(ids, slots)


class FreeList:
    """Numbers 0, 1, 2, ... to be lent and given back, the lowest first as long as none came back."""

    def __init__(self) -> None:
        self._free = NO_ROWS
        self._count = 0
        self.capacity = 0

    def take(self, n: int) -> np.ndarray:
        """`n` numbers, int64 [n]. There must be as many: see `short`."""
        self._count -= n
        return self._free[self._count : self._count + n][::-1].copy()

    def give(self, numbers: np.ndarray) -> None:
        """The first of them is lent first: numbers that were given back ascending are lent so again."""
        self._free[self._count : self._count + len(numbers)] = numbers[::-1]
        self._count += len(numbers)

    def short(self, n: int) -> int:
        """How many are lacking for a take of `n`."""
        return max(0, n - self._count)

    def grow(self, capacity: int) -> None:
        free = np.empty(capacity, np.int64)
        new = capacity - self.capacity
        free[:new] = np.arange(capacity - 1, self.capacity - 1, -1)
        free[new : new + self._count] = self._free[: self._count]
        self._free, self._count, self.capacity = free, self._count + new, capacity


class RowTable:
    """Rows with int64 attributes and reused slots. A new row's are 0. Memory is bounded by the most rows at once."""

    def __init__(self, *names: str) -> None:
        self._index = IdIndex()
        self._free = FreeList()
        self._names = ("row_id", *names)
        self._table = np.zeros((len(self._names), 0), np.int64)
        self._used = np.zeros(0, bool)
        self._grow(4)  # never empty: slot -1 (absent) must be an index that can be read

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, name: str) -> np.ndarray:
        """The attribute of all slots, used and unused; index it with slots. Invalid after the next `add`."""
        return self._data[name]

    @property
    def slots(self) -> np.ndarray:
        """Slots in use, ascending, int64 [rows]."""
        return np.nonzero(self._used)[0]

    def add(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of new rows, int64 [B]; the ids must not be there yet."""
        if short := self._free.short(len(row_ids)):
            self._grow(short)
        slots = self._free.take(len(row_ids))
        self._index.insert(row_ids, slots)
        self._table[:, slots] = 0
        self._data["row_id"][slots] = row_ids
        self._used[slots] = True
        return slots

    def find(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of rows, -1 for those that are not here, int64 [B]."""
        return self._index.find(row_ids)

    def present(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of those rows that are here."""
        slots = self.find(row_ids)
        return slots[slots >= 0]

    def remove(self, slots: np.ndarray) -> None:
        self._index.remove(self._data["row_id"][slots])
        self._used[slots] = False
        self._free.give(slots)

    def _grow(self, short: int) -> None:
        old = self._free.capacity
        new = max(2 * old, old + short)
        self._free.grow(new)
        self._used = larger(self._used, new)
        table = np.zeros((len(self._names), new), np.int64)
        table[:, : self._table.shape[1]] = self._table
        self._table = table
        self._data = dict(zip(self._names, table))


class Roster:
    """Which slot each row of the flow has: the index that the ledger and the controllers of one process share.

    A group has a block of G slots, its rows side by side by sample index, so a group's rows are arithmetic.
    Per row and slot: row_id, here. Per block: order, group_id, place.
    """

    def __init__(self, group_size: int) -> None:
        self.size = group_size
        self.by_group: dict[int, int] = {}
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._index = IdIndex()
        self._free = FreeList()
        self._within = np.arange(group_size)
        self.row_id, self.here = np.zeros(0, np.int64), np.zeros(0, bool)
        self.order, self.group_id, self.place = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32)
        self._grow(1)  # never empty: slot -1 (absent) must be an index that can be read

    def __len__(self) -> int:
        """Rows that are here."""
        return len(self._index)

    @property
    def blocks(self) -> int:
        """Blocks, used and unused: arrays per block have this length, arrays per slot G times it."""
        return self._free.capacity

    def enter(
        self, row_ids: np.ndarray, group_ids: Sequence[int], orders: Sequence[int], places: Sequence[int]
    ) -> np.ndarray:
        """New groups of at most G rows each, int64 [N, rows]; their slots, in the same shape."""
        if short := self._free.short(len(row_ids)):
            self._grow(short)
        blocks = self._free.take(len(row_ids))
        slots = blocks[:, None] * self.size + self._within[: row_ids.shape[1]]
        self._index.insert(row_ids.ravel(), slots.ravel())
        self.row_id[slots], self.here[slots] = row_ids, True
        self.order[blocks], self.group_id[blocks], self.place[blocks] = orders, group_ids, places
        self.by_group.update(zip(group_ids, blocks.tolist()))
        return slots

    def find(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of rows, -1 for those that are not here, int64 [B]."""
        return self._index.find(row_ids)

    def present(self, row_ids: np.ndarray) -> np.ndarray:
        """Slots of those rows that are here."""
        slots = self.find(row_ids)
        return slots[slots >= 0]

    def leave(self, slots: np.ndarray) -> list[int]:
        """Rows are forgotten; a block is free again with its last one. Returns the ids of groups that are gone."""
        self._index.remove(self.row_id[slots])
        self.here[slots] = False
        blocks = self.blocks_of(slots)
        empty = blocks[~self.here[self.members(blocks)].any(1)]
        gone = self.group_id[empty].tolist()
        for group_id in gone:
            del self.by_group[group_id]
        self._free.give(empty)
        return gone

    def blocks_of(self, slots: np.ndarray) -> np.ndarray:
        """Blocks of slots, each once, ascending. Answers are kept: several controllers ask for the same array of rows,
        which must not be changed meanwhile.
        """
        kept = self._blocks.get(id(slots))
        if kept is not None and kept[0] is slots:
            return kept[1]
        blocks = distinct(slots // self.size)
        if len(self._blocks) >= KEPT_BLOCKS:
            self._blocks.clear()
        self._blocks[id(slots)] = slots, blocks
        return blocks

    def members(self, blocks: np.ndarray) -> np.ndarray:
        """Slots of blocks, used or not, [blocks, G]."""
        return blocks[:, None] * self.size + self._within

    def rows_of(self, block: int) -> np.ndarray:
        """Ids of the rows of a block that are here, by sample index."""
        slots = block * self.size + self._within
        return self.row_id[slots[self.here[slots]]]

    @property
    def used(self) -> np.ndarray:
        """Slots of all rows, by order of admission, then sample index, int64 [rows]."""
        blocks = np.fromiter(self.by_group.values(), np.int64, len(self.by_group))
        members = self.members(blocks[np.argsort(self.order[blocks])]).ravel()
        return members[self.here[members]]

    def _grow(self, short: int) -> None:
        new = max(2 * self.blocks, self.blocks + short)
        self._free.grow(new)
        for name in ("order", "group_id", "place"):
            setattr(self, name, larger(getattr(self, name), new))
        for name in ("row_id", "here"):
            setattr(self, name, larger(getattr(self, name), new * self.size))


def larger(array: np.ndarray, length: int) -> np.ndarray:
    """The same entries, then zeros."""
    grown = np.zeros((length, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def distinct(values: np.ndarray) -> np.ndarray:
    """Each value once, ascending. Rows mostly come group by group, so what is sorted already is not sorted again."""
    if len(values) < 2:
        return values
    rising = values[1:] > values[:-1]  # compared: differences may wrap around
    if rising.all():
        return values
    if (values[1:] < values[:-1]).any():
        return np.unique(values)
    kept = np.ones(len(values), bool)
    kept[1:] = rising
    return values[kept]


def unique_ids(row_ids: np.ndarray) -> bool:
    """No id twice."""
    return len(distinct(row_ids)) == len(row_ids)
