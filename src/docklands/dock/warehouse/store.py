"""What a warehouse process does with a message: calls in, replies out, no socket and no clock.

Columns are kept as they travelled (JSON as its text), so that nothing is parsed here. A put's values stay where they
arrived: in the received frame, or in the producer's slab of the shared arena.

Legend: B rows.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from docklands.core.batch import Jagged
from docklands.core.fields import Field
from docklands.core.graph import rows_text
from docklands.dock.rules.messages import Ended, Notice
from docklands.dock.rules.table import distinct, unique_ids
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse import wal
from docklands.dock.warehouse.chunks import Warehouse, Write, piece
from docklands.dock.warehouse.lives import outlived, renew
from docklands.dock.warehouse.records import (
    check_birth,
    inside,
    inventory,
    near,
    record_free,
    record_put,
    records,
    replay,
    restore,
    snapshot_file,
    traffic,
)
from docklands.dock.warehouse.slabs import Slabs, home_of, lease_bytes
from docklands.dock.wire.format import (
    Buffer,
    ColumnMeta,
    Home,
    Limits,
    Part,
    batch_of,
    decode_parts,
    encode_parts,
    field_of,
    int64s,
    raw,
)
from docklands.errors import CheckpointError, DockError, RowGone, UnknownField, WireError

SMALL = 32 << 10
"""Pieces smaller than this on average are joined before they are sent: a frame costs more than their copy."""

OVER = 4096
"""Ended leases that are remembered: more than readers hold while a line to the control process is down."""

Reply = tuple[msgspec.Struct, list[Buffer]]


class WarehouseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a warehouse process is started with.

    columns, readers  the graph's columns, and which stages are told of each
    endpoint          tcp://ADDRESS_OR_INTERFACE:PORT (port *: any), never all interfaces; or ipc://PATH
    public_key, secret_key, allowed  CurveZMQ, Z85 text: its own pair, and the clients that may talk to it
    capacity          bytes that it holds in memory before its producers wait; 0: unbounded
    shared_bytes      bytes of its arena under /dev/shm at most; 0: no shared memory
    spill_bytes       bytes on disk for what does not fit into `capacity`; 0: producers wait instead
    folder            for the spill file and the snapshots; no call can name a file outside of it
    replica, replica_key  endpoint and public key of a second warehouse that is to have everything too; "": none
    replica_lost_s    seconds after which a second warehouse that is away is not waited for any more
    second            it is that second warehouse: a starter puts it on another node than the first
    parent            pid of a process whose end ends this one too; 0: none
    log               path of its write-ahead log; "": none. fsync: when it is brought to disk (wal.py)
    """

    place: int
    columns: list[ColumnMeta]
    readers: dict[str, list[str]] = {}
    run: str = "run"
    endpoint: str = "tcp://127.0.0.1:*"
    public_key: str = ""
    secret_key: str = ""
    allowed: list[str] = []
    capacity: int = 0
    shared_bytes: int = 1 << 30
    spill_bytes: int = 0
    folder: str = "."
    replica: str = ""
    replica_key: str = ""
    replica_lost_s: float = 10.0
    second: bool = False
    log: str = ""
    fsync: wal.Fsync = "never"
    message_bytes: int = 1 << 30
    parent: int = 0


