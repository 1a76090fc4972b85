"""Immutable jagged batches: some rows of the table, with some of its columns.

Legend: B rows (samples), T tokens of all rows packed end to end.
Three kinds of column, by the field's dims:
    ragged  ("T" or "*")  -> Jagged: values [sum of lengths, *inner] and offsets [B + 1]
    regular ()            -> Tensor [B, *inner]
    json                  -> tuple of B JSON values
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.core.fields import LOSS_MASK, TOKEN_IDS, Field
from docklands.errors import DockError, RowGone, UnknownField


def torch_dtype(field: Field[Any]) -> torch.dtype:
    """The torch dtype of a non-json field."""
    return getattr(torch, field.dtype)


@dataclass(frozen=True, slots=True)
class Jagged:
    """Rows of unequal length end to end: row i is values[offsets[i]:offsets[i + 1]]."""

    values: Tensor
    offsets: np.ndarray

    @staticmethod
    def of(
        rows: Sequence[Tensor | np.ndarray | Sequence[Any]], dtype: torch.dtype, inner: tuple[int, ...] = ()
    ) -> Jagged:
        """Pack `rows`; each is [length, *inner] (an empty row may leave out the inner dimensions)."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        for i, row in enumerate(tensors):
            if row.dim() == 0 or (tuple(row.shape[1:]) != inner and row.numel()):
                raise DockError(
                    f"row {i} has shape {tuple(row.shape)}, expected [length{''.join(f', {n}' for n in inner)}]"
                )
        tensors = [row.reshape(len(row) if row.numel() else 0, *inner) for row in tensors]
        lengths = [len(t) for t in tensors]
        values = torch.cat(tensors) if tensors else torch.empty((0, *inner), dtype=dtype)
        return Jagged(values, offsets_of(lengths))

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row, int64 [B]."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tensor:
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def select(self, rows: np.ndarray) -> Jagged:
        """The given rows, in the given order."""
        if len(rows) and rows[0] >= 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            first, last = int(rows[0]), int(rows[-1]) + 1
            start, stop = int(self.offsets[first]), int(self.offsets[last])
            return Jagged(self.values[start:stop], self.offsets[first : last + 1] - start)
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        index = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Jagged(self.values[torch.from_numpy(index)], offsets)


