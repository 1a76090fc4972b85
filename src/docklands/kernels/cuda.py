"""CUDA: torch's own fused operations where it has them, rotation and SwiGLU as torch.compile fuses them; everything
else falls back to the reference.

Legend: T packed tokens, S keys, D model, F feed-forward, N heads, K kv heads, H head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from docklands.kernels import attention, block_attention, reference

BACKEND: Any = "inductor"
"""Of torch.compile."""

log = logging.getLogger("docklands.kernels")

_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels.rms_norm; one fused kernel, statistics in fp32."""
    return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D.to(x_TD.dtype), eps)


@cache
def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """One kernel for any number of tokens, made at the first call; gives None where that fails."""
    from torch._dynamo.exc import TorchDynamoException

    made, broken = torch.compile(function, dynamic=True, fullgraph=True, backend=backend), False

    def call(*inputs: Tensor) -> Any:
        nonlocal broken
        if not broken:
            try:
                return made(*inputs)
            except TorchDynamoException as error:  # no Triton, no C compiler
                broken = True
                reason = " ".join(str(error).strip().splitlines()[:2])
                log.warning("%s is not compiled, torch computes it in steps: %s", function.__name__, reason)
        return None

    return call


def _swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return F.silu(gate_TF) * up_TF


def _swiglu_fused(gate_up_TF: Tensor) -> Tensor:
    gate, up = gate_up_TF.chunk(2, -1)
    return F.silu(gate) * up


def _rope(q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    half = q_TNH.shape[-1] // 2
    cos, sin = cos_TH[:, None, :half].to(q_TNH.dtype), sin_TH[:, None, :half].to(q_TNH.dtype)
    turned = []
    for x in (q_TNH, k_TKH):
        first, second = x[..., :half], x[..., half:]
        turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
    return turned[0], turned[1]


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """See kernels.swiglu; compiled."""
    return _or_plain(_swiglu, reference.swiglu, gate_TF, up_TF)


def swiglu_fused(gate_up_TF: Tensor) -> Tensor:
    """See kernels.swiglu_fused; compiled."""
    return _or_plain(_swiglu_fused, reference.swiglu_fused, gate_up_TF)


def rope(q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels.rope; q and k in one compiled function."""
    return _or_plain(_rope, reference.rope, q_TNH, k_TKH, cos_TH, sin_TH)


def _or_plain(function: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor) -> Any:
    """The compiled function, or its plain form."""
    found = _compiled(function, BACKEND)(*inputs) if inputs[0].numel() else None
    return plain(*inputs) if found is None else found


def varlen_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, lengths: attention.Lengths, scale: float) -> Tensor:
    """See kernels.varlen_attention; torch's own flash attention in half precision, the reference in fp32."""
    if q_TNH.dtype not in (torch.float16, torch.bfloat16) or not len(q_TNH):
        return attention.varlen_attention(q_TNH, k_SKH, v_SKH, lengths, scale)
    attention.check_varlen(q_TNH, k_SKH, lengths)
    from torch.nn.attention.varlen import varlen_attn

    q_ends, k_ends = (torch.tensor([0, *some]).cumsum(0).to(q_TNH.device, torch.int32) for some in lengths)
    longest_q, longest_k = map(max, lengths)
    grouped, causal = q_TNH.shape[1] != k_SKH.shape[1], (-1, 0)  # any distance back from the last key, none ahead
    out = varlen_attn(
        q_TNH,
        k_SKH,
        v_SKH,
        q_ends,
        k_ends,
        longest_q,
        longest_k,
        scale=scale,
        window_size=causal,
        enable_gqa=grouped,
    )
    assert isinstance(out, Tensor)
    return out


def _takes(q: Tensor) -> bool:
    """Whether flash attention takes queries of this kind: 16 bits, heads of a multiple of 8 up to 256."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See kernels.block_forward; torch's flash attention, which gives the log-sum-exp."""
    if not _takes(q):
        return block_attention.plain_forward(q, k, v, causal, scale)
    found = _flash(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def block_backward(inputs: block_attention.Six, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.block_backward; the backward of the same. Without dropout its random state is not read."""
    go, q, k, v, o, lse = inputs
    if not _takes(q):
        return block_attention.plain_backward(inputs, causal, scale)
    none, state = q.new_empty(0, dtype=torch.int32), q.new_empty(2, dtype=torch.uint64)
    lengths = none, none, q.shape[2], k.shape[2]
    return _flash_backward(go, q, k, v, o, lse.contiguous(), *lengths, 0.0, causal, state, state[:0], scale=scale)


def packed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """See kernels.packed_attention; `varlen_attention` with as many keys as queries."""
    attention.check_lengths(q_TNH, seqlens)
    return varlen_attention(q_TNH, k_TKH, v_TKH, (seqlens, seqlens), scale)
