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
from collections.abc import Collection

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
    wanted   whole groups that the most modest of the takes in vain waits for, in a fixed composition; 0: not known

    step     groups of a step: a reader's preference for its own node passes over older groups only within so many
    """

    def __init__(self, roster: Roster, by: By, deterministic: bool, overtake: int = 0, step: int = 1) -> None:
        self.roster = roster
        self.by: By = by
        self.fixed = deterministic or by == "step"
        self._overtake, self._step = overtake, step
        self.open, self.ready = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._skips, self._queued = np.zeros(0, np.int32), np.zeros(0, bool)
        self._heap: list[int] = []
        self.pending = self.whole = 0
        self.put_off: set[int] = set()
        self.wanted, self._last = 0, -1

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
            self._push(np.sort((self.roster.order[new] << BLOCK_BITS) | new).tolist())

    def _push(self, keys: list[int]) -> None:
        """Entries, ascending, join the heap. Groups that have just been admitted come after all others."""
        if keys[0] > self._last:
            self._heap.extend(keys)
        else:
            for key in keys:
                heapq.heappush(self._heap, key)
        self._last = max(self._last, keys[-1])

    def put_back(self, blocks: np.ndarray) -> None:
        """These are to go on beside others, those of them that are whole."""
        whole = (self.open[blocks] > 0) & (self.open[blocks] == self.ready[blocks])
        self.put_off.update(blocks[whole].tolist())

    def _update_few(self, blocks: np.ndarray, counts: tuple[np.ndarray, ...]) -> None:
        """As `update`, for a few groups, most of which change alike: less than the array operations take."""
        changes = list(zip(*(array.tolist() for array in counts)))
        joining: list[int] = []
        for change in set(changes):
            had, had_ready, left, ready = change
            count = changes.count(change)
            whole = left > 0 and left == ready
            self.pending += count * ((left > 0) - (had > 0))
            self.whole += count * (whole - (had > 0 and had == had_ready))
            if left > 0 if self.fixed else (ready > 0 if self.by == "sample" else whole):
                joining += [block for block, its in zip(blocks.tolist(), changes) if its == change]
        new = [block for block in joining if not self._queued[block]]
        if new:
            self._queued[new] = True
            self._push(sorted(int(self.roster.order[block]) << BLOCK_BITS | block for block in new))

    def choose(self, groups: int, exhausted: bool, near: Collection[int] = (), strict: bool = False) -> np.ndarray:
        """Blocks to hand out, in order of admission; none: not yet.

        groups     at most, beside those that were put off (in a fixed composition exactly, or all that are pending if
                   no further group will come)
        exhausted  no further group will be admitted
        near       places whose groups come first; strict: others are not wanted
        The caller must `update` the chosen groups afterwards: they have left the queue.
        """
        keys, passed = self._scan(groups + len(self.put_off), exhausted)
        if near and keys:
            keys = self._nearest(keys, near, strict)
        for key in passed:
            heapq.heappush(self._heap, key)
        if not keys:
            return NO_ROWS
        if passed:
            self.overtake(np.array([key & (1 << BLOCK_BITS) - 1 for key in passed], np.int64))
        blocks = np.array([key & (1 << BLOCK_BITS) - 1 for key in keys], np.int64)
        self._queued[blocks], self.wanted = False, 0
        return blocks

    def _nearest(self, keys: list[int], near: Collection[int], strict: bool) -> list[int]:
        """Instead of these entries, as many of those that follow within a step and lie at a place that is near."""
        last = (keys[0] >> BLOCK_BITS) + self._step
        every = list(keys)
        while self._heap and self._heap[0] >> BLOCK_BITS < last:
            key = heapq.heappop(self._heap)
            block = key & (1 << BLOCK_BITS) - 1
            if not self._able(key):
                continue
            if self.fixed and self.open[block] != self.ready[block]:
                heapq.heappush(self._heap, key)
                break
            every.append(key)
        far = {key: int(self.roster.place[key & (1 << BLOCK_BITS) - 1]) not in near for key in every}
        chosen = sorted(every, key=lambda key: (far[key], key))[: len(keys)]
        if strict and any(far[key] for key in chosen):
            chosen = []
        for key in set(every).difference(chosen):
            heapq.heappush(self._heap, key)
        return sorted(chosen)

    @property
    def may_choose(self) -> bool:
        """Whether `choose` might hand something out to those who have asked in vain."""
        return self.whole >= max(1, self.wanted) if self.fixed else bool(self._heap)

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
            self.wanted = min(need, self.wanted or need)
            return [], []
        if straight := self._straight(groups):
            return straight, []
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

    def _straight(self, groups: int) -> list[int]:
        """The first entries, taken out of the heap, if they are many and all stand for whole groups; else none."""
        if not FEW < groups <= len(self._heap) or (self.by == "sample" and not self.fixed):
            return []
        first = self._heap[0] & (1 << BLOCK_BITS) - 1
        if self.open[first] != self.ready[first]:
            return []
        keys = [heapq.heappop(self._heap) for _ in range(groups)]
        found = np.array(keys, np.int64)
        blocks = found & (1 << BLOCK_BITS) - 1
        open_ = self.open[blocks]
        same = (self.roster.order[blocks] == found >> BLOCK_BITS) & (open_ > 0) & (open_ == self.ready[blocks])
        if same.all():
            return keys
        for key in keys:
            heapq.heappush(self._heap, key)
        return []

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
