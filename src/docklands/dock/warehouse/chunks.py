"""A warehouse: the bytes. (row, column) -> un-padded array, kept in the chunks in which they were put.

It knows which controllers read a column, and says whom to tell of a write; it knows no stage's progress. Nothing is
copied on the way in or out where that can be helped: a chunk is the producer's own tensor, and reading rows that lie
side by side in one chunk gives a view. Batches are immutable by contract, on both sides.

Legend: B rows, T tokens of all rows packed end to end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.core.batch import Batch, Column, Jagged, offsets_of, torch_dtype
from docklands.core.fields import Field
from docklands.dock.rules.messages import Home, Notice
from docklands.dock.rules.table import RowTable
from docklands.errors import DockError

UNKNOWN_LENGTH = -1
ROW_BITS = 32
"""Of a cell: which row of its chunk."""


@dataclass(slots=True)
class Chunk:
    """Part of one column as it was put; freed when its last row is.

    sizes    bytes of each of its rows, int64 [rows], where they do not follow from the column (JSON)
    rows     those of them that are still here
    home     of its values in shared memory; None: this process's own memory
    spilled  it lies on disk and weighs nothing in memory
    """

    column: Column
    sizes: np.ndarray | None
    nbytes: int
    rows: int
    home: Home | None = None
    spilled: bool = False


@dataclass(frozen=True)
class Write:
    """A column's rows that a put would add: positions in the batch (None: all), and what they weigh."""

    field: Field[Any]
    column: Column
    positions: np.ndarray | None
    sizes: np.ndarray | None
    nbytes: int


