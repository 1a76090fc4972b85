"""A warehouse's answers, without sockets: puts, gets, frees, room, spill, log and snapshot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.warehouse_parts import BIRTH, FIELDS, make_batch, options, same

from docklands.core.batch import Batch
from docklands.core.fields import PROMPT, REWARD, TOKEN_IDS, Field
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse import wal
from docklands.dock.warehouse.arena import Extent, Mapped, SlabWriter, start_ticks
from docklands.dock.warehouse.calls import Session
from docklands.dock.warehouse.store import Store
from docklands.dock.wire.format import batch_of, decode_parts, encode_batch, parts_of
from docklands.errors import CheckpointError, RowGone

ME = b"client"
NAMED = {field.name: field for field in FIELDS}


def put(store: Store, batch: Batch, birth: m.Birth | None = None, place: Any = None) -> Any:
    meta, frames = encode_batch(batch, place)
    return store.answer(ME, m.Put(meta, birth), [bytearray(frame) for frame in frames])[0]


def get(store: Store, ids: list[int], fields: tuple[Field[Any], ...] = FIELDS) -> Any:
    reply, frames = store.answer(ME, m.Get([f.name for f in fields]), [np.array(ids, np.int64).data])
    if not isinstance(reply, m.Found):
        return reply
    return batch_of(*decode_parts(reply.batch, [bytearray(frame) for frame in frames]), NAMED)


def free(store: Store, ids: list[int]) -> Any:
    return store.answer(ME, m.Free(), [np.array(ids, np.int64).data])[0]


@pytest.fixture
def store() -> Any:
    made = Store(options())
    yield made
    made.close()


def test_rows_come_back_in_the_order_asked_for_from_any_chunks(store: Store) -> None:
    one, two = make_batch([3, 0, 5], seed=1), make_batch([2, 4], seed=2, first=3)
    assert put(store, one, BIRTH) == m.Stored(1, 0, 0)
    assert put(store, two, m.Birth(1, 8, 0)) == m.Stored(2, 0, 0)
    everything = Batch.concat([one, two])
    order = [4, 0, 2, 1, 3]
    assert same(get(store, order), everything.by_id(order))
    assert same(get(store, []), everything.select(np.array([], np.int64)))


def test_the_first_write_wins_and_rows_that_left_are_named(store: Store) -> None:
    batch = make_batch([3, 2])
    put(store, batch.only([TOKEN_IDS]), BIRTH)
    assert put(store, make_batch([3, 2], (TOKEN_IDS, REWARD), seed=9)) == m.Stored(2, 2, 0)
    assert same(get(store, [0, 1], (TOKEN_IDS,)), batch.only([TOKEN_IDS]))
    assert free(store, [0, 77]) == m.Done(1, 2)
    late = make_batch([3, 2], (Field("pair", "float32", (2,)),))
    meta, frames = encode_batch(late)
    reply, gone = store.answer(ME, m.Put(meta), frames)
    assert reply == m.Stored(3, 0, 1) and np.frombuffer(gone[0], np.int64).tolist() == [0]


def test_failures_name_what_is_wrong(store: Store) -> None:
    put(store, make_batch([1, 2], (TOKEN_IDS,)), BIRTH)
    for reply, kind, text in (
        (get(store, [5]), "RowGone", "rows are not in warehouse 0: 5"),
        (get(store, [1], (REWARD,)), "UnknownField", "row 1 has no reward yet"),
        (get(store, [1], (Field("none", "int8"),)), "UnknownField", "does not hold the column 'none'"),
        (put(store, Batch([1, 1], {REWARD: [1.0, 2.0]})), "DockError", "names a row twice"),
        (put(store, Batch([1], {Field("reward", "int8"): [1]})), "UnknownField", "does not hold the column"),
        (put(store, make_batch([7], (FIELDS[3],))), "DockError", "has 7 tokens in row 0, token_ids has 1"),
        (store.answer(ME, m.Snapshot("../../elsewhere"), [])[0], "DockError", "is not in the folder"),
    ):
        assert isinstance(reply, m.Failure) and reply.kind == kind and text in reply.message, reply


def test_notices_go_to_the_stages_that_read_a_column_with_lengths(store: Store) -> None:
    put(store, make_batch([3, 2]), BIRTH)
    found = {n.stage: (n.columns, n.row_ids.tolist(), n.lengths.tolist()) for n in store.outbox}
    assert found == {
        "rollout": (("prompt_tokens",), [0, 1], [3, 2]),
        "ref": (("token_ids",), [0, 1], [3, 2]),
        "reward": (("token_ids",), [0, 1], [3, 2]),
        "update": (("reward",), [0, 1], [3, 2]),
    }


def test_a_put_without_room_changes_nothing_until_rows_are_freed() -> None:
    store = Store(options(capacity=1000))
    try:
        put(store, make_batch([100], (TOKEN_IDS,)), BIRTH)
        second = make_batch([200], (TOKEN_IDS,), first=1)
        full = put(store, second, m.Birth(1, 8, 0))
        assert isinstance(full, m.Full) and full.free == 1000 - 408 and store.waiting == {ME}
        assert len(store.births) == 1 and isinstance(get(store, [1], (TOKEN_IDS,)), m.Failure)
        too_large = put(store, make_batch([300], (TOKEN_IDS,), first=2), m.Birth(2, 9, 0))
        assert isinstance(too_large, m.Failure) and "larger than warehouse" in too_large.message
        free(store, [0])
        assert isinstance(put(store, second, m.Birth(1, 8, 0)), m.Stored)
        assert store.warehouse.nbytes == 808
    finally:
        store.close()


def test_what_does_not_fit_is_spilled_and_served_from_disk(tmp_path: Path) -> None:
    store = Store(options(capacity=5000, spill_bytes=1 << 20, folder=str(tmp_path)))
    try:
        batches = [make_batch([100] * 3, (TOKEN_IDS, PROMPT), seed=i, first=3 * i) for i in range(8)]
        for i, batch in enumerate(batches):
            assert isinstance(put(store, batch, m.Birth(i, i, 0)), m.Stored)
        stats = store.stats()
        assert stats["bytes"] <= 5000 < stats["spilled_bytes"]
        everything = Batch.concat(batches)
        order = np.random.default_rng(0).permutation(24).tolist()
        assert same(get(store, order, (TOKEN_IDS, PROMPT)), everything.by_id(order))
        before = store.stats()
        free(store, list(range(24)))
        assert store.stats()["spilled_bytes"] == store.stats()["bytes"] == 0
        assert store.freed == before["bytes"] + before["spilled_bytes"], "room on disk wakes those who wait, too"
        assert store.slabs.arenas[1].used == 0
    finally:
        store.close()
    assert list(tmp_path.iterdir()) == []


def slab(store: Store, client: bytes = ME) -> tuple[SlabWriter, Mapped, m.Slab]:
    """A producer's slab, as a client would lease it."""
    store.answer(client, m.Hello("test", os.getpid(), start_ticks(os.getpid())), [])
    given = store.answer(client, m.Lease(1 << 20), [])[0]
    arena = store.slabs.arenas[0]
    writer = SlabWriter(str(arena.path), Extent(given.generation, given.offset, given.nbytes))
    return writer, Mapped(str(arena.path), arena.nonce), given


