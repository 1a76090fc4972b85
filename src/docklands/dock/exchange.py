"""The dock in one process: the rules (control.py) and the bytes (transport.py), kept in step, without waiting.

Every change of state is one synchronous call here. A call that cannot be answered yet says so (False or None) and
changes nothing; the facade (dock.py) adds waits, deadlines, timers and closing.

Legend: B rows of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, SAMPLE_INDEX, Field
from docklands.core.graph import Graph, rows_text
from docklands.core.protocols import Rows
from docklands.dock.rules.control import Control
from docklands.dock.rules.flow import Flow
from docklands.dock.rules.options import DockOptions
from docklands.dock.rules.table import unique_ids
from docklands.dock.transport import LocalStores
from docklands.errors import DockError, RowGone, UnknownField


class Exchange:
    """Control and warehouses of one graph."""

    def __init__(self, graph: Graph, options: DockOptions) -> None:
        self.options = options
        self.control = Control(graph, options)
        self.flow = self.control.flow
        self.counters = self.control.counters
        self.stores = LocalStores(self.flow, options, self.counters)

    def admit(self, batch: Batch) -> bool:
        """Enter groups with their source columns; True also when they are here already. False: no slots or no room."""
        control = self.control
        batch, ids = checked_groups(self.flow, batch)
        if len(ids) > self.options.window:
            raise DockError(f"{len(ids)} groups at once, at most {self.options.window} are in flight")
        groups = list(zip(ids, batch.row_ids.reshape(len(ids), -1)))
        new = groups
        if not unique_ids(batch.row_ids) or not control.unknown(ids, batch.row_ids):
            new = [(group, row_ids) for group, row_ids in groups if not control.known(row_ids, group)]
        if len(new) > control.slots:
            return False
        if len(new) < len(groups):
            fresh = np.isin(batch.row_ids, [row_ids for _, row_ids in new])
            self.counters.ignored_puts += int(np.count_nonzero(~fresh)) * len(batch.fields)
            batch = batch.select(fresh)
        planned = control.ledger.plan(new)
        places = np.repeat(np.array([group.place for group in planned], np.int32), self.options.group_size)
        parts = self.stores.plan(batch, places) if new else []
        if not self.stores.has_room(parts):
            return False
        for place in sorted({group.place for group in planned}):
            rows = np.concatenate([group.row_ids for group in planned if group.place == place])
            self.stores.warehouses[place].add(rows)
        control.admit_all(new)
        control.notice(self.stores.write(parts))
        return True

    def put(self, batch: Batch) -> bool:
        """Add columns to rows that are here; cells that are there already are passed over. False: no room yet."""
        batch = self._checked_put(batch)
        places = self.control.ledger.places(batch.row_ids)
        parts = self.stores.plan(batch, places)
        self._check_complete(batch, places)
        if not self.stores.has_room(parts):
            return False
        self.control.notice(self.stores.write(parts))
        return True

    def _checked_put(self, batch: Batch) -> Batch:
        """Known columns, each row once; rows that left under a reader's hands are taken out and counted."""
        for field in batch.fields:
            self.flow.check_field(field)
        if not unique_ids(batch.row_ids):
            raise DockError(f"a put names a row twice: {rows_text(batch.row_ids.tolist())}")
        here = self.control.roster.find(batch.row_ids) >= 0
        if here.all():
            return batch
        check_late(self.control, batch.row_ids[~here])
        self.counters.ignored_puts += int(np.count_nonzero(~here)) * len(batch.fields)
        return batch.select(here)

    def _check_complete(self, batch: Batch, places: np.ndarray) -> None:
        """A stage writes all its columns of a row in one put, so that two readers' results can never mix."""
        for stage, given, lacking in partial_writes(self.flow, [field.name for field in batch.fields]):
            fresh = self.stores.absent(batch.row_ids, places, given)
            if fresh:
                raise partial_write(stage, list(fresh), lacking)

    def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """Columns of rows, in the order of `rows`."""
        for field in fields:
            self.flow.check_field(field)
        here = self.control.roster.find(rows.row_ids) >= 0
        if not here.all():
            raise RowGone(
                f"fetch of rows that are not in the dock: {rows_text(rows.row_ids[~here].tolist())}",
                "they were retired, dropped, or never admitted",
            )
        for name, lacking in self.stores.absent(rows.row_ids, rows.places, [f.name for f in fields]).items():
            raise UnknownField(
                f"row {lacking[0]} has no {name} yet ({len(lacking)} of {len(rows)} rows lack it)",
                f"the stage {self.flow.writer.get(name, 'prompts')!r} writes it",
            )
        return self.stores.read(rows.row_ids, rows.places, fields, rows.stage)

    def settle(self) -> list[str]:
        """After every change: free what nobody needs any more; who may be served now."""
        for place, row_ids in self.control.settle():
            self.stores.warehouses[place].free(row_ids)
        return self.control.woken()


