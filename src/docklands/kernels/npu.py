"""Ascend NPU: torch_npu's fused operations, by its documentation; everything else falls back to the reference.

Legend: T packed tokens, S keys, D model, F feed-forward, N heads, K kv heads, H head dim, M rows of experts,
E experts, k experts of a token, I inputs, O outputs.

None of this has run on an NPU: tests hold the calls against the documented signatures (tests/npu_api.py).
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from torch import Tensor

from docklands.kernels import attention, deferred, grouped_mm, reference

MASK_SIZE = 2048  # sparse_mode 3 takes one compressed causal mask of this size for any length
MAX_ROTARY = 896  # npu_rotary_mul: largest head
MAX_TOP_K = 512  # npu_moe_token_unpermute
MAX_CHOICES = 16_777_215  # npu_moe_token_permute


def _npu() -> Any:
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels.rms_norm; npu_rms_norm."""
    return _npu().npu_rms_norm(x_TD, weight_D.to(x_TD.dtype), epsilon=eps)[0]


def swiglu_fused(gate_up_TF: Tensor) -> Tensor:
    """See kernels.swiglu_fused; npu_swiglu splits the last dimension in halves."""
    return _npu().npu_swiglu(gate_up_TF, dim=-1)


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """See kernels.swiglu; npu_swiglu of both side by side."""
    return swiglu_fused(torch.cat([gate_TF, up_TF], -1))