def test_values_in_a_slab_are_stored_and_served_by_reference_without_a_copy(store: Store) -> None:
    writer, reader, given = slab(store)
    batch = make_batch([3, 0, 5, 2])
    assert put(store, batch, BIRTH, writer.write) == m.Stored(1, 0, 0)
    reply, frames = store.answer(ME, m.Get([f.name for f in FIELDS], True), [batch.row_ids[1:3].data])
    assert len(frames) == 1, "nothing but the index"
    ids, parts = decode_parts(reply.batch, frames, find=lambda home, n: reader.view(home[1], home[2], n))
    assert same(batch_of(ids, parts, NAMED), batch.select([1, 2]))
    assert {home[1] for part in parts for _, home in part.pieces if home} == {given.generation}
    assert same(get(store, [2, 0, 3]), batch.select([2, 0, 3])), "others get bytes"


def test_a_slab_is_free_once_it_is_closed_and_its_last_row_gone(store: Store) -> None:
    writer, reader, given = slab(store)
    put(store, make_batch([3, 4]), BIRTH, writer.write)
    put(store, make_batch([3], first=5), m.Birth(1, 8, 0), writer.write)
    used = store.slabs.used
    second = store.answer(ME, m.Lease(1 << 20, [given.generation]), [])[0]
    assert store.slabs.used == 2 * used and reader.fresh(given.generation, given.offset)
    free(store, [0, 1])
    assert reader.fresh(given.generation, given.offset)
    free(store, [5])
    assert not reader.fresh(given.generation, given.offset) and store.slabs.used == used
    stale = put(store, make_batch([3], first=9), m.Birth(2, 9, 0), writer.write)
    assert isinstance(stale, m.Failure) and "not the sender's" in stale.message
    assert second.nbytes == given.nbytes


