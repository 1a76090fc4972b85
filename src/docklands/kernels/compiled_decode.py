"""Attention of a decode step on CPU, compiled: every sequence reads its pages in place, one loop, no partial results.

A decode step of a small model asks for thousands of tiny products; called one by one from torch they cost more in calls
than in arithmetic. Here numba compiles the whole loop nest for this machine's vector units (once; kept on disk). The
operations of one sequence depend on that sequence alone, so its result has the same bits in any company.

Only this file imports numba. Where it is missing, `available()` is false and kernels.paged_attention does the work.

Legend: R sequences, N heads, K kv heads, M = N / K queries of a kv head, H head dim, Pg pages, S tokens of a page.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

PARALLEL_FROM = 1 << 21
"""Multiplications of a call from which its rows are worth dividing over threads."""


@dataclass(frozen=True)
class Pages:
    """Where the tokens of each sequence are: first the pages of its prompt, then its own.

    prompt, own                  int32 [R, n], -1 beyond their end
    prompt_tokens, own_tokens    int32 [R]
    """

    prompt: np.ndarray
    prompt_tokens: np.ndarray
    own: np.ndarray
    own_tokens: np.ndarray


@cache
def _attend() -> Any:
    """The compiled function, or None without numba."""
    try:
        from docklands.kernels import compiled_loops
    except ImportError:
        return None
    return compiled_loops.attend


def available(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether `decode_attention` can run for tensors of this kind here."""
    known = dtype in (torch.float32, torch.bfloat16) and torch.device(device).type == "cpu"
    return known and _attend() is not None


def decode_attention(q_RNH: Tensor, k_PgKSH: Tensor, v_PgKSH: Tensor, pages: Pages, scale: float) -> Tensor:
    """softmax(q k^T * scale) v of each sequence over its own tokens. -> o_RNH in q's dtype.

    q_RNH holds heads in (query, kv head) order: head m * K + k is query m of kv head k. Rows beyond those of `pages`
    (padding) give 0. fp32 or bf16, one dtype for all; sums are in fp32.
    """
    rows, heads, size = len(pages.own), q_RNH.shape[1], q_RNH.shape[2]
    q, k, v = (_array(tensor) for tensor in (q_RNH, k_PgKSH, v_PgKSH))
    out = torch.zeros_like(q_RNH, memory_format=torch.contiguous_format)
    o = _array(out)
    attend = _attend()

    def some(first: int, last: int) -> None:
        part = slice(first, last)
        attend(
            (q[part], o[part]), (k, v), (pages.prompt[part], pages.own[part]),
            (pages.prompt_tokens[part], pages.own_tokens[part]), np.float32(scale),
        )  # fmt: skip

    tokens = int(pages.prompt_tokens.sum()) + int(pages.own_tokens.sum())
    threads = torch.get_num_threads()
    if threads == 1 or tokens * heads * size * 2 < PARALLEL_FROM:
        some(0, rows)
    else:
        edges = np.linspace(0, rows, threads + 1).astype(int).tolist()
        rest = [workers(threads - 1).submit(some, a, b) for a, b in zip(edges[1:-1], edges[2:])]
        some(edges[0], edges[1])
        for future in rest:
            future.result(timeout=600)
    return out


@cache
def workers(threads: int) -> ThreadPoolExecutor:
    """Threads that compiled loops are divided over, beside the caller's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="loops")


os.register_at_fork(after_in_child=workers.cache_clear)  # a child has the pool, but not its threads


def _array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory; bf16 as its bits."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
