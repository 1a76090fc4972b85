"""The ledger: which groups are in flight, which rows live, where they lie, and why others left.

It is the admission window. Bound: a group enters only while fewer than `window` groups are in flight, and counts as in
flight until every one of its rows has been retired or dropped; so at no time are more than `window` in flight.

A row that left is *dead*. It is kept while a stage still has to do with it (its bytes may be in use), then removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from docklands.dock.rules.messages import Admission
from docklands.dock.rules.options import DockOptions
from docklands.dock.rules.table import Roster, larger
from docklands.errors import CheckpointError, DockError, TooManyDropped

REMEMBERED = 65_536
"""Of the rows that left while a reader might still write to them, so many are remembered: a late write is no error."""

REASONS = 64
"""Distinct drop reasons that are counted by name; any further one counts as 'other'."""


class Ledger:
    """Rows and groups of one dock. Rows are named by their slots in the roster, which the ledger fills and empties.

    dead   rows that left and are still in the roster
    fresh  slots of rows that left since the list was last emptied
    """

    def __init__(self, options: DockOptions, roster: Roster) -> None:
        self.options = options
        self.roster = roster
        self.in_flight = 0
        self.admitted = 0
        self.retired = 0
        self.ended = False
        self.dropped: dict[str, int] = {}
        self.dropped_groups = 0
        self.dropped_since_retire: dict[str, int] = {}
        self._first_failure = ""
        self.dead = 0
        self.fresh: list[np.ndarray] = []
        self._alive, self._contested = np.zeros(1, bool), np.zeros(1, bool)  # never empty: slot -1 is looked up
        self._live, self._retired = np.zeros(0, np.int32), np.zeros(0, bool)
        self._late: dict[int, None] = {}
        self._began = 0, 0  # (steps, groups) that were trained before this run, which may take other steps

    # --- admission ---------------------------------------------------------------------------------------------

    @property
    def goal(self) -> int:
        """Groups to be trained in all, those from before a resumption included; 0: endless."""
        steps, groups = self._began
        total = self.options.total_groups
        return groups + max(0, total - steps * self.options.prompts_per_step) if total else 0

    @property
    def room(self) -> int:
        """Groups that may be admitted now, unless prompts have ended."""
        goal, free = self.goal, self.options.window - self.in_flight
        return max(0, min(free, goal - self.retired - self.in_flight) if goal else free)

    @property
    def exhausted(self) -> bool:
        """No further group will be admitted, whatever happens to those in flight."""
        return self.ended or (0 < self.goal <= self.retired)

    @property
    def closing(self) -> bool:
        """All groups that will ever be trained are in flight, unless some of them are dropped."""
        return self.ended or (0 < self.goal <= self.retired + self.in_flight)

    def plan(self, groups: Sequence[tuple[int, np.ndarray]], places: Sequence[int] = ()) -> list[Admission]:
        """Groups (id, row ids) as they would enter. The caller has checked `room` and `known`.

        places  of each; -1, or none at all: in turn
        """
        first, count, places = self.admitted, self.options.warehouses, places or [-1] * len(groups)
        return [
            Admission(row_ids, group_id, order, order % count if place < 0 else place)
            for order, ((group_id, row_ids), place) in enumerate(zip(groups, places), first)
        ]

    def admit(self, planned: Sequence[Admission]) -> None:
        """They enter."""
        self.admitted += len(planned)
        self.in_flight += len(planned)
        self.enter(planned)

    def known(self, row_ids: np.ndarray, group_id: int) -> bool:
        """This very group is here already; some of its rows may have left.

        Raises DockError when its rows or its id are here, but not together.
        """
        block = self.roster.by_group.get(group_id)
        here = int((self.roster.find(row_ids) >= 0).sum())
        if block is None and not here:
            return False
        if block is not None and np.isin(self.roster.rows_of(block), row_ids).all():
            return True
        what = (
            f"group {group_id} is in flight with other rows"
            if block is not None
            else f"{here} of its rows are in flight"
        )
        raise DockError(f"group {group_id} cannot be admitted: {what}", "row and group ids are unique")

    def enter(self, new: Sequence[Admission]) -> np.ndarray:
        """Rows of groups into the roster, as many of each; their slots, [groups, rows]."""
        roster = self.roster
        slots = roster.enter(
            np.stack([group.row_ids for group in new]),
            [group.group_id for group in new],
            [group.order for group in new],
            [group.place for group in new],
        )
        if len(self._live) < roster.blocks:
            self._live, self._retired = larger(self._live, roster.blocks), larger(self._retired, roster.blocks)
            self._alive = larger(self._alive, len(roster.row_id))
            self._contested = larger(self._contested, len(roster.row_id))
        blocks = slots[:, 0] // roster.size
        self._live[blocks], self._retired[blocks] = slots.shape[1], False
        self._alive[slots], self._contested[slots] = True, False
        return slots

    # --- rows --------------------------------------------------------------------------------------------------

    def alive(self, slots: np.ndarray) -> np.ndarray:
        """Whether each row (slot -1: not here) is in the flow, bool [B]."""
        return (slots >= 0) & self._alive[slots]

    def places(self, row_ids: np.ndarray) -> np.ndarray:
        """Warehouse of rows that are here, int32 [B]."""
        return self.roster.place[self.roster.find(row_ids) // self.roster.size]

    def late(self, row_ids: np.ndarray) -> np.ndarray:
        """Whether each row left while a reader might still have been at work on it, bool [B]."""
        return np.array([row in self._late for row in row_ids.tolist()], bool)

    def contest(self, slots: np.ndarray) -> None:
        """A reader may write to these rows after they have left: its lease has expired, or they leave under it."""
        self._contested[slots] = True

    # --- leaving -----------------------------------------------------------------------------------------------

    def drop(self, reasons: Mapping[int, str]) -> int:
        """Rows leave, counted by reason; returns the number of groups that are thereby lost whole."""
        rows = np.fromiter(reasons, np.int64, len(reasons))
        slots = self.roster.find(rows)
        alive = self.alive(slots)
        for row in rows[alive].tolist():
            self._count(reasons[row])
        gone = self._leave(slots[alive])
        lost = gone[~self._retired[gone]]
        self.retired += len(gone) - len(lost)
        self.dropped_groups += len(lost)
        for block in lost.tolist():
            reason = next(reasons[row] for row in self.roster.rows_of(block).tolist() if row in reasons)
            name = short_reason(reason)
            if name != reason and not self._first_failure:
                self._first_failure = reason
            self.dropped_since_retire[name] = self.dropped_since_retire.get(name, 0) + 1
        return len(lost)

    def too_many_dropped(self) -> TooManyDropped | None:
        """The error that ends a run whose groups are lost faster than they are trained."""
        limit, reasons = self.options.max_dropped_groups_per_step, self.dropped_since_retire
        lost = sum(reasons.values())
        if not limit or lost <= limit:
            return None
        counts = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1]))
        said = f"{lost} groups were dropped since the last step, at most {limit} are allowed: {counts}"
        if self._first_failure:
            return TooManyDropped(f"{said}; the first failure: {self._first_failure}", "repair what failed")
        return TooManyDropped(
            said,
            "every sample of a group was filtered; make the task easier, look at the reward, or raise "
            "algorithm.max_dropped_groups",
        )

    def retire(self, slots: np.ndarray) -> np.ndarray:
        """Trained rows leave; the slots of those that were still in the flow."""
        slots = slots[self.alive(slots)]
        self._retired[slots // self.roster.size] = True
        self.retired += len(self._leave(slots))
        if len(slots):
            self.dropped_since_retire.clear()
            self._first_failure = ""
        return slots

    def remove(self, slots: np.ndarray) -> list[int]:
        """Dead rows that no stage holds any more are forgotten; contested ones are remembered as late.

        Returns the ids of groups of which nothing is left.
        """
        self._late.update(dict.fromkeys(self.roster.row_id[slots[self._contested[slots]]].tolist()))
        while len(self._late) > REMEMBERED:
            del self._late[next(iter(self._late))]
        self.dead -= len(slots)
        return self.roster.leave(slots)

    def _leave(self, slots: np.ndarray) -> np.ndarray:
        """Rows that are alive leave; the blocks of groups that are thereby gone."""
        self._alive[slots] = False
        self.dead += len(slots)
        self.fresh.append(slots)
        blocks, counts = np.unique(slots // self.roster.size, return_counts=True)
        self._live[blocks] -= counts.astype(np.int32)
        gone = blocks[self._live[blocks] == 0]
        self.in_flight -= len(gone)
        return gone

    def _count(self, reason: str) -> None:
        name = short_reason(reason)
        if name not in self.dropped and len(self.dropped) >= REASONS:
            name = "other"
        self.dropped[name] = self.dropped.get(name, 0) + 1

    # --- snapshot ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups in order of admission, their rows, and the counts."""
        roster, slots = self.roster, self.roster.used
        groups = np.array(sorted(roster.by_group.values(), key=lambda block: roster.order[block]), np.int64)
        return {
            "orders": roster.order[groups].tolist(),
            "group_ids": roster.group_id[groups].tolist(),
            "places": roster.place[groups].tolist(),
            "row_ids": torch.from_numpy(roster.row_id[slots]),
            "sizes": roster.here[roster.members(groups)].sum(1).tolist(),
            "retired_groups": self._retired[groups].tolist(),
            "dead": torch.from_numpy(roster.row_id[slots[~self._alive[slots]]]),
            "contested": torch.from_numpy(roster.row_id[slots[self._contested[slots]]]),
            "late": list(self._late),
            "admitted": self.admitted,
            "retired": self.retired,
            "began": self._began,
            "prompts_per_step": self.options.prompts_per_step,
            "ended": self.ended,
            "dropped": dict(self.dropped),
            "dropped_groups": self.dropped_groups,
            "dropped_since_retire": dict(self.dropped_since_retire),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[tuple[Admission, np.ndarray]]:
        """Into an empty ledger; the admissions to tell the controllers, in their old order, and the rows' slots."""
        if len(self.roster) or self.admitted:
            raise CheckpointError("a dock can be restored only before anything was admitted")
        fresh = []
        pieces = np.split(state["row_ids"].numpy(), np.cumsum(state["sizes"], dtype=np.int64))
        names = ("orders", "group_ids", "places", "retired_groups")
        for row_ids, order, group_id, place, retired in zip(pieces, *(state[name] for name in names)):
            new = Admission(row_ids, group_id, order, place % self.options.warehouses)
            slots = self.enter([new])[0]
            self._retired[slots[0] // self.roster.size] = retired
            fresh.append((new, slots))
        self.in_flight = len(fresh)
        self._leave(self.roster.find(state["dead"].numpy()))
        self.contest(self.roster.find(state["contested"].numpy()))
        self._late = dict.fromkeys(state["late"])
        for name in ("admitted", "retired", "dropped_groups"):
            setattr(self, name, state[name])
        (steps, groups), size = state["began"], state["prompts_per_step"]
        changed = size != self.options.prompts_per_step
        self._began = (steps + (self.retired - groups) // size, self.retired) if changed else (steps, groups)
        self.dropped = dict(state["dropped"])
        self.dropped_since_retire = dict(state["dropped_since_retire"])
        return fresh


def where(ledger: Ledger, row_ids: np.ndarray) -> np.ndarray:
    """Place of each row, -1 where it left while a reader might still have been at work on it, -2 unknown; int64 [B]."""
    roster = ledger.roster
    slots = roster.find(row_ids)
    places = roster.place[slots // roster.size].astype(np.int64)
    return np.where(slots >= 0, places, np.where(ledger.late(row_ids), -1, -2))


def short_reason(reason: str) -> str:
    """What a drop is counted as: the reason up to its first colon ('env_error: division by zero' -> 'env_error')."""
    return reason.split(":", 1)[0].strip()[:48] or "unnamed"
