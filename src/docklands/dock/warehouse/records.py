"""A warehouse's state as records: for its log, its snapshots, and back (the file format is in wal.py).

A record is a call as a client would send it, with every value inline; replaying it is answering it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse import wal
from docklands.dock.wire.format import CALL, Buffer, Part, encode_parts
from docklands.errors import CheckpointError, WireError

if TYPE_CHECKING:
    from docklands.dock.warehouse.store import Store

COMPACT = 64 << 20
"""Bytes of a log that are never worth a compaction."""


def record_put(store: Store, message: m.Put, row_ids: np.ndarray, parts: Sequence[Part]) -> None:
    """A put that is about to be stored: into the log, and to the second warehouse."""
    if store.log is None and store.forward is None:
        return
    inline = [Part(part.meta, part.lengths, [(values, None) for values, _ in part.pieces]) for part in parts]
    meta, buffers = encode_parts(row_ids, inline)
    frames = [m.CALLS.pack(CALL, store.seq + 1, m.Put(meta, message.birth, message.stage)), *buffers]
    if store.log is not None:
        store.log.append(frames)
    if store.forward is not None:
        store.forward(frames)


def record_free(store: Store, row_ids: np.ndarray) -> None:
    """Rows that are gone; the log is written anew when most of it is about such rows."""
    if not len(row_ids):
        return
    frames = [m.CALLS.pack(CALL, store.seq, m.Free()), row_ids.data]
    if store.forward is not None:
        store.forward(frames)
    if store.log is not None:
        store.log.append(frames)
        if store.log.nbytes > COMPACT + 2 * (store.warehouse.nbytes + store.warehouse.spilled_bytes):
            store.log.replace(records(store))
            store.count("compactions")


def records(store: Store, place: int = -1) -> Iterator[list[Buffer]]:
    """Everything that is here (of that place, if it is not negative): per group its admission, then its columns."""
    births = store.births
    slots = births.slots if place < 0 else births.slots[births["place"][births.slots] == place]
    slots = slots[np.lexsort((births["sample"][slots], births["order"][slots]))]
    ids = births["row_id"][slots]
    for start, stop in edges(births["order"][slots]):
        at, row_ids = slots[start], ids[start:stop]
        order, group_id, at_place = (int(births[name][at]) for name in ("order", "group_id", "place"))
        birth = m.Birth(order, group_id, at_place, births["sample"][slots[start:stop]].tolist())
        meta, buffers = encode_parts(row_ids, [])
        yield [m.CALLS.pack(CALL, store.seq, m.Put(meta, birth)), *buffers]
        for name in store.fields:
            found = store.warehouse.find(row_ids)
            has = store.warehouse.has(name, found)
            if has.any():
                meta, buffers = encode_parts(row_ids[has], [store.part(name, found[has], local=False)])
                yield [m.CALLS.pack(CALL, store.seq, m.Put(meta)), *buffers]


def replay(store: Store, path: Path, mend: bool) -> None:
    """Do everything that a file of records says. Raises CheckpointError when it does not fit this warehouse."""
    last = 0
    for header, *frames in wal.read(path, mend):
        try:
            _, last, message = m.CALLS.unpack(header)
        except WireError as error:
            raise CheckpointError(f"{path} is not of this version: {error.message}") from None
        reply, _ = store.answer(b"", message, frames)
        if isinstance(reply, m.Failure | m.Full):
            why = reply.message if isinstance(reply, m.Failure) else f"it needs {reply.nbytes} bytes more"
            raise CheckpointError(
                f"{path} does not fit warehouse {store.options.place}: {why}",
                "resume with the columns and the capacity that the run was started with",
            )
    store.seq = last
    store.outbox.clear()
    store.figures.clear()


def edges(orders: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each run of equal values."""
    cuts = (np.nonzero(np.diff(orders))[0] + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(orders)])) if len(orders) else []


def check_birth(birth: m.Birth, rows: int) -> None:
    """WireError when an admission does not fit the rows that it comes with."""
    if birth.samples and len(birth.samples) != rows:
        raise WireError(f"malformed message: {len(birth.samples)} sample indices for {rows} rows")
    groups = np.size(birth.order)
    if not groups or np.size(birth.group_id) != groups or rows % groups:
        raise WireError(f"malformed message: admission of {rows} rows in {groups} groups")
