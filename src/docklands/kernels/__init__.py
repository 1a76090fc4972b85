"""Fused operations behind one dispatch: reference (CPU and oracle), cuda.py, npu.py.

Legend: T packed tokens, S keys, D model (or any last dimension), F feed-forward, N heads, K kv heads, H head dim,
V vocabulary, E experts, k experts of a token, M rows of experts, I inputs, O outputs.

Activations decide the precision: a parameter of another dtype is cast to the activation's at each use, and its gradient
comes back in its own dtype. No cast is kept: a version counter does not see every optimizer's step (the fused AdamW of
torch does not raise it), so a kept one could be stale. An engine that wants to cast once holds 16-bit parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from docklands.kernels.logprob import logprob_of_logits, sampled_logprob

if TYPE_CHECKING:
    from docklands.kernels.grouped_mm import ExpertRows

__all__ = [
    "OPERATIONS",
    "block_backward",
    "block_forward",
    "get",
    "grouped_linear",
    "linear",
    "logprob_of_logits",
    "packed_attention",
    "permute",
    "rms_norm",
    "rope",
    "sampled_logprob",
    "swiglu",
    "swiglu_fused",
    "unpermute",
    "used",
    "varlen_attention",
]

_BACKENDS = {"cuda": "docklands.kernels.cuda", "npu": "docklands.kernels.npu"}
_FALLBACK = ("reference", "attention", "block_attention", "grouped_mm", "logprob")
OPERATIONS = (
    "varlen_attention",
    "packed_attention",
    "block_forward",
    "block_backward",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_fused",
    "linear",
    "grouped_linear",
    "permute",
    "unpermute",
    "sampled_logprob",
)
"""Every operation that `get` knows."""


@cache
def get(op: str, device_type: str) -> Callable[..., Any]:
    """The implementation of `op` for a device type: the backend's own where it has one, else the reference.

    KeyError for an operation that does not exist.
    """
    names = [_BACKENDS[device_type]] if device_type in _BACKENDS else []
    for name in [*names, *(f"docklands.kernels.{module}" for module in _FALLBACK)]:
        found = getattr(importlib.import_module(name), op, None)
        if found is not None:
            return found
    raise KeyError(f"no kernel {op!r}")


def used(device_type: str) -> dict[str, str]:
    """Operation -> the module of this package that computes it on a device type."""
    return {op: get(op, device_type).__module__.rsplit(".", 1)[1] for op in OPERATIONS}


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32 (Zhang and Sennrich 2019)."""
    return get("rms_norm", x_TD.device.type)(x_TD, weight_D, eps)


def rope(q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding, half-split layout: pairs are (h, h + H/2) (Su et al. 2021). cos, sin: fp32, halves repeated."""
    return get("rope", q_TNH.device.type)(q_TNH, k_TKH, cos_TH, sin_TH)


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return get("swiglu", gate_TF.device.type)(gate_TF, up_TF)


def swiglu_fused(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side in the last dimension: [T, 2F] -> [T, F]."""
    return get("swiglu_fused", gate_up_TF.device.type)(gate_up_TF)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; weight [out, in]."""
    return get("linear", x.device.type)(x, weight, bias)


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Rows sorted by expert, each times the transposed weight of its own; `ends_E`: int32, one past each expert's last
    row, M in the end. -> [M, O] in x's dtype.
    """
    return get("grouped_linear", x_MI.device.type)(x_MI, weight_EOI, ends_E)


def packed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """Causal attention inside each of the sequences packed end to end; grouped-query when K < N. -> o_TNH."""
    return get("packed_attention", q_TNH.device.type)(q_TNH, k_TKH, v_TKH, seqlens, scale)


def varlen_attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, lengths: tuple[Sequence[int], Sequence[int]], scale: float
) -> Tensor:
    """Causal attention of each sequence's queries to its keys, both packed end to end; `lengths`: queries and keys of
    each. The last query sees all keys, the one before it all but the last, and so on. -> o_TNH. TrainError.
    """
    return get("varlen_attention", q_TNH.device.type)(q_TNH, k_SKH, v_SKH, lengths, scale)


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of a block of queries [1, N, L, H] to a block of keys [1, K, M, H], one step of a ring; causal: the
    i-th query sees the keys up to the i-th, and L = M. -> (output [1, N, L, H], log-sum-exp fp32 [1, N, L]).
    """
    return get("block_forward", q.device.type)(q, k, v, causal, scale)


def block_backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's q, k and v. inputs: gradient of the output, q, k, v, and output and log-sum-exp after all
    blocks have been merged. Of some dtype, to be added up in fp32.
    """
    return get("block_backward", inputs[0].device.type)(inputs, causal, scale)


def permute(x_TD: Tensor, rows: ExpertRows) -> Tensor:
    """Each token's state to the rows of its experts. -> x_MD"""
    return get("permute", x_TD.device.type)(x_TD, rows)


def unpermute(y_MD: Tensor, rows: ExpertRows, weight_Tk: Tensor) -> Tensor:
    """Weighted sum of each token's rows. -> y_TD in y's dtype"""
    return get("unpermute", y_MD.device.type)(y_MD, rows, weight_Tk)
