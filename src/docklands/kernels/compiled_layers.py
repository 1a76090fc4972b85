"""One pass over a dense decoder, from embeddings to final states, as numba compiles it; and single products.

Every thread of a team runs `decode`; between the phases of a layer they meet. Numbers are rounded to the dtype of the
activations where the modules round them. The operations of a row depend on that row alone.

Imported by compiled_step.py only.

Legend: R rows, T tokens, D model, F feed-forward, N heads, K kv heads, M = N / K queries of a kv head, H head dim,
L layers, Pg pages, S tokens of a page, P positions, I inputs, O outputs, W the widest product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from docklands.kernels.compiled_cache import njit
from docklands.kernels.compiled_loops import FAST, load, store
from docklands.kernels.compiled_rows import sigmoids
from docklands.kernels.compiled_team import meet, next_task
from docklands.kernels.compiled_tiles import (
    ACROSS,
    BLOCK_ROWS,
    LANES,
    ROWS,
    add_weighted,
    address,
    multiply,
    ready,
    share,
    some_rows,
    tiles_of,
)
from docklands.kernels.compiled_vectors import plus_at, soften, turn_at

COLUMNS = 256  # outputs of a product that are kept in fp32 at a time
GATED = 16384  # numbers of gate, and of up, that are kept in fp32 at a time


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
def gated(both_2RC: Any, act_RF: Any, part: Any, scratch: Any) -> None:
    """act, columns first..last <- silu(gate) * up, which are overwritten. scratch = (fp32 [C], int32 [C])"""
    first, last = part
    n = last - first
    sigma, powers = scratch[0][:n], scratch[1][:n]
    for r in range(act_RF.shape[0]):
        gate, up, act = both_2RC[0, r, :n], both_2RC[1, r, :n], act_RF[r, first:last]
        settle(gate, act)
        settle(up, act)
        sigmoids(gate, sigma, powers)
        for i in range(n):
            sigma[i] *= gate[i]
        settle(sigma, act)
        for i in range(n):
            sigma[i] *= up[i]
        store(sigma, act)


@njit(cache=True, nogil=True)
def feed(x: Any, weight: Any, act_RF: Any, part: Any, scratch: Any) -> None:
    """act, columns first..last <- silu(x @ gate.T) * (x @ up.T), some at a time: gate and up stay in a core's cache.

    x: `ready`. weight = (address of gate and up, end to end, bytes of a row); scratch = (fp32 [2, R, C], (fp32 [C],
    int32 [C]))
    """
    first, end = part
    both_2RC, powers = scratch
    (gate_up, row), width, most = weight, act_RF.shape[1], both_2RC.shape[2]
    while first < end:
        left = end - first
        last = end if left <= most else first + min(most, (left - ACROSS) // ACROSS * ACROSS)  # 4 or more are left
        multiply(x, gate_up + first * row, both_2RC[0], 0, last - first)
        multiply(x, gate_up + (width + first) * row, both_2RC[1], 0, last - first)
        gated(both_2RC, act_RF, (first, last), powers)
        first = last


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


@njit(error_model="numpy", cache=True, nogil=True)
def turn(r: Any, layer: Any, model: Any, buffers: Any, pages: Any, scratch: Any) -> None:
    """One row: its queries, rotated, to q_RKMH; its new key and value to their page. scratch: fp32 [2, H]"""
    (kv_heads, size, eps, _), (qkv_bias_LO, qk_norm_LMH, cos_PH, sin_PH) = model
    y_RW, q_RKMH, (k_LPgKSH, v_LPgKSH) = buffers
    _, own_Rn, prompt_R, own_R = pages
    queries, per_page, half = q_RKMH.shape[2], k_LPgKSH.shape[3], size // 2
    position, last = prompt_R[r] + own_R[r] - 1, own_R[r] - 1
    page, slot = own_Rn[r, last // per_page], last % per_page
    y, bias = address(y_RW) + r * y_RW.strides[0], address(qkv_bias_LO) + layer * qkv_bias_LO.strides[0]
    angles = address(cos_PH) + position * half * 4, address(sin_PH) + position * half * 4, half
    plain = qk_norm_LMH.shape[2] == 0 and half % LANES == 0
    for kv in range(kv_heads):
        for m in range(queries + 1):
            at = (m * kv_heads + kv) * size
            out = q_RKMH[r, kv, m] if m < queries else k_LPgKSH[layer, page, kv, slot]
            if plain:
                turn_at(q_RKMH, y + at * 4, bias + at * 4, angles, address(out))
            else:
                norm = qk_norm_LMH[layer, m * kv_heads + kv]
                scratch[0] = qkv_bias_LO[layer, at : at + size]
                project(y_RW[r, at : at + size], (norm, eps), (cos_PH[position], sin_PH[position]), out, scratch)
        at = ((queries + 1) * kv_heads + kv) * size
        plus_at(q_RKMH, y + at * 4, bias + at * 4, address(v_LPgKSH[layer, page, kv, slot]), size)


@njit(error_model="numpy", cache=True, nogil=True)
def attend(q_MH: Any, pool: Any, tables: Any, lengths: Any, scratch: Any) -> None:
    """scratch = (scores [M, longest + more], acc [M, H]); pool = (addresses of k and v of this layer and kv head, bytes
    from page to page, tokens of a page, scale); tables, lengths = pages and tokens of the prompt, of the row itself.

    -> acc, softmax in fp32
    """
    keys_at, values_at, pages, per_page, scale = pool
    score, acc = scratch
    queries, size = q_MH.shape
    width = size * q_MH.itemsize
    q, out, stride, sums = address(q_MH), address(score), score.strides[0], address(acc)
    at = 0
    for part in range(2):
        left, page = lengths[part], 0
        while left > 0:
            here = min(left, per_page)
            keys = keys_at + tables[part][page] * pages
            for first in range(0, queries, ROWS):
                m = min(ROWS, queries - first)
                for t in range(0, here, ACROSS):  # beyond `here`: overwritten by what follows, or masked
                    place = out + first * stride + (at + t) * 4
                    tiles_of(q_MH, m, (q + first * width, keys + t * width, width, place, stride, ACROSS * width))
            at, left, page = at + here, left - here, page + 1
    end = (at + LANES - 1) // LANES * LANES
    for m in range(queries):
        for t in range(at, end):
            score[m, t] = -np.inf
        soften(out + m * stride, end, scale)
        for h in range(size):
            acc[m, h] = 0
    at = 0
    for part in range(2):
        left, page = lengths[part], 0
        while left > 0:
            here = min(left, per_page)
            values = values_at + tables[part][page] * pages
            for first in range(0, queries, ROWS):
                weights, place = out + first * stride + at * 4, sums + first * size * 4
                add_weighted(q_MH, min(ROWS, queries - first), size, (weights, stride, values, here, place))
            at, left, page = at + here, left - here, page + 1


@njit(error_model="numpy", cache=True, nogil=True)
def head(task: Any, layer: Any, model: Any, buffers: Any, pages: Any, scratch: Any) -> None:
    """One row and kv head: attend to what `turn` has kept."""
    kv_heads, size, _, scale = model[0]
    q_RKMH, o_RD, (k_LPgKSH, v_LPgKSH) = buffers
    prompt_Rn, own_Rn, prompt_R, own_R = pages
    scores, acc, zeros = scratch
    r, kv = task // kv_heads, task % kv_heads
    per_page, width = k_LPgKSH.shape[3], size * q_RKMH.itemsize
    head_bytes = per_page * width
    start = (layer * k_LPgKSH.shape[1] * kv_heads + kv) * head_bytes
    pool = address(k_LPgKSH) + start, address(v_LPgKSH) + start, kv_heads * head_bytes, per_page, scale
    attend(q_RKMH[r, kv], pool, (prompt_Rn[r], own_Rn[r]), (prompt_R[r], own_R[r]), (scores, acc))
    for m in range(acc.shape[0]):
        out = address(o_RD) + r * o_RD.strides[0] + (m * kv_heads + kv) * width
        plus_at(o_RD, address(acc) + m * size * 4, address(zeros), out, size)


@njit(error_model="numpy", cache=True, nogil=True)
def decode(team: Any, model: Any, buffers: Any, pages: Any) -> None:
    """team = (part, parts, state); see compiled_step for the rest. x <- the residual stream, normed <- final states."""
    part, parts, state = team
    shape, pointers_L4, norms, attention = model
    x_RD, n_RD, q_RKMH, o_RD, act_RF, y_RW, pool = buffers
    norm_L2D, final_D, o_bias_LD, eps = norms
    rows, kv_heads, queries, size = q_RKMH.shape
    first, last = rows * part // parts, rows * (part + 1) // parts
    columns, width, inner = (queries + 2) * kv_heads * size, act_RF.shape[1], x_RD.shape[1]
    longest = 1
    for r in range(rows):
        longest = max(longest, pages[2][r] + pages[3][r])
    scores = np.empty((queries, longest + pool[0].shape[3] + LANES), np.float32)
    heads = scores, np.empty((queries, size), np.float32), np.zeros(size, np.float32)
    turning = np.empty((2, size), np.float32)
    qkv, o, down = share(columns, part, parts), share(inner, part, parts), share(inner, part, parts)
    gate = share(width, part, parts)
    most = min(max(GATED // rows // ACROSS, 2) * ACROSS, width)
    feeding = np.empty((2, rows, most), np.float32), (np.empty(most, np.float32), np.empty(most, np.int32))
    nothing = np.zeros(inner, np.float32)
    for layer in range(norm_L2D.shape[0]):
        add_and_norm((x_RD, n_RD), y_RW, nothing, (norm_L2D[layer, 0], eps), (first, last, layer > 0))
        meet(state, parts)
        multiply(ready(n_RD), pointers_L4[layer, 0], y_RW, qkv[0], qkv[1])
        meet(state, parts)
        for r in range(first, last):
            turn(r, layer, (shape, attention), (y_RW, q_RKMH, pool), pages, turning)
        meet(state, parts)
        task = next_task(state)
        while task < rows * kv_heads:
            head(task, layer, (shape, attention), (q_RKMH, o_RD, pool), pages, heads)
            task = next_task(state)
        meet(state, parts)
        multiply(ready(o_RD), pointers_L4[layer, 1], y_RW, o[0], o[1])
        meet(state, parts)
        add_and_norm((x_RD, n_RD), y_RW, o_bias_LD[layer], (norm_L2D[layer, 1], eps), (first, last, True))
        meet(state, parts)
        feed(ready(n_RD), (pointers_L4[layer, 2], inner * n_RD.itemsize), act_RF, gate, feeding)
        meet(state, parts)
        multiply(ready(act_RF), pointers_L4[layer, 3], y_RW, down[0], down[1])
        meet(state, parts)
    add_and_norm((x_RD, n_RD), y_RW, nothing, (final_D, eps), (first, last, True))


@njit(cache=True, nogil=True)
def linear(team: Any, x_TI: Any, weight: Any, bias_O: Any, out_TO: Any) -> None:
    """team = (part, parts). out <- x @ weight.T + bias; weight: its address, bias fp32, [0]: none."""
    part, parts = team
    first, last = share(out_TO.shape[1], part, parts)
    rows, size, x = x_TI.shape[0], x_TI.shape[1] * x_TI.itemsize, ready(x_TI)
    y = np.empty((min(BLOCK_ROWS, rows), COLUMNS + ACROSS), np.float32)
    while first < last:
        end = first + COLUMNS if first + COLUMNS + ACROSS <= last else last
        n = end - first
        for row in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - row)
            multiply(some_rows(x, row, row + count), weight + first * size, y[:count], 0, n)
            for r in range(count):
                if bias_O.size:
                    for i in range(n):
                        y[r, i] += bias_O[first + i]
                store(y[r, :n], out_TO[row + r, first:end])
        first = end
