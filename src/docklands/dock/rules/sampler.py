"""What is handed out next: the groups of one stage, oldest first, in a queue that is kept up to date change by change.

Three ways to choose, all by the order of admission:
  exact   the next groups once all of them are whole: the k-th take of a stage holds the same rows in every run
  window  as exact, but a group may be overtaken by younger ones in `overtake` takes at most (the update's slow tail)
  eager   whatever is ready, oldest first: whole groups, or (by sample) any ready rows
A stage by "step" is never eager: that the update trains nearly the oldest groups is what bounds staleness.

Legend: B rows, N groups of a call. A group is named by its block in the roster.
"""

from __future__ import annotations

import heapq

import numpy as np

from docklands.core.stage import By
from docklands.dock.rules.table import NO_ROWS, Roster, larger
from docklands.errors import DockError

BLOCK_BITS = 32
FEW = 16
"""Groups that are counted one by one."""


class GroupQueue:
    """Groups of one stage by what it has still to take.

    open     rows that the stage has still to take, int32 [blocks]
    ready    those of them whose columns are all there, int32 [blocks]
    pending  groups with an open row; whole: those of them with every open row ready
    put_off  blocks of whole groups that were begun and are to go on beside others (rest.py)
    """

    def __init__(self, roster: Roster, by: By, deterministic: bool, overtake: int = 0) -> None:
        self.roster = roster
        self.by: By = by
        self.fixed = deterministic or by == "step"
        self._overtake = overtake
        self.open, self.ready = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._skips, self._queued = np.zeros(0, np.int32), np.zeros(0, bool)
        self._heap: list[int] = []
        self.pending = self.whole = 0
        self.put_off: set[int] = set()

    def enter(self, blocks: np.ndarray) -> None:
        """New groups in blocks that may have been others'."""
        if len(self.open) < self.roster.blocks:
            for name in ("open", "ready", "_skips", "_queued"):
                setattr(self, name, larger(getattr(self, name), self.roster.blocks))
        self._skips[blocks], self._queued[blocks] = 0, False

    def overtaken(self, blocks: np.ndarray) -> np.ndarray:
        """In how many takes each group has been overtaken, int32 [N]."""
        return self._skips[blocks]

    def overtake(self, blocks: np.ndarray) -> None:
        """A take passed over these groups."""
        self._skips[blocks] += 1

    def set_overtaken(self, blocks: np.ndarray, times: np.ndarray) -> None:
        """What `overtaken` gave before a loss, int [N]."""
        self._skips[blocks] = times

    @property
    def nbytes(self) -> int:
        """Bytes of arrays and heap; an entry is a pointer and a number of 36 bytes."""
        arrays = (self.open, self.ready, self._skips, self._queued)
        return sum(array.nbytes for array in arrays) + 44 * len(self._heap)

    def update(self, blocks: np.ndarray, open_: np.ndarray, ready: np.ndarray) -> None:
        """New counts of groups, int [N]; groups that may be handed out now join the queue."""
        was_open, was_ready = self.open[blocks], self.ready[blocks]
        if len(blocks) <= FEW and not self.put_off:
            self.open[blocks], self.ready[blocks] = open_, ready
            return self._update_few(blocks, (was_open, was_ready, open_, ready))
        self.pending += int(np.count_nonzero(open_)) - int(np.count_nonzero(was_open))
        was_whole = (was_open > 0) & (was_open == was_ready)
        whole = (open_ > 0) & (open_ == ready)
        self.whole += int(np.count_nonzero(whole)) - int(np.count_nonzero(was_whole))
        self.open[blocks], self.ready[blocks] = open_, ready
        if self.put_off:
            self.put_off.difference_update(blocks[~whole].tolist())
        able = open_ > 0 if self.fixed else (ready > 0 if self.by == "sample" else whole)
        new = blocks[able & ~self._queued[blocks]]
        if len(new):
            self._queued[new] = True
            for key in ((self.roster.order[new] << BLOCK_BITS) | new).tolist():
                heapq.heappush(self._heap, key)

    def put_back(self, blocks: np.ndarray) -> None:
        """These are to go on beside others, those of them that are whole."""
        whole = (self.open[blocks] > 0) & (self.open[blocks] == self.ready[blocks])
        self.put_off.update(blocks[whole].tolist())

    def _update_few(self, blocks: np.ndarray, counts: tuple[np.ndarray, ...]) -> None:
        """As `update`, one by one: for a few groups that takes half the time of the array operations."""
        numbers = [array.tolist() for array in (blocks, self._queued[blocks], *counts)]
        for block, queued, had, had_ready, left, ready in zip(*numbers):
            self.pending += (left > 0) - (had > 0)
            whole = left > 0 and left == ready
            self.whole += whole - (had > 0 and had == had_ready)
            able = left > 0 if self.fixed else (ready > 0 if self.by == "sample" else whole)
            if able and not queued:
                self._queued[block] = True
                heapq.heappush(self._heap, int(self.roster.order[block]) << BLOCK_BITS | block)

    def choose(self, groups: int, exhausted: bool) -> np.ndarray:
        """Blocks to hand out, in order of admission; none: not yet.

        groups     at most, beside those that were put off (in a fixed composition exactly, or all that are pending if
                   no further group will come)
        exhausted  no further group will be admitted
        The caller must `update` the chosen groups afterwards: they have left the queue.
        """
        keys, passed = self._scan(groups + len(self.put_off), exhausted)
        for key in passed:
            heapq.heappush(self._heap, key)
        if not keys:
            return NO_ROWS
        if passed:
            self.overtake(np.array([key & (1 << BLOCK_BITS) - 1 for key in passed], np.int64))
        blocks = np.array([key & (1 << BLOCK_BITS) - 1 for key in keys], np.int64)
        self._queued[blocks] = False
        return blocks

    @property
    def may_choose(self) -> bool:
        """Whether `choose` might hand something out."""
        return self.whole > 0 if self.fixed else bool(self._heap)

    def can_choose(self, groups: int, exhausted: bool) -> bool:
        """Whether `choose` would hand something out; changes nothing."""
        keys, passed = self._scan(groups, exhausted)
        for key in (*keys, *passed):
            heapq.heappush(self._heap, key)
        return bool(keys)

    def _scan(self, groups: int, exhausted: bool) -> tuple[list[int], list[int]]:
        """Entries taken out of the heap: those to hand out (all or none), and those that they overtake."""
        need = min(groups, self.pending) if exhausted else groups
        if self.fixed and (not need or self.whole < need):
            return [], []
        keys: list[int] = []
        passed: list[int] = []
        while self._heap and len(keys) < groups:
            key = heapq.heappop(self._heap)
            if not self._able(key):
                continue
            block = key & (1 << BLOCK_BITS) - 1
            if not self.fixed or self.open[block] == self.ready[block]:
                keys.append(key)
            elif self._skips[block] < self._overtake:
                passed.append(key)
            else:  # it may not be overtaken (any more)
                heapq.heappush(self._heap, key)
                break
        if self.fixed and len(keys) < need:
            for key in (*keys, *passed):
                heapq.heappush(self._heap, key)
            return [], []
        return keys, passed

    def _able(self, key: int) -> bool:
        """Whether a heap entry still stands for a group that may be handed out."""
        block = key & (1 << BLOCK_BITS) - 1
        if self.roster.order[block] != key >> BLOCK_BITS:
            return False  # the block is another group's by now
        if self.fixed:
            able = self.open[block] > 0
        elif self.by == "sample":
            able = self.ready[block] > 0
        else:
            able = 0 < self.open[block] == self.ready[block]
        if not able:
            self._queued[block] = False
        return bool(able)


