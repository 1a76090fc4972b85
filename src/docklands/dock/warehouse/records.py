"""A warehouse's state as records: for its log, its snapshots, and back (the file format is in wal.py); its counts.

A record is a call as a client would send it, with every value inline; replaying it is answering it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse import wal
from docklands.dock.wire.format import CALL, Buffer, Part, encode_parts, int64s
from docklands.errors import CheckpointError, DockError, WireError

if TYPE_CHECKING:
    from docklands.dock.warehouse.store import Store, WarehouseOptions

COMPACT = 64 << 20
"""Bytes of a log that are never worth a compaction."""


def record_put(store: Store, message: m.Put, row_ids: np.ndarray, parts: Sequence[Part]) -> None:
    """A put that is about to be stored: into the log, and to the second warehouse."""
    if store.log is None and store.forward is None:
        return
    inline = [Part(part.meta, part.lengths, [(values, None) for values, _ in part.pieces]) for part in parts]
    meta, buffers = encode_parts(row_ids, inline)
    said = m.Put(meta, message.birth, message.stage, message.lease, lives=message.lives)
    frames = [m.CALLS.pack(CALL, store.seq + 1, said), *buffers]
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
    slots = slots[np.lexsort((births["sample"][slots], births["life"][slots], births["order"][slots]))]
    ids = births["row_id"][slots]
    for start, stop in edges(births["order"][slots], births["life"][slots]):
        at, row_ids = slots[start], ids[start:stop]
        order, group_id, at_place, life = (int(births[name][at]) for name in ("order", "group_id", "place", "life"))
        birth = m.Birth(order, group_id, at_place, births["sample"][slots[start:stop]].tolist(), life)
        meta, buffers = encode_parts(row_ids, [])
        yield [m.CALLS.pack(CALL, store.seq, m.Put(meta, birth)), *buffers]
        for name in store.fields:
            found = store.warehouse.find(row_ids)
            has = store.warehouse.has(name, found)
            if has.any():
                meta, buffers = encode_parts(row_ids[has], [store.part(name, found[has], local=False)])
                lives = [life] * int(has.sum()) if life else []
                yield [m.CALLS.pack(CALL, store.seq, m.Put(meta, lives=lives)), *buffers]


def replay(store: Store, path: Path, mend: bool, place: int | None = None) -> None:
    """Do everything that a file of records says. Raises CheckpointError when it does not fit this warehouse.

    place  that its rows are of from now on; None: as it says
    """
    last = 0
    for header, *frames in wal.read(path, mend):
        try:
            _, last, message = m.CALLS.unpack(header)
        except WireError as error:
            raise CheckpointError(f"{path} is not of this version: {error.message}") from None
        if place is not None and isinstance(message, m.Put) and message.birth is not None:
            message.birth.place = place  # before it is answered: a second warehouse is told what is answered
        reply, _ = store.answer(b"", message, frames)
        if isinstance(reply, m.Failure | m.Full):
            why = reply.message if isinstance(reply, m.Failure) else f"it needs {reply.nbytes} bytes more"
            raise CheckpointError(
                f"{path} does not fit warehouse {store.options.place}: {why}",
                "resume with the columns and the capacity that the run was started with",
            )
    store.seq = last
    store.outbox.clear()
    store.ended.clear()
    store.figures.clear()


def inventory(store: Store, place: int = -1) -> tuple[m.Inventoried, list[Buffer]]:
    """Rows, their admission, their lengths and lives, and which columns they have."""
    births = store.births
    slots = births.slots if place < 0 else births.slots[births["place"][births.slots] == place]
    row_ids = births["row_id"][slots]
    told = ("order", "group_id", "place", "sample", "length", "life")
    table = np.concatenate([row_ids, *(births[name][slots] for name in told)])
    have = [np.isin(row_ids, ids).astype(np.uint8) for ids in store.warehouse.inventory().values()]
    reply = m.Inventoried(len(row_ids), list(store.fields), store.seq, list(store.over))
    return reply, [table.data, *(column.data for column in have)]


def outdated(store: Store, reply: m.Inventoried, frames: Sequence[Buffer]) -> np.ndarray:
    """Rows of this warehouse's places in another one's inventory that are not here, or not of the same admission."""
    table, births = int64s(frames[0], 7 * reply.rows).reshape(7, reply.rows), store.births
    slots = births.find(table[0])
    same = (slots >= 0) & (births["order"][slots] == table[1]) & (births["life"][slots] == table[6])
    mine = np.isin(table[3], [store.options.place, *np.unique(births["place"][births.slots])])
    return table[0][mine & ~same]


def snapshot_file(options: WarehouseOptions, path: str) -> Path:
    """The file of a snapshot, in the folder. Raises DockError for one outside of it, and for the name of a log."""
    found, log = inside(options.folder, path), Path(options.log).resolve()
    if options.log and found.parent == log.parent and found.stem == log.stem:
        raise DockError(f"snapshot {path!r} would replace a warehouse's log", "choose another name")
    return found


def inside(root: str, path: str) -> Path:
    """The file of that name in the folder; DockError for one outside of it."""
    folder = Path(root).resolve()
    found = (folder / path).resolve() if "\0" not in path else folder
    if folder not in found.parents:
        raise DockError(f"snapshot {path!r} is not in the folder {folder}", "name a file inside of it")
    return found


def restore(store: Store, paths: list[Path]) -> m.Done:
    """Read snapshots. Raises CheckpointError if there is something here already, unless it is of this very call."""
    if len(store.warehouse) and store.restored == paths:  # said again after its answer was lost
        return m.Done(len(store.warehouse), store.seq)
    if len(store.warehouse):
        raise CheckpointError(f"warehouse {store.options.place} holds rows", "restore into an empty one")
    log, store.log = store.log, None
    try:
        for path in paths:
            replay(store, path, mend=False, place=store.options.place)
    finally:
        store.log = log
    if log is not None:
        log.replace(records(store))
    store.restored = paths
    return m.Done(len(store.warehouse), store.seq)


def edges(*values: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each run in which all of the arrays [B] stay as they are."""
    orders = values[0]
    cuts = (np.nonzero(np.any([value[1:] != value[:-1] for value in values], 0))[0] + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(orders)])) if len(orders) else []


def check_birth(birth: m.Birth, rows: int) -> None:
    """WireError when an admission does not fit the rows that it comes with."""
    if birth.samples and len(birth.samples) != rows:
        raise WireError(f"malformed message: {len(birth.samples)} sample indices for {rows} rows")
    groups, ids = (len(n) if isinstance(n, list) else 1 for n in (birth.order, birth.group_id))
    if not groups or ids != groups or rows % groups:
        raise WireError(f"malformed message: admission of {rows} rows in {groups} groups")


def near(parts: Sequence[Part]) -> bool:
    """What was put came through shared memory, so its producer is on this node."""
    return any(home is not None for part in parts for _, home in part.pieces)


def traffic(store: Store, calls: str, direction: str, stage: str, nbytes: int, here: bool = False) -> None:
    """Count a call and its bytes, in all and for its stage. here: the bytes are of a producer on this node."""
    store.count(calls)
    store.count(direction, nbytes)
    if here:
        store.count("bytes_near", nbytes)
    if stage in store.stages:
        store.count(f"{stage}/{calls}")
        store.count(f"{stage}/{direction}", nbytes)
        if here:
            store.count(f"{stage}/bytes_near", nbytes)
