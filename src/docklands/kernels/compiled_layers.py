"""One decode step of a dense decoder, from embeddings to final states, as numba compiles it; and single products.

Every thread of a team runs `decode`; between the phases of a layer they meet. Numbers are rounded to the dtype of the
activations where the modules round them. The operations of a row depend on that row alone.

Imported by compiled_step.py only.

Legend: R rows, T tokens, D model, F feed-forward, N heads, K kv heads, M = N / K queries of a kv head, H head dim,
L layers, Pg pages, S tokens of a page, P positions, I inputs, O outputs, W the widest product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from docklands.kernels.compiled_loops import FAST, exponentials, largest, load, store
from docklands.kernels.compiled_rows import sigmoids
from docklands.kernels.compiled_team import meet, next_task
from docklands.kernels.compiled_tiles import ACROSS, BLOCK_ROWS, ROWS, add_weighted, address, multiply, share, tiles_of

COLUMNS = 256  # outputs of a product that are kept in fp32 at a time


def settle(x: Any, like: Any) -> None:
    """Round fp32 scratch to the numbers that `like` can hold."""


@overload(settle)
def _settle(x: Any, like: Any) -> Any:
    if like.dtype == types.uint16:

        def bits(x: Any, like: Any) -> None:
            whole = x.view(np.uint32)
            for i in range(x.size):
                odd = (whole[i] >> np.uint32(16)) & np.uint32(1)
                whole[i] = (whole[i] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)

        return bits

    def numbers(x: Any, like: Any) -> None:
        pass

    return numbers


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def normalise(x: Any, weight: Any, eps: Any, like: Any) -> None:
    """x <- x / sqrt(mean(x^2) + eps) * weight, rounded after each of the two."""
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(x.size) + eps)
    for i in range(x.size):
        x[i] *= scale
    settle(x, like)
    for i in range(x.size):
        x[i] *= weight[i]
    settle(x, like)


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def add_and_norm(rows: Any, y_RW: Any, bias_D: Any, norm: Any, part: Any) -> None:
    """rows = (x, normed) [R, D]; norm = (weight, eps); part = (first, last, add). x += y + bias where `add`."""
    x_RD, out_RD = rows
    first, last, add = part
    size = x_RD.shape[1]
    x, more = np.empty(size, np.float32), np.empty(size, np.float32)
    for r in range(first, last):
        load(x_RD[r], x)
        if add:
            y = y_RW[r]
            for i in range(size):
                more[i] = y[i] + bias_D[i]
            settle(more, x_RD)
            for i in range(size):
                x[i] += more[i]
            settle(x, x_RD)
            store(x, x_RD[r])
        normalise(x, norm[0], norm[1], x_RD)
        store(x, out_RD[r])


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def gated(y_RW: Any, act_RF: Any, first: Any, last: Any) -> None:
    """act <- silu(gate) * up, columns first..last; y holds gate and up side by side."""
    width, n = act_RF.shape[1], last - first
    sigma, powers = np.empty(n, np.float32), np.empty(n, np.int32)
    for r in range(y_RW.shape[0]):
        gate, up = y_RW[r, first:last], y_RW[r, width + first : width + last]
        settle(gate, act_RF)
        settle(up, act_RF)
        sigmoids(gate, sigma, powers)
        for i in range(n):
            sigma[i] *= gate[i]
        settle(sigma, act_RF)
        for i in range(n):
            sigma[i] *= up[i]
        store(sigma, act_RF[r, first:last])


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def project(y: Any, norm: Any, turn: Any, out: Any, scratch: Any) -> None:
    """One head, without its bias yet: scratch[0] holds that. norm = (weight [H] or [0], eps); turn = (cos, sin) [H/2].

    -> out: bias added, normed where there is a weight, rotated."""
    a, b = scratch[0], scratch[1]
    half = a.size // 2
    for i in range(a.size):
        a[i] += y[i]
    settle(a, out)
    if norm[0].size:
        normalise(a, norm[0], norm[1], out)
    cos, sin = turn
    for i in range(half):
        b[i] = a[i] * cos[i]
        b[half + i] = a[half + i] * cos[i]
    settle(b, out)
    for i in range(half):
        b[i] -= a[half + i] * sin[i]
        b[half + i] += a[i] * sin[i]
    store(b, out)


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def attend(q_MH: Any, pool: Any, tables: Any, lengths: Any, scratch: Any) -> None:
    """scratch = (scores [M, longest + S], acc [M, H], weights, powers [longest]); pool = (k, v, layer, kv head, scale);
    tables, lengths = the pages and tokens of the prompt, of the row itself. -> acc, softmax in fp32
    """
    k_LPgKSH, v_LPgKSH, layer, kv, scale = pool
    score, acc, weights, powers = scratch
    queries, size = q_MH.shape
    per_page, width = k_LPgKSH.shape[3], size * q_MH.itemsize
    q, out, stride = address(q_MH), address(score), score.strides[0]
    length = lengths[0] + lengths[1]
    at = 0
    for part in range(2):
        left, page = lengths[part], 0
        while left > 0:
            here = min(left, per_page)
            keys = address(k_LPgKSH[layer, tables[part][page], kv])
            for first in range(0, queries, ROWS):
                m = min(ROWS, queries - first)
                for t in range(0, here, ACROSS):  # beyond `here`: overwritten by what follows, or not read
                    place = out + first * stride + (at + t) * 4
                    tiles_of(q_MH, m, (q + first * width, keys + t * width, width, place, stride, ACROSS * width))
            at, left, page = at + here, left - here, page + 1
    for m in range(queries):
        x = score[m, :length]
        for t in range(length):
            x[t] *= scale
        total = exponentials(x, largest(x), weights[:length], powers[:length])
        for t in range(length):
            x[t] = weights[t] / total
        for h in range(size):
            acc[m, h] = 0
    at = 0
    for part in range(2):
        left, page = lengths[part], 0
        while left > 0:
            here = min(left, per_page)
            values = address(v_LPgKSH[layer, tables[part][page], kv])
            for first in range(0, queries, ROWS):
                m = min(ROWS, queries - first)
                weights_at, sums = out + first * stride + at * 4, address(acc) + first * size * 4
                add_weighted(q_MH, m, size, (weights_at, stride, values, here, sums))
            at, left, page = at + here, left - here, page + 1


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def head(task: Any, layer: Any, model: Any, buffers: Any, pages: Any, scratch: Any) -> None:
    """One row and kv head: rotate, keep the new key and value, attend."""
    shape, weights = model
    qkv_bias_LO, qk_norm_LMH, cos_PH, sin_PH = weights
    kv_heads, size, eps, scale = shape
    y_RW, o_RD, (k_LPgKSH, v_LPgKSH) = buffers
    prompt_Rn, own_Rn, prompt_R, own_R = pages
    q_MH, ab, attention = scratch
    r, kv = task // kv_heads, task % kv_heads
    queries, per_page = q_MH.shape[0], k_LPgKSH.shape[3]
    position, last = prompt_R[r] + own_R[r] - 1, own_R[r] - 1
    page, slot = own_Rn[r, last // per_page], last % per_page
    y, bias, turn = y_RW[r], qkv_bias_LO[layer], (cos_PH[position], sin_PH[position])
    for m in range(queries + 1):
        at = m * kv_heads + kv
        part = slice(at * size, (at + 1) * size)
        ab[0] = bias[part]
        norm = qk_norm_LMH[layer, at]
        if m < queries:
            project(y[part], (norm, eps), turn, q_MH[m], ab)
        else:
            project(y[part], (norm, eps), turn, k_LPgKSH[layer, page, kv, slot], ab)
    at = (queries + 1) * kv_heads + kv
    for h in range(size):
        ab[0, h] = y[at * size + h] + bias[at * size + h]
    store(ab[0], v_LPgKSH[layer, page, kv, slot])
    pool = k_LPgKSH, v_LPgKSH, layer, kv, scale
    attend(q_MH, pool, (prompt_Rn[r], own_Rn[r]), (prompt_R[r], own_R[r]), attention)
    acc = attention[1]
    for m in range(queries):
        at = m * kv_heads + kv
        store(acc[m], o_RD[r, at * size : (at + 1) * size])


@njit(error_model="numpy", cache=True, nogil=True)
def decode(team: Any, model: Any, buffers: Any, pages: Any) -> None:
    """team = (part, parts, state); see compiled_step for the rest. x <- the residual stream, normed <- final states."""
    part, parts, state = team
    shape, pointers_L4, norms, attention = model
    x_RD, n_RD, o_RD, act_RF, y_RW, pool = buffers
    norm_L2D, final_D, o_bias_LD, eps = norms
    rows, (kv_heads, size, _, _) = x_RD.shape[0], shape
    first, last = rows * part // parts, rows * (part + 1) // parts
    queries = o_RD.shape[1] // (kv_heads * size)
    columns = (queries + 2) * kv_heads * size
    longest = 1
    for r in range(rows):
        longest = max(longest, pages[2][r] + pages[3][r])
    per_page, width, inner = pool[0].shape[3], act_RF.shape[1], x_RD.shape[1]
    scores = np.empty((queries, longest + per_page), np.float32)
    acc = np.empty((queries, size), np.float32)
    weights, powers = np.empty(longest, np.float32), np.empty(longest, np.int32)
    scratch = np.empty((queries, size), x_RD.dtype), np.empty((2, size), np.float32), (scores, acc, weights, powers)
    qkv, o, down = share(columns, part, parts), share(inner, part, parts), share(inner, part, parts)
    gate = share(width, part, parts)
    nothing = np.zeros(inner, np.float32)
    for layer in range(norm_L2D.shape[0]):
        add_and_norm((x_RD, n_RD), y_RW, nothing, (norm_L2D[layer, 0], eps), (first, last, layer > 0))
        meet(state, parts)
        multiply(n_RD, pointers_L4[layer, 0], y_RW, qkv[0], qkv[1])
        meet(state, parts)
        task = next_task(state)
        while task < rows * kv_heads:
            head(task, layer, (shape, attention), (y_RW, o_RD, pool), pages, scratch)
            task = next_task(state)
        meet(state, parts)
        multiply(o_RD, pointers_L4[layer, 1], y_RW, o[0], o[1])
        meet(state, parts)
        add_and_norm((x_RD, n_RD), y_RW, o_bias_LD[layer], (norm_L2D[layer, 1], eps), (first, last, True))
        meet(state, parts)
        if gate[1] > gate[0]:
            multiply(n_RD, pointers_L4[layer, 2], y_RW, gate[0], gate[1])
            multiply(n_RD, pointers_L4[layer, 2], y_RW, width + gate[0], width + gate[1])
            gated(y_RW, act_RF, gate[0], gate[1])
        meet(state, parts)
        multiply(act_RF, pointers_L4[layer, 3], y_RW, down[0], down[1])
        meet(state, parts)
    add_and_norm((x_RD, n_RD), y_RW, nothing, (final_D, eps), (first, last, True))


@njit(cache=True, nogil=True)
def linear(team: Any, x_TI: Any, weight: Any, bias_O: Any, out_TO: Any) -> None:
    """team = (part, parts). out <- x @ weight.T + bias; weight: its address, bias fp32, [0]: none."""
    part, parts = team
    first, last = share(out_TO.shape[1], part, parts)
    y = np.empty((min(BLOCK_ROWS, x_TI.shape[0]), COLUMNS + ACROSS), np.float32)
    size = x_TI.shape[1] * x_TI.itemsize
    while first < last:
        end = first + COLUMNS if first + COLUMNS + ACROSS <= last else last
        n = end - first
        for row in range(0, x_TI.shape[0], BLOCK_ROWS):
            some = x_TI[row : row + BLOCK_ROWS]
            multiply(some, weight + first * size, y, 0, n)
            for r in range(some.shape[0]):
                if bias_O.size:
                    for i in range(n):
                        y[r, i] += bias_O[first + i]
                store(y[r, :n], out_TO[row + r, first:end])
        first = end
