"""A controller: what one stage may take. Metadata only: ids, places, lengths, which columns are missing, leases.

It is told of admissions, ready columns, drops and retirements by messages, and is asked for rows by the stage's
readers. It knows no tensor, no other controller and no clock: the time is an argument.

Row states, per (row, stage):  FREE -> LEASED -> DONE, and back to FREE when the lease's deadline passes.
A *hidden* row has left the flow: it is not handed out any more, and disappears once its lease, if any, has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from docklands.core.protocols import Rows
from docklands.core.stage import By
from docklands.dock.messages import Admission, Census, Notice, Want
from docklands.dock.sampler import GroupState, Sampler, fit
from docklands.dock.table import RowTable
from docklands.errors import DockError

FREE, LEASED, DONE = 1, 2, 3


@dataclass(slots=True)
class Lease:
    """Rows in a reader's hands. Times in seconds of the caller's clock."""

    row_ids: np.ndarray
    since: float
    deadline: float


class Controller:
    """The metadata of one stage.

    reads  names of the columns that make a row ready
    """

    def __init__(self, stage: str, by: By, reads: Sequence[str], sampler: Sampler) -> None:
        if len(reads) > 63:
            raise DockError(f"stage {stage!r} reads {len(reads)} columns, at most 63 are possible")
        self.stage = stage
        self.by: By = by
        self.reads = tuple(reads)
        self.leases: dict[int, Lease] = {}
        self._bits = {name: 1 << i for i, name in enumerate(reads)}
        self._pick = sampler
        self._rows = RowTable(
            order=np.int64,
            length=np.int64,
            lease=np.int64,
            missing=np.int64,
            place=np.int32,
            state=np.uint8,
            hidden=bool,
        )
        self._groups: dict[int, GroupState] = {}
        self._pending: dict[int, GroupState] = {}
        self._last_lease = 0
        self._allowed = 0
        self._changed = False

    # --- messages ----------------------------------------------------------------------------------------------

    def admit(self, new: Admission) -> None:
        """Rows of one group, nothing ready yet."""
        slots = self._rows.add(new.row_ids)
        for name, value in (("order", new.order), ("place", new.place), ("state", FREE)):
            self._rows[name][slots] = value
        self._rows["missing"][slots] = (1 << len(self.reads)) - 1
        self._groups[new.order] = GroupState(new.order, new.group_id, slots)
        self._recount((new.order,))

    def ready(self, notice: Notice) -> None:
        """Columns are there. Rows that this stage no longer knows are passed over."""
        slots = self._rows.find(notice.row_ids)
        here = slots >= 0
        slots = slots[here]
        self._rows["missing"][slots] &= ~sum(self._bits[name] for name in notice.columns)
        self._rows["length"][slots] = np.maximum(self._rows["length"][slots], notice.lengths[here])
        self._recount_rows(slots)

    def hide(self, row_ids: np.ndarray) -> None:
        """Rows have left the flow: hand them out no more. Those in a reader's hands stay until it is through."""
        slots = self._rows.present(row_ids)
        self._rows["hidden"][slots] = True
        self._recount_rows(slots)

    def forget(self, row_ids: np.ndarray) -> None:
        """Rows are freed everywhere."""
        slots = self._rows.present(row_ids)
        for order in np.unique(self._rows["order"][slots]).tolist():
            group = self._groups[order]
            group.slots = group.slots[~np.isin(group.slots, slots)]
        self._recount_rows(slots)
        self._rows.remove(slots)
        self._end_leases()

    def holds(self, row_ids: np.ndarray) -> np.ndarray:
        """Whether the stage has still to do with each row, bool [B]: it is leased, or free and not hidden."""
        slots = self._rows.find(row_ids)
        state, hidden = self._rows["state"][slots], self._rows["hidden"][slots]
        return (slots >= 0) & ((state == LEASED) | ((state == FREE) & ~hidden))

    # --- readers -----------------------------------------------------------------------------------------------

    def take(self, want: Want, now: float, lease_s: float) -> Rows | None:
        """Lease the next rows, or None: not yet. Raises DockError when a row does not fit under the token cap."""
        chosen = self._pick(self._pending.values(), self._limit(want.groups), want.exhausted)
        if not chosen:
            return None
        pieces = [self._takeable(group) for group in chosen]
        if want.max_tokens is not None:
            pieces = fit(pieces, [self._rows["length"][piece] for piece in pieces], want.max_tokens, self.by)
        slots = np.concatenate(pieces)
        self._allowed = 0
        self._last_lease += 1
        self._rows["state"][slots] = LEASED
        self._rows["lease"][slots] = self._last_lease
        row_ids = self._rows["row_id"][slots]
        self.leases[self._last_lease] = Lease(row_ids, now, now + lease_s)
        self._recount_rows(slots)
        group_ids = np.array([self._groups[order].group_id for order in self._rows["order"][slots].tolist()], np.int64)
        lengths, places = self._rows["length"][slots], self._rows["place"][slots]
        return Rows(row_ids, group_ids, lengths, places, self.stage, self._last_lease)

    def owned(self, lease: int, row_ids: np.ndarray) -> np.ndarray:
        """Whether an acknowledgement under `lease` still counts for each row, bool [B].

        It does while the lease lasts, and after its deadline as long as nobody else has taken the row.
        """
        if not 0 < lease <= self._last_lease:
            raise DockError(f"stage {self.stage!r} never gave out the lease {lease}")
        slots = self._rows.find(row_ids)
        state = self._rows["state"][slots]
        return (slots >= 0) & (self._rows["lease"][slots] == lease) & ((state == LEASED) | (state == FREE))

    def finish(self, row_ids: np.ndarray, partly: bool = False) -> None:
        """Rows are done here. Call with owned rows only. A stage by group finishes whole groups, unless `partly`."""
        slots = self._rows.present(row_ids)
        if self.by != "sample" and not partly:
            lease = set(np.unique(self._rows["lease"][slots]).tolist())
            for order in np.unique(self._rows["order"][slots]).tolist():
                rest = np.setdiff1d(self._groups[order].slots, slots)
                rest = rest[self._rows["state"][rest] == LEASED]
                if lease.intersection(self._rows["lease"][rest].tolist()):
                    raise DockError(
                        f"stage {self.stage!r} finished a part of group {self._groups[order].group_id}",
                        f"a stage by {self.by} acknowledges whole groups",
                    )
        self._rows["state"][slots] = DONE
        self._recount_rows(slots)
        self._end_leases()

    def expire(self, now: float) -> list[np.ndarray]:
        """Give the rows of overdue leases back; the ids of each such lease."""
        overdue = [lease for lease, held in self.leases.items() if held.deadline <= now]
        given_back = []
        for lease in overdue:
            slots = self._rows.present(self.leases.pop(lease).row_ids)
            slots = slots[(self._rows["lease"][slots] == lease) & (self._rows["state"][slots] == LEASED)]
            self._rows["state"][slots] = FREE
            self._recount_rows(slots)
            given_back.append(self._rows["row_id"][slots])
        return given_back

    # --- the flow at rest --------------------------------------------------------------------------------------

    def can_take(self, groups: int, exhausted: bool) -> bool:
        """A take of `groups` groups would be answered."""
        return bool(self._pick(self._pending.values(), self._limit(groups), exhausted))

    def allow_short(self) -> bool:
        """The flow is at rest: if all that is pending here is ready, the next take may have just that."""
        if self._pending and all(group.whole for group in self._pending.values()):
            self._changed = self._changed or self._allowed != len(self._pending)
            self._allowed = len(self._pending)
            return True
        return False

    @property
    def pending(self) -> int:
        """Groups with a row that the stage has still to take."""
        return len(self._pending)

    def take_changed(self) -> bool:
        """Whether anything has changed since this was last asked: a sleeping reader may be served now."""
        changed, self._changed = self._changed, False
        return changed

    # --- looking in --------------------------------------------------------------------------------------------

    def census(self, now: float) -> Census:
        """Rows by state, and what is missing."""
        slots = self._rows.slots
        state, missing = self._rows["state"][slots], self._rows["missing"][slots]
        free = (state == FREE) & ~self._rows["hidden"][slots]
        ids = self._rows["row_id"][slots]
        return Census(
            ready=int((free & (missing == 0)).sum()),
            leased=int((state == LEASED).sum()),
            done=int((state == DONE).sum()),
            waiting=int((free & (missing != 0)).sum()),
            groups=len(self._pending),
            whole=sum(group.whole for group in self._pending.values()),
            oldest_s=max((now - held.since for held in self.leases.values()), default=0.0),
            missing={name: lack for name, bit in self._bits.items() if len(lack := ids[free & (missing & bit != 0)])},
        )

    def split(self, row_ids: np.ndarray) -> tuple[int, int, int]:
        """How many of these rows are leased, ready and free, and not yet ready."""
        slots = self._rows.present(row_ids)
        state, missing = self._rows["state"][slots], self._rows["missing"][slots]
        free = state == FREE
        return int((state == LEASED).sum()), int((free & (missing == 0)).sum()), int((free & (missing != 0)).sum())

    def state_dict(self) -> dict[str, Any]:
        """Rows with their bits; leases become free."""
        slots = self._rows.slots
        state = self._rows["state"][slots]
        return {
            "row_ids": torch.from_numpy(self._rows["row_id"][slots]),
            "missing": torch.from_numpy(self._rows["missing"][slots]),
            "length": torch.from_numpy(self._rows["length"][slots]),
            "hidden": torch.from_numpy(self._rows["hidden"][slots]),
            "done": torch.from_numpy(state == DONE),
            "last_lease": self._last_lease,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bits of rows that have been admitted before. Acknowledgements of leases of the old process do not count."""
        slots = self._rows.find(state["row_ids"].numpy())
        for name in ("missing", "length", "hidden"):
            self._rows[name][slots] = state[name].numpy()
        self._rows["state"][slots] = np.where(state["done"].numpy(), DONE, FREE)
        self._last_lease = state["last_lease"]
        self._recount(tuple(self._groups))

    # --- inside ------------------------------------------------------------------------------------------------

    def _limit(self, groups: int) -> int:
        return min(groups, self._allowed, max(1, len(self._pending))) if self._allowed else groups

    def _takeable(self, group: GroupState) -> np.ndarray:
        slots = group.slots
        free = (self._rows["state"][slots] == FREE) & ~self._rows["hidden"][slots]
        return slots[free & (self._rows["missing"][slots] == 0)]

    def _recount_rows(self, slots: np.ndarray) -> None:
        self._recount(np.unique(self._rows["order"][slots]).tolist())

    def _recount(self, orders: Iterable[int]) -> None:
        """Open and ready rows of these groups, and whether they are pending."""
        back = False
        self._changed = True
        for order in orders:
            group = self._groups[order]
            free = (self._rows["state"][group.slots] == FREE) & ~self._rows["hidden"][group.slots]
            group.open = int(free.sum())
            group.ready = int((free & (self._rows["missing"][group.slots] == 0)).sum())
            if not group.open:
                self._pending.pop(order, None)
            elif order not in self._pending:
                back = back or (bool(self._pending) and order < next(reversed(self._pending)))
                self._pending[order] = group
            if not len(group.slots):
                del self._groups[order]
        if back:  # a lease came back: its groups stand in the order of admission again
            self._pending = dict(sorted(self._pending.items()))

    def _end_leases(self) -> None:
        """Drop leases of which no row is left in the reader's hands."""
        for lease, held in list(self.leases.items()):
            slots = self._rows.present(held.row_ids)
            if not ((self._rows["lease"][slots] == lease) & (self._rows["state"][slots] == LEASED)).any():
                del self.leases[lease]
