"""The compiled decode kernel: against softmax in float64, bits that do not depend on company, threads, bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from docklands.kernels import compiled_decode
from docklands.kernels.compiled_decode import Pages, decode_attention

SIZE = 4


def case(dtype: torch.dtype, heads: int, kv_heads: int, size: int, rows: int = 12):
    """Random pages, each used once, in no order."""
    rng = np.random.default_rng(heads)
    torch.manual_seed(heads)
    pool = 16 * rows
    q = torch.randn(rows, heads, size).to(dtype)
    k, v = torch.randn(2, pool, kv_heads, SIZE, size).to(dtype)
    free = rng.permutation(pool).tolist()

    def tables(tokens: np.ndarray) -> np.ndarray:
        table = np.full((rows, 8), -1, np.int32)
        for row, count in enumerate(tokens.tolist()):
            for i in range(-(-count // SIZE)):
                table[row, i] = free.pop()
        return table

    prompt, own = (rng.integers(1, 30, rows).astype(np.int32) for _ in range(2))
    prompt[0], own[0] = 1, 1
    return q, k, v, Pages(tables(prompt), prompt, tables(own), own)


def plain(q, k, v, pages, scale):
    """float64, one (row, head) after the other."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    kv_heads = k.shape[1]
    for row in range(len(pages.own)):
        parts = ((pages.prompt[row], pages.prompt_tokens[row]), (pages.own[row], pages.own_tokens[row]))
        keys, values = (
            torch.cat([torch.cat([x[p] for p in table if p >= 0], 1)[:, :n] for table, n in parts], 1).double()
            for x in (k, v)
        )
        for head in range(q.shape[1]):
            weights = torch.softmax(keys[head % kv_heads] @ q[row, head].double() * scale, 0)
            out[row, head] = weights @ values[head % kv_heads]
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 32), (9, 3, 8), (5, 1, 24), (2, 2, 64)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_equals_softmax_in_float64(dtype, close, heads, kv_heads, size) -> None:
    assert compiled_decode.available("cpu", dtype)
    q, k, v, pages = case(dtype, heads, kv_heads, size)
    found = decode_attention(q, k, v, pages, 0.3)
    assert found.dtype == dtype
    assert (found.double() - plain(q, k, v, pages, 0.3)).abs().max() < close


def test_extreme_scores_stay_finite() -> None:
    q, k, v, pages = case(torch.float32, 4, 2, 32)
    found = decode_attention(q * 1e4, k, v, pages, 1.0)
    assert torch.isfinite(found).all()
    assert (found.double() - plain(q * 1e4, k, v, pages, 1.0)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company_and_with_any_threads(dtype, monkeypatch) -> None:
    q, k, v, pages = case(dtype, 4, 2, 32)
    whole = decode_attention(q, k, v, pages, 0.3)
    for row in range(len(q)):
        part = slice(row, row + 1)
        tables = pages.prompt[part], pages.prompt_tokens[part], pages.own[part], pages.own_tokens[part]
        assert torch.equal(decode_attention(q[part], k, v, Pages(*tables), 0.3)[0], whole[row])
    monkeypatch.setattr(compiled_decode, "PARALLEL_FROM", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(decode_attention(q, k, v, pages, 0.3), whole)
    finally:
        torch.set_num_threads(threads)


def test_padding_rows_are_zero_and_other_devices_are_refused() -> None:
    q, k, v, pages = case(torch.float32, 4, 2, 32)
    assert not decode_attention(torch.cat([q, q]), k, v, pages, 0.3)[len(q) :].any()
    assert not compiled_decode.available("cuda", torch.float32) and not compiled_decode.available("cpu", torch.float16)