def fit(lengths: np.ndarray, units: np.ndarray, max_tokens: int) -> int:
    """How many of the rows, from the first on, make the longest whole number of units within a hard cap of tokens.

    lengths  tokens of each row, int [B]
    units    rows with the same number stay together (groups), ascending, int64 [B]
    Raises DockError when not even the first unit fits.
    """
    ends = np.concatenate([np.nonzero(np.diff(units))[0] + 1, [len(units)]])
    totals = np.cumsum(lengths, dtype=np.int64)[ends - 1]
    fitting = int(np.searchsorted(totals, max_tokens, side="right"))
    if not fitting:
        raise too_long(int(ends[0]), int(totals[0]), max_tokens)
    return int(ends[fitting - 1])


def too_long(rows: int, tokens: int, max_tokens: int) -> DockError:
    """The error of a row or group that no take can ever hold."""
    what = "row" if rows == 1 else f"group of {rows} rows"
    return DockError(
        f"the next {what} has {tokens} tokens, the budget of a take is {max_tokens}",
        "raise the token budget or lower the length limits",
    )


def divide(lengths: np.ndarray, units: np.ndarray, ranks: int, max_tokens: int | None) -> list[np.ndarray]:
    """Rows for each of `ranks` readers, balanced by tokens: positions in order of admission, possibly none.

    Longest processing time first (Graham 1969): no rank has more than 4/3 - 1/(3 ranks) of the least possible maximum.
    With `max_tokens` as a hard cap per rank, the youngest units are left out until the rest fit.
    Raises DockError when the first unit alone is over the cap.
    """
    starts = np.concatenate([[0], np.nonzero(np.diff(units))[0] + 1])
    tokens = np.add.reduceat(lengths.astype(np.int64), starts)
    ends = np.append(starts[1:], len(lengths))
    count = len(tokens)
    if max_tokens is not None:
        if tokens[0] > max_tokens:
            raise too_long(int(ends[0]), int(tokens[0]), max_tokens)
        count = max(1, int(np.searchsorted(np.cumsum(tokens), ranks * max_tokens, side="right")))
    while True:
        owner, unplaced = longest_first(tokens[:count], ranks, max_tokens)
        if not unplaced:
            break
        count -= unplaced
    rank_of_row = np.repeat(owner, (ends - starts)[:count])
    return [np.nonzero(rank_of_row == rank)[0] for rank in range(ranks)]


def longest_first(tokens: np.ndarray, ranks: int, max_tokens: int | None) -> tuple[np.ndarray, int]:
    """Rank of each unit, and how many found no room under the cap (less than all, if the longest fits alone)."""
    owner = np.zeros(len(tokens), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    unplaced = 0
    for unit in np.argsort(-tokens, kind="stable").tolist():
        load, rank = loads[0]
        if max_tokens is not None and load + tokens[unit] > max_tokens:
            unplaced += 1
            continue
        owner[unit] = rank
        heapq.heapreplace(loads, (load + int(tokens[unit]), rank))
    return owner, unplaced