Column = Jagged | Tensor | tuple[Any, ...]


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Exclusive prefix sum with the total at the end, int64 [B + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def make_column(field: Field[Any], value: Any, rows: int) -> Column:
    """Check and convert `value` to the column type of `field`; errors name the field and both shapes."""
    if field.is_json:
        column: Column = tuple(value)
    elif field.is_ragged:
        column = value if isinstance(value, Jagged) else ragged(field, value)
        if column.values.dtype != torch_dtype(field) or tuple(column.values.shape[1:]) != field.inner_shape:
            raise DockError(
                f"column {field.name}: got {column.values.dtype} with inner shape {tuple(column.values.shape[1:])}, "
                f"declared {field!r}"
            )
        if int(column.offsets[-1]) != len(column.values):
            raise DockError(
                f"column {field.name}: offsets end at {column.offsets[-1]}, there are {len(column.values)} values"
            )
    else:
        column = torch.as_tensor(value, dtype=torch_dtype(field))
        if rows == 0 and column.numel() == 0:
            column = column.reshape(0, *field.inner_shape)
        if tuple(column.shape[1:]) != field.inner_shape:
            raise DockError(f"column {field.name}: got shape {tuple(column.shape)}, declared {field!r}")
    if len(column) != rows:
        raise DockError(f"column {field.name}: {len(column)} entries for {rows} rows")
    return column


def ragged(field: Field[Any], rows: Sequence[Any]) -> Jagged:
    """Rows of plain values as the field's column."""
    try:
        return Jagged.of(rows, torch_dtype(field), field.inner_shape)
    except DockError as error:
        raise DockError(f"column {field.name}: {error.message}, declared {field!r}") from None


class Batch:
    """Some rows of the table. Immutable: every change gives a new batch that shares the old one's storage."""

    __slots__ = ("row_ids", "_columns", "__dict__")

    def __init__(self, row_ids: Sequence[int] | np.ndarray, columns: Mapping[Field[Any], Any]) -> None:
        ids = np.asarray(row_ids, np.int64).copy()
        ids.setflags(write=False)
        self.row_ids = ids
        self._columns = {field: make_column(field, value, len(ids)) for field, value in columns.items()}
        self._check_alignment()

    @classmethod
    def made(cls, row_ids: np.ndarray, columns: Mapping[Field[Any], Column]) -> Batch:
        """As Batch(...), of int64 ids and columns that are known to be what their fields say, an entry for each row."""
        batch = cls.__new__(cls)
        batch.row_ids = row_ids.copy()
        batch.row_ids.setflags(write=False)
        batch._columns = dict(columns)
        batch._check_alignment()
        return batch

    def _check_alignment(self) -> None:
        first: tuple[Field[Any], Jagged] | None = None
        for field, column in self._columns.items():
            if not field.is_token or not isinstance(column, Jagged):
                continue
            if first is None:
                first = field, column
                continue
            of, reference = first
            if column.offsets is not reference.offsets and not np.array_equal(column.lengths, reference.lengths):
                row = int(np.nonzero(column.lengths != reference.lengths)[0][0])
                raise DockError(
                    f"column {field.name} has {column.lengths[row]} tokens in row {self.row_ids[row]}, "
                    f"{of.name} has {reference.lengths[row]}",
                    "every token column has the length of token_ids",
                )

    def __len__(self) -> int:
        return len(self.row_ids)

    def __contains__(self, field: Field[Any]) -> bool:
        return field in self._columns

    def __getitem__(self, field: Field[Any]) -> Any:
        """Jagged, Tensor [B, ...] or tuple, as the field's dims say."""
        try:
            return self._columns[field]
        except KeyError:
            have = ", ".join(sorted(f.name for f in self._columns)) or "none"
            raise UnknownField(f"batch has no column {field.name}", f"it has: {have}") from None

    @property
    def fields(self) -> tuple[Field[Any], ...]:
        return tuple(self._columns)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [B]."""
        for field, column in self._columns.items():
            if field.is_token and isinstance(column, Jagged):
                return column.lengths
        raise UnknownField("batch has no token column", "read token_ids to know the lengths")

    @property
    def num_tokens(self) -> int:
        """T: tokens of all rows."""
        return int(self.lengths.sum())

    @property
    def num_trained_tokens(self) -> int:
        """Tokens under the loss mask."""
        return int(self[LOSS_MASK].values.sum())

    def select(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """Rows by position (int indices or a bool mask), in the given order."""
        index = np.asarray(rows)
        index = np.nonzero(index)[0] if index.dtype == bool else index.astype(np.int64)
        columns: dict[Field[Any], Any] = {}
        for field, column in self._columns.items():
            if isinstance(column, Jagged):
                columns[field] = column.select(index)
            elif isinstance(column, Tensor):
                columns[field] = column[torch.from_numpy(index)]
            else:
                columns[field] = tuple(column[i] for i in index)
        return Batch(self.row_ids[index], columns)

    def by_id(self, row_ids: Sequence[int] | np.ndarray) -> Batch:
        """Rows by id, in the given order; RowGone if one is not here."""
        where = {int(row): i for i, row in enumerate(self.row_ids)}
        missing = [int(row) for row in row_ids if int(row) not in where]
        if missing:
            raise RowGone(f"rows {missing[:8]} are not in the batch")
        return self.select(np.array([where[int(row)] for row in row_ids], np.int64))

    def with_(self, columns: Mapping[Field[Any], Any]) -> Batch:
        """The same rows with columns added or replaced."""
        return Batch(self.row_ids, {**self._columns, **columns})

    def only(self, fields: Sequence[Field[Any]]) -> Batch:
        """The same rows with only these columns."""
        return Batch(self.row_ids, {field: self[field] for field in fields})

    def split_by_samples(self, samples: int) -> list[Batch]:
        """Consecutive pieces of at most `samples` rows."""
        return [self.select(np.arange(i, min(i + samples, len(self)))) for i in range(0, len(self), samples)]

    def minibatches(self, *, samples: int | None = None, max_tokens: int | None = None) -> list[Batch]:
        """Consecutive pieces by samples, or by a token budget that is never exceeded."""
        if samples is not None:
            return self.split_by_samples(samples)
        if max_tokens is None:
            return [self]
        return [self.select(np.array(rows)) for rows in fill_to_cap(self.lengths, max_tokens)]

    def pack(self) -> Packed:
        """All rows end to end: token columns become [T]."""
        return Packed(self)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all batches; they must have the same columns."""
        if not batches:
            raise DockError("concat of no batches")
        fields = batches[0].fields
        for batch in batches:
            if set(batch.fields) != set(fields):
                odd = ", ".join(sorted(f.name for f in set(batch.fields) ^ set(fields)))
                raise DockError(f"concat needs the same columns in every batch; these are not in all: {odd}")
        columns: dict[Field[Any], Any] = {}
        for field in fields:
            parts = [batch[field] for batch in batches]
            if isinstance(parts[0], Jagged):
                lengths = np.concatenate([part.lengths for part in parts])
                columns[field] = Jagged(torch.cat([part.values for part in parts]), offsets_of(lengths))
            elif isinstance(parts[0], Tensor):
                columns[field] = torch.cat(parts)
            else:
                columns[field] = tuple(value for part in parts for value in part)
        return Batch(np.concatenate([batch.row_ids for batch in batches]), columns)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows; {', '.join(repr(f) for f in self._columns)})"