def checked_groups(flow: Flow, batch: Batch) -> tuple[Batch, list[int]]:
    """Groups of one size with exactly the source columns: group after group, each by sample index; and their ids."""
    names = {field.name for field in batch.fields}
    for field in batch.fields:
        flow.check_field(field)
    if names != set(flow.sources):
        wrong = sorted(names.symmetric_difference(flow.sources))
        raise UnknownField(f"admission has the wrong columns: {', '.join(wrong)}", f"sources: {flow.sources}")
    if GROUP_ID not in batch or not len(batch):
        raise DockError("admission is of whole groups, with their group_id")
    if (groups := in_order(batch)) is not None:
        return batch, groups
    ids, first, member = np.unique(batch[GROUP_ID].numpy(), return_index=True, return_inverse=True)
    turn = np.argsort(np.argsort(first))  # groups stay in the order in which they come
    sizes = np.bincount(member)
    if (sizes != sizes[0]).any():
        raise DockError(
            f"admission of groups of {sizes.min()} and {sizes.max()} rows", "one group at a time, or groups of one size"
        )
    samples = batch[SAMPLE_INDEX].numpy() if SAMPLE_INDEX in batch else np.arange(len(batch))
    order = np.lexsort((samples, turn[member]))
    sorted_already = np.array_equal(order, np.arange(len(batch)))
    return (batch if sorted_already else batch.select(order)), ids[np.argsort(first)].tolist()


def in_order(batch: Batch) -> list[int] | None:
    """Ids of the groups of a batch that stand one after the other, of one size and each by sample index; else None."""
    ids = batch[GROUP_ID].numpy()
    starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    groups = ids[starts].tolist()
    size = len(ids) // len(groups)
    if len(set(groups)) < len(groups) or not np.array_equal(starts, np.arange(len(groups)) * size):
        return None
    if SAMPLE_INDEX in batch:
        samples = batch[SAMPLE_INDEX].numpy()
        rising = samples[1:] > samples[:-1]
        rising[starts[1:] - 1] = True
        if not rising.all():
            return None
    return groups if size * len(groups) == len(ids) else None


def check_late(control: Control, gone: np.ndarray) -> None:
    """RowGone unless all of these rows left while a reader might still have been at work on them."""
    unknown = gone[~control.ledger.late(gone)]
    if len(unknown):
        raise RowGone(
            f"put to rows that are not in the dock: {rows_text(unknown.tolist())}",
            "they were never admitted, or were retired or dropped before",
        )


def partial_writes(flow: Flow, names: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Stages of which some of the columns are named but not all: stage, those given, those lacking."""
    found = []
    for stage, writes in flow.writes.items():
        given = [name for name in writes if name in names]
        if given and len(given) < len(writes):
            found.append((stage, given, [name for name in writes if name not in names]))
    return found


def partial_write(stage: str, given: Sequence[str], lacking: Sequence[str]) -> DockError:
    """The error of a put that would leave a row half written."""
    return DockError(
        f"stage {stage!r} wrote {', '.join(given)} without {', '.join(lacking)}",
        "a stage puts all of its columns of a row at once",
    )
