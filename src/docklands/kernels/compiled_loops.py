"""The loops of compiled_decode, as numba compiles them. Imported by that file only.

Sums may be reordered (`reassoc`), so that they run in vector registers; how, depends on lengths alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from docklands.kernels.compiled_cache import njit

FAST = {"reassoc", "contract", "nsz", "arcp"}
LOG2_E = np.float32(1.4426950408889634)
TINY = np.float32(2.0**-126)
LANES = 64
EXP2 = tuple(np.float32(c) for c in (1.0, 0.6931472, 0.2402265, 0.05550411, 0.009618129, 0.0013333558, 0.00015403530))
"""Taylor terms of 2^x, good to 1e-7 for |x| <= 0.5."""


def load(source: Any, target: Any) -> None:
    """Copy numbers into fp32 scratch."""


@overload(load)
def _load(source: Any, target: Any) -> Any:
    if source.dtype == types.uint16:  # bfloat16: the upper half of a float32

        def bits(source: Any, target: Any) -> None:
            whole = target.view(np.uint32)
            for i in range(source.size):
                whole[i] = np.uint32(source[i]) << np.uint32(16)

        return bits

    def numbers(source: Any, target: Any) -> None:
        for i in range(source.size):
            target[i] = source[i]

    return numbers


def store(source: Any, target: Any) -> None:
    """Copy fp32 scratch into the result."""


@overload(store)
def _store(source: Any, target: Any) -> Any:
    if target.dtype == types.uint16:  # to the nearest, ties to even

        def bits(source: Any, target: Any) -> None:
            whole = source.view(np.uint32)
            for i in range(source.size):
                odd = (whole[i] >> np.uint32(16)) & np.uint32(1)
                target[i] = np.uint16((whole[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return bits

    def numbers(source: Any, target: Any) -> None:
        for i in range(source.size):
            target[i] = source[i]

    return numbers


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True, inline="always")
def exponentials(z: Any, most: Any, out: Any, powers: Any) -> Any:
    """out <- exp(z - most), 0 from 2^-126 down. -> their sum. `powers`: int32 scratch.

    Three memories of their own: else the loops cannot be vectorised."""
    for i in range(z.size):
        y = (z[i] - most) * LOG2_E
        y = y if y > np.float32(-126) else np.float32(-126)
        whole = np.floor(y + np.float32(0.5))
        f = y - whole
        p = EXP2[5] + f * EXP2[6]
        p = EXP2[4] + f * p
        p = EXP2[3] + f * p
        p = EXP2[2] + f * p
        p = EXP2[1] + f * p
        out[i] = EXP2[0] + f * p
        powers[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    factor = powers.view(np.float32)
    total = np.float32(0)
    for i in range(z.size):
        power = factor[i]
        value = out[i] * (power if power > TINY else np.float32(0))
        out[i] = value
        total += value
    return total


@njit(fastmath=FAST, cache=True, nogil=True)
def largest(x: Any) -> Any:
    """The largest number: many at once, since a single chain of comparisons is not vectorised."""
    most = x[0]
    for i in range(x.size % LANES):
        most = max(most, x[i])
    if x.size >= LANES:
        tops = x[:LANES].copy()
        for first in range(x.size % LANES, x.size, LANES):
            for i in range(LANES):
                y = x[first + i]
                tops[i] = y if y > tops[i] else tops[i]
        for i in range(LANES):
            most = max(most, tops[i])
    return most


@njit(fastmath=FAST, cache=True, nogil=True)
def attend(rows: Any, pool: Any, tables: Any, tokens: Any, scale: Any) -> None:
    """rows = (q, out) [R, N, H]; pool = (k, v) [Pg, K, S, H]; tables [R, n], tokens [R] of prompts, of own tokens."""
    q_RNH, out_RNH = rows
    k_PgKSH, v_PgKSH = pool
    heads, size = q_RNH.shape[1], q_RNH.shape[2]
    kv_heads, per_page = k_PgKSH.shape[1], k_PgKSH.shape[2]
    queries = heads // kv_heads
    longest = 1
    for r in range(q_RNH.shape[0]):
        longest = max(longest, tokens[0][r] + tokens[1][r])
    tile = np.empty(per_page * size, np.float32)
    q = np.empty((queries, size), np.float32)
    acc = np.empty((queries, size), np.float32)
    p = np.empty((queries, longest), np.float32)
    weights, powers = np.empty(longest, np.float32), np.empty(longest, np.int32)
    for r in range(tokens[0].size):
        length = tokens[0][r] + tokens[1][r]
        for k in range(kv_heads):
            for m in range(queries):
                load(q_RNH[r, m * kv_heads + k], q[m])
                for h in range(size):
                    q[m, h] *= scale
                    acc[m, h] = 0
            at = 0
            for part in range(2):
                left, page = tokens[part][r], 0
                while left > 0:
                    here = min(left, per_page)
                    load(k_PgKSH[tables[part][r, page], k, :here].reshape(here * size), tile)
                    for m in range(queries):
                        for t in range(here):
                            dot = np.float32(0)
                            for h in range(size):
                                dot += q[m, h] * tile[t * size + h]
                            p[m, at + t] = dot
                    at, left, page = at + here, left - here, page + 1
            for m in range(queries):
                most = largest(p[m, :length])
                x = p[m, :length]
                total = exponentials(x, most, weights[:length], powers[:length])
                for t in range(length):
                    x[t] = weights[t] / total
            at = 0
            for part in range(2):
                left, page = tokens[part][r], 0
                while left > 0:
                    here = min(left, per_page)
                    load(v_PgKSH[tables[part][r, page], k, :here].reshape(here * size), tile)
                    for m in range(queries):
                        for t in range(here):
                            weight = p[m, at + t]
                            for h in range(size):
                                acc[m, h] += weight * tile[t * size + h]
                    at, left, page = at + here, left - here, page + 1
            for m in range(queries):
                store(acc[m], out_RNH[r, m * kv_heads + k])
