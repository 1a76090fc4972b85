"""Batch: what goes in comes out, in any order, in any pieces; nothing changes in place; the token cap holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.core.batch import Batch, Jagged, fill_to_cap, offsets_of
from docklands.core.fields import LOSS_MASK, PROMPT, PROMPT_TOKENS, REWARD, ROLLOUT_LOGPROBS, TOKEN_IDS, Field
from docklands.core.protocols import Rows
from docklands.errors import DockError, RowGone, UnknownField

ROUTES = Field("routes", "int16", ("T", 2, 3))
PAIR = Field("pair", "float32", (2,))
HALF = Field("half", "bfloat16", ("T",))
ALL = (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS, ROUTES, HALF, PROMPT_TOKENS, REWARD, PAIR, PROMPT)

lengths_lists = st.lists(st.integers(0, 9), min_size=0, max_size=12)


def build(lengths: list[int], seed: int = 0) -> tuple[Batch, list[dict[Field[Any], Any]]]:
    """A batch with every kind of column, and its rows as plain values."""
    rng = np.random.default_rng(seed)
    rows: list[dict[Field[Any], Any]] = []
    for i, n in enumerate(lengths):
        rows.append(
            {
                TOKEN_IDS: rng.integers(0, 100, n).tolist(),
                LOSS_MASK: rng.integers(0, 2, n).astype(bool).tolist(),
                ROLLOUT_LOGPROBS: rng.normal(size=n).astype(np.float32).tolist(),
                ROUTES: rng.integers(0, 9, (n, 2, 3)).tolist(),
                HALF: rng.integers(-8, 8, n).astype(float).tolist(),
                PROMPT_TOKENS: rng.integers(0, 100, int(rng.integers(0, 4))).tolist(),
                REWARD: float(np.float32(rng.normal())),
                PAIR: [float(i), float(-i)],
                PROMPT: {"i": i},
            }
        )
    ids = rng.permutation(1000)[: len(lengths)]
    columns: dict[Field[Any], Any] = {field: [row[field] for row in rows] for field in ALL}
    return Batch(ids, columns), rows


def unbuild(batch: Batch) -> list[dict[Field[Any], Any]]:
    """The rows of a batch as plain values."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return [{field: plain(batch[field][i]) for field in batch.fields} for i in range(len(batch))]


@given(lengths_lists)
def test_what_goes_in_comes_out(lengths: list[int]) -> None:
    batch, rows = build(lengths)
    assert unbuild(batch) == rows
    assert batch.lengths.tolist() == lengths and batch.num_tokens == sum(lengths)
    assert batch.num_trained_tokens == sum(sum(row[LOSS_MASK]) for row in rows)


@given(lengths_lists, st.data())
def test_select_takes_the_rows_asked_for_in_that_order(lengths: list[int], data: st.DataObject) -> None:
    batch, rows = build(lengths)
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15)) if lengths else []
    picked = batch.select(index)
    assert unbuild(picked) == [rows[i] for i in index]
    assert picked.row_ids.tolist() == [int(batch.row_ids[i]) for i in index]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))), bool)
    assert unbuild(batch.select(mask)) == [row for row, keep in zip(rows, mask) if keep]


@given(lengths_lists, st.data())
def test_by_id_and_select_agree(lengths: list[int], data: st.DataObject) -> None:
    batch, rows = build(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    assert unbuild(batch.by_id(batch.row_ids[np.array(order, np.int64)])) == [rows[i] for i in order]
    with pytest.raises(RowGone, match="1001"):
        batch.by_id([1001])


@given(lengths_lists, st.integers(1, 5))
def test_concat_undoes_a_split(lengths: list[int], samples: int) -> None:
    batch, rows = build(lengths)
    pieces = batch.minibatches(samples=samples)
    assert all(1 <= len(piece) <= samples for piece in pieces)
    assert [row for piece in pieces for row in unbuild(piece)] == rows
    if pieces:
        whole = Batch.concat(pieces)
        assert unbuild(whole) == rows and np.array_equal(whole.row_ids, batch.row_ids)


@settings(max_examples=1000)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 40))
def test_pitfall_35_the_token_cap_is_never_exceeded(lengths: list[int], cap: int) -> None:
    """A thousand random cases: every piece within its budget, every row once and in order."""
    if max(lengths, default=0) > cap:
        with pytest.raises(DockError, match=f"the budget is {cap} tokens"):
            fill_to_cap(lengths, cap)
        return
    bins = fill_to_cap(lengths, cap)
    assert [row for rows in bins for row in rows] == list(range(len(lengths)))
    assert all(0 < len(rows) and sum(lengths[row] for row in rows) <= cap for rows in bins)
    for rows, following in zip(bins, bins[1:]):
        assert sum(lengths[row] for row in rows) + lengths[following[0]] > cap, "a piece was closed too early"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.integers(9, 20))
def test_pitfall_35_batches_by_token_budget(lengths: list[int], cap: int) -> None:
    batch, rows = build(lengths)
    pieces = batch.minibatches(max_tokens=cap)
    assert all(piece.num_tokens <= cap for piece in pieces)
    assert [row for piece in pieces for row in unbuild(piece)] == rows