def test_rows_that_are_stored_in_part_do_not_stay_in_the_slab(store: Store) -> None:
    """The columns of a put of which some rows have left are copied: nothing holds the slab for them."""
    put(store, make_batch([0, 4], (PROMPT,)), BIRTH)
    free(store, [0])
    writer, _, given = slab(store)
    batch = make_batch([0, 4], (TOKEN_IDS,))
    assert put(store, batch, None, writer.write) == m.Stored(2, 0, 1)
    store.answer(ME, m.Lease(1 << 20, [given.generation]), [])
    again = store.answer(b"other", m.Hello("x", os.getpid(), start_ticks(os.getpid())), [])
    assert isinstance(again[0], m.Welcome)
    store.slabs.arenas[0].view(given.offset, 4096).fill_(0xEE)
    assert same(get(store, [1], (TOKEN_IDS,)), batch.select([1]))


def test_the_slabs_of_a_dead_producer_come_back(store: Store) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    store.slabs._pids[b"dead"] = (child, 1)
    extent = store.slabs.lease(b"dead", 1 << 20, [])
    assert extent is not None and store.slabs.used
    assert store.slabs.bury() == 1 and store.slabs.used == 0
    assert store.answer(b"dead", m.Lease(1 << 20), [])[0] == m.Slab(0, 0, 0), "nor does it get another one"


def test_another_producers_slab_and_bytes_outside_are_refused(store: Store) -> None:
    writer, _, given = slab(store)
    batch = make_batch([3], (TOKEN_IDS,))
    meta, frames = encode_batch(batch, writer.write)
    stolen = store.answer(b"thief", m.Put(meta, BIRTH), frames)[0]
    assert isinstance(stolen, m.Failure) and stolen.kind == "WireError"
    meta, frames = encode_batch(batch, lambda _: (0, given.generation, given.offset + given.nbytes - 4))
    outside = store.answer(ME, m.Put(meta, BIRTH), frames)[0]
    assert isinstance(outside, m.Failure) and "outside of its slab" in outside.message
    assert store.stats()["bad_messages"] == 2


# --- log and snapshot ----------------------------------------------------------------------------------------------


def opened(path: Path, **more: Any) -> Store:
    store = Store(options(log=str(path), folder=str(path.parent), shared_bytes=0, **more))
    store.open_log()
    return store


def test_a_log_brings_everything_back(tmp_path: Path) -> None:
    path, batch = tmp_path / "log", make_batch([3, 0, 5])
    store = opened(path)
    put(store, batch.only([PROMPT]), m.Birth(4, 70, 0))
    put(store, batch.only([TOKEN_IDS, REWARD]))
    put(store, make_batch([1], first=8), m.Birth(5, 80, 0))
    free(store, [1, 8])
    seq = store.seq
    store.close()
    again = opened(path)
    assert same(get(again, [2, 0], (PROMPT, TOKEN_IDS, REWARD)), batch.only([PROMPT, TOKEN_IDS, REWARD]).by_id([2, 0]))
    assert len(again.births) == 2 and again.seq == seq and not again.outbox
    slots = again.births.find(np.array([0, 2]))
    assert [again.births[n][slots].tolist() for n in ("order", "group_id", "sample")] == [[4, 4], [70, 70], [0, 2]]
    again.close()


def test_a_torn_tail_is_cut_and_damage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    store = opened(path)
    ends = []
    for i in range(4):
        put(store, make_batch([2, 2], first=2 * i), m.Birth(i, i, 0))
        ends.append(store.log.nbytes)  # type: ignore[union-attr]
    store.close()
    whole = path.read_bytes()
    for cut in (ends[2] + 1, ends[2] + 30, ends[3] - 1):
        path.write_bytes(whole[:cut])
        again = opened(path)
        assert len(again.births) == 6 and path.stat().st_size == ends[2]
        again.close()
    damaged = bytearray(whole)
    damaged[ends[1] + 40] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f"damaged at byte {ends[1]}"):
        opened(path)


def test_a_log_is_compacted_when_rows_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docklands.dock.warehouse.records.COMPACT", 10_000)
    store = opened(tmp_path / "log")
    kept = make_batch([50, 60], first=10_000)
    put(store, kept, m.Birth(0, 99, 0))
    for i in range(1, 60):
        put(store, make_batch([40], first=i), m.Birth(i, i, 0))
        free(store, [i])
    assert store.stats()["compactions"] >= 1 and (tmp_path / "log").stat().st_size < 40_000
    store.close()
    again = opened(tmp_path / "log")
    assert len(again.births) == 2 and same(get(again, [10_000, 10_001]), kept)
    again.close()


def test_slabs_that_end_while_others_are_asked_for_are_all_given_back(store: Store) -> None:
    session = Session("test")
    for told in ([], [], [1]):
        session.writer, _, _ = slab(store)
        session.leased(m.Slab(0, 0, 0), told)
    first = session._done[0]
    session.leased(m.Slab(0, 0, 0), [first])
    assert session._done == [first + 1, first + 2]