def rope(q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels.rope; npu_rotary_mul in its half mode, layout [1, T, N, H] with cos and sin [1, T, 1, H]."""
    size = q_TNH.shape[-1]
    if size % 2 or size > MAX_ROTARY or not len(q_TNH):
        return reference.rope(q_TNH, k_TKH, cos_TH, sin_TH)
    cos, sin = (x.to(q_TNH.dtype)[None, :, None].contiguous() for x in (cos_TH, sin_TH))
    q, k = (_npu().npu_rotary_mul(x[None].contiguous(), cos, sin, rotary_mode="half")[0] for x in (q_TNH, k_TKH))
    return q, k


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def varlen_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, lengths: attention.Lengths, scale: float) -> Tensor:
    """See kernels.varlen_attention; npu_fusion_attention in TND layout, lengths as cumulative host integers. fp32: the
    reference.
    """
    if q_TNH.dtype not in (torch.float16, torch.bfloat16) or not len(q_TNH):
        return attention.varlen_attention(q_TNH, k_SKH, v_SKH, lengths, scale)
    attention.check_varlen(q_TNH, k_SKH, lengths)
    real = [pair for pair in zip(*lengths) if pair[0]]
    if sum(keys for _, keys in real) != len(k_SKH):  # keys that no query asks for
        return attention.varlen_attention(q_TNH, k_SKH, v_SKH, lengths, scale)
    return _npu().npu_fusion_attention(
        q_TNH,
        k_SKH,
        v_SKH,
        q_TNH.shape[1],
        "TND",
        atten_mask=_causal_mask(q_TNH.device),
        scale=scale,
        actual_seq_qlen=list(itertools.accumulate(queries for queries, _ in real)),
        actual_seq_kvlen=list(itertools.accumulate(keys for _, keys in real)),
        sparse_mode=3,  # causal, aligned at the last key
    )[0]


def packed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """See kernels.packed_attention; `varlen_attention` with as many keys as queries."""
    attention.check_lengths(q_TNH, seqlens)
    return varlen_attention(q_TNH, k_TKH, v_TKH, (seqlens, seqlens), scale)


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See kernels.block_forward; npu_fusion_attention gives the row's maximum and sum, 8 times each."""
    found = _npu().npu_fusion_attention(
        *(x.contiguous() for x in (q, k, v)), q.shape[1], "BNSD", scale=scale, **_who_sees(q, causal)
    )
    return found[0], (found[1] + found[2].log())[..., 0]


def block_backward(inputs: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.block_backward; npu_fusion_attention_grad, with lse as the maximum and a sum of 1: exp(x - lse)."""
    go, q, k, v, o = (x.contiguous() for x in inputs[:5])
    most = inputs[5].float()[..., None].expand(*inputs[5].shape, 8).contiguous()
    found = _npu().npu_fusion_attention_grad(
        q, k, v, go, q.shape[1], "BNSD", softmax_max=most, softmax_sum=torch.ones_like(most), attention_in=o,
        scale_value=scale, **_who_sees(q, causal),
    )  # fmt: skip
    return found[0], found[1], found[2]


def _who_sees(q: Tensor, causal: bool) -> dict[str, Any]:
    """Mask arguments of a block: all keys, or up to one's own."""
    return {"atten_mask": _causal_mask(q.device), "sparse_mode": 3} if causal else {}


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """See kernels.grouped_linear; npu_grouped_matmul, whose backward is two of the same."""
    if not len(x_MI):
        return grouped_mm.grouped_linear(x_MI, weight_EOI, ends_E)
    return _GroupedMatmul.apply(x_MI, weight_EOI, ends_E)  # type: ignore[return-value]


class _GroupedMatmul(torch.autograd.Function):
    """torch_npu registers no gradient for it. The weight is cast to the activation's dtype, its gradient in its own."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        cast_EOI, ends_E = weight_EOI.to(x_MI.dtype), ends_E.to(torch.int64)
        ctx.save_for_backward(x_MI, cast_EOI, ends_E)
        ctx.dtype, ctx.later = weight_EOI.dtype, deferred.store_for(weight_EOI)
        return _rows(x_MI, cast_EOI.transpose(1, 2), ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, cast_EOI, ends_E = ctx.saved_tensors
        grad_MO = grads[0].contiguous()
        grad_x = _rows(grad_MO, cast_EOI, ends_E) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            dtype = ctx.dtype
            grad_weight = deferred.gradient(ctx.later, lambda: _outer(x_MI, grad_MO, ends_E).transpose(1, 2).to(dtype))
        return grad_x, grad_weight, None


def _rows(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """group_type 0: the rows are cut, at cumulative counts (group_list_type 0), into one output (split_item 2)."""
    return _npu().npu_grouped_matmul(
        [x_MI], [weight_EIO], group_list=ends_E, split_item=2, group_type=0, group_list_type=0
    )[0]


def _outer(x_MI: Tensor, grad_MO: Tensor, ends_E: Tensor) -> Tensor:
    """group_type 2: the summed axis is cut. [I, M] x [M, O] -> [E, I, O]"""
    return _npu().npu_grouped_matmul(
        [x_MI.t()], [grad_MO], group_list=ends_E, split_item=3, group_type=2, group_list_type=0
    )[0]


def permute(x_TD: Tensor, rows: grouped_mm.ExpertRows) -> Tensor:
    """See kernels.permute; npu_moe_token_permute sorts as ExpertRows does: by expert, then by token."""
    if not _takes(rows):
        return grouped_mm.permute(x_TD, rows)
    return _npu().npu_moe_token_permute(x_TD, rows.choice_Tk.to(torch.int32))[0]


def unpermute(y_MD: Tensor, rows: grouped_mm.ExpertRows, weight_Tk: Tensor) -> Tensor:
    """See kernels.unpermute; npu_moe_token_unpermute, with the weights in y's dtype as its examples have them."""
    if not _takes(rows):
        return grouped_mm.unpermute(y_MD, rows, weight_Tk)
    indices = rows.row_Tk.flatten().to(torch.int32)
    return _npu().npu_moe_token_unpermute(y_MD, indices, probs=weight_Tk.to(y_MD.dtype))


def _takes(rows: grouped_mm.ExpertRows) -> bool:
    """Whether the operator takes so many choices; without padding rows, which an NPU never has."""
    choices = rows.row_Tk.numel()
    return choices == len(rows.token_M) and 0 < choices < MAX_CHOICES and rows.row_Tk.shape[1] <= MAX_TOP_K
