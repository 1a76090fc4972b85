"""The choice of the next token, as numba compiles it: three passes over a row's logits, which stay in a core's cache.

Imported by compiled_step.py only. A row's result depends on that row alone.

Legend: R rows, V vocabulary, C chunks of CHUNK entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from docklands.kernels.compiled_loops import FAST, exponentials, largest, load

CHUNK = 128
BELOW = 1 - 2.0**-50  # of a sum: what a uniform number may reach, so that rounding never runs past the end


@njit(cache=True, nogil=True)
def first_above(weights: Any, target: Any) -> Any:
    """(first index where the running sum exceeds `target`, the sum before it); else the last that weighs anything."""
    total, last, before = 0.0, 0, 0.0
    for i in range(weights.size):
        weight = np.float64(weights[i])
        if weight > 0:
            last, before = i, total
            total += weight
            if total > target:
                break
    return last, before


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def extremes(z: Any) -> Any:
    """(largest number, how many are not numbers)"""
    most, wrong = largest(z), np.int32(0)
    for i in range(z.size):
        wrong += np.int32(z[i] != z[i])
    return most, wrong


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def draw(logits_RV: Any, how: Any, out: Any, first: Any, last: Any) -> None:
    """how = (temperature, uniform) float64 [R]; out = (tokens int64, logprobs fp32) [R]; rows first..last.

    A log-probability is NaN where the logits hold a NaN or an infinity.
    """
    temperature_R, uniform_R = how
    tokens_R, logprobs_R = out
    vocabulary = logits_RV.shape[1]
    z, weight, powers = np.empty(vocabulary, np.float32), np.empty(vocabulary, np.float32), np.empty(CHUNK, np.int32)
    sums = np.empty((vocabulary + CHUNK - 1) // CHUNK, np.float64)
    for r in range(first, last):
        load(logits_RV[r], z)
        scale = np.float32(temperature_R[r])
        if scale > 0 and scale != 1:
            for i in range(vocabulary):
                z[i] /= scale
        most, wrong = extremes(z)
        if wrong or not np.isfinite(most):
            tokens_R[r], logprobs_R[r] = 0, np.nan
            continue
        total = 0.0
        for c in range(sums.size):
            part = slice(c * CHUNK, min(vocabulary, (c + 1) * CHUNK))
            some = z[part]
            sums[c] = exponentials(some, most, weight[part], powers[: some.size])
            total += sums[c]
        if scale > 0:
            chunk, before = first_above(sums, uniform_R[r] * total * BELOW)
            inside = weight[chunk * CHUNK : (chunk + 1) * CHUNK]
            exact = 0.0
            for i in range(inside.size):
                exact += np.float64(inside[i])
            rest = min(uniform_R[r] * total * BELOW - before, exact * BELOW)
            token = chunk * CHUNK + first_above(inside, rest)[0]
        else:
            token = 0
            while z[token] != most:
                token += 1
        tokens_R[r] = token
        logprobs_R[r] = (np.float64(z[token]) - np.float64(most)) - np.log(total)
