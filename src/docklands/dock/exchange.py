"""The dock's rules, without waiting: every change of state is one synchronous call here, and none of them blocks.

The facade (dock.py) adds what takes time: waits, deadlines, timers, closing. A call that cannot be answered yet says so
(False or None) and changes nothing.

Legend: B rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, SAMPLE_INDEX, Field
from docklands.core.graph import UPDATE, Graph, rows_text
from docklands.core.protocols import Rows
from docklands.core.stage import Stage
from docklands.dock.controller import Controller
from docklands.dock.flow import Flow, verdict
from docklands.dock.ledger import Ledger
from docklands.dock.messages import Notice, Want
from docklands.dock.options import DockOptions
from docklands.dock.table import unique_ids
from docklands.dock.transport import LocalTransport
from docklands.errors import DockError, RowGone, UnknownField


class Exchange:
    """Ledger, controllers and warehouses, kept in step with one another."""

    def __init__(self, graph: Graph, options: DockOptions) -> None:
        self.flow = Flow(graph)
        self.options = options
        self.ledger = Ledger(options)
        self.transport = LocalTransport(self.flow, options)
        self.counters = self.transport.counters

    # --- admission ---------------------------------------------------------------------------------------------

    @property
    def has_slot(self) -> bool:
        """One more group may be admitted."""
        return not self.ledger.ended and self.ledger.has_room

    def admit(self, batch: Batch) -> bool:
        """Enter one group with its source columns; True also when it is here already. False: no slot or no room."""
        batch = self._checked_group(batch)
        group_id = int(batch[GROUP_ID][0])
        if self.ledger.known(batch.row_ids, group_id):
            self.counters.ignored_puts += len(batch) * len(batch.fields)
            return True
        if self.ledger.ended:
            raise DockError(f"group {group_id} is admitted after the end of prompts")
        place = np.full(len(batch), self.ledger.next_place, np.int32)
        parts = self.transport.plan(batch, place) if self.has_slot else []
        if not parts or not self.transport.has_room(parts):
            return False
        self.transport.announce(self.ledger.admit(batch.row_ids, group_id))
        self.transport.write(parts)
        return True

    def _checked_group(self, batch: Batch) -> Batch:
        """One group, whole, with exactly the source columns, by sample index."""
        names = {field.name for field in batch.fields}
        for field in batch.fields:
            self.flow.check_field(field)
        if names != set(self.flow.sources):
            wrong = sorted(names.symmetric_difference(self.flow.sources))
            raise UnknownField(f"admission has the wrong columns: {', '.join(wrong)}", f"sources: {self.flow.sources}")
        if GROUP_ID not in batch or len(np.unique(batch[GROUP_ID].numpy())) != 1:
            raise DockError("admission is of one group at a time, with its group_id")
        if len(batch) != self.options.group_size or not unique_ids(batch.row_ids):
            raise DockError(
                f"group {int(batch[GROUP_ID][0])} has {len(set(batch.row_ids.tolist()))} different rows, "
                f"group_size is {self.options.group_size}"
            )
        if SAMPLE_INDEX not in batch:
            return batch
        order = np.argsort(batch[SAMPLE_INDEX].numpy(), kind="stable")
        return batch if np.array_equal(order, np.arange(len(batch))) else batch.select(order)

    # --- bytes -------------------------------------------------------------------------------------------------

    def put(self, batch: Batch) -> bool:
        """Add columns to rows that are here; cells that are there already are passed over. False: no room yet."""
        batch = self._checked_put(batch)
        places = self.ledger.places(batch.row_ids)
        parts = self.transport.plan(batch, places)
        self._check_complete(batch, places)
        if not self.transport.has_room(parts):
            return False
        self.transport.write(parts)
        return True

    def _checked_put(self, batch: Batch) -> Batch:
        """Known columns, each row once; rows that left under a reader's hands are taken out and counted."""
        for field in batch.fields:
            self.flow.check_field(field)
        if not unique_ids(batch.row_ids):
            raise DockError(f"a put names a row twice: {rows_text(batch.row_ids.tolist())}")
        here = self.ledger.here(batch.row_ids)
        if here.all():
            return batch
        gone = batch.row_ids[~here]
        unknown = gone[~self.ledger.late(gone)]
        if len(unknown):
            raise RowGone(
                f"put to rows that are not in the dock: {rows_text(unknown.tolist())}",
                "they were never admitted, or were retired or dropped before",
            )
        self.counters.ignored_puts += len(gone) * len(batch.fields)
        return batch.select(here)

    def _check_complete(self, batch: Batch, places: np.ndarray) -> None:
        """A stage writes all its columns of a row in one put, so that two readers' results can never mix."""
        given = {field.name for field in batch.fields}
        for stage, names in self.flow.writes.items():
            lacking = [name for name in names if name not in given]
            if not lacking or len(lacking) == len(names):
                continue
            fresh = self.transport.absent(batch.row_ids, places, [name for name in names if name in given])
            if fresh:
                raise DockError(
                    f"stage {stage!r} wrote {', '.join(fresh)} without {', '.join(lacking)}",
                    "a stage puts all of its columns of a row at once",
                )

    def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """Columns of rows, in the order of `rows`."""
        for field in fields:
            self.flow.check_field(field)
        here = self.ledger.here(rows.row_ids)
        if not here.all():
            raise RowGone(
                f"fetch of rows that are not in the dock: {rows_text(rows.row_ids[~here].tolist())}",
                "they were retired, dropped, or never admitted",
            )
        for name, lacking in self.transport.absent(rows.row_ids, rows.places, [f.name for f in fields]).items():
            raise UnknownField(
                f"row {lacking[0]} has no {name} yet ({len(lacking)} of {len(rows)} rows lack it)",
                f"the stage {self.flow.writer.get(name, 'prompts')!r} writes it",
            )
        return self.transport.read(rows.row_ids, rows.places, fields, rows.stage)

    # --- readers -----------------------------------------------------------------------------------------------

    def controller(self, stage: Stage | str) -> Controller:
        name = stage if isinstance(stage, str) else stage.name
        return self.transport.controllers[self.flow.stage(name).name]

    def want(self, stage: Stage, groups: int | None, max_tokens: int | None) -> Want:
        """A reader's wish, with defaults; refused when it can never be met."""
        size = groups if groups is not None else self.default_groups(stage.by)
        if not 0 < size <= self.options.window:
            raise DockError(
                f"take of {size} groups for stage {stage.name!r}", f"1 to {self.options.window} groups are in flight"
            )
        return Want(size, max_tokens)

    def default_groups(self, by: str) -> int:
        return self.options.prompts_per_step if by == "step" else self.options.take_groups

    def take(self, stage: Stage, want: Want, now: float) -> Rows | None:
        """Lease the stage's next rows. None: not yet."""
        wish = Want(want.groups, want.max_tokens, self.ledger.exhausted)
        return self.controller(stage).take(wish, now, self.options.lease_s)

    def drained(self, stage: Stage) -> bool:
        """Nothing is left for the stage, and nothing will come."""
        controller = self.controller(stage)
        return self.ledger.exhausted and not controller.pending and not controller.leases

    def finish(self, rows: Rows, dropped: Mapping[int, str]) -> None:
        """Acknowledge: rows are done, or leave the flow. Rows that another reader has by now are passed over."""
        controller = self.controller(rows.stage)
        ids = set(rows.row_ids.tolist())
        stray = [row for row in dropped if row not in ids]
        if stray:
            raise DockError(f"stage {rows.stage!r} dropped rows that it was not given: {rows_text(stray)}")
        owned = controller.owned(rows.lease, rows.row_ids)
        self.counters.late_acks += int((~owned).sum())
        mine = rows.row_ids[owned]
        lost = np.array([row in dropped for row in mine.tolist()], bool)
        kept = self._written(controller, rows.lease, mine[~lost])
        controller.finish(np.concatenate([kept, mine[lost]]))
        if rows.stage in self.flow.filters:
            name, zeros = verdict(rows.stage), np.zeros(len(kept), np.int64)
            readers = self.flow.readers.get(name, ())
            self.transport.notify([Notice(reader, kept, (name,), zeros) for reader in readers])
        self._drop({row: dropped[row] for row in mine[lost].tolist()}, rows.stage)

    def _written(self, controller: Controller, lease: int, row_ids: np.ndarray) -> np.ndarray:
        """Rows whose every column of the stage is there. DockError for others while the lease lasts."""
        names = self.flow.writes[controller.stage]
        absent = self.transport.absent(row_ids, self.ledger.places(row_ids), names)
        if absent and lease in controller.leases:
            name, lacking = next(iter(absent.items()))
            raise DockError(
                f"stage {controller.stage!r} finished rows without writing {name}: {rows_text(lacking.tolist())}",
                "put the columns first, or drop the rows",
            )
        return row_ids[~np.isin(row_ids, np.concatenate(list(absent.values())))] if absent else row_ids

    # --- leaving -----------------------------------------------------------------------------------------------

    def drop(self, rows: Rows, reason: str) -> None:
        """Rows leave the flow, wherever they are."""
        if rows.lease and rows.stage in self.flow.stages:
            self.finish(rows, dict.fromkeys(rows.row_ids.tolist(), reason))
        else:
            self._drop(dict.fromkeys(rows.row_ids.tolist(), reason), None)

    def _drop(self, reasons: Mapping[int, str], stage: str | None) -> None:
        if not reasons:
            return
        self.ledger.drop(reasons)
        self.transport.hide(np.fromiter(reasons, np.int64, len(reasons)), self._who_sees_drops_of(stage))

    def _who_sees_drops_of(self, stage: str | None) -> Iterable[str]:
        """Deterministic: only stages that wait for `stage`. For the others it would be a race whether they see it."""
        if stage is None or not self.options.deterministic:
            return self.flow.stages
        return (stage, *sorted(self.flow.descendants[stage]))

    def retire(self, rows: Rows) -> None:
        """Trained rows leave; their group's slot is free. Rows that have left already are passed over."""
        left = self.ledger.retire(rows.row_ids)
        self.counters.late_acks += len(rows) - len(left)
        self.transport.hide(left, self.flow.stages)
        if rows.lease and rows.stage in self.flow.stages:
            controller = self.controller(rows.stage)
            controller.finish(rows.row_ids[controller.owned(rows.lease, rows.row_ids)], partly=True)

    def expire(self, now: float) -> bool:
        """Overdue leases give their rows back; whether there were any."""
        before = self.counters.expired_leases
        for controller in self.transport.controllers.values():
            for row_ids in controller.expire(now):
                self.ledger.contest(row_ids)
                self.counters.expired_leases += 1
        return self.counters.expired_leases > before

    def next_deadline(self) -> float | None:
        """When the next lease is overdue."""
        leases = [held.deadline for c in self.transport.controllers.values() for held in c.leases.values()]
        return min(leases, default=None)

    # --- after every change ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Free what nobody needs any more, and look whether the flow has come to rest."""
        if self.ledger.dead:
            dead = np.fromiter(self.ledger.dead, np.int64, len(self.ledger.dead))
            free = dead[~self.transport.held(dead)]
            if len(free):
                self.transport.free(free, self.ledger.places(free))
                self.ledger.remove(free)
        self._rest()

    def _rest(self) -> None:
        """At rest nothing is leased, nothing can be admitted and no full take is possible: allow short takes.

        Every earlier event is over by then, so which groups are pending where does not depend on time, and neither do
        the short takes. They go to each stage that has all of its pending groups ready; the first stage in the graph
        with any pending group always has, so the flow moves again.
        """
        controllers = self.transport.controllers.values()
        if not self.options.deterministic or self.has_slot or any(c.leases for c in controllers):
            return
        if any(c.can_take(self.default_groups(c.by), self.ledger.exhausted) for c in controllers):
            return
        for controller in controllers:
            if controller.stage != UPDATE or self.ledger.closing:
                controller.allow_short()
