"""Attention of some queries to some blocks of keys at a time, merged through the log-sum-exp: the step of a ring.

Legend: T queries of this rank, S keys at hand, N heads, K kv heads, H head dim; a block has L queries and M keys.

o = sum_b w_b o_b with w_b = exp(lse_b - lse) and lse = log sum_b exp lse_b (online softmax, arXiv 1805.02867). Backward
of a block needs only the merged o and lse (FlashAttention-2, arXiv 2307.08691, algorithm 2).

A block is one call of the device's fused attention, forward and backward, which never holds its scores; where there is
none (fp32 on CUDA, sizes that it does not take), plain torch over a few queries at a time, at most SCORES numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from docklands import kernels

SCORES = 4_194_304
"""Numbers: 16 MiB in fp32."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradient of the output, q, k, v, the merged output, the merged log-sum-exp."""


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
    running: Running, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float, device: str = ""
) -> None:
    """Attend over `blocks` and merge into `running`. `device`: the type whose kernels to use; "": the tensors'."""
    q_TNH, k_SKH, v_SKH = qkv
    attend = kernels.get("block_forward", device or q_TNH.device.type)
    for block in blocks:
        q, k, v = _of(q_TNH, block.start, block.stop), *(_of(x, block.first, block.last) for x in (k_SKH, v_SKH))
        o, lse = attend(q, k, v, block.causal, scale)
        running.merge(block, o[0].transpose(0, 1), lse[0].transpose(0, 1))


def backward_blocks(
    grads: tuple[Tensor, Tensor, Tensor],
    inputs: Six,
    blocks: Sequence[Block],
    scale: float,
    device: str = "",
) -> None:
    """Add the gradients of `blocks` to grads (dq_TNH, dk_SKH, dv_SKH, fp32).

    inputs: gradient of the output, q, k, v and the output, in one dtype, and the log-sum-exp, fp32
    """
    go_TNH, q_TNH, k_SKH, v_SKH, o_TNH, lse_TN = inputs
    attend = kernels.get("block_backward", device or q_TNH.device.type)
    for block in blocks:
        go, q, o = (_of(x, block.start, block.stop) for x in (go_TNH, q_TNH, o_TNH))
        k, v = (_of(x, block.first, block.last) for x in (k_SKH, v_SKH))
        found = attend((go, q, k, v, o, lse_TN[block.start : block.stop].t()[None]), block.causal, scale)
        grads[0][block.start : block.stop] += found[0][0].transpose(0, 1)
        for grad, part in zip(grads[1:], found[1:]):
            grad[block.first : block.last] += part[0].transpose(0, 1)


def _of(x_TNH: Tensor, start: int, stop: int) -> Tensor:
    """-> [1, N, L, H]"""
    return x_TNH[start:stop].transpose(0, 1)[None]


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See kernels.block_forward; torch's flash attention for CPUs."""
    return _flash(q, k, v, 0.0, causal, scale=scale)


def block_backward(inputs: Six, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.block_backward; in fp32 (see attention.py)."""
    *wide, lse = (x.float() for x in inputs)
    return _flash_backward(*wide, lse.contiguous(), 0.0, causal, scale=scale)


# --- plain torch, a few queries at a time -----------------------------------------------------------------------------


def _rows(queries: int, k: Tensor, heads: int) -> Iterator[slice]:
    """Queries whose scores together are at most SCORES."""
    each = max(1, SCORES // max(1, heads * k.shape[2]))
    return (slice(i, min(i + each, queries)) for i in range(0, queries, each))


def _scores(q: Tensor, k: Tensor, first: int | None, scale: float) -> Tensor:
    """fp32 [1, K, N / K, L, M] of the queries `first`, `first` + 1, ... of a causal block; None: of a whole one."""
    scores = q.float().unflatten(1, (k.shape[1], -1)) @ k.float().transpose(-1, -2)[:, :, None] * scale
    if first is not None:
        length, keys = scores.shape[-2:]
        seen = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(first)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See kernels.block_forward, on any device and in any dtype."""
    outs, lses = [], []
    for rows in _rows(q.shape[2], k, q.shape[1]):
        scores = _scores(q[:, :, rows], k, rows.start if causal else None, scale)
        lse = torch.logsumexp(scores, -1)
        outs.append((scores.sub_(lse[..., None]).exp_() @ v.float()[:, :, None]).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def plain_backward(inputs: Six, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.block_backward, on any device and in any dtype."""
    go, q, k, v, o, lse = (x.float() for x in inputs)
    groups = (k.shape[1], -1)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _rows(q.shape[2], k, q.shape[1]):
        go_, q_, o_ = (x[:, :, rows].unflatten(1, groups) for x in (go, q, o))
        p = _scores(q[:, :, rows], k, rows.start if causal else None, scale)
        p.sub_(lse[:, :, rows].unflatten(1, groups)[..., None]).exp_()
        dv += (p.transpose(-1, -2) @ go_).sum(2)
        ds = p.mul_(go_ @ v[:, :, None].transpose(-1, -2) - (go_ * o_).sum(-1, keepdim=True)).mul_(scale)
        dk += (ds.transpose(-1, -2) @ q_).sum(2)
        dq[:, :, rows] = (ds @ k[:, :, None]).flatten(1, 2)
    return dq, dk, dv