def test_a_put_brings_the_slab_for_the_next_one_if_there_is_plenty(store: Store) -> None:
    writer, reader, given = slab(store)
    meta, frames = encode_batch(make_batch([3, 4]), writer.write)
    bad = store.answer(ME, m.Put(meta, BIRTH, room=m.Lease(0)), frames)[0]
    assert isinstance(bad, m.Failure) and "slab of 0 bytes" in bad.message and not len(store.warehouse)
    found = store.answer(ME, m.Put(meta, BIRTH, room=m.Lease(1 << 20, [given.generation])), frames)[0]
    assert found.slab.nbytes == given.nbytes and found.slab.generation > given.generation
    free(store, [0, 1])
    assert not reader.fresh(given.generation, given.offset), "the old one was closed with the put"
    half = store.slabs.arenas[0].capacity // 2
    meta, frames = encode_batch(make_batch([3], first=5))
    refused = store.answer(ME, m.Put(meta, m.Birth(1, 8, 0), room=m.Lease(half)), frames)[0]
    assert refused == m.Stored(2, 0, 0, m.Slab(0, 0, 0))
    assert store.answer(ME, m.Lease(half), [])[0].nbytes >= half, "who needs it now gets it"


def test_a_session_asks_for_one_slab_ahead_when_another_put_would_not_fit(store: Store) -> None:
    session, size = Session("test"), 100_000
    parts = parts_of(make_batch([size], (TOKEN_IDS,)))
    assert session.ahead(parts) is None, "a client that writes no slabs"
    session.writer, _, given = slab(store)
    assert session.ahead(parts) is None, "there is room"
    session.writer.write(*(values for values, _ in parts[0].pieces), torch.zeros(300_000, dtype=torch.uint8))
    assert session.ahead(parts) == m.Lease(4 << 20, [])
    assert session.ahead(parts) is None, "it is asked for"
    session.stored(m.Stored(1, 0, 0))
    assert session.ahead(parts) is None, "another put's answer"
    session.stored(m.Stored(2, 0, 0, m.Slab(0, 0, 0)))
    assert session.writer.generation == given.generation and session.ahead(parts) is not None, "refused: again"
    session.stored(m.Full(1, 0))
    assert session.ahead(parts) is not None, "nothing came of that put"
    session.stored(m.Stored(3, 0, 0, m.Slab(99, 0, 100)))
    assert session._done == [99] and session.writer.generation == given.generation, "there is more room here"
    session.stored(m.Failure("DockError", "no"))
    big = parts_of(make_batch([5_000_000], (TOKEN_IDS,)))
    assert session.ahead(big) is None, "too much to be kept idle"


def test_what_was_borrowed_of_an_arena_that_is_mapped_no_longer_is_gone() -> None:
    """Its rows are served from another node by now."""
    with pytest.raises(RowGone, match="of a warehouse that has gone"):
        Session("test").check((0, 1, 4096))


def test_a_snapshot_restores_into_an_empty_warehouse_only(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    batch = make_batch([3, 0, 5])
    put(store, batch, m.Birth(4, 70, 0))
    put(store, make_batch([2], (PROMPT,), first=9), m.Birth(5, 80, 0))
    assert store.answer(ME, m.Snapshot("snap/shot"), [])[0] == m.Done(4, 2)
    full = store.answer(ME, m.Restore(["snap/shot"]), [])[0]
    assert isinstance(full, m.Failure) and full.kind == "CheckpointError"
    store.close()
    other = Store(options(folder=str(tmp_path), shared_bytes=0))
    for _ in range(2):  # the second time because the first answer was lost
        assert other.answer(ME, m.Restore(["snap/shot"]), [])[0] == m.Done(4, 2)
    assert same(get(other, [2, 1, 0]), batch.by_id([2, 1, 0]))
    assert isinstance(get(other, [9], (TOKEN_IDS,)), m.Failure)
    (tmp_path / "torn").write_bytes((tmp_path / "snap" / "shot").read_bytes()[:-3])
    fresh = Store(options(folder=str(tmp_path), shared_bytes=0))
    torn = fresh.answer(ME, m.Restore(["torn"]), [])[0]
    assert isinstance(torn, m.Failure) and "damaged" in torn.message
    other.close()
    fresh.close()


def test_records_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    wal.write_file(path, [[b"ab", b""], [torch.arange(3).numpy().data]])
    assert [[bytes(f) for f in record] for record in wal.read(path)] == [[b"ab", b""], [np.arange(3).tobytes()]]
    with pytest.raises(CheckpointError):
        list(wal.read(tmp_path / "none"))
    with pytest.raises(CheckpointError):
        wal.write_file(tmp_path / "file" / "below", [])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
