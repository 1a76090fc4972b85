"""The dock's rules on ids and metadata: the ledger and the controllers of all stages, kept in step with one another.

No bytes, no warehouse, no clock, no waiting: every change of state is one synchronous call, and none of them blocks.
A call that cannot be answered yet says so (None) and changes nothing. Two carriers stand on these rules: the dock in
one process (exchange.py, dock.py) and the control process of the distributed dock (control/server.py).

After every change the carrier calls `settle`, frees in the warehouses what it names, and wakes whom `woken` names.

Legend: B rows of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from docklands.core.graph import Graph, rows_text
from docklands.core.protocols import Rows
from docklands.core.stage import Stage
from docklands.dock.rules.addresses import Addresses, Runs, width
from docklands.dock.rules.controller import Controller
from docklands.dock.rules.counters import Counters, Traffic
from docklands.dock.rules.flow import Flow, verdict
from docklands.dock.rules.ledger import Ledger
from docklands.dock.rules.messages import Admission, Notice, Want
from docklands.dock.rules.options import DockOptions
from docklands.dock.rules.rest import free_dead, look_for_rest
from docklands.dock.rules.sampler import GroupQueue
from docklands.dock.rules.table import NO_ROWS, Roster, unique_ids
from docklands.errors import DockClosed, DockError, DocklandsError

SLOT, ROOM = "@slot", "@room"
"""What a waiter may wait for beside a stage's rows: a free slot, room in a warehouse."""


class Gate:
    """How groups come in, and what readers may ask for: base of Control, which sets these."""

    flow: Flow
    options: DockOptions
    roster: Roster
    addresses: Addresses
    ledger: Ledger
    controllers: dict[str, Controller]
    counters: Counters
    journal: Callable[[str, dict[str, Any], np.ndarray], None]
    closed: bool

    @property
    def slots(self) -> int:
        """Groups that may be admitted now."""
        return 0 if self.ledger.ended else self.ledger.room

    @property
    def has_slot(self) -> bool:
        """One more group may be admitted."""
        return self.slots > 0

    def look_slots(self) -> int | None:
        """How many groups may be admitted; None: not one now. 0: never again."""
        if self.closed or self.ledger.exhausted:
            return 0
        return self.slots or None

    def want(
        self,
        stage: str,
        groups: int | None,
        max_tokens: int | None,
        part: tuple[int, int] = (0, 0),
        near: Iterable[int] = (),
    ) -> Want:
        """A reader's wish, with defaults; refused when it can never be met. `part`: rank, ranks."""
        size = groups if groups is not None else self.default_groups(self.flow.stage(stage).by)
        rank, ranks = part
        if not 0 < size <= self.options.window:
            raise DockError(
                f"take of {size} groups for stage {stage!r}", f"1 to {self.options.window} groups are in flight"
            )
        if not 0 <= rank < max(1, ranks):
            raise DockError(f"take of rank {rank} of {ranks} for stage {stage!r}", "ranks are 0 to ranks - 1")
        return Want(size, max_tokens, rank=rank, ranks=ranks, near=frozenset(near))

    def default_groups(self, by: str) -> int:
        return self.options.prompts_per_step if by == "step" else self.options.take_groups

    def unknown(self, groups: Sequence[int], row_ids: np.ndarray) -> bool:
        """None of these groups is here, and none of their rows: a short way around `known`, which may still refuse."""
        here = self.roster.by_group
        return (
            not self.ledger.ended
            and len(row_ids) == len(groups) * self.options.group_size
            and not any(group in here for group in groups)
            and not (self.roster.find(row_ids) >= 0).any()
        )

    def known(self, row_ids: np.ndarray, group_id: int) -> bool:
        """This very group is here already. Raises DockError when it can never be admitted."""
        if len(row_ids) != self.options.group_size or not unique_ids(row_ids):
            raise DockError(
                f"group {group_id} has {len(np.unique(row_ids))} different rows, "
                f"group_size is {self.options.group_size}"
            )
        if self.ledger.known(row_ids, group_id):
            return True
        if self.ledger.ended:
            raise DockError(f"group {group_id} is admitted after the end of prompts")
        return False

    def admit(self, row_ids: np.ndarray, group_id: int, place: int = -1) -> Admission:
        """Enter a group of which nothing is ready yet. The caller has asked `known` and `slots`."""
        return self.admit_all([(group_id, row_ids)], [place])[0]

    def admit_all(self, groups: Sequence[tuple[int, np.ndarray]], places: Sequence[int] = ()) -> list[Admission]:
        """As `admit`, of several groups (id, row ids) at once: hardly more work than one."""
        entered = self.ledger.plan(groups, places)
        if entered:
            every = np.concatenate([new.row_ids for new in entered])
            facts = {"group_ids": [new.group_id for new in entered], "places": [new.place for new in entered]}
            self.journal("admit", facts, every)  # before anything is changed: it may fail, for lack of room on its disk
            self.ledger.admit(entered)
            self._announce(self.roster.find(every), sum(new.nbytes for new in entered))
        return entered

    def end_of_prompts(self) -> None:
        """No further group will be admitted."""
        self.journal("end", {}, NO_ROWS)
        self.ledger.ended = True

    def _announce(self, slots: np.ndarray, nbytes: int) -> None:
        self.addresses.forget(slots)
        for controller in self.controllers.values():
            controller.admit(slots)
            self.counters.metadata_bytes += nbytes


