"""CUDA: torch's own fused operations where it has them; everything else falls back to the reference.

Legend: T packed tokens, D model, N heads, K kv heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from docklands.kernels import attention


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels.rms_norm; one fused kernel, statistics in fp32."""
    return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D.to(x_TD.dtype), eps)


def packed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """See kernels.packed_attention: variable-length flash attention in half precision, the reference in fp32."""
    if q_TNH.dtype not in (torch.float16, torch.bfloat16):
        return attention.packed_attention(q_TNH, k_TKH, v_TKH, seqlens, scale)
    attention.check_lengths(q_TNH, seqlens)
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *seqlens]).cumsum(0).to(q_TNH.device, torch.int32)
    longest, grouped = max(seqlens, default=0), q_TNH.shape[1] != k_TKH.shape[1]
    causal = (-1, 0)  # any distance back, none ahead
    out = varlen_attn(
        q_TNH, k_TKH, v_TKH, ends, ends, longest, longest, scale=scale, window_size=causal, enable_gqa=grouped
    )
    assert isinstance(out, Tensor)
    return out
