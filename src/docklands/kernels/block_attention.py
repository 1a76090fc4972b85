"""Attention of some queries to some blocks of keys at a time, merged through the log-sum-exp: the step of a ring.

Legend: T queries of this rank, S keys at hand, N heads, K kv heads, H head dim; a block has L queries and M keys.

o = sum_b w_b o_b with w_b = exp(lse_b - lse) and lse = log sum_b exp lse_b (online softmax, arXiv 1805.02867). Backward
of a block needs only the merged o and lse (FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Block:
    """Queries start..stop see keys first..last; causal: the i-th query sees the keys up to the i-th."""

    start: int
    stop: int
    first: int
    last: int
    causal: bool = False


class Running:
    """Output and log-sum-exp of the blocks so far: o_TNH and lse_TN, fp32."""

    def __init__(self, q_TNH: Tensor) -> None:
        self.o_TNH = torch.zeros(q_TNH.shape, dtype=torch.float32, device=q_TNH.device)
        self.lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, device=q_TNH.device)

    def merge(self, block: Block, o_LNH: Tensor, lse_LN: Tensor) -> None:
        """Take in what one block gave."""
        rows = slice(block.start, block.stop)
        before_LN = self.lse_TN[rows]
        after_LN = torch.logaddexp(before_LN, lse_LN)
        kept, added = (before_LN - after_LN).exp(), (lse_LN - after_LN).exp()
        self.o_TNH[rows] = self.o_TNH[rows] * kept[..., None] + o_LNH.float() * added[..., None]
        self.lse_TN[rows] = after_LN


def forward_blocks(
    running: Running, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float, portable: bool = False
) -> None:
    """Attend over `blocks` and merge into `running`. `portable`: take the path of other devices on the CPU too."""
    q_TNH, k_SKH, v_SKH = qkv
    portable = portable or q_TNH.device.type != "cpu"
    for block in blocks:
        q, k, v = _of(q_TNH, block.start, block.stop), *(_of(x, block.first, block.last) for x in (k_SKH, v_SKH))
        if portable:
            o, lse = _forward(q, k, v, block.causal, scale)
        else:
            o, lse = _flash(q, k, v, 0.0, block.causal, scale=scale)
        running.merge(block, o[0].transpose(0, 1), lse[0].transpose(0, 1))


def backward_blocks(
    grads: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    blocks: Sequence[Block],
    scale: float,
    portable: bool = False,
) -> None:
    """Add the gradients of `blocks` to grads (dq_TNH, dk_SKH, dv_SKH, fp32).

    inputs: gradient of the output, q, k, v, output and log-sum-exp, all fp32
    """
    go_TNH, q_TNH, k_SKH, v_SKH, o_TNH, lse_TN = inputs
    portable = portable or q_TNH.device.type != "cpu"
    for block in blocks:
        go, q, o = (_of(x, block.start, block.stop) for x in (go_TNH, q_TNH, o_TNH))
        k, v = (_of(x, block.first, block.last) for x in (k_SKH, v_SKH))
        lse = lse_TN[block.start : block.stop].t()[None]
        if portable:
            found = _backward((go, q, k, v, o, lse), block.causal, scale)
        else:
            found = _flash_backward(go, q, k, v, o, lse.contiguous(), 0.0, block.causal, scale=scale)
        grads[0][block.start : block.stop] += found[0][0].transpose(0, 1)
        for grad, part in zip(grads[1:], found[1:]):
            grad[block.first : block.last] += part[0].transpose(0, 1)


def _of(x_TNH: Tensor, start: int, stop: int) -> Tensor:
    """-> [1, N, L, H]"""
    return x_TNH[start:stop].transpose(0, 1)[None]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """fp32 [1, K, N / K, L, M]"""
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = grouped @ k.float().transpose(-1, -2)[:, :, None] * scale
    if causal:
        length, keys = scores.shape[-2:]
        seen = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    lse = torch.logsumexp(scores, -1)
    o = (scores - lse[..., None]).exp() @ v.float()[:, :, None]
    return o.flatten(1, 2), lse.flatten(1, 2)


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    go, q, k, v, o, lse = inputs
    groups = (k.shape[1], -1)
    go, o, lse = (x.unflatten(1, groups) for x in (go, o, lse))
    p = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    dv = (p.transpose(-1, -2) @ go).sum(2)
    ds = p * (go @ v[:, :, None].transpose(-1, -2) - (go * o).sum(-1, keepdim=True)) * scale
    dk = (ds.transpose(-1, -2) @ q.unflatten(1, groups)).sum(2)
    return (ds @ k[:, :, None]).flatten(1, 2), dk, dv
