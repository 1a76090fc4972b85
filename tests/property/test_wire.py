"""The wire format: every batch comes back to the bit; no bytes whatever crash a warehouse or give a wrong batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.warehouse_parts import BIRTH, DENSE, FIELDS, RAGGED, make_batch, options, same

from docklands.core.batch import Batch
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.server import Server
from docklands.dock.wire.format import CALL, PREFIX, Limits, decode_batch, decode_parts, encode_batch
from docklands.errors import WireError

ALL = (*FIELDS, *DENSE, *RAGGED)
FUZZED = 100_000


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.sampled_from(ALL), unique=True), st.integers(0, 2**32 - 1))
def test_a_batch_comes_back_to_the_bit(lengths: list[int], fields: list[Any], seed: int) -> None:
    batch = make_batch(lengths, tuple(fields), seed)
    meta, frames = encode_batch(batch)
    header = m.CALLS.pack(CALL, seed, m.Put(meta))
    kind, number, message = m.CALLS.unpack(header)
    again = decode_batch(message.batch, [bytearray(frame) for frame in frames])
    assert (kind, number) == (CALL, seed)
    renamed = Batch(again.row_ids, {field: again[f] for field in fields for f in again.fields if f.name == field.name})
    assert same(renamed, batch)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_a_changed_index_is_refused_or_means_the_same_bytes(lengths: list[int], data: st.DataObject) -> None:
    """Whatever number of the index is changed: WireError, or a batch whose columns still have all their bytes."""
    batch = make_batch(lengths)
    meta, frames = encode_batch(batch)
    index = np.frombuffer(frames[0], np.int64).copy()
    at = data.draw(st.integers(0, len(index) - 1))
    index[at] = data.draw(st.one_of(st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1)))
    try:
        _, parts = decode_parts(meta, [index.data, *frames[1:]])
    except WireError:
        return
    for part in parts:
        if part.lengths is not None:
            assert (part.lengths >= 0).all()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.chdir(tmp_path)
    made = Server(options(endpoint=f"ipc://{tmp_path}/socket", folder=str(tmp_path), message_bytes=1 << 22))
    yield made
    made.close()


def valid_messages(server: Server) -> list[list[bytes]]:
    """One of each kind of call, with frames, as a client sends them."""
    batch = make_batch([3, 0, 5])
    slab = server.store.answer(b"c", m.Lease(1 << 20), [])[0]
    meta, frames = encode_batch(batch)
    refs, index = encode_batch(batch.only(FIELDS[1:]), lambda values: (0, slab.generation, slab.offset))
    ids = batch.row_ids.tobytes()
    calls: list[tuple[Any, list[Any]]] = [
        (m.Hello("c", os.getpid(), 1), []),
        (m.Put(meta, BIRTH, "rollout"), frames),
        (m.Put(refs), index),
        (m.Put(meta, BIRTH, "rollout", room=m.Lease(1 << 20, [slab.generation])), frames),
        (m.Get([field.name for field in FIELDS], True, "ref"), [ids]),
        (m.Get([FIELDS[0].name]), [ids]),
        (m.Free(), [ids]),
        (m.Inventory(), []),
        (m.Subscribe(["ref"]), []),
        (m.Lease(1 << 20, [slab.generation]), []),
        (m.Stats(), []),
        (m.Allow(["x" * 40]), []),
    ]
    return [[m.CALLS.pack(CALL, 5, call), *(bytes(frame) for frame in held)] for call, held in calls]


def mutated(frames: list[bytes], rng: np.random.Generator) -> list[bytes]:
    """A message with something wrong: bytes changed, cut, added; frames dropped, doubled, swapped, made up."""
    frames = list(frames)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(frames))) if frames else 0
        way = int(rng.integers(8))
        frame = bytearray(frames[at]) if frames else bytearray()
        if way <= 3 and frame:
            first = PREFIX.size if at == 0 and rng.random() < 0.9 and len(frame) > PREFIX.size else 0
            where = int(rng.integers(first, len(frame)))
            frame[where] = int(rng.choice([0, 1, 0x7F, 0x80, 0xC0, 0xFF, int(rng.integers(256))]))
            frames[at] = bytes(frame)
        elif way == 4 and frames:
            frames[at] = bytes(frame[: int(rng.integers(len(frame) + 1))])
        elif way == 5 and frames:
            frames[at] = bytes(frame) + rng.bytes(int(rng.integers(1, 20)))
        elif way == 6:
            frames.insert(at, rng.bytes(int(rng.integers(0, 40))))
        elif frames:
            del frames[at]
    return frames


@pytest.mark.slow
def test_100_000_fuzzed_messages_never_crash_a_warehouse(server: Server) -> None:
    """Random ones and mutated valid ones; every one is answered, bad ones are counted, and it still works after."""
    rng = np.random.default_rng(11)
    corpus = valid_messages(server)
    answers: dict[str, int] = {}
    for i in range(FUZZED):
        if i % 10 == 0:
            head = PREFIX.pack(b"DK", 1, CALL, 9) if i % 20 else b""
            message = [head + rng.bytes(int(rng.integers(0, 60))) for _ in range(int(rng.integers(1, 4)))]
        else:
            message = mutated(corpus[int(rng.integers(len(corpus)))], rng)
        reply = server.call(b"c", [bytearray(frame) for frame in message])
        kind = type(m.REPLIES.unpack(reply[0])[2]).__name__
        answers[kind] = answers.get(kind, 0) + 1
        server.running = True  # a mutation may well be a valid call to end
        server.store.outbox.clear()
    stats = server.store.stats()
    assert sum(answers.values()) == FUZZED
    assert 0.3 * FUZZED < stats["bad_messages"] + stats["refused_calls"] == answers["Failure"] < FUZZED
    assert {"Stored", "Found", "Done", "Slab", "Inventoried", "Welcome"} <= set(answers)
    batch = make_batch([4, 2], first=1_000_000)
    meta, frames = encode_batch(batch)
    stored, _ = server.store.answer(b"d", m.Put(meta, m.Birth(1 << 40, 1, 0)), frames)
    assert isinstance(stored, m.Stored)
    found, buffers = server.store.answer(b"d", m.Get([f.name for f in FIELDS]), [batch.row_ids.data])
    again = decode_batch(found.batch, buffers)
    assert [bytes(x) for x in encode_batch(again)[1]] == [bytes(x) for x in frames]


def test_limits_are_kept() -> None:
    meta, frames = encode_batch(make_batch([3, 4]))
    for limits in (Limits(rows=1), Limits(columns=2), Limits(pieces=1), Limits(nbytes=8)):
        with pytest.raises(WireError, match="at most|more than"):
            decode_parts(meta, frames, limits)
