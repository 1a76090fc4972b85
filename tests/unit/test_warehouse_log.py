"""What a warehouse remembers: its log on a full disk or with a torn end, lives of rows, ended leases."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.test_warehouse_store import ME, get, opened, put
from tests.warehouse_parts import BIRTH, make_batch, options, same

from docklands.core.fields import PROMPT, REWARD, TOKEN_IDS, Field
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse import wal
from docklands.dock.warehouse.store import Store
from docklands.dock.wire.format import CALL, encode_batch
from docklands.errors import DockError, WireError


def test_a_put_of_an_earlier_life_finds_its_rows_gone_also_after_a_restart(tmp_path: Path) -> None:
    """Rows 0 and 1 were lost and made anew, row 2 was not: what was made of the lost ones must not come beside them."""
    store = opened(tmp_path / "log")
    batch = make_batch([3, 4, 5])
    put(store, batch.only([PROMPT]).select([0, 1]), m.Birth(0, 70, 0, life=7))
    put(store, batch.only([PROMPT]).select([2]), m.Birth(0, 70, 0, [2]))

    def late(store: Store, lives: list[int], field: Field[Any]) -> Any:
        meta, frames = encode_batch(batch.only([field]))
        return store.answer(ME, m.Put(meta, lives=lives), frames)[0]

    assert late(store, [], TOKEN_IDS).gone == 2 and late(store, [6, 7, 0], TOKEN_IDS).gone == 1
    assert isinstance(get(store, [0], (TOKEN_IDS,)), m.Failure)
    assert late(store, [9, 7, 0], TOKEN_IDS).gone == 0, "the control process knows of a loss before the rows do"
    assert late(store, [8, 7, 0], REWARD).gone == 1 and late(store, [1], REWARD).kind == "WireError"
    assert store.answer(ME, m.Snapshot("snap"), [])[0] == m.Done(3, store.seq)
    store.close()
    again, other = opened(tmp_path / "log"), Store(options(folder=str(tmp_path), shared_bytes=0))
    other.answer(ME, m.Restore(["snap"]), [])
    for found in (again, other):
        assert found.births["life"][found.births.find(np.arange(3))].tolist() == [9, 7, 0]
        assert same(get(found, [0, 1, 2], (TOKEN_IDS,)), batch.only([TOKEN_IDS]))
        assert late(found, [], REWARD).gone == 2
        found.close()


def test_an_inventory_names_the_leases_that_puts_have_ended_also_after_a_restart(tmp_path: Path) -> None:
    store, batch = opened(tmp_path / "log"), make_batch([3])
    put(store, batch.only([PROMPT]), BIRTH)
    meta, frames = encode_batch(batch.only([TOKEN_IDS]))
    store.answer(ME, m.Put(meta, None, "rollout", 5), frames)
    store.close()
    again = opened(tmp_path / "log")
    assert again.answer(ME, m.Inventory(), [])[0].ended == [("rollout", 5)] and not again.ended  # type: ignore[attr-defined]
    again.close()


def test_a_disk_that_was_full_once_leaves_a_whole_log(tmp_path: Path) -> None:
    """Of a record that did not fit nothing stays, neither in the file nor in a buffer of the process."""
    log, before = wal.Log(tmp_path / "log"), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log.append([b"one"])
    try:
        for nbytes in (100, 200_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.nbytes + 50, hard))
            with pytest.raises(DockError, match="make room on its disk"):
                log.append([b"does not fit", bytes(nbytes)])
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            log.append([b"after", *[b"x"] * 1200])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    log.close()
    assert [len(frames) for frames in wal.read(tmp_path / "log")] == [1, 1201, 1201]


def test_a_record_inside_of_a_torn_one_is_not_taken_for_one_after_it(tmp_path: Path) -> None:
    path, inner = tmp_path / "log", b"".join(bytes(part) for part in wal.record([b"x"]))
    log = wal.Log(path)
    log.append([b"good"])
    good = log.nbytes
    log.append([b"head", inner + bytes(20)])
    log.close()
    whole = path.read_bytes()
    for cut in range(good, len(whole)):
        path.write_bytes(whole[:cut])
        assert [bytes(frames[0]) for frames in wal.read(path, mend=True)] == [b"good"]


def test_the_name_of_a_log_is_no_name_for_a_snapshot(tmp_path: Path) -> None:
    store = opened(tmp_path / "wal.0")
    put(store, make_batch([3]), BIRTH)
    for name in ("wal.0", "wal.1", "wal"):
        refused = store.answer(ME, m.Snapshot(name), [])[0]
        assert isinstance(refused, m.Failure) and "would replace a warehouse's log" in refused.message
    assert store.answer(ME, m.Snapshot("snap.0"), [])[0] == m.Done(1, 1)
    store.close()


def test_numbers_that_no_array_holds_are_refused_before_anything_is_logged() -> None:
    meta, _ = encode_batch(make_batch([3]))
    big = 2**63
    births = (m.Birth(big, 1, 0), m.Birth(1, [big], 0), m.Birth(1, 1, big), m.Birth(1, 1, 0, [big]))
    puts = [m.Put(meta, birth) for birth in births]
    for message in (*puts, m.Put(meta, lease=big), m.Inventory(big), m.Snapshot("x", big), m.Hello("x", big, 1)):
        with pytest.raises(WireError):
            m.CALLS.unpack(m.CALLS.pack(CALL, 1, message))


def test_a_second_warehouse_hears_of_which_place_restored_rows_are(tmp_path: Path) -> None:
    """The snapshot is of place 1, and is read at place 0: whoever serves in its stead must list the rows under 0."""
    old, new, copy = (Store(options(place=place, folder=str(tmp_path), shared_bytes=0)) for place in (1, 0, 0))
    put(old, make_batch([2, 3], (PROMPT,)), m.Birth(0, 7, 1))
    assert old.answer(ME, m.Snapshot("s"), [])[0] == m.Done(2, 1)

    def forward(frames: list) -> None:
        copy.answer(ME, m.CALLS.unpack(frames[0])[2], [bytearray(memoryview(frame).cast("B")) for frame in frames[1:]])

    new.forward = forward
    assert new.answer(ME, m.Restore(["s"]), [])[0] == m.Done(2, 1)
    assert [
        one.answer(ME, m.Inventory(0), [])[0].rows  # type: ignore[attr-defined]
        for one in (new, copy)
    ] == [2, 2]
    for one in (old, new, copy):
        one.close()
