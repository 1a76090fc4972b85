"""The wire format: one message = [header, (index, value buffers...)], no pickle, no copy of a value.

header   12 bytes (magic, version, kind, call number) and one msgpack struct (messages.py beside the servers)
index    only beside a batch: one int64 frame = row ids [B], then the lengths [B] of each ragged column, then one line
         per piece: (column, arena or -1, generation, offset, nbytes)
values   raw bytes of the pieces whose arena is -1, one frame each, in the order of their lines. The bytes of the other
         pieces lie in a shared arena (arena.py) and are not sent at all.

A column is the concatenation of its pieces. JSON cells travel and are stored as msgpack text in a ragged uint8 column,
so a warehouse never parses them. Lengths are sent, not offsets: offsets made of checked lengths are in order and in
range by construction. Everything received is checked before a tensor is made of it; whatever is wrong raises WireError.

Legend: B rows, P pieces.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from docklands.core.batch import Batch, Column, Jagged, offsets_of
from docklands.core.fields import DTYPES, Field
from docklands.dock.rules.messages import Home
from docklands.errors import DockError, WireError

MAGIC, VERSION = b"DK", 1
CALL, REPLY, PUSH = 0, 1, 2
PREFIX = struct.Struct("<2sBBQ")
INLINE = -1
PIECE = 5
"""Numbers in the index line of a piece."""

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a numpy array, a ZeroMQ frame's buffer."""
M = TypeVar("M")


@dataclass(frozen=True)
class Limits:
    """What a message may be at most, so that a bad one costs little before it is refused.

    nbytes  bytes of all frames of a message, and of all bytes that it refers to
    """

    nbytes: int = 1 << 30
    rows: int = 1 << 20
    columns: int = 256
    pieces: int = 1 << 16


LIMITS = Limits()


class ColumnMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A column: dims is "" (one value per row), "T" or "*" (ragged), inner the trailing dimensions."""

    name: str
    dtype: str
    dims: str
    inner: tuple[int, ...] = ()

    @property
    def ragged(self) -> bool:
        return bool(self.dims) or self.dtype == "json"


class BatchMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the index and value frames hold."""

    rows: int
    columns: list[ColumnMeta]
    pieces: int


@dataclass(frozen=True)
class Part:
    """One column as raw bytes.

    lengths  int64 [B] for ragged columns (bytes of each cell for JSON), else None
    pieces   (bytes as a uint8 tensor, its home in shared memory or None); their concatenation is the column
    """

    meta: ColumnMeta
    lengths: np.ndarray | None
    pieces: list[tuple[Tensor, Home | None]]


# --- header --------------------------------------------------------------------------------------------------------


class Codec:
    """Headers whose struct is one of `kinds`, a union of tagged msgspec structs."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._encoder = msgspec.msgpack.Encoder()

    def pack(self, kind: int, call: int, message: msgspec.Struct) -> bytes:
        """The header frame."""
        return PREFIX.pack(MAGIC, VERSION, kind, call) + self._encoder.encode(message)

    def unpack(self, frame: Buffer) -> tuple[int, int, Any]:
        """(kind, call number, struct) of a header frame."""
        kind, call = prefix(frame)
        try:
            return kind, call, self._decoder.decode(memoryview(frame)[PREFIX.size :])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"malformed message: {error}", "both ends must run the same version") from None


def prefix(frame: Buffer) -> tuple[int, int]:
    """(kind, call number) of a header frame, without looking at the struct."""
    if memoryview(frame).nbytes < PREFIX.size:
        raise WireError(f"malformed message: a header of {memoryview(frame).nbytes} bytes")
    magic, version, kind, call = PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise WireError("malformed message: it does not begin as a message of the dock")
    if version != VERSION:
        raise WireError(
            f"message of wire version {version}, this process speaks {VERSION}", "run one version on all nodes"
        )
    if kind not in (CALL, REPLY, PUSH):
        raise WireError(f"malformed message: kind {kind}")
    return kind, call


def renumbered(header: Buffer, kind: int, call: int) -> bytes:
    """The same header under another call number."""
    return PREFIX.pack(MAGIC, VERSION, kind, call) + bytes(memoryview(header)[PREFIX.size :])


def check_size(frames: Sequence[Buffer], limits: Limits = LIMITS) -> None:
    """WireError when the frames are together larger than a message may be."""
    if len(frames) > limits.pieces + 2:
        raise WireError(f"message of {len(frames)} frames, at most {limits.pieces + 2} are allowed")
    nbytes = sum(memoryview(frame).nbytes for frame in frames)
    if nbytes > limits.nbytes:
        raise WireError(
            f"message of {nbytes} bytes, at most {limits.nbytes} are allowed", "put or fetch fewer rows at once"
        )


# --- a batch to parts, and back ------------------------------------------------------------------------------------


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes as uint8 [nbytes]; a view where it is contiguous and in host memory."""
    if tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    return (tensor if tensor.dim() == 1 else tensor.reshape(-1)).view(torch.uint8)


