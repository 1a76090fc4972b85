"""A controller: what one stage may take. Metadata only: ids, places, lengths, which columns are missing, leases.

It is told of admissions, ready columns, drops and retirements (progress.py), and is asked for rows by the stage's
readers. It knows no tensor, no other controller and no clock: the time is an argument.

Legend: B rows of a call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from docklands.core.protocols import Rows
from docklands.dock.rules.messages import Census, Want
from docklands.dock.rules.progress import DONE, FREE, HIDDEN, LEASED, STATE, Progress
from docklands.dock.rules.sampler import GroupQueue, divide, fit
from docklands.dock.rules.table import NO_ROWS
from docklands.errors import DockError

NEAR_S = 0.05
"""Rows that stand ready are kept so long for readers of their own node, while others wait for work."""
EPOCH_BITS = 40
"""A lease number is the epoch of its process, then a count: one that outlives a restarted controller is recognised."""


@dataclass(slots=True)
class Lease:
    """Rows in a reader's hands. Times in seconds of the caller's clock.

    left   rows that are not acknowledged yet
    owner  name of the client that took them
    """

    slots: np.ndarray
    left: int
    since: float
    deadline: float
    owner: str = ""


class Controller(Progress):
    """The metadata of one stage, and its leases, the earliest deadline first."""

    def __init__(self, stage: str, columns: tuple[Sequence[str], Sequence[str]], queue: GroupQueue) -> None:
        """`columns`: those that make a row ready, and those that the stage makes."""
        super().__init__(stage, columns, queue)
        self.leases: dict[int, Lease] = {}
        self._parts: dict[int, list[deque[int]]] = {}
        self._last_lease = self._first_lease = 0
        self._allowed = 0
        self._kept_since = math.inf

    def begin_epoch(self, epoch: int) -> None:
        """Leases are numbered from here; acknowledgements of earlier epochs' leases do not count."""
        self._first_lease = self._last_lease = epoch << EPOCH_BITS

    # --- readers -----------------------------------------------------------------------------------------------

    def take(self, want: Want, now: float, lease_s: float, owner: str = "") -> Rows | None:
        """Lease the next rows, or None: not yet. Raises DockError when a row does not fit under the token cap."""
        if want.max_tokens is not None and self.by == "step":
            raise DockError("a stage by step takes whole steps and no token budget", "leave max_tokens out")
        if want.ranks:
            return self._take_part(want, now, lease_s, owner)
        chosen, units = self._choose(want, now)
        if not len(chosen):
            return None
        try:
            slots = chosen
            if want.max_tokens is not None:
                slots = slots[: fit(self._length[slots], units, want.max_tokens)]
            return self._rows(slots, self._lend(slots, now, lease_s, owner))
        finally:
            self._taken(chosen)

    def _take_part(self, want: Want, now: float, lease_s: float, owner: str) -> Rows | None:
        """The next part of this rank: the first one to ask divides a round, the others find theirs set aside."""
        waiting = self._parts.setdefault(want.ranks, [deque() for _ in range(want.ranks)])
        mine = waiting[want.rank]
        while mine and mine[0] and mine[0] not in self.leases:
            mine.popleft()  # nobody came for it before its deadline
        if not mine:
            chosen, units = self._choose(want, now)
            if not len(chosen):
                return None
            try:
                for queue, part in zip(waiting, divide(self._length[chosen], units, want.ranks, want.max_tokens)):
                    queue.append(self._lend(chosen[part], now, lease_s, owner) if len(part) else 0)
            finally:
                self._taken(chosen)
        lease = mine.popleft()
        if not lease:
            return self._rows(NO_ROWS, 0)
        held = self.leases.pop(lease)  # the lease begins now, at the end of the line
        self.leases[lease] = Lease(held.slots, held.left, now, now + lease_s, owner)
        return self._rows(held.slots, lease)

    def _choose(self, want: Want, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Slots that may be leased, in order, and which of them stay together. Their groups are to be recounted."""
        groups, strict = self._limit(want.groups), bool(want.near) and now < self._kept_since + NEAR_S
        blocks = self._queue.choose(groups, want.exhausted, want.near, strict)
        if not len(blocks):
            if strict and self._queue.can_choose(groups, want.exhausted):
                self._kept_since = min(self._kept_since, now)
            return NO_ROWS, NO_ROWS
        self._allowed, self._kept_since = 0, math.inf
        members = self._roster.members(blocks)
        mask = (self._state[members] == FREE) & (self._missing[members] & self._need == 0)
        slots = members[mask]
        return slots, np.arange(len(slots)) if self.by == "sample" else np.nonzero(mask)[0]

    def _taken(self, chosen: np.ndarray) -> None:
        """Recount the groups of what was chosen."""
        if self._queue.fixed and (self._state[chosen] == LEASED).all():  # whole groups: nothing is left of them
            self._changed = True
            blocks = self._roster.blocks_of(chosen)
            none = np.zeros(len(blocks), np.int32)
            self._queue.update(blocks, none, none)
        else:
            self._recount(chosen)

    def _lend(self, slots: np.ndarray, now: float, lease_s: float, owner: str) -> int:
        self._last_lease += 1
        self._state[slots] = LEASED
        self._lease[slots] = self._last_lease
        self.leases[self._last_lease] = Lease(slots, len(slots), now, now + lease_s, owner)
        return self._last_lease

    def _rows(self, slots: np.ndarray, lease: int) -> Rows:
        roster, blocks = self._roster, slots // self._roster.size
        lengths = self._length[slots].astype(np.int64)
        return Rows(roster.row_id[slots], roster.group_id[blocks], lengths, roster.place[blocks], self.stage, lease)

    def owned(self, lease: int, slots: np.ndarray) -> np.ndarray:
        """Whether an acknowledgement under `lease` still counts for each row (slot -1: gone), bool [B].

        It does while the lease lasts, and after its deadline as long as nobody else has taken the row.
        """
        if not len(slots):  # a rank's part may be empty, without a lease
            return np.zeros(0, bool)
        if lease >> EPOCH_BITS < self._first_lease >> EPOCH_BITS and lease > 0:
            return np.zeros(len(slots), bool)
        if not self._first_lease < lease <= self._last_lease:
            raise DockError(f"stage {self.stage!r} never gave out the lease {lease}")
        return (slots >= 0) & (self._lease[slots] == lease) & (self._state[slots] & STATE != DONE)

    def check_whole(self, slots: np.ndarray, lease: int) -> None:
        """DockError unless a stage by group would finish whole groups with these rows. Call with owned rows only."""
        if self.by == "sample":
            return
        blocks = self._roster.blocks_of(slots)
        members = self._roster.members(blocks)
        rest = ((self._state[members] & STATE == LEASED) & (self._lease[members] == lease)).sum(1)
        rest -= np.bincount(np.searchsorted(blocks, slots // self._roster.size), minlength=len(blocks))
        if (rest > 0).any():
            raise DockError(
                f"stage {self.stage!r} finished a part of group {self._roster.group_id[blocks[rest > 0][0]]}",
                f"a stage by {self.by} acknowledges whole groups",
            )

    def finish(self, slots: np.ndarray, lease: int) -> None:
        """Rows are done here. Call with owned rows only."""
        held = int(np.count_nonzero(self._state[slots] & STATE == LEASED))
        self._state[slots] |= DONE
        self.released.append(slots)
        if held < len(slots):  # what was leased was not there to be taken either
            self._recount(slots)
        if lease in self.leases:
            self.leases[lease].left -= held
            if not self.leases[lease].left:
                del self.leases[lease]

    def held(self, lease: int) -> np.ndarray:
        """Slots of the rows that are not acknowledged yet, of a lease that lasts."""
        slots = self.leases[lease].slots
        return slots[(self._lease[slots] == lease) & (self._state[slots] & STATE == LEASED)]

    def next_deadline(self) -> float:
        """When the first lease is overdue, or rows need not be kept for readers of their node; infinite: never."""
        lease = next(iter(self.leases.values())).deadline if self.leases else math.inf
        return min(lease, self._kept_since + NEAR_S if self._kept_since > -math.inf else math.inf)

    def expire(self, now: float) -> list[np.ndarray]:
        """Give the rows of overdue leases back; the slots of each such lease."""
        if -math.inf < self._kept_since <= now - NEAR_S:
            self._kept_since, self._changed = -math.inf, True
        overdue = []
        for lease, held in self.leases.items():  # the oldest deadline first
            if held.deadline > now:
                break
            overdue.append(lease)
        return [self.give_back(lease) for lease in overdue]

    def give_back(self, lease: int, later: bool = False) -> np.ndarray:
        """End a lease: its rows are free again; their slots.

        later  they were begun: whole groups go on beside others, or when nothing else can (rest.py). Where takes are
               fixed they have company in any case
        """
        slots = self.held(lease)
        del self.leases[lease]
        self._state[slots] = FREE | self._state[slots] & HIDDEN
        self.released.append(slots)
        self._recount(slots)
        if later and not self._queue.fixed and self.by == "group":
            self._queue.put_back(self._roster.blocks_of(slots))
        return slots

    def waits_for_others(self, has_slot: bool) -> bool:
        """What is here was put off, and there is nothing yet, or not all there will be, to go on beside."""
        put_off = self._queue.put_off
        return bool(put_off) and (has_slot or self._queue.whole <= len(put_off))

    def wipe(self, slots: np.ndarray) -> None:
        """See Progress.wipe; what is left of their leases goes on."""
        leased = slots[self._state[slots] & STATE == LEASED]
        for lease, count in zip(*(found.tolist() for found in np.unique(self._lease[leased], return_counts=True))):
            self.leases[lease].left -= count
            if not self.leases[lease].left:
                del self.leases[lease]
        super().wipe(slots)

    # --- the flow at rest --------------------------------------------------------------------------------------

    def can_take(self, groups: int, exhausted: bool) -> bool:
        """A take of `groups` groups would be answered."""
        return self._queue.can_choose(self._limit(groups), exhausted)

    @property
    def may_take(self) -> bool:
        """See Progress.may_take. A rank's part may be set aside, and a short take allowed."""
        set_aside = any(queue for waiting in self._parts.values() for queue in waiting)
        return bool(self._allowed) or set_aside or super().may_take

    def go_on(self) -> None:
        """The flow is at rest: what was put off goes on alone."""
        self._changed = self._changed or bool(self._queue.put_off)
        self._queue.put_off.clear()

    def allow_short(self) -> bool:
        """The flow is at rest: if all that is pending here is ready, the next take may have just that."""
        if 0 < self._queue.pending == self._queue.whole:
            self._changed = self._changed or self._allowed != self._queue.pending
            self._allowed = self._queue.pending
            return True
        return False

    # --- looking in --------------------------------------------------------------------------------------------

    def census(self, now: float = 0.0) -> Census:
        """Rows by state, what is missing, and the age of the oldest lease."""
        oldest = max((now - held.since for held in self.leases.values()), default=0.0)
        return replace(super().census(), oldest_s=oldest)

    def state_dict(self) -> dict[str, Any]:
        """Rows with their bits; leases become free."""
        return {**super().state_dict(), "last_lease": self._last_lease}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bits of rows that have been admitted before. Acknowledgements of leases of the old process do not count."""
        super().load_state_dict(state)
        self._last_lease = state["last_lease"]

    def _limit(self, groups: int) -> int:
        return min(groups, self._allowed, max(1, self.pending)) if self._allowed else groups
