"""Backward passes of norms and SwiGLU on CPU, as numba compiles them: each row is read once and written once.

Imported by compiled_train.py only. A row's result depends on that row alone.

Legend: R rows, D size of a row, F feed-forward.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from docklands.kernels.compiled_cache import njit
from docklands.kernels.compiled_loops import EXP2, FAST, LOG2_E, load, store

BLOCK = 1024
"""Numbers of a row at a time, where a row need not be whole: they stay in a core's first cache."""


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def rms_norm_backward(inputs: Any, scale_R: Any, grad_x_RD: Any, grad_weight_D: Any) -> None:
    """inputs = (gradient, x, weight). With n = x * scale and g = gradient * weight: (g - n * mean(g * n)) * scale.

    grad_weight_D, fp32, grows by the sum over rows of gradient * n.
    """
    grad_RD, x_RD, weight_D = inputs
    size = x_RD.shape[1]
    grad, row, weight = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    load(weight_D, weight)
    for r in range(x_RD.shape[0]):
        load(x_RD[r], row)
        load(grad_RD[r], grad)
        scale, total = scale_R[r], np.float32(0)
        for d in range(size):
            row[d] *= scale
            product = grad[d] * row[d]
            grad_weight_D[d] += product
            total += product * weight[d]
        total /= np.float32(size)
        for d in range(size):
            row[d] = (grad[d] * weight[d] - row[d] * total) * scale
        store(row, grad_x_RD[r])


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True, inline="always")
def sigmoids(x: Any, out: Any, powers: Any) -> None:
    """out <- 1 / (1 + exp(-x)). `powers`: int32 scratch; a memory of its own, else the loops cannot be vectorised."""
    for i in range(x.size):
        y = min(max(-x[i] * LOG2_E, np.float32(-126)), np.float32(126))
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
    for i in range(x.size):
        out[i] = np.float32(1) / (np.float32(1) + out[i] * factor[i])


@njit(fastmath=FAST, error_model="numpy", cache=True, nogil=True)
def swiglu_backward(grad_RF: Any, gate_up_RF: Any, grad_gate_up_RF: Any) -> None:
    """Of up: grad * silu(gate). Of gate: grad * up * s * (1 + gate * (1 - s)) with s = sigmoid(gate)."""
    width = grad_RF.shape[1]
    gate, sigma, powers = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32)
    up, grad = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for r in range(grad_RF.shape[0]):
        for first in range(0, width, BLOCK):
            n = min(BLOCK, width - first)
            a, s, u, g = gate[:n], sigma[:n], up[:n], grad[:n]
            load(gate_up_RF[r, first : first + n], a)
            load(gate_up_RF[r, width + first : width + first + n], u)
            load(grad_RF[r, first : first + n], g)
            sigmoids(a, s, powers[:n])
            for i in range(n):
                slope = s[i] * (np.float32(1) + a[i] * (np.float32(1) - s[i]))
                u[i] *= g[i] * slope
                g[i] *= a[i] * s[i]
            store(u, grad_gate_up_RF[r, first : first + n])
            store(g, grad_gate_up_RF[r, width + first : width + first + n])