def parts_of(batch: Batch) -> list[Part]:
    """A batch's columns as raw bytes. Raises DockError when a JSON cell is not JSON."""
    parts = []
    for field in batch.fields:
        column = batch[field]
        meta = column_meta(field)
        if isinstance(column, Jagged):
            parts.append(Part(meta, column.lengths, [(raw(column.values), None)]))
        elif isinstance(column, Tensor):
            parts.append(Part(meta, None, [(raw(column), None)]))
        else:
            cells = json_cells(field, column)
            text = torch.frombuffer(bytearray().join(cells), dtype=torch.uint8) if any(cells) else empty_bytes()
            parts.append(Part(meta, np.array([len(cell) for cell in cells], np.int64), [(text, None)]))
    return parts


@lru_cache(maxsize=4096)
def column_meta(field: Field[Any]) -> ColumnMeta:
    """How a field is named on the wire."""
    return ColumnMeta(field.name, field.dtype, str(field.dims[0]) if field.is_ragged else "", field.inner_shape)


@lru_cache(maxsize=4096)
def field_of(meta: ColumnMeta) -> Field[Any]:
    """The field that a column's meta describes; WireError when there can be none."""
    dims = (meta.dims, *meta.inner) if meta.dims else meta.inner
    if not 0 < len(meta.name) <= 128 or meta.dtype not in DTYPES or meta.dims not in ("", "T", "*"):
        raise WireError(f"malformed message: column {meta.name[:40]!r} of dtype {meta.dtype[:40]!r}")
    if meta.dtype == "json" and dims:
        raise WireError(f"malformed message: JSON column {meta.name!r} with dims")
    if len(meta.inner) > 8 or any(n < 0 for n in meta.inner) or math.prod(max(n, 1) for n in meta.inner) >= 1 << 31:
        raise WireError(f"malformed message: column {meta.name!r} with inner shape {meta.inner[:9]}")
    return Field(meta.name, meta.dtype, dims)


def json_cells(field: Field[Any], values: Sequence[Any]) -> list[bytes]:
    """Each value as msgpack; one object that stands in several cells is encoded once."""
    done: dict[int, bytes] = {}
    for value in values:
        if id(value) not in done:
            try:
                done[id(value)] = msgspec.msgpack.encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise DockError(f"column {field.name}: a value is not JSON: {error}") from None
    return [done[id(value)] for value in values]


def json_values(name: str, cells: Jagged) -> tuple[Any, ...]:
    """The values of a JSON column; equal neighbours (a prompt's samples) are decoded once and shared."""
    text = cells.values.numpy().data
    at = cells.offsets.tolist()
    values: list[Any] = []
    last, value = memoryview(b""), None
    for start, stop in zip(at, at[1:]):
        cell = text[start:stop]
        if cell != last or not values:
            try:
                last, value = cell, msgspec.msgpack.decode(cell)
            except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
                raise WireError(f"malformed message: a cell of column {name}: {error}") from None
        values.append(value)
    return tuple(values)


@lru_cache(maxsize=64)
def itemsize(dtype: str) -> int:
    """Bytes of a value; of JSON, of a byte of its text."""
    return 1 if dtype == "json" else getattr(torch, dtype).itemsize


