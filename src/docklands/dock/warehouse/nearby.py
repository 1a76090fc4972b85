"""Reading leased rows where they lie in shared memory, without a word to their warehouse.

A take's answer says where the columns of its rows lie (rules/addresses.py). What is read there is looked at as any
reference is, before and after: the generation in the arena says whether the bytes are still those that were meant. In
every other case (another node, a column that lies elsewhere, an address that has become old) there is no answer here,
and the warehouse is asked.

Legend: B rows of the lease.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.core.batch import Batch, Jagged, offsets_of
from docklands.core.fields import Field
from docklands.core.protocols import Rows
from docklands.dock.rules.addresses import MEMORY, RUN, Runs, width
from docklands.dock.rules.messages import Home
from docklands.dock.warehouse.arena import Mapped
from docklands.dock.warehouse.calls import Borrowed, Session
from docklands.dock.wire.format import typed
from docklands.errors import RowGone, WireError

View = tuple[list[Mapped], Home, Tensor]
"""A stretch of a column where it lies: the arenas it is of, its home, its values."""


class Stretched:
    """How a column of a lease's rows lies.

    before             values before each row, [B + 1]
    starts, ends       first row of each stretch, and the one behind it; generations: of each
    views              of the stretches that have been read
    """

    __slots__ = ("before", "ends", "field", "generations", "offsets", "size", "starts", "views")

    def __init__(
        self, field: Field[Any], size: int, before: Sequence[int], runs: tuple[list[int], list[int], list[int]]
    ) -> None:
        """size: bytes of a value."""
        self.field, self.size, self.before = field, size, before
        self.starts, self.generations, self.offsets = runs
        self.ends = [*self.starts[1:], len(before) - 1]
        self.views: list[View | None] = [None] * len(self.starts)

    def view(self, session: Session, number: int) -> View:
        """One stretch, whole."""
        count = self.before[self.ends[number]] - self.before[self.starts[number]]
        home = MEMORY, self.generations[number], self.offsets[number]
        values = typed(session.find(home, self.size * count), self.field.dtype, (count, *self.field.inner_shape))
        return session.arenas, home, values


class Nearby:
    """The addresses of one lease's rows. homes: column -> stretches; starts of stretches ascend from 0."""

    def __init__(self, rows: Rows, homes: Mapping[str, Runs]) -> None:
        self.source = rows, homes
        self._row_ids = rows.row_ids
        self._order: np.ndarray | None = None
        self._places = rows.places.tolist()
        self._spread = len(set(self._places)) > 1
        self._offsets = offsets_of(rows.lengths)
        self._before = self._offsets.tolist()
        self._columns: dict[str, Stretched] = {}
        self._next = 0
        self._runs = {name: (flat[::RUN], flat[1::RUN], flat[2::RUN]) for name, flat in homes.items()}

    def read(
        self, sessions: Mapping[int, Session], row_ids: np.ndarray, fields: Sequence[Field[Any]], copy: bool
    ) -> Borrowed | None:
        """Columns of rows of the lease: views where they follow one another there, or copies in memory of one's own.

        None: ask.
        """
        stretches = self._stretches(row_ids)
        if not stretches or not fields:
            return None
        if len(stretches) == 1:
            ((start, stop),) = stretches
            offsets = self._offsets[start : stop + 1] - self._before[start]
        else:
            lengths = np.diff(self._offsets)
            offsets = offsets_of(np.concatenate([lengths[start:stop] for start, stop in stretches]))
        checks: dict[tuple[int, int], tuple[Session, Home]] = {}
        columns: dict[Field[Any], Any] = {}
        nbytes = 0
        try:
            for field in fields:
                pieces: list[Tensor] = []
                column = self._columns.get(field.name)
                if column is None or column.field is not field:
                    column = self._column(field)
                for stretch in stretches:
                    if column is None or not self._add_pieces(pieces, sessions, column, stretch, checks):
                        return None
                if not pieces:  # tokens of rows that have none
                    return None
                values = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone() if copy else pieces[0]
                nbytes += values.numel() * values.element_size()
                columns[field] = Jagged(values, offsets) if field.is_token else values
            borrowed = Borrowed(Batch.made(row_ids, columns), list(checks.values()), nbytes)
            if copy:
                borrowed.check()
        except (RowGone, WireError):
            return None
        return borrowed

    def places(self, row_ids: np.ndarray) -> int:
        """How many warehouses these rows lie in."""
        if not self._spread:
            return 1
        stretches = self._stretches(row_ids) or ()
        return len({place for start, stop in stretches for place in self._places[start:stop]})

    def _add_pieces(
        self,
        pieces: list[Tensor],
        sessions: Mapping[int, Session],
        column: Stretched,
        rows: tuple[int, int],
        checks: dict[tuple[int, int], tuple[Session, Home]],
    ) -> bool:
        """A column's values, piece by piece; False if they cannot be read here. Notes what is to be looked at again."""
        at, stop = rows
        before, starts, ends, views = column.before, column.starts, column.ends, column.views
        number = bisect_right(starts, at) - 1
        while at < stop:
            end = ends[number] if ends[number] < stop else stop
            first, last = before[at], before[end]
            if first < last:
                place = self._places[at]
                session = sessions.get(place)
                if session is None or session.welcome is None or not session.arenas:
                    return False
                view = views[number]
                if view is None or view[0] is not session.arenas:
                    view = views[number] = column.view(session, number)
                key = place, view[1][1]
                if key not in checks:
                    session.check(view[1])
                    checks[key] = session, view[1]
                zero = before[starts[number]]
                pieces.append(view[2][first - zero : last - zero])
            at, number = end, number + 1
        return True

    def _column(self, field: Field[Any]) -> Stretched | None:
        """How a column lies, which is noted; None if that is not known."""
        known, runs = width(field), self._runs.get(field.name)
        if known is None or runs is None:
            return None
        before = self._before if known[1] else range(len(self._before))
        found = self._columns[field.name] = Stretched(field, known[0], before, runs)
        return found

    def _stretches(self, row_ids: np.ndarray) -> list[tuple[int, int]] | None:
        """Where these rows are in the lease, [first, last) of each piece; None if one is not in it."""
        if row_ids is self._row_ids:
            return [(0, len(row_ids))]
        if not len(row_ids) or not len(self._row_ids):
            return None
        start, stop = self._next, self._next + len(row_ids)
        if stop <= len(self._row_ids) and (self._row_ids[start:stop] == row_ids).all():  # micro-batch after micro-batch
            self._next = stop
            return [(start, stop)]
        if self._order is None:
            self._order = np.argsort(self._row_ids, kind="stable")
        at = self._order[np.searchsorted(self._row_ids, row_ids, sorter=self._order).clip(max=len(self._order) - 1)]
        if not np.array_equal(self._row_ids[at], row_ids):
            return None
        cuts = (np.flatnonzero(np.diff(at) != 1) + 1).tolist()
        starts, stops = [0, *cuts], [*cuts, len(at)]
        self._next = int(at[-1]) + 1
        return [(int(at[start]), int(at[stop - 1]) + 1) for start, stop in zip(starts, stops)]