def fill_to_cap(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> list[list[int]]:
    """Consecutive rows in bins of at most `max_tokens` tokens; one row over the cap is an error."""
    bins: list[list[int]] = []
    room = -1
    for row, length in enumerate(int(n) for n in lengths):
        if length > max_tokens:
            raise DockError(
                f"row {row} has {length} tokens, the budget is {max_tokens} tokens",
                "raise train.tokens_per_microbatch or lower the length limits",
            )
        if length > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(row)
        room -= length
    return bins


class Packed:
    """A batch with its rows end to end. Token columns [T], sample columns [B], nothing padded."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    @cached_property
    def seqlens(self) -> list[int]:
        """Length of each row as Python ints."""
        return [int(n) for n in self.batch.lengths]

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """Cumulative lengths with a leading 0, int64 [B + 1]."""
        return offsets_of(self.seqlens)

    @cached_property
    def token_ids_T(self) -> Tensor:
        """int64 [T]"""
        return self.batch[TOKEN_IDS].values.long()

    @cached_property
    def loss_mask_T(self) -> Tensor:
        """bool [T]; the first token of a row never trains: nothing precedes it."""
        return self.batch[LOSS_MASK].values

    @cached_property
    def positions_T(self) -> Tensor:
        """Position of each token in its row, int64 [T]."""
        return torch.arange(self.num_tokens) - torch.from_numpy(np.repeat(self.cu_seqlens[:-1], self.seqlens))

    @cached_property
    def row_T(self) -> Tensor:
        """Which row each token belongs to, int64 [T] in 0..B-1."""
        return torch.from_numpy(np.repeat(np.arange(len(self.batch)), self.seqlens))

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    def __len__(self) -> int:
        return len(self.batch)

    def __contains__(self, field: Field[Any]) -> bool:
        return field in self.batch

    def __getitem__(self, field: Field[Any]) -> Tensor:
        """Token fields as [T, ...], sample fields as [B, ...]."""
        column = self.batch[field]
        return column.values if isinstance(column, Jagged) else column

    def per_token(self, field: Field[Any]) -> Tensor:
        """A sample field spread over its row's tokens, [T]; a token field as it is."""
        value = self[field]
        return value if field.is_token else value[self.row_T]

    def sum_rows(self, value_T: Tensor) -> Tensor:
        """Sum over each row's tokens, [B]."""
        return torch.zeros(len(self), dtype=value_T.dtype, device=value_T.device).index_add_(
            0, self.row_T.to(value_T.device), value_T
        )

    def unpack(self, value_T: Tensor) -> Jagged:
        """[T, ...] back to one entry per row."""
        return Jagged(value_T, self.cu_seqlens)
