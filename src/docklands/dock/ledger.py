"""The ledger: which groups are in flight, which rows live, where they lie, and why others left.

It is the admission window. Bound: a group enters only while fewer than `window` groups are in flight, and counts as in
flight until every one of its rows has been retired or dropped; so at no time are more than `window` in flight.

A row that left is *dead*. It is kept while a stage still has to do with it (its bytes may be in use), then removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from docklands.dock.messages import Admission
from docklands.dock.options import DockOptions
from docklands.dock.table import RowTable
from docklands.errors import CheckpointError, DockError, TooManyDropped

REMEMBERED = 65_536
"""Of the rows that left while a reader might still write to them, so many are remembered: a late write is no error."""

REASONS = 64
"""Distinct drop reasons that are counted by name; any further one counts as 'other'."""


@dataclass(slots=True)
class Group:
    """A group from admission until its last row is removed."""

    group_id: int
    place: int
    row_ids: np.ndarray
    live: int
    retired: bool = False


class Ledger:
    """Rows and groups of one dock."""

    def __init__(self, options: DockOptions) -> None:
        self.options = options
        self.groups: dict[int, Group] = {}
        self.in_flight = 0
        self.admitted = 0
        self.retired = 0
        self.ended = False
        self.dropped: dict[str, int] = {}
        self.dropped_groups = 0
        self.dropped_since_retire: dict[str, int] = {}
        self.dead: set[int] = set()
        self._by_id: dict[int, int] = {}
        self._rows = RowTable(order=np.int64, place=np.int32, alive=bool, contested=bool)
        self._late: dict[int, None] = {}

    # --- admission ---------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """One more group may be admitted."""
        total = self.options.total_groups
        return self.in_flight < self.options.window and (not total or self.retired + self.in_flight < total)

    @property
    def exhausted(self) -> bool:
        """No further group will be admitted, whatever happens to those in flight."""
        return self.ended or (0 < self.options.total_groups <= self.retired)

    @property
    def closing(self) -> bool:
        """All groups that will ever be trained are in flight, unless some of them are dropped."""
        total = self.options.total_groups
        return self.ended or (0 < total <= self.retired + self.in_flight)

    @property
    def next_place(self) -> int:
        """Warehouse of the next group: whole groups, in turn."""
        return self.admitted % self.options.warehouses

    def admit(self, row_ids: np.ndarray, group_id: int) -> Admission:
        """Enter a group. The caller has checked `has_room` and `known`."""
        order, place = self.admitted, self.next_place
        self.admitted += 1
        self._enter(order, Group(group_id, place, row_ids, len(row_ids)))
        self.in_flight += 1
        return Admission(row_ids, group_id, order, place)

    def known(self, row_ids: np.ndarray, group_id: int) -> bool:
        """This very group is here already; some of its rows may have left.

        Raises DockError when its rows or its id are here, but not together.
        """
        order = self._by_id.get(group_id)
        here = int((self._rows.find(row_ids) >= 0).sum())
        if order is None and not here:
            return False
        if order is not None and set(self.groups[order].row_ids.tolist()) <= set(row_ids.tolist()):
            return True
        what = (
            f"group {group_id} is in flight with other rows"
            if order is not None
            else f"{here} of its rows are in flight"
        )
        raise DockError(f"group {group_id} cannot be admitted: {what}", "row and group ids are unique")

    def _enter(self, order: int, group: Group) -> None:
        self.groups[order] = group
        self._by_id[group.group_id] = order
        slots = self._rows.add(group.row_ids)
        self._rows["order"][slots] = order
        self._rows["place"][slots] = group.place
        self._rows["alive"][slots] = True

    # --- rows --------------------------------------------------------------------------------------------------

    def here(self, row_ids: np.ndarray) -> np.ndarray:
        """Whether each row is held, alive or dead, bool [B]."""
        return self._rows.find(row_ids) >= 0

    def alive(self, row_ids: np.ndarray) -> np.ndarray:
        """Whether each row is in the flow, bool [B]."""
        slots = self._rows.find(row_ids)
        return (slots >= 0) & self._rows["alive"][slots]

    def places(self, row_ids: np.ndarray) -> np.ndarray:
        """Warehouse of rows that are here, int32 [B]."""
        return self._rows["place"][self._rows.find(row_ids)]

    def late(self, row_ids: np.ndarray) -> np.ndarray:
        """Whether each row left while a reader might still have been at work on it, bool [B]."""
        return np.array([row in self._late for row in row_ids.tolist()], bool)

    def contest(self, row_ids: np.ndarray) -> None:
        """A reader may write to these rows after they have left: its lease has expired, or they leave under it."""
        self._rows["contested"][self._rows.present(row_ids)] = True

    # --- leaving -----------------------------------------------------------------------------------------------

    def drop(self, reasons: Mapping[int, str]) -> int:
        """Rows leave, counted by reason; returns the number of groups that are thereby lost whole."""
        rows = np.fromiter(reasons, np.int64, len(reasons))
        rows = rows[self.alive(rows)]
        for row in rows.tolist():
            self._count(reasons[row])
        gone = self._leave(rows)
        lost = [self.groups[order] for order in gone if not self.groups[order].retired]
        self.retired += len(gone) - len(lost)
        self.dropped_groups += len(lost)
        for group in lost:
            name = short_reason(next(reasons[row] for row in group.row_ids.tolist() if row in reasons))
            self.dropped_since_retire[name] = self.dropped_since_retire.get(name, 0) + 1
        return len(lost)

    def too_many_dropped(self) -> TooManyDropped | None:
        """The error that ends a run whose groups are lost faster than they are trained."""
        limit, reasons = self.options.max_dropped_groups_per_step, self.dropped_since_retire
        lost = sum(reasons.values())
        if not limit or lost <= limit:
            return None
        counts = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1]))
        return TooManyDropped(
            f"{lost} groups were dropped since the last step, at most {limit} are allowed: {counts}",
            "every sample of a group failed or was filtered; make the task easier, look at the reward, or raise "
            "algorithm.max_dropped_groups",
        )

    def retire(self, row_ids: np.ndarray) -> np.ndarray:
        """Trained rows leave; the ids of those that were still in the flow."""
        rows = row_ids[self.alive(row_ids)]
        for order in np.unique(self._rows["order"][self._rows.find(rows)]).tolist():
            self.groups[order].retired = True
        self.retired += len(self._leave(rows))
        if len(rows):
            self.dropped_since_retire.clear()
        return rows

    def remove(self, row_ids: np.ndarray) -> None:
        """Dead rows that no stage holds any more are forgotten; contested ones are remembered as late."""
        slots = self._rows.present(row_ids)
        contested = self._rows["row_id"][slots[self._rows["contested"][slots]]]
        self._late.update(dict.fromkeys(contested.tolist()))
        while len(self._late) > REMEMBERED:
            del self._late[next(iter(self._late))]
        for order in np.unique(self._rows["order"][slots]).tolist():
            group = self.groups[order]
            group.row_ids = group.row_ids[~np.isin(group.row_ids, row_ids)]
            if not len(group.row_ids):
                del self._by_id[self.groups.pop(order).group_id]
        self._rows.remove(slots)
        self.dead.difference_update(row_ids.tolist())

    def _leave(self, row_ids: np.ndarray) -> list[int]:
        slots = self._rows.find(row_ids)
        self._rows["alive"][slots] = False
        self.dead.update(row_ids.tolist())
        orders, counts = np.unique(self._rows["order"][slots], return_counts=True)
        gone = []
        for order, count in zip(orders.tolist(), counts.tolist()):
            self.groups[order].live -= count
            if not self.groups[order].live:
                gone.append(order)
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
        slots = self._rows.slots
        return {
            "orders": list(self.groups),
            "group_ids": [group.group_id for group in self.groups.values()],
            "row_ids": [torch.from_numpy(group.row_ids.copy()) for group in self.groups.values()],
            "retired_groups": [group.retired for group in self.groups.values()],
            "dead": sorted(self.dead),
            "contested": torch.from_numpy(self._rows["row_id"][slots[self._rows["contested"][slots]]]),
            "late": list(self._late),
            "admitted": self.admitted,
            "retired": self.retired,
            "ended": self.ended,
            "dropped": dict(self.dropped),
            "dropped_groups": self.dropped_groups,
            "dropped_since_retire": dict(self.dropped_since_retire),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[Admission]:
        """Into an empty ledger; the admissions to tell the controllers, in their old order."""
        if self.groups or self.admitted:
            raise CheckpointError("a dock can be restored only before anything was admitted")
        fresh = []
        for order, group_id, ids in zip(state["orders"], state["group_ids"], state["row_ids"]):
            row_ids = ids.numpy()
            place = order % self.options.warehouses
            self._enter(order, Group(group_id, place, row_ids, len(row_ids)))
            fresh.append(Admission(row_ids, group_id, order, place))
        self.in_flight = len(self.groups)
        for order, retired in zip(state["orders"], state["retired_groups"]):
            self.groups[order].retired = retired
        self._leave(np.array(state["dead"], np.int64))
        self.contest(state["contested"].numpy())
        self._late = dict.fromkeys(state["late"])
        for name in ("admitted", "retired", "ended", "dropped_groups"):
            setattr(self, name, state[name])
        self.dropped = dict(state["dropped"])
        self.dropped_since_retire = dict(state["dropped_since_retire"])
        return fresh


def short_reason(reason: str) -> str:
    """What a drop is counted as: the reason up to its first colon ('env_error: division by zero' -> 'env_error')."""
    return reason.split(":", 1)[0].strip()[:48] or "unnamed"
