"""Causal attention over sequences packed end to end.

Legend: T packed tokens, N heads, K kv heads, H head dim, B sequences of one length, S tokens of each, or keys in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from docklands.errors import TrainError

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


Lengths = tuple[Sequence[int], Sequence[int]]
"""Queries and keys of each sequence, in packed order."""


def buckets_of(seqlens: list[int]) -> dict[int, list[int]]:
    """Length -> start offsets of the sequences with that length; empty sequences are left out."""
    buckets: dict[int, list[int]] = {}
    start = 0
    for length in seqlens:
        if length:
            buckets.setdefault(length, []).append(start)
        start += length
    return buckets


def check_lengths(q_TNH: Tensor, seqlens: list[int]) -> None:
    """TrainError when the lengths do not add up to the pack."""
    if sum(seqlens) != len(q_TNH):
        raise TrainError(f"packed attention: lengths add up to {sum(seqlens)}, the pack has {len(q_TNH)} tokens")


def packed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """Causal attention inside each sequence: one SDPA call per distinct length. -> o_TNH.

    A dense block mask over the whole pack costs as much as padding, so sequences of one length go together instead.
    TrainError when the lengths do not add up to T.
    """
    check_lengths(q_TNH, seqlens)
    buckets = buckets_of(seqlens)
    if not buckets:
        return torch.empty_like(q_TNH)
    if len(buckets) == 1:
        return _one_length(q_TNH, k_TKH, v_TKH, len(next(iter(buckets.values()))), scale)
    outs, indices = [], []
    for length, starts in buckets.items():
        index = (torch.tensor(starts)[:, None] + torch.arange(length)).flatten().to(q_TNH.device)
        outs.append(_one_length(q_TNH[index], k_TKH[index], v_TKH[index], len(starts), scale))
        indices.append(index)
    order = torch.empty(len(q_TNH), dtype=torch.long, device=q_TNH.device)
    order[torch.cat(indices)] = torch.arange(len(q_TNH), device=q_TNH.device)
    return torch.cat(outs)[order]


def check_varlen(q_TNH: Tensor, k_SKH: Tensor, lengths: Lengths) -> None:
    """TrainError when the lengths do not fit the packs, or a sequence has fewer keys than queries."""
    queries, keys = lengths
    check_lengths(q_TNH, list(queries))
    check_lengths(k_SKH, list(keys))
    if len(queries) != len(keys) or any(a > b for a, b in zip(queries, keys)):
        raise TrainError(f"attention: {len(queries)} and {len(keys)} lengths; a sequence needs a key for every query")


def varlen_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, lengths: Lengths, scale: float) -> Tensor:
    """See kernels.varlen_attention: one SDPA call a sequence, where queries and keys differ in number."""
    check_varlen(q_TNH, k_SKH, lengths)
    queries, keys = lengths
    if list(queries) == list(keys):
        return packed_attention(q_TNH, k_SKH, v_SKH, list(queries), scale)
    grouped, outs = q_TNH.shape[1] != k_SKH.shape[1], [q_TNH[:0]]
    for q, k, v in zip(q_TNH.split(list(queries)), k_SKH.split(list(keys)), v_SKH.split(list(keys))):
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        parts = (x.transpose(0, 1)[None] for x in (q, k, v))
        if len(q):
            o = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=grouped)
            outs.append(o[0].transpose(0, 1))
    return torch.cat(outs)


def _one_length(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: int, scale: float) -> Tensor:
    """Attention inside `sequences` sequences of equal length."""
    q_BNSH, k_BKSH, v_BKSH = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
    if q_TNH.device.type == "cpu" and torch.is_grad_enabled():
        o_BNSH: Tensor = _CpuCausal.apply(q_BNSH, k_BKSH, v_BKSH, scale)  # type: ignore[assignment]
    else:
        grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
        o_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, scale=scale, enable_gqa=grouped)
    return o_BNSH.transpose(1, 2).flatten(0, 1)


class _CpuCausal(torch.autograd.Function):
    """Torch's flash attention on CPU with its backward in fp32: in bf16 that is 2 to 7 times slower up to 128 tokens
    (and less exact), while forward in bf16 is the faster one.
    """

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, scale: float) -> Tensor:
        o_BNSH, lse_BNS = FLASH(q_BNSH, k_BKSH, v_BKSH, 0.0, True, scale=scale)
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, o_BNSH, lse_BNS)
        ctx.scale = scale
        return o_BNSH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSH, k_BKSH, v_BKSH, o_BNSH, lse_BNS = ctx.saved_tensors
        wide = [x.float() for x in (grads[0], q_BNSH, k_BKSH, v_BKSH, o_BNSH)]
        grad_qkv = FLASH_BACKWARD(*wide, lse_BNS, 0.0, True, scale=ctx.scale)
        return *(grad.to(q_BNSH.dtype) for grad in grad_qkv), None
