"""The choice of the next token, as numba compiles it: three passes over a row's logits, which stay in a core's cache.

Imported by compiled_step.py only. A row's result depends on that row alone.

Legend: R rows, V vocabulary, C chunks of CHUNK entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from docklands.kernels.compiled_cache import njit
from docklands.kernels.compiled_loops import FAST
from docklands.kernels.compiled_tiles import address
from docklands.kernels.compiled_vectors import exponentials_at, numbers_at

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
def draw(logits_RV: Any, how: Any, out: Any, first: Any, last: Any) -> None:
    """how = (temperature, uniform) float64 [R]; out = (tokens int64, logprobs fp32) [R]; rows first..last.

    A log-probability is NaN where the logits hold a NaN or an infinity.
    """
    temperature_R, uniform_R = how
    tokens_R, logprobs_R = out
    vocabulary = logits_RV.shape[1]
    chunks = (vocabulary + CHUNK - 1) // CHUNK
    z, weight, sums = np.empty(chunks * CHUNK, np.float32), np.empty(chunks * CHUNK, np.float32), np.empty(chunks)
    row = np.zeros(chunks * CHUNK, logits_RV.dtype)  # the last chunk of a row, filled up
    whole = vocabulary // CHUNK * CHUNK
    for r in range(first, last):
        most = np.float32(-np.inf)
        if whole:
            most = numbers_at(row, address(logits_RV[r]), address(z), whole)
        if whole < vocabulary:
            row[whole:vocabulary] = logits_RV[r, whole:]
            end = numbers_at(row, address(row[whole:]), address(z[whole:]), CHUNK)
            z[vocabulary:] = -np.inf
            end = np.nan if np.isnan(end) else z[whole:vocabulary].max()
            most = np.float32(end if np.isnan(end) or end > most else most)
        scale = np.float32(temperature_R[r])
        if scale > 0 and scale != 1:
            for i in range(z.size):
                z[i] /= scale
            most /= scale
        if not np.isfinite(most):
            tokens_R[r], logprobs_R[r] = 0, np.nan
            continue
        total = 0.0
        for c in range(chunks):
            sums[c] = exponentials_at(address(z) + c * CHUNK * 4, most, address(weight) + c * CHUNK * 4, CHUNK)
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
