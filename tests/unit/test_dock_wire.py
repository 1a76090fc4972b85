"""The wire format: what a message looks like, and what is said of one that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.warehouse_parts import make_batch

from docklands.core.batch import Batch
from docklands.core.fields import PROMPT, REWARD, TOKEN_IDS
from docklands.dock.rules.messages import Ended, Notice
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.notices import notices_from, notices_message
from docklands.dock.wire.format import (
    CALL,
    REPLY,
    BatchMeta,
    ColumnMeta,
    check_size,
    decode_batch,
    decode_parts,
    encode_batch,
    field_of,
    parts_of,
)
from docklands.dock.wire.net import check_endpoint
from docklands.errors import ConfigError, DockError, WireError


def test_values_are_not_copied_on_either_side() -> None:
    batch = make_batch([300, 200], (TOKEN_IDS, REWARD))
    _, frames = encode_batch(batch)
    sent = torch.frombuffer(frames[1], dtype=torch.int32)
    assert sent.data_ptr() == batch[TOKEN_IDS].values.data_ptr()
    arrived = [bytearray(frame) for frame in frames]
    again = decode_batch(encode_batch(batch)[0], arrived)
    column = next(again[field] for field in again.fields if field.name == "token_ids")
    assert column.values.data_ptr() == torch.frombuffer(arrived[1], dtype=torch.uint8).data_ptr()


def test_a_message_has_two_small_frames_and_one_per_column() -> None:
    batch = make_batch([3, 4], (TOKEN_IDS, REWARD))
    meta, frames = encode_batch(batch)
    assert [memoryview(frame).nbytes for frame in frames] == [8 * (2 + 2 + 2 * 5), 28, 8]
    assert len(m.CALLS.pack(CALL, 1, m.Put(meta))) < 100


def test_values_that_are_not_aligned_are_still_right() -> None:
    batch = make_batch([3, 4], (TOKEN_IDS,))
    meta, frames = encode_batch(batch)
    shifted = memoryview(bytearray(b"." + bytes(frames[1])))[1:]
    again = decode_batch(meta, [frames[0], shifted])
    assert again[again.fields[0]].values.tolist() == batch[TOKEN_IDS].values.tolist()


def test_json_cells_come_back_and_shared_ones_are_shared() -> None:
    prompt = {"prompt": "2+2", "n": [1, 2.5, None, True], "ü": "ß"}
    batch = Batch([1, 2, 3], {PROMPT: [prompt, prompt, "other"]})
    meta, frames = encode_batch(batch)
    values = decode_batch(meta, [bytearray(f) for f in frames])[PROMPT_HERE]
    assert values == (prompt, prompt, "other") and values[0] is values[1]
    with pytest.raises(DockError, match="column prompt: a value is not JSON"):
        parts_of(Batch([1], {PROMPT: [object()]}))
    with pytest.raises(DockError, match="not JSON"):
        parts_of(Batch([1], {PROMPT: [2**70]}))


PROMPT_HERE = field_of(ColumnMeta("prompt", "json", ""))


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "header of 0 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin"),
        (b"DK\x02\x00" + bytes(8), "wire version 2, this process speaks 1"),
        (b"DK\x01\x07" + bytes(8), "kind 7"),
        (b"DK\x01\x00" + bytes(8), "malformed message"),
        (b"DK\x01\x00" + bytes(8) + b"\x91\xff", "malformed message"),
        (b"DK\x01\x00" + bytes(8) + b"\x91" * 5000, "malformed message"),
        (m.REPLIES.pack(REPLY, 1, m.Done(1, 2)), "malformed message"),
    ],
)
def test_a_bad_header_is_a_wire_error(frame: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        m.CALLS.unpack(frame)


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        (ColumnMeta("", "int8", ""), "column ''"),
        (ColumnMeta("x" * 129, "int8", ""), "column"),
        (ColumnMeta("a", "complex64", ""), "dtype 'complex64'"),
        (ColumnMeta("a", "int8", "Q"), "column"),
        (ColumnMeta("a", "json", "T"), "JSON column"),
        (ColumnMeta("a", "json", "", (2,)), "JSON column"),
        (ColumnMeta("a", "int8", "", (-1,)), "inner shape"),
        (ColumnMeta("a", "int8", "T", (1 << 20, 1 << 20)), "inner shape"),
    ],
)
def test_a_bad_column_is_a_wire_error(meta: ColumnMeta, text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode_parts(BatchMeta(0, [meta], 0), [b""])


def broken(change: Any) -> tuple[BatchMeta, list[Any]]:
    """A valid batch of rows of 3 and 4 tokens, its index changed."""
    meta, frames = encode_batch(make_batch([3, 4], (TOKEN_IDS,)))
    index = np.frombuffer(frames[0], np.int64).copy()
    change(index)
    return meta, [index.data, *frames[1:]]


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (2, -3, "impossible lengths"),
        (2, 1 << 60, "impossible lengths"),
        (2, 4, "28 bytes, expected 32"),
        (4, 1, "for column 1"),
        (4, -1, "for column -1"),
        (5, 0, "shared memory"),
        (7, -1, "at -1"),
        (8, 27, "28 bytes of values, expected 27"),
        (8, 0, "piece of 0 bytes"),
    ],
)
def test_a_bad_index_is_a_wire_error(at: int, value: int, text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode_parts(*broken(lambda index: index.__setitem__(at, value)))


def test_missing_and_superfluous_frames_are_wire_errors() -> None:
    meta, frames = encode_batch(make_batch([3, 4], (TOKEN_IDS,)))
    for held in ([], frames[:1], [*frames, b"x"], [b"", *frames[1:]]):
        with pytest.raises(WireError):
            decode_parts(meta, held)
    with pytest.raises(WireError, match="a column twice"):
        decode_parts(BatchMeta(2, [*meta.columns, *meta.columns], 1), frames)
    with pytest.raises(WireError, match="frames"):
        check_size([b""] * 100_000)


def test_token_columns_of_different_lengths_are_a_wire_error() -> None:
    other = make_batch([3, 5], (TOKEN_IDS,))
    one, two = encode_batch(make_batch([3, 4], (TOKEN_IDS,))), encode_batch(other)
    a, b = (np.frombuffer(frames[0], np.int64) for _, frames in (one, two))
    line = b[4:].copy()
    line[0] = 1
    index = np.concatenate([a[:4], b[2:4], a[4:], line])
    columns = [ColumnMeta("token_ids", "int32", "T"), ColumnMeta("more", "int32", "T")]
    with pytest.raises(WireError, match="every token column has the length"):
        decode_batch(BatchMeta(2, columns, 2), [index.data, one[1][1], two[1][1]])


def test_notices_of_one_stage_and_columns_are_joined() -> None:
    def notice(stage: str, ids: list[int], *columns: str) -> Notice:
        return Notice(stage, np.array(ids), columns, np.array(ids) * 10)

    given = [notice("ref", [1, 2], "a"), notice("adv", [1], "a", "b"), notice("ref", [5], "a")]
    message, frames = notices_message(3, (4, 6), given)
    assert (message.place, message.first, message.last) == (3, 4, 6)
    found, _ = notices_from(message, frames)
    assert [(n.stage, n.columns, n.row_ids.tolist(), n.lengths.tolist()) for n in found] == [
        ("ref", ("a",), [1, 2, 5], [10, 20, 50]),
        ("adv", ("a", "b"), [1], [10]),
    ]
    ended = [Ended("ref", 7, np.array([1, 2, 5]), (3, 400)), Ended("adv", 1 << 41, np.array([1]))]
    found, through = notices_from(*notices_message(3, (4, 6), given, ended))
    assert len(found) == 2 and [(e.stage, e.lease, e.row_ids.tolist(), e.read) for e in through] == [
        ("ref", 7, [1, 2, 5], (3, 400)),
        ("adv", 1 << 41, [1], (0, 0)),
    ]
    with pytest.raises(WireError):
        notices_from(message, [b"12345678"])
    with pytest.raises(WireError):
        notices_from(m.Notices(0, 1, 1, [m.NoticeMeta([("ref", ["a"])])]), [b""])


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5", "tcp://0.0.0.0:5", "tcp://[::]:5", "udp://127.0.0.1:5", "tcp://", "x"]
)
def test_a_server_listens_on_named_addresses_only(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        check_endpoint(endpoint, keyed=True)


def test_tcp_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="no key"):
        check_endpoint("tcp://127.0.0.1:*", keyed=False)
    check_endpoint("ipc://here", keyed=False)
    check_endpoint("tcp://eth0:*", keyed=True)