class Control(Gate):
    """Ledger and controllers of one graph.

    gone     groups of which the last `settle` has forgotten the last row
    journal  called before each change that no warehouse could tell of: what, its facts, its rows (recover.py)
    lossy    warehouses may die: what a stage has done may come again as long as anything is in flight
    """

    lossy = False

    def __init__(self, graph: Graph, options: DockOptions) -> None:
        self.flow = Flow(graph)
        self.options = options
        self.roster = Roster(options.group_size)
        widths = {name: width(self.flow.fields[name]) for name in self.flow.readers if name in self.flow.fields}
        self.addresses = Addresses({name: known for name, known in widths.items() if known})
        self.ledger = Ledger(options, self.roster)
        self.controllers = {name: self._controller(stage) for name, stage in self.flow.stages.items()}
        self.counters = Counters(stages={name: Traffic() for name in self.flow.stages})
        self.journal: Callable[[str, dict[str, Any], np.ndarray], None] = unrecorded
        self.gone: list[int] = []
        self.closed = False
        self.failure: DocklandsError | None = None

    def _controller(self, stage: Stage) -> Controller:
        overtake = self.options.overtake if stage.by == "step" else 0
        step = self.options.prompts_per_step
        queue = GroupQueue(self.roster, stage.by, self.options.deterministic, overtake, step)
        return Controller(stage.name, (self.flow.reads[stage.name], self.flow.writes[stage.name]), queue)

    # --- columns ----------------------------------------------------------------------------------------------

    def notice(self, notices: Iterable[Notice]) -> None:
        """Columns are ready, to the controllers of their readers and writers. Rows that have gone are passed over."""
        rows = slots = here = NO_ROWS
        for notice in notices:
            if notice.row_ids is not rows:  # those of one put share their rows
                rows = notice.row_ids
                slots = self.roster.find(rows)
                here = slots >= 0
                if notice.homes:
                    self.addresses.note(slots, notice.lengths, notice.homes)
            if here.all():
                self.controllers[notice.stage].ready(slots, notice.columns, notice.lengths)
            else:
                self.controllers[notice.stage].ready(slots[here], notice.columns, notice.lengths[here])
            self.counters.metadata_bytes += notice.nbytes

    # --- readers -----------------------------------------------------------------------------------------------

    def controller(self, stage: Stage | str) -> Controller:
        return self.controllers[self.flow.stage(stage if isinstance(stage, str) else stage.name).name]

    def look_take(self, stage: str, want: Want, now: float, owner: str = "") -> Rows | None:
        """Lease the stage's next rows; None: not yet. Raises DockClosed when none will come."""
        controller = self.controller(stage)
        if self.closed:
            raise DockClosed(f"the dock is closed: nothing is left to take for stage {stage!r}")
        exhausted = self.ledger.exhausted
        wish = Want(want.groups, want.max_tokens, exhausted, want.rank, want.ranks, want.near)
        wait = controller.waits_for_others(self.has_slot)
        rows = None if wait else controller.take(wish, now, self.options.lease_s, owner)
        through = not controller.pending and not controller.leases and not (self.lossy and self.ledger.in_flight)
        if rows is None and exhausted and through:
            raise DockClosed(f"nothing is left to take for stage {stage!r}: the prompts have ended")
        return rows

    def finish(self, rows: Rows, dropped: Mapping[int, str]) -> None:
        """Acknowledge: rows are done, or leave the flow. Rows that another reader has by now are passed over."""
        controller = self.controller(rows.stage)
        lost = np.fromiter(dropped, np.int64, len(dropped))
        if len(lost) and not (given := np.isin(lost, rows.row_ids)).all():
            stray = rows_text(lost[~given].tolist())
            raise DockError(f"stage {rows.stage!r} dropped rows that it was not given: {stray}")
        slots = self.roster.find(rows.row_ids)
        owned = controller.owned(rows.lease, slots)
        self.counters.late_acks += int(np.count_nonzero(~owned))
        gone = owned & np.isin(rows.row_ids, lost) if len(lost) else np.zeros(len(slots), bool)
        kept = slots[owned & ~gone]
        written = controller.written(kept)
        if not written.all():
            if rows.lease in controller.leases:
                raise unwritten(controller, self.roster.row_id[kept[~written]], kept[~written])
            kept = kept[written]
        done = np.concatenate([kept, slots[gone]])
        controller.check_whole(done, rows.lease)
        reasons = {row: dropped[row] for row in rows.row_ids[gone].tolist()} if gone.any() else {}
        if rows.stage in self.flow.filters:
            self.journal("pass", {"stage": rows.stage}, self.roster.row_id[kept])
        if reasons:
            self._record_drop(reasons, rows.stage)
        controller.finish(done, rows.lease)  # nothing was changed before: a journal may fail, for lack of room
        if rows.stage in self.flow.filters:
            self.passed(rows.stage, kept)
        if reasons:
            self.dropped(reasons, rows.stage)

    def homes(self, rows: Rows) -> dict[str, Runs]:
        """Where the columns that a stage reads of its leased rows lie in shared memory, of those that all do."""
        slots = self.controller(rows.stage).leases[rows.lease].slots
        return self.addresses.runs(slots, rows.lengths, rows.places, self.flow.reads[rows.stage])

    def leased(self, stage: str, lease: int) -> np.ndarray | None:
        """Slots of the rows that a lease still holds; None: it has ended, or there was none."""
        controller = self.controller(stage)
        return controller.held(lease) if lease in controller.leases else None

    def still_leased(self, rows: Rows, dropped: Mapping[int, str]) -> Mapping[int, str]:
        """Without the verdicts on rows of the lease that are not in it any more: their warehouse has lost them."""
        controller = self.controller(rows.stage)
        lease = controller.leases.get(rows.lease)
        if not dropped or lease is None:
            return dropped
        void = np.setdiff1d(self.roster.row_id[lease.slots], self.roster.row_id[controller.held(rows.lease)])
        return {row: why for row, why in dropped.items() if row not in void}

    def lacks_columns(self, rows: Rows, dropped: Mapping[int, str]) -> bool:
        """Rows under a lease that lasts lack columns of their stage: `finish` would be refused."""
        controller = self.controller(rows.stage)
        slots = self.roster.find(rows.row_ids)
        if rows.lease not in controller.leases:
            return False
        kept = controller.owned(rows.lease, slots)
        if dropped:
            kept &= ~np.isin(rows.row_ids, list(dropped))
        return not controller.written(slots[kept]).all()

    def passed(self, stage: str, slots: np.ndarray) -> None:
        """Rows passed a filter, which is recorded: the stages after it have its verdict."""
        name, zeros = verdict(stage), np.zeros(len(slots), np.int64)
        for reader in self.flow.readers.get(name, ()):
            self.controllers[reader].ready(slots, (name,), zeros)
            self.counters.metadata_bytes += 16 * len(slots) + 2

    def give_back(self, stage: str, lease: int, later: bool = False) -> None:
        """A reader has gone or cannot go on: its rows are free, at once or `later`. A lease that has ended: nothing."""
        controller = self.controller(stage)
        if lease in controller.leases:
            self.ledger.contest(controller.give_back(lease, later))
            self.counters.expired_leases += 1

    def expire(self, now: float) -> bool:
        """Overdue leases give their rows back; whether there were any."""
        before = self.counters.expired_leases
        for controller in self.controllers.values():
            for slots in controller.expire(now):
                self.ledger.contest(slots)
                self.counters.expired_leases += 1
        return self.counters.expired_leases > before

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        first = min(controller.next_deadline() for controller in self.controllers.values())
        return None if first == math.inf else first

    # --- leaving -----------------------------------------------------------------------------------------------

    def drop(self, rows: Rows, reason: str) -> None:
        """Rows leave the flow, wherever they are."""
        reasons = dict.fromkeys(rows.row_ids.tolist(), reason)
        leased = rows.lease and rows.stage in self.flow.stages
        self.finish(rows, reasons) if leased else self.drop_rows(reasons, None)

    def drop_rows(self, reasons: Mapping[int, str], stage: str | None) -> None:
        """Rows leave, each with its reason, because `stage` said so."""
        self._record_drop(reasons, stage)
        self.dropped(reasons, stage)

    def _record_drop(self, reasons: Mapping[int, str], stage: str | None) -> None:
        facts = {"stage": stage, "reasons": list(reasons.values())}
        self.journal("drop", facts, np.fromiter(reasons, np.int64, len(reasons)))

    def dropped(self, reasons: Mapping[int, str], stage: str | None) -> None:
        """As `drop_rows`, which is recorded already."""
        self.ledger.drop(reasons)
        slots = self.roster.present(np.fromiter(reasons, np.int64, len(reasons)))
        self.hide(slots, self.flow.sees_drops_of(stage if self.options.deterministic else None))

    def hide(self, slots: np.ndarray, stages: Iterable[str]) -> None:
        """Stages hear that rows have left."""
        for stage in stages:
            self.controllers[stage].hide(slots)
            self.counters.metadata_bytes += 8 * len(slots)

    def retire(self, rows: Rows) -> None:
        """Trained rows leave; their group's slot is free. Rows that have left already are passed over."""
        self.journal("retire", {}, rows.row_ids)
        slots = self.roster.find(rows.row_ids)
        left = self.ledger.retire(slots)
        self.counters.late_acks += len(rows) - len(left)
        self.hide(left, self.flow.stages)
        if rows.lease and rows.stage in self.flow.stages:
            controller = self.controller(rows.stage)
            controller.finish(slots[controller.owned(rows.lease, slots)], rows.lease)

    # --- after every change ------------------------------------------------------------------------------------

    def settle(self) -> list[tuple[int, np.ndarray]]:
        """Forget what nobody needs any more, and look whether the flow has come to rest.

        Returns (place, row ids) to free in the warehouses.
        """
        freed = free_dead(self)
        look_for_rest(self)
        if self.failure is None:
            self.failure = self.ledger.too_many_dropped()
        return freed

    def woken(self) -> list[str]:
        """Who may be served now: stages, SLOT, ROOM. To be asked once after each `settle`."""
        if self.failure is not None or self.closed:
            return [*self.flow.stages, SLOT, ROOM]
        exhausted = self.ledger.exhausted
        keys = [name for name, c in self.controllers.items() if c.take_changed() and c.may_take or exhausted]
        if self.has_slot or exhausted:
            keys += [SLOT, ROOM]
        elif self.options.capacity_bytes:
            keys.append(ROOM)
        return keys

    def raise_failure(self) -> None:
        """Every call raises what ended the run."""
        if self.failure is not None:
            raise type(self.failure)(self.failure.message, self.failure.hint)

    # --- snapshot ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Rows, groups, bits and counts; leases become free."""
        return {
            "ledger": self.ledger.state_dict(),
            "controllers": {name: c.state_dict() for name, c in self.controllers.items()},
            "counters": self.counters.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], same_run: bool = False) -> None:
        """Into a control that has admitted nothing.

        same_run  the prompts are where they were; else (a checkpoint) whether they have ended is asked anew, because
                  a run may go on with more of them
        """
        for new, slots in self.ledger.load_state_dict(state["ledger"]):
            self._announce(slots, new.nbytes)
        for name, controller in self.controllers.items():
            controller.load_state_dict(state["controllers"][name])
        self.counters.load_state_dict(state["counters"])
        self.ledger.ended = same_run and state["ledger"]["ended"]


def unrecorded(what: str, facts: dict[str, Any], row_ids: np.ndarray) -> None:
    """The journal of a dock that lives and dies with its process."""


def unwritten(controller: Controller, row_ids: np.ndarray, slots: np.ndarray) -> DockError:
    """The error of rows that are to be finished without their columns."""
    return DockError(
        f"stage {controller.stage!r} finished rows without writing {controller.lacking(slots)}: "
        f"{rows_text(row_ids.tolist())}",
        "put the columns first, or drop the rows",
    )