def empty_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def typed(values: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Raw bytes as a tensor; a view unless the bytes are not aligned for the dtype."""
    kind = getattr(torch, dtype)
    if not values.numel():
        return torch.empty(shape, dtype=kind)
    if values.data_ptr() % kind.itemsize:
        values = values.clone()
    return values.view(kind) if len(shape) == 1 else values.view(kind).reshape(shape)


def column_of(part: Part, rows: int, offsets: np.ndarray | None = None) -> Column:
    """A checked part as a column; JSON stays text, a ragged uint8 column. A view if there is one piece."""
    dtype, inner = ("uint8", ()) if part.meta.dtype == "json" else (part.meta.dtype, part.meta.inner)
    pieces = [values for values, _ in part.pieces]
    values = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else empty_bytes()
    if part.lengths is None:
        return typed(values, dtype, (rows, *inner))
    offsets = offsets_of(part.lengths) if offsets is None else offsets
    return Jagged(typed(values, dtype, (int(offsets[-1]), *inner)), offsets)


def batch_of(row_ids: np.ndarray, parts: Sequence[Part], fields: Mapping[str, Field[Any]] | None = None) -> Batch:
    """Parts as a batch; `fields` gives the declared fields by name, else they are made from the message."""
    columns: dict[Field[Any], Any] = {}
    lengths = offsets = None
    for part in parts:
        field = fields[part.meta.name] if fields else field_of(part.meta)
        same = lengths is not None and part.lengths is not None and np.array_equal(lengths, part.lengths)
        column = column_of(part, len(row_ids), offsets if same else None)
        if isinstance(column, Jagged) and not same:
            lengths, offsets = part.lengths, column.offsets
        columns[field] = json_values(field.name, column) if field.is_json and isinstance(column, Jagged) else column
    try:
        return Batch.made(row_ids, columns)
    except DockError as error:
        raise WireError(f"malformed message: {error.message}", error.hint) from None


# --- parts to frames, and back -------------------------------------------------------------------------------------


def encode_parts(
    row_ids: np.ndarray, parts: Sequence[Part], place: Callable[..., Home | None] | None = None
) -> tuple[BatchMeta, list[Buffer]]:
    """(meta for the header, [index, value buffers...]); `place` may move a column to a home, as one piece."""
    lines: list[int] = []
    buffers: list[Buffer] = []
    for number, part in enumerate(parts):
        pieces = [piece for piece in part.pieces if piece[0].numel()]
        if place and pieces and (found := place(*(values for values, _ in pieces))) is not None:
            lines += (number, *found, sum(values.numel() for values, _ in pieces))
            continue
        for values, home in pieces:
            lines += (number, *(home or (INLINE, 0, 0)), values.numel())
            if home is None:
                buffers.append(values.numpy().data)
    lengths = (part.lengths for part in parts if part.lengths is not None)
    joined = np.concatenate([row_ids, *lengths, lines], dtype=np.int64, casting="unsafe")
    return BatchMeta(len(row_ids), [part.meta for part in parts], len(lines) // PIECE), [joined.data, *buffers]


def encode_batch(batch: Batch, place: Callable[..., Home | None] | None = None) -> tuple[BatchMeta, list[Buffer]]:
    """(meta for the header, [index, value buffers...]) of a batch. No value is copied."""
    return encode_parts(batch.row_ids, parts_of(batch), place)


def decode_parts(
    meta: BatchMeta,
    frames: Sequence[Buffer],
    limits: Limits = LIMITS,
    find: Callable[[Home, int], Tensor] | None = None,
) -> tuple[np.ndarray, list[Part]]:
    """(row ids [B], parts whose pieces are views of the frames), all checked.

    `find` gives the bytes of a piece in shared memory and raises WireError for a reference that is not valid.
    """
    _check_meta(meta, limits)
    if not frames:
        raise WireError("malformed message: a batch without its index")
    ragged = sum(column.ragged for column in meta.columns)
    index = int64s(frames[0], meta.rows * (1 + ragged) + PIECE * meta.pieces)
    table = index[: meta.rows * (1 + ragged)].reshape(1 + ragged, meta.rows)
    lines = index[meta.rows * (1 + ragged) :].reshape(meta.pieces, PIECE)
    pieces = _pieces(lines.tolist(), len(meta.columns), frames[1:], find)
    if sum(values.numel() for held in pieces for values, _ in held) > limits.nbytes:
        raise WireError(f"message refers to more than {limits.nbytes} bytes", "put or fetch fewer rows at once")
    lengths = iter(table[1:])
    parts = []
    for column, held in zip(meta.columns, pieces):
        part = Part(column, next(lengths) if column.ragged else None, held)
        _check_part(part, meta.rows)
        parts.append(part)
    return table[0], parts


def decode_batch(meta: BatchMeta, frames: Sequence[Buffer], limits: Limits = LIMITS) -> Batch:
    """A batch of views into the frames. Raises WireError for anything that is not one."""
    row_ids, parts = decode_parts(meta, frames, limits)
    return batch_of(row_ids, parts)


def int64s(frame: Buffer, count: int) -> np.ndarray:
    """A frame of exactly `count` int64 values as an array of its own."""
    if memoryview(frame).nbytes != 8 * count:
        raise WireError(f"malformed message: an index of {memoryview(frame).nbytes} bytes, expected {8 * count}")
    return np.frombuffer(frame, np.int64).copy()


def _check_meta(meta: BatchMeta, limits: Limits) -> None:
    for name, value, most in (
        ("rows", meta.rows, limits.rows),
        ("columns", len(meta.columns), limits.columns),
        ("pieces", meta.pieces, limits.pieces),
    ):
        if not 0 <= value <= most:
            raise WireError(f"message of {value} {name}, at most {most} are allowed")
    for column in meta.columns:
        field_of(column)
    if len({column.name for column in meta.columns}) != len(meta.columns):
        raise WireError("malformed message: a column twice")


def _pieces(
    lines: list[list[int]], columns: int, frames: Sequence[Buffer], find: Callable[[Home, int], Tensor] | None
) -> list[list[tuple[Tensor, Home | None]]]:
    """Pieces by column."""
    found: list[list[tuple[Tensor, Home | None]]] = [[] for _ in range(columns)]
    inline = iter(frames)
    last = used = 0
    for column, arena, generation, offset, nbytes in lines:
        if not last <= column < columns or nbytes <= 0 or offset < 0:
            raise WireError(f"malformed message: a piece of {nbytes} bytes at {offset} for column {column}")
        last = column
        if arena == INLINE:
            frame = next(inline, b"")
            used += 1
            if memoryview(frame).nbytes != nbytes:
                raise WireError(f"malformed message: {memoryview(frame).nbytes} bytes of values, expected {nbytes}")
            found[column].append((torch.frombuffer(frame, dtype=torch.uint8), None))
        elif find is None:
            raise WireError("malformed message: a reference to shared memory where none is shared")
        else:
            home = (arena, generation, offset)
            found[column].append((find(home, nbytes), home))
    if used != len(frames):
        raise WireError(f"malformed message: {len(frames)} value frames, {used} announced")
    return found


def _check_part(part: Part, rows: int) -> None:
    """The column's bytes are as many as its rows, lengths, dtype and inner shape say."""
    size = itemsize(part.meta.dtype)
    for n in part.meta.inner:
        size *= n
    count = rows
    if part.lengths is not None:
        if rows and part.lengths.view(np.uint64).max() >= 1 << 42:  # a negative one is a very large one
            raise WireError(f"malformed message: column {part.meta.name!r} has impossible lengths")
        count = int(part.lengths.sum())
    nbytes = sum(values.numel() for values, _ in part.pieces)
    if count * size != nbytes:
        raise WireError(f"malformed message: column {part.meta.name!r} has {nbytes} bytes, expected {count * size}")
    if count >= 1 << 42:
        raise WireError(f"malformed message: column {part.meta.name!r} has impossible lengths")
