"""Attention of a decode step over KV-cache pages, without gathering them.

Every page is attended to on its own, in the order of its physical address, by the queries of all sequences that use
it: one batched call over the pages of sequences, one over the pages of shared prompts, where the queries of a group are
the rows of one product. The partial results are then merged per sequence by their log-sum-exps (Rabe and Staats 2021,
arXiv 2112.05682). No key or value is copied, and a partial result depends on its page and its query alone: a
sequence's attention has the same bits whatever else is in the batch.

Legend: Pg pages, S tokens of a page, K kv heads, H head dim, M query rows of a page and kv head (row-major over query
and N / K), N heads, R sequences, C partial results of a sequence (padded), Q all partial results.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -1e30
"""Additive mask: finite, so that a page without a single valid token gives numbers (which then weigh nothing)."""


def page_attention(
    q_PgMKH: Tensor, k_PgKSH: Tensor, v_PgKSH: Tensor, mask_PgS: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention inside each page. -> (o [Pg, M, K, H] in q's dtype, log-sum-exp [Pg, M, K] fp32)."""
    q_PgKMH, mask_Pg11S = q_PgMKH.transpose(1, 2), mask_PgS[:, None, None, :]
    if q_PgMKH.device.type == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_PgKMH, k_PgKSH, v_PgKSH, 0.0, False, attn_mask=mask_Pg11S, scale=scale
        )
        return o.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()
    scores = torch.matmul(q_PgKMH, k_PgKSH.transpose(2, 3)).float().mul_(scale).add_(mask_Pg11S)
    lse = torch.logsumexp(scores, -1)
    o = torch.matmul((scores - lse[..., None]).exp_().to(v_PgKSH.dtype), v_PgKSH)
    return o.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def merge_pages(o_QH: Tensor, lse_Q: Tensor, index_RNC: Tensor, offsets_RN: Tensor) -> Tensor:
    """Weighted sum of partial results. -> o_RNH in o's dtype.

    o_QH        all partial results, fp32 or bf16
    index_RNC   which of them belong to each (sequence, head); padded with the index of a fully masked one. C is a
                multiple of 16: sums over whole vector registers do not change with the padding
    offsets_RN  arange(0, R * N * C, C)
    """
    rows, heads, _ = index_RNC.shape
    weights_RNC = torch.softmax(lse_Q[index_RNC], -1)
    found = torch.embedding_bag(
        o_QH.float(), index_RNC.view(-1), offsets_RN, False, 0, False, weights_RNC.view(-1), False
    )[0]
    return found.view(rows, heads, -1).to(o_QH.dtype)
