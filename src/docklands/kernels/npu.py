"""Ascend NPU: torch_npu's fused operations, by its documentation; everything else falls back to the reference.

Legend: T packed tokens, D model, F feed-forward, N heads, K kv heads, H head dim.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from torch import Tensor

from docklands.kernels import attention

MASK_SIZE = 2048  # sparse_mode 3 takes one compressed causal mask of this size for any length


def _npu() -> Any:
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels.rms_norm; npu_rms_norm."""
    return _npu().npu_rms_norm(x_TD, weight_D.to(x_TD.dtype), epsilon=eps)[0]


def swiglu_fused(gate_up_TF: Tensor) -> Tensor:
    """See kernels.swiglu_fused; npu_swiglu splits the last dimension in halves."""
    return _npu().npu_swiglu(gate_up_TF, dim=-1)


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def packed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """See kernels.packed_attention; npu_fusion_attention in TND layout, lengths as cumulative host integers."""
    if q_TNH.dtype not in (torch.float16, torch.bfloat16):
        return attention.packed_attention(q_TNH, k_TKH, v_TKH, seqlens, scale)
    attention.check_lengths(q_TNH, seqlens)
    ends = list(itertools.accumulate(length for length in seqlens if length))
    return _npu().npu_fusion_attention(
        q_TNH,
        k_TKH,
        v_TKH,
        q_TNH.shape[1],
        input_layout="TND",
        atten_mask=_causal_mask(q_TNH.device),
        scale=scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=3,
    )[0]
