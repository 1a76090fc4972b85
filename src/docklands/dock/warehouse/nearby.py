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
from docklands.dock.warehouse.calls import Borrowed, Session
from docklands.dock.wire.format import typed
from docklands.errors import RowGone, WireError


class Nearby:
    """The addresses of one lease's rows. homes: column -> stretches; starts of stretches ascend from 0."""

    def __init__(self, rows: Rows, homes: Mapping[str, Runs]) -> None:
        self._row_ids = rows.row_ids
        self._places = rows.places.tolist()
        self._spread = len(set(self._places)) > 1
        self._offsets = offsets_of(rows.lengths)
        self._before = self._offsets.tolist()
        self._runs = {name: (flat[::RUN], flat[1::RUN], flat[2::RUN]) for name, flat in homes.items()}

    def read(
        self, sessions: Mapping[int, Session], row_ids: np.ndarray, fields: Sequence[Field[Any]], copy: bool
    ) -> Borrowed | None:
        """Columns of rows that follow one another in the lease: views, or copies in memory of one's own. None: ask."""
        start = self._position(row_ids)
        if start is None or not fields:
            return None
        stop = start + len(row_ids)
        offsets = self._offsets[start : stop + 1] - self._before[start]
        checks: dict[tuple[int, int], tuple[Session, Home]] = {}
        columns: dict[Field[Any], Any] = {}
        try:
            for field in fields:
                pieces = self._pieces(sessions, field, (start, stop), checks)
                if not pieces:
                    return None
                values = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone() if copy else pieces[0]
                count = int(offsets[-1]) if field.is_token else len(row_ids)
                values = typed(values, field.dtype, (count, *field.inner_shape))
                columns[field] = Jagged(values, offsets) if field.is_token else values
            found = Borrowed(Batch.made(row_ids, columns), list(checks.values()))
            if copy:
                found.check()
        except (RowGone, WireError):
            return None
        return found

    def places(self, row_ids: np.ndarray) -> int:
        """How many warehouses these rows lie in."""
        if not self._spread:
            return 1
        start = self._position(row_ids) or 0
        return len(set(self._places[start : start + len(row_ids)]))

    def _pieces(
        self,
        sessions: Mapping[int, Session],
        field: Field[Any],
        rows: tuple[int, int],
        checks: dict[tuple[int, int], tuple[Session, Home]],
    ) -> list[Tensor]:
        """A column's bytes, uint8; empty if they cannot be read here. Notes what is to be looked at again."""
        start, stop = rows
        known, runs = width(field), self._runs.get(field.name)
        if known is None or runs is None:
            return []
        size, by_token = known
        starts, generations, offsets = runs
        before: Sequence[int] = self._before if by_token else range(len(self._before))
        pieces = []
        for number in range(bisect_right(starts, start) - 1, len(starts)):
            first = starts[number]
            if first >= stop:
                break
            following = starts[number + 1] if number + 1 < len(starts) else len(self._places)
            low, high = max(start, first), min(stop, following)
            place = self._places[low]
            session = sessions.get(place)
            if session is None or session.welcome is None or not session.local:
                return []
            nbytes = size * (before[high] - before[low])
            if nbytes:
                home = MEMORY, generations[number], offsets[number] + size * (before[low] - before[first])
                pieces.append(session.find(home, nbytes))
                checks[place, home[1]] = session, home
        return pieces

    def _position(self, row_ids: np.ndarray) -> int | None:
        """Where these rows begin in the lease; None if they do not follow one another there."""
        if row_ids is self._row_ids:
            return 0
        found = np.flatnonzero(self._row_ids == row_ids[0]) if len(row_ids) else ()
        if len(found) != 1:
            return None
        start = int(found[0])
        return start if np.array_equal(self._row_ids[start : start + len(row_ids)], row_ids) else None