class Warehouse:
    """The bytes of some rows.

    readers   column name -> stages to tell when it is written
    capacity  bytes; 0: unbounded
    release   called with the home of a chunk that is freed
    as_is     columns are kept as they come, not copied out of a larger tensor's storage
    """

    def __init__(
        self,
        place: int,
        fields: Sequence[Field[Any]],
        readers: Mapping[str, Sequence[str]],
        capacity: int = 0,
        release: Callable[[Home], None] | None = None,
        as_is: bool = False,
    ) -> None:
        self.place = place
        self.capacity = capacity
        self.nbytes = 0
        self.spilled_bytes = 0
        self._release, self._as_is = release, as_is
        self.ignored = 0
        self._readers = {name: tuple(stages) for name, stages in readers.items()}
        self._fields = {field.name: field for field in fields}
        self._rows = RowTable("length", "order", "group_id", "place", "sample", "life", *map(cell, self._fields))
        self._told: dict[tuple[str, ...], list[tuple[str, tuple[str, ...]]]] = {}
        self._count = np.arange(64)
        self._chunks: dict[int, Chunk] = {}
        self._last_chunk = 0

    def __len__(self) -> int:
        return len(self._rows)

    # --- writing -----------------------------------------------------------------------------------------------

    @property
    def rows(self) -> RowTable:
        """Rows with their length and what a warehouse process remembers of their admission."""
        return self._rows

    def add(self, row_ids: np.ndarray) -> np.ndarray:
        """Make place for new rows, without a column yet; their numbers, see `find`."""
        slots = self._rows.add(row_ids)
        self._rows["length"][slots] = UNKNOWN_LENGTH
        return slots

    def plan(self, batch: Batch, slots: np.ndarray | None = None) -> list[Write]:
        """What a put of `batch` would add: cells that are already there are left out (the first write wins).

        Rows that are not here yet are planned as new ones. slots: what `find` says of the rows.

        Raises DockError when a token column has another length than the row's token columns that are here.
        """
        if slots is None:
            slots = self._rows.find(batch.row_ids)
        new = len(slots) > 0 and slots.max() < 0
        whole = new or (len(slots) > 0 and slots.min() >= 0)
        writes = []
        for field in batch.fields:
            column, fresh = batch[field], None
            if not new:
                absent = self._rows[cell(field.name)][slots] == 0
                if not whole or not absent.all():
                    fresh = np.nonzero((slots < 0) | absent)[0]
                    if not len(fresh):
                        continue
                    column = column if len(fresh) == len(batch) else batch.select(fresh)[field]
                check_lengths(self._rows, field, column, slots if fresh is None else slots[fresh])
            column = column if self._as_is else settled(column)
            sizes = text_sizes(field, column) if isinstance(column, tuple) else None
            nbytes = weight(column, 0, len(column)) if sizes is None else int(sizes.sum())
            writes.append(Write(field, column, fresh, sizes, nbytes))
        return writes

    def has_room(self, nbytes: int) -> bool:
        """`nbytes` more fit. DockError when they would not fit into an empty warehouse."""
        if self.capacity and nbytes > self.capacity:
            raise DockError(
                f"one put of {nbytes} bytes is larger than warehouse {self.place}, which holds {self.capacity} bytes",
                "raise dock.capacity_mib or put fewer rows at once",
            )
        return not self.capacity or self.nbytes + nbytes <= self.capacity

    def write(
        self,
        batch: Batch,
        writes: Sequence[Write],
        homes: Mapping[str, Home] | None = None,
        slots: np.ndarray | None = None,
    ) -> list[Notice]:
        """Store what `plan` said, and say which controllers are to be told.

        homes  column -> where its values lie in shared memory; for columns that are written whole
        slots  what `find` says of the rows
        """
        if slots is None:
            slots = self._rows.find(batch.row_ids)
        self.ignored += len(batch.fields) * len(batch)
        if len(self._count) < len(batch):
            self._count = np.arange(len(batch))
        for write in writes:
            at = slots if write.positions is None else slots[write.positions]
            self.ignored -= len(at)
            if write.field.is_token and isinstance(write.column, Jagged):
                self._rows["length"][at] = write.column.lengths
            self._last_chunk += 1
            home = (homes or {}).get(write.field.name)
            self._chunks[self._last_chunk] = Chunk(write.column, write.sizes, write.nbytes, len(at), home)
            self._rows[cell(write.field.name)][at] = self._count[: len(at)] + (self._last_chunk << ROW_BITS)
            self.nbytes += write.nbytes
        return self._notices(batch.row_ids, slots, writes, homes or {})

    def free(self, row_ids: np.ndarray) -> None:
        """Rows are gone; a chunk goes with its last row."""
        slots = self._rows.present(row_ids)
        for name in self._fields:
            for number, count in counted(self._rows[cell(name)][slots] >> ROW_BITS):
                if not number:
                    continue
                chunk = self._chunks[number]
                chunk.rows -= count
                if not chunk.rows:
                    self._drop(chunk)
                    del self._chunks[number]
        self._rows.remove(slots)

    def spill(self, nbytes: int, move: Callable[[Tensor], tuple[Tensor, Home] | None]) -> None:
        """Move the oldest chunks out of memory until `nbytes` more fit.

        move  copies values to disk: (a view of them there, their home), or None: no room there either
        """
        for chunk in self._chunks.values():
            if not self.capacity or self.nbytes + nbytes <= self.capacity:
                return
            column = chunk.column
            values = column.values if isinstance(column, Jagged) else column
            if chunk.spilled or not isinstance(values, Tensor) or not values.numel():
                continue
            moved = move(values)
            if moved is None:
                return
            self._drop(chunk)
            chunk.column = Jagged(moved[0], column.offsets) if isinstance(column, Jagged) else moved[0]
            chunk.home, chunk.spilled = moved[1], True
            self.spilled_bytes += chunk.nbytes

    # --- reading -----------------------------------------------------------------------------------------------

    def absent(self, row_ids: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """column -> those of the rows (which must be here) that lack it."""
        slots = self._rows.find(row_ids)
        lacking = {name: row_ids[self._rows[cell(name)][slots] == 0] for name in names}
        return {name: rows for name, rows in lacking.items() if len(rows)}

    def get(self, row_ids: np.ndarray, fields: Sequence[Field[Any]]) -> tuple[Batch, int]:
        """Columns of rows, in the order of `row_ids`, and their bytes. All must be there (see `absent`)."""
        slots = self._rows.find(row_ids)
        columns, nbytes = {}, 0
        for field in fields:
            columns[field], size = self._gather(field, slots)
            nbytes += size
        return Batch(row_ids, columns), nbytes

    def inventory(self) -> dict[str, np.ndarray]:
        """column -> ids of the rows that have it."""
        slots = self._rows.slots
        ids = self._rows["row_id"][slots]
        return {name: ids[self._rows[cell(name)][slots] != 0] for name in self._fields}

    # --- inside ------------------------------------------------------------------------------------------------

    def _notices(
        self, row_ids: np.ndarray, slots: np.ndarray, writes: Sequence[Write], homes: Mapping[str, Home]
    ) -> list[Notice]:
        """One notice per controller and set of rows, coalesced over columns; those of one set share their arrays."""
        sets: dict[bytes, tuple[np.ndarray | None, list[str]]] = {}
        for write in writes:
            key = b"" if write.positions is None else write.positions.tobytes()
            sets.setdefault(key, (write.positions, []))[1].append(write.field.name)
        lengths = np.maximum(self._rows["length"][slots], 0)
        found = []
        for at, names in sets.values():
            ids, tokens = (row_ids, lengths) if at is None else (row_ids[at], lengths[at])
            lie = {name: homes[name] for name in homes if self._readers.get(name)} if at is None else {}
            placed = ((len(ids), lie),) if lie else ()
            found += [Notice(stage, ids, columns, tokens, placed) for stage, columns in self._whom(tuple(names))]
        return found

    def _whom(self, names: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        """Stages to be told of these columns, and of which each."""
        if names not in self._told:
            told: dict[str, list[str]] = {}
            for name in names:
                for stage in self._readers.get(name, ()):
                    told.setdefault(stage, []).append(name)
            self._told[names] = [(stage, tuple(columns)) for stage, columns in told.items()]
        return self._told[names]

    def _drop(self, chunk: Chunk) -> None:
        """Its memory is free."""
        if chunk.spilled:
            self.spilled_bytes -= chunk.nbytes
        else:
            self.nbytes -= chunk.nbytes
        if chunk.home is not None and self._release is not None:
            self._release(chunk.home)

    def _gather(self, field: Field[Any], slots: np.ndarray) -> tuple[Column, int]:
        """Runs of rows that lie side by side in a chunk are views; more than one run is joined by a copy."""
        if not len(slots):
            return empty(field), 0
        runs = self.runs(field.name, slots)
        pieces = [piece(chunk.column, start, stop) for chunk, start, stop in runs]
        nbytes = sum(
            weight(chunk.column, start, stop) if chunk.sizes is None else int(chunk.sizes[start:stop].sum())
            for chunk, start, stop in runs
        )
        return (pieces[0] if len(pieces) == 1 else join(pieces)), nbytes

    def find(self, row_ids: np.ndarray) -> np.ndarray:
        """A number for each row, -1 for rows that are not here, int64 [B]; valid until rows are added or freed."""
        return self._rows.find(row_ids)

    def has(self, name: str, slots: np.ndarray) -> np.ndarray:
        """Whether each of these rows, by `find`, has the column, bool [B]."""
        return self._rows[cell(name)][slots] != 0

    def runs(self, name: str, slots: np.ndarray) -> list[tuple[Chunk, int, int]]:
        """Where a column of rows, by `find`, that have it lies, in their order: (chunk, start, stop) in its rows."""
        if not len(slots):
            return []
        cells = self._rows[cell(name)][slots]
        breaks = np.flatnonzero(cells[1:] - cells[:-1] != 1) + 1
        edges = [0, *breaks.tolist(), len(slots)]
        found = []
        for start, stop in zip(edges, edges[1:]):
            number, first = divmod(int(cells[start]), 1 << ROW_BITS)
            found.append((self._chunks[number], first, first + stop - start))
        return found


def check_lengths(rows: RowTable, field: Field[Any], column: Column, slots: np.ndarray) -> None:
    """DockError when a token column has other lengths than the rows' token columns that are here."""
    if not field.is_token or not isinstance(column, Jagged):
        return
    known = rows["length"][slots]
    if (known == column.lengths).all() and slots.min(initial=0) >= 0:
        return
    known = np.where(slots < 0, UNKNOWN_LENGTH, known)
    wrong = np.nonzero((known != UNKNOWN_LENGTH) & (known != column.lengths))[0]
    if len(wrong):
        i = int(wrong[0])
        raise DockError(
            f"column {field.name} has {column.lengths[i]} tokens in row {rows['row_id'][slots[i]]}, "
            f"token_ids has {known[i]}",
            "every token column has the length of token_ids",
        )


def counted(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Each number and how often it is there. Rows mostly leave as they came: all of one chunk."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [(int(numbers[0]), len(numbers))]
    found, counts = np.unique(numbers, return_counts=True)
    return list(zip(found.tolist(), counts.tolist()))


def settled(column: Column) -> Column:
    """A column fit to be kept: in host memory, without a graph, and not holding on to a larger tensor's storage."""
    if isinstance(column, Jagged):
        return Jagged(keep(column.values), column.offsets)
    return keep(column) if isinstance(column, Tensor) else column


def keep(tensor: Tensor) -> Tensor:
    """The tensor itself where it owns all of its storage, else a copy."""
    tensor = tensor.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole and tensor.is_contiguous() else tensor.contiguous().clone()


@lru_cache(maxsize=1024)
def cell(name: str) -> str:
    """The attribute that says where a row's value of that column lies: chunk number, then row in it; 0: nowhere."""
    return f"{name}.cell"


def weight(column: Column, start: int, stop: int) -> int:
    """Bytes of some rows of a column that is not JSON: the values, and 8 for each ragged row's offset."""
    if isinstance(column, Jagged):
        count, values, more = int(column.offsets[stop]) - int(column.offsets[start]), column.values, 8 * (stop - start)
    else:
        assert isinstance(column, Tensor)
        count, values, more = stop - start, column, 0
    return count * values.element_size() * math.prod(values.shape[1:]) + more


def text_sizes(field: Field[Any], column: tuple[Any, ...]) -> np.ndarray:
    """Bytes of each row of a JSON column, int64 [B]: its text."""
    texts: dict[int, int] = {}
    for value in column:
        if id(value) not in texts:
            try:
                texts[id(value)] = len(json.dumps(value))
            except (TypeError, ValueError) as error:
                raise DockError(f"column {field.name}: a value is not JSON: {error}") from None
    return np.array([texts[id(value)] for value in column], np.int64)


def piece(column: Column, start: int, stop: int) -> Column:
    """Rows start..stop of a chunk, as a view."""
    if isinstance(column, Jagged):
        if start == 0 and stop == len(column):
            return column
        first, last = int(column.offsets[start]), int(column.offsets[stop])
        return Jagged(column.values[first:last], column.offsets[start : stop + 1] - first)
    return column[start:stop]


def join(pieces: Sequence[Any]) -> Column:
    """Columns of one field end to end."""
    if isinstance(pieces[0], Jagged):
        lengths = np.concatenate([part.lengths for part in pieces])
        return Jagged(torch.cat([part.values for part in pieces]), offsets_of(lengths))
    if isinstance(pieces[0], Tensor):
        return torch.cat(list(pieces))
    return tuple(value for part in pieces for value in part)


def empty(field: Field[Any]) -> Column:
    """A column of no rows."""
    if field.is_json:
        return ()
    values = torch.empty((0, *field.inner_shape), dtype=torch_dtype(field))
    return Jagged(values, offsets_of([])) if field.is_ragged else values