class Store:
    """The state of one warehouse process.

    outbox    notices that have not been sent, with `seq` the number of the last put among them; ended: leases, likewise
    forward   called with every put and free, as frames with all values inline: a second warehouse's copy
    over      (stage, lease) of the last leases that a put has ended
    waiting   clients whose put found no room, the first of them when `full_at` bytes had been freed in all
    restored  snapshots that it began with
    lives     there are or were rows of a later life (lives.py)
    """

    def __init__(self, options: WarehouseOptions) -> None:
        self.options = options
        self.limits = Limits(nbytes=options.message_bytes)
        self.fields = {column.name: stored(field_of(column)) for column in options.columns}
        self.stages = {stage for stages in options.readers.values() for stage in stages}
        self.metas = {column.name: column for column in options.columns}
        self.slabs = Slabs(options.run, options.shared_bytes, options.spill_bytes, options.folder)
        self.warehouse = Warehouse(
            options.place, tuple(self.fields.values()), options.readers, options.capacity, self.slabs.release, True
        )
        self.births = self.warehouse.rows
        self.seq = 0
        self.outbox: list[Notice] = []
        self.ended: list[Ended] = []
        self.over: deque[tuple[str, int]] = deque(maxlen=OVER)
        self.waiting: set[bytes] = set()
        self.full_at = self.freed = 0
        self.lives = False
        self.restored: list[Path] = []
        self.figures: dict[str, int] = {}
        self.log: wal.Log | None = None
        self.forward: Callable[[list[Buffer]], None] | None = None

    def open_log(self) -> None:
        """Replay the log of an earlier process of this place, and go on writing it."""
        if not self.options.log:
            return
        path = Path(self.options.log)
        if path.exists():
            replay(self, path, mend=True)
        self.log = wal.Log(path, self.options.fsync)

    @property
    def capacity_left(self) -> int:
        return self.options.capacity - self.warehouse.nbytes

    def close(self) -> None:
        """Leave nothing behind but the log."""
        if self.log is not None:
            self.log.close()
        self.slabs.close()

    def answer(self, client: bytes, message: Any, frames: Sequence[Buffer]) -> Reply:
        """The reply to a call. Every DockError and CheckpointError becomes a Failure; nothing else is raised."""
        try:
            return self._answer(client, message, frames)
        except (DockError, CheckpointError) as error:
            self.count("bad_messages" if isinstance(error, WireError) else "refused_calls")
            return m.Failure(type(error).__name__, error.message, error.hint), []

    def count(self, name: str, by: int = 1) -> None:
        self.figures[name] = self.figures.get(name, 0) + by

    def _answer(self, client: bytes, message: Any, frames: Sequence[Buffer]) -> Reply:
        match message:
            case m.Put():
                if message.room is not None:
                    lease_bytes(message.room.nbytes, self.limits.nbytes)
                reply, rows = self.put(client, message, frames)
                if message.room is not None and isinstance(reply, m.Stored):
                    reply = msgspec.structs.replace(reply, slab=slab_of(self, client, message.room, spare=True))
                return reply, rows
            case m.Get():
                return self.get(message, frames)
            case m.Free():
                return self.free(row_ids_of(frames, self.limits))
            case m.Lease():
                return slab_of(self, client, message), []
            case m.Hello():
                return self.hello(client, message), []
            case m.Inventory():
                return inventory(self, message.place)
            case m.Stats():
                return m.Figures(self.stats()), []
            case m.Snapshot():
                wal.write_file(snapshot_file(self.options, message.path), records(self, message.place))
                return m.Done(len(self.warehouse), self.seq), []
            case m.Restore():
                return restore(self, [inside(self.options.folder, path) for path in message.paths]), []
        raise WireError(f"a warehouse's store does not answer {type(message).__name__}")

    # --- bytes -------------------------------------------------------------------------------------------------

    def put(self, client: bytes, message: m.Put, frames: Sequence[Buffer]) -> Reply:
        """Store columns; whole or not at all."""
        row_ids, parts = decode_parts(message.batch, frames, self.limits, self.slabs.finder(client))
        for part in parts:
            if self.metas.get(part.meta.name) != part.meta:
                raise UnknownField(f"warehouse {self.options.place} does not hold the column {part.meta}")
        if not unique_ids(row_ids):
            raise DockError(f"a put names a row twice: {rows_text(row_ids.tolist())}")
        batch = batch_of(row_ids, [as_text(part) for part in parts], self.fields)
        birth = message.birth
        if birth is not None:
            check_birth(birth, len(row_ids))
        if message.lives and len(message.lives) != len(row_ids):
            raise WireError(f"malformed message: {len(message.lives)} lives for {len(row_ids)} rows")
        slots = self.warehouse.find(row_ids)
        here = slots >= 0
        if self.lives and birth is None:
            here &= ~outlived(self.births, slots, message.lives)
        known = bool(here.all())
        gone = row_ids[:0] if known or birth is not None else row_ids[~here]
        if len(gone):
            batch, slots = batch.select(here), slots[here]
        writes = self.warehouse.plan(batch, slots)
        nbytes = sum(write.nbytes for write in writes)
        if not self._make_room(nbytes):
            self.full_at = self.full_at if self.waiting else self.freed
            self.waiting.add(client)
            self.count("full")
            return m.Full(nbytes, self.capacity_left), []
        record_put(self, message, row_ids, parts)
        if birth is not None and not known:
            slots[~here] = self._admit(row_ids, here, birth)
        if life := birth.life if birth is not None else message.lives:
            self.lives = True
            renew(self.births, slots, life if isinstance(life, int) else np.array(life, np.int64)[here])
        whole = {write.field.name for write in writes if write.positions is None} if not len(gone) else set()
        homes = {part.meta.name: home for part in parts if part.meta.name in whole and (home := home_of(part))}
        for home in homes.values():
            self.slabs.hold(home)
        ignored = self.warehouse.ignored
        writes = [write if write.field.name in homes else own(write) for write in writes]
        notices = self.warehouse.write(batch, writes, homes, slots)
        if message.lease:
            self.ended.append(Ended(message.stage, message.lease, row_ids, message.read))
            self.over.append((message.stage, message.lease))
        if writes or birth is not None or message.lease:
            self.seq += 1
            self.outbox += notices
        traffic(self, "puts", "bytes_in", message.stage, nbytes, near(parts))
        return m.Stored(self.seq, self.warehouse.ignored - ignored, len(gone)), [gone.data]

    def get(self, message: m.Get, frames: Sequence[Buffer]) -> Reply:
        """Columns of rows, in the order asked for."""
        row_ids = row_ids_of(frames, self.limits)
        unknown = [name for name in message.columns if name not in self.fields]
        if unknown:
            raise UnknownField(f"warehouse {self.options.place} does not hold the column {unknown[0]!r}")
        slots = self.warehouse.find(row_ids)
        if len(slots) and slots.min() < 0:
            raise RowGone(
                f"rows are not in warehouse {self.options.place}: {rows_text(row_ids[slots < 0].tolist())}",
                "they were retired, dropped, or never admitted",
            )
        for name in message.columns:
            has = self.warehouse.has(name, slots)
            if not has.all():
                lacking = row_ids[~has]
                raise UnknownField(
                    f"row {lacking[0]} has no {name} yet ({len(lacking)} of {len(row_ids)} rows lack it)"
                )
        parts = [self.part(name, slots, message.local) for name in message.columns]
        nbytes = sum(values.numel() for part in parts for values, _ in part.pieces)
        if nbytes > self.limits.nbytes:
            raise DockError(f"a fetch of {nbytes} bytes, at most {self.limits.nbytes} are allowed", "fetch fewer rows")
        meta, buffers = encode_parts(row_ids, parts)
        traffic(self, "gets", "bytes_out", message.stage, nbytes)
        return m.Found(meta), buffers

    def free(self, row_ids: np.ndarray) -> Reply:
        """Rows are gone; rows that are not here are passed over."""
        row_ids = distinct(row_ids)
        before, held = len(self.warehouse), self.warehouse.nbytes + self.warehouse.spilled_bytes
        self.warehouse.free(row_ids)
        self.freed += held - self.warehouse.nbytes - self.warehouse.spilled_bytes
        record_free(self, row_ids)
        return m.Done(before - len(self.warehouse), self.seq), []

    # --- looking in --------------------------------------------------------------------------------------------

    def hello(self, client: bytes, message: m.Hello) -> m.Welcome:
        """Who is here, and which arenas it may map."""
        self.slabs.bury()
        self.slabs.greet(client, message.pid, message.start)
        arenas = [m.ArenaMeta(str(arena.path), arena.nonce) for arena in self.slabs.arenas]
        return m.Welcome(self.options.place, os.getpid(), list(self.metas.values()), arenas, self.seq)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is here now."""
        now = {
            "rows": len(self.warehouse),
            "bytes": self.warehouse.nbytes,
            "spilled_bytes": self.warehouse.spilled_bytes,
            "shared_bytes": self.slabs.used,
            "ignored_cells": self.warehouse.ignored,
            "seq": self.seq,
            "log_bytes": self.log.nbytes if self.log else 0,
            "log_syncs": self.log.syncs if self.log else 0,
        }
        return {**self.figures, **now}

    # --- inside ------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> bool:
        if not self.warehouse.has_room(nbytes) and self.slabs.can_spill:
            self.warehouse.spill(nbytes, self.slabs.to_disk)
        return self.warehouse.has_room(nbytes)

    def _admit(self, row_ids: np.ndarray, here: np.ndarray, birth: m.Birth) -> np.ndarray:
        slots = self.warehouse.add(row_ids[~here])
        orders, groups = np.atleast_1d(birth.order), np.atleast_1d(birth.group_id)
        size = len(here) // len(orders)
        samples = np.array(birth.samples, np.int64) if birth.samples else np.arange(len(here)) % max(1, size)
        new = slice(None) if len(slots) == len(here) else ~here
        for name, values in (("sample", samples), ("order", orders.repeat(size)), ("group_id", groups.repeat(size))):
            self.births[name][slots] = values[new]
        self.births["place"][slots] = birth.place
        return slots

    def part(self, name: str, slots: np.ndarray, local: bool) -> Part:
        """A column of rows, by `Warehouse.find`.

        References where the reader can follow them, else bytes that nobody can recycle.
        """
        field = self.fields[name]
        lengths: list[np.ndarray] = []
        pieces: list[tuple[Tensor, Home | None]] = []
        for chunk, start, stop in self.warehouse.runs(name, slots):
            column = piece(chunk.column, start, stop)
            values = raw(column.values if isinstance(column, Jagged) else column)  # type: ignore[arg-type]
            if isinstance(column, Jagged):
                lengths.append(column.lengths)
            if chunk.home is not None and values.numel():
                arena, generation, first = chunk.home
                home = (arena, generation, first + skipped(chunk.column, start))
                pieces.append((values, home) if local else (values.clone(), None))
            else:
                pieces.append((values, None))
        inline = [values for values, home in pieces if home is None]
        if len(inline) > 1 and len(inline) == len(pieces) and sum(v.numel() for v in inline) < SMALL * len(inline):
            pieces = [(torch.cat(inline), None)]
        joined = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        return Part(self.metas[name], joined if field.is_ragged else None, pieces)


def slab_of(store: Store, client: bytes, message: m.Lease, spare: bool = False) -> m.Slab:
    """The answer to a producer that asks for room."""
    nbytes = lease_bytes(message.nbytes, store.limits.nbytes)
    extent = store.slabs.lease(client, nbytes, message.done, spare)
    return m.Slab(extent.generation, extent.offset, extent.nbytes) if extent else m.Slab(0, 0, 0)


def row_ids_of(frames: Sequence[Buffer], limits: Limits) -> np.ndarray:
    """The one frame of row ids that a call comes with."""
    if len(frames) != 1 or memoryview(frames[0]).nbytes > 8 * limits.rows:
        raise WireError("malformed message: expected one frame of row ids")
    return int64s(frames[0], memoryview(frames[0]).nbytes // 8)


def stored(field: Field[Any]) -> Field[Any]:
    """The field as a warehouse keeps it: JSON as its text."""
    return Field(field.name, "uint8", ("*",)) if field.is_json else field


def as_text(part: Part) -> Part:
    """A part as a warehouse keeps it."""
    if part.meta.dtype != "json":
        return part
    return Part(ColumnMeta(part.meta.name, "uint8", "*"), part.lengths, part.pieces)


def own(write: Write) -> Write:
    """A write that keeps no view of a slab that it does not hold, nor of a message."""
    column = write.column
    copied = Jagged(column.values.clone(), column.offsets) if isinstance(column, Jagged) else column.clone()  # type: ignore[union-attr]
    return replace(write, column=copied)


def skipped(column: Any, rows: int) -> int:
    """Bytes of a chunk's values before its row `rows`."""
    values = column.values if isinstance(column, Jagged) else column
    first = int(column.offsets[rows]) if isinstance(column, Jagged) else rows
    return first * values[:1].numel() * values.element_size()