@given(lengths_lists)
def test_pack_and_unpack(lengths: list[int]) -> None:
    batch, rows = build(lengths)
    packed = batch.pack()
    assert packed.num_tokens == sum(lengths) and packed.seqlens == lengths and len(packed) == len(lengths)
    assert packed.token_ids_T.dtype == torch.int64
    assert packed.token_ids_T.tolist() == [t for row in rows for t in row[TOKEN_IDS]]
    assert packed.positions_T.tolist() == [p for n in lengths for p in range(n)]
    assert packed.row_T.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert packed.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
    assert packed.per_token(REWARD).tolist() == [row[REWARD] for row in rows for _ in row[TOKEN_IDS]]
    assert packed.per_token(TOKEN_IDS) is packed[TOKEN_IDS]
    values_T = packed.token_ids_T.double()
    assert packed.sum_rows(values_T).tolist() == [sum(row[TOKEN_IDS]) for row in rows]
    assert [row.tolist() for row in packed.unpack(packed[ROUTES])] == [row[ROUTES] for row in rows]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_a_token_column_of_another_length_is_refused(lengths: list[int], data: st.DataObject) -> None:
    batch, rows = build(lengths)
    wrong = data.draw(st.integers(0, len(lengths) - 1))
    values = [list(row[ROLLOUT_LOGPROBS]) for row in rows]
    values[wrong] = [*values[wrong], 0.0]
    with pytest.raises(DockError, match=f"rollout_logprobs has .* in row {batch.row_ids[wrong]}, token_ids has"):
        batch.with_({ROLLOUT_LOGPROBS: values})


@given(lengths_lists)
def test_a_batch_never_changes(lengths: list[int]) -> None:
    batch, rows = build(lengths)
    ids = np.array(batch.row_ids)
    more = batch.with_({REWARD: [7.0] * len(lengths)})
    assert unbuild(batch) == rows and set(more.fields) == set(ALL)
    if lengths:
        assert more[REWARD].tolist() == [7.0] * len(lengths) and more[TOKEN_IDS] is batch[TOKEN_IDS]
        with pytest.raises(ValueError, match="read-only"):
            batch.row_ids[0] = 5
    few = batch.only((REWARD, TOKEN_IDS))
    assert few.fields == (REWARD, TOKEN_IDS) and TOKEN_IDS in few and PROMPT not in few
    source = np.array(ids)
    copy = Batch(source, {})
    source[:] = -1
    assert np.array_equal(copy.row_ids, ids)


@given(lengths_lists, st.integers(1, 5))
def test_rows_split_like_batches(lengths: list[int], samples: int) -> None:
    n = len(lengths)
    rows = Rows(np.arange(n) + 100, np.arange(n) // 2, np.array(lengths, np.int64), np.zeros(n, np.int32), "update", 9)
    pieces = rows.minibatches(samples)
    assert np.concatenate([np.zeros(0, int), *(p.row_ids for p in pieces)]).tolist() == rows.row_ids.tolist()
    assert all(piece.stage == "update" and piece.lease == 9 and 1 <= len(piece) <= samples for piece in pieces)
    back = rows.select(np.arange(n)[::-1])
    assert back.lengths.tolist() == lengths[::-1] and back.group_ids.tolist() == rows.group_ids[::-1].tolist()


def test_errors_name_the_column_and_both_shapes() -> None:
    batch, _ = build([2, 3])
    with pytest.raises(UnknownField, match="no column values.*it has: half, loss_mask"):
        batch[Field("values", "float32", ("T",))]
    with pytest.raises(DockError, match="reward: 3 entries for 2 rows"):
        batch.with_({REWARD: [1.0, 2.0, 3.0]})
    with pytest.raises(DockError, match=r"pair: got shape \(2, 3\), declared pair:float32\[2\]"):
        batch.with_({PAIR: torch.zeros(2, 3)})
    with pytest.raises(DockError, match=r"token_ids: got torch.float32 with inner shape \(\)"):
        batch.with_({TOKEN_IDS: Jagged(torch.zeros(5), offsets_of([2, 3]))})
    with pytest.raises(DockError, match="no batches"):
        Batch.concat([])
    with pytest.raises(UnknownField, match="no token column"):
        _ = Batch([1], {REWARD: [0.0]}).lengths
    other = batch.only((TOKEN_IDS, REWARD))
    with pytest.raises(DockError, match="same columns"):
        Batch.concat([other, batch])
    with pytest.raises(DockError, match="offsets end at 6, there are 5 values"):
        batch.with_({TOKEN_IDS: Jagged(torch.zeros(5, dtype=torch.int32), np.array([0, 2, 6]))})
    with pytest.raises(DockError, match=r"routes: row 0 has shape \(1, 3, 2\), expected \[length, 2, 3\], declared"):
        Batch([0], {ROUTES: [[[[1, 2], [3, 4], [5, 6]]]]})
    with pytest.raises(DockError, match=r"token_ids: row 1 has shape \(\), expected \[length\]"):
        Batch([0, 1], {TOKEN_IDS: [[1], 2]})


def test_positions_from_the_end() -> None:
    batch, rows = build([2, 0, 3])
    assert unbuild(batch.select([-1])) == [rows[-1]]
    assert unbuild(batch.select([-1, 0])) == [rows[-1], rows[0]]
