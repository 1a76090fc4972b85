"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C).

Legend: T packed tokens, D model, N heads, R rank of the latent vector, P rotary part of a head, U the other part,
H = U + P query and key head, W value head, C = R + P what the cache keeps of a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from docklands import kernels
from docklands.models import lora
from docklands.models.blocks import AttentionContext, Block, ColumnLinear, Linear, RmsNorm, RowLinear, yarn_mscale
from docklands.models.config import ModelConfig

NORM_EPS = 1e-6  # of the two inner norms, whatever the config says of the others: as released


class Mla(nn.Module):
    """Queries, keys and values through low-rank bottlenecks; keys share one rotary part over all heads.

    Training expands the latent vector into keys and values. A context that keeps a cache has a method `latent`, which
    takes the latent vector; where it answers True, queries attend to the latent vectors themselves, with the
    up-projection absorbed into query and output: one key of C numbers a token instead of 2 N of H.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c, mla = config, config.mla
        assert mla is not None
        self.layer, self.mla, self.scale = layer, mla, softmax_scale(config)
        heads = c.num_heads * c.head_dim
        self.q = ColumnLinear(c.hidden_size, heads) if not mla.q_rank else None
        self.q_a = Linear(c.hidden_size, mla.q_rank, c.qkv_bias) if mla.q_rank else None
        self.q_a_norm = RmsNorm(mla.q_rank, NORM_EPS) if mla.q_rank else None
        self.q_b = ColumnLinear(mla.q_rank, heads) if mla.q_rank else None
        self.kv_a = Linear(c.hidden_size, mla.kv_rank + mla.rope_dim, c.qkv_bias)
        self.kv_a_norm = RmsNorm(mla.kv_rank, NORM_EPS)
        self.kv_b = ColumnLinear(mla.kv_rank, c.num_heads * (mla.nope_dim + mla.v_dim))
        self.o = RowLinear(c.num_heads * mla.v_dim, c.hidden_size, c.o_bias)

    def forward(self, x_TD: Tensor, cos_TP: Tensor, sin_TP: Tensor, attend: AttentionContext) -> Tensor:
        """Normed input -> output of the attention [T, D]."""
        q_TNH = self.queries(x_TD)
        q_TNU, q_TNP = q_TNH.split([self.mla.nope_dim, self.mla.rope_dim], -1)
        latent_TR, k_TP = self.kv_a(x_TD).split([self.mla.kv_rank, self.mla.rope_dim], -1)
        latent_TR = self.kv_a_norm(latent_TR)
        if self.kv_b.tp is not None:  # every rank's heads use the rotary key: as if it went through kv_b
            k_TP = self.kv_b.tp.enter(k_TP.contiguous())
        q_TNP, k_T1P = kernels.rope(self._halves(q_TNP), self._halves(k_TP[:, None]), cos_TP, sin_TP)
        keep = getattr(attend, "latent", None)
        if keep is not None:
            whole_TR = latent_TR if self.kv_b.tp is None else self.kv_b.tp.enter(latent_TR)
            kept_T1C = torch.cat([whole_TR[:, None], k_T1P], -1)
            if keep(self.layer, kept_T1C):
                return self.o(self._absorbed(q_TNU, q_TNP, kept_T1C, attend).flatten(1))
        return self.o(self._expanded(torch.cat([q_TNU, q_TNP], -1), latent_TR, k_T1P, attend).flatten(1))

    def queries(self, x_TD: Tensor) -> Tensor:
        """-> q_TNH, not rotated."""
        if self.q is not None:
            q = self.q(x_TD)
        else:
            assert self.q_a is not None and self.q_a_norm is not None and self.q_b is not None
            q = self.q_b(self.q_a_norm(self.q_a(x_TD)))
        return q.unflatten(-1, (-1, self.mla.nope_dim + self.mla.rope_dim))

    def _expanded(self, q_TNH: Tensor, latent_TR: Tensor, k_T1P: Tensor, attend: AttentionContext) -> Tensor:
        kv = self.kv_b(latent_TR).unflatten(-1, (-1, self.mla.nope_dim + self.mla.v_dim))
        k_TNU, v_TNW = kv.split([self.mla.nope_dim, self.mla.v_dim], -1)
        k_TNH = torch.cat([k_TNU, k_T1P.expand(-1, k_TNU.shape[1], -1)], -1)
        width = max(k_TNH.shape[-1], self.mla.v_dim)  # flash attention takes heads of one size: zeros change nothing
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q_TNH, k_TNH, v_TNW))
        return attend(self.layer, q, k, v, self.scale)[..., : self.mla.v_dim]

    def _absorbed(self, q_TNU: Tensor, q_TNP: Tensor, kept_T1C: Tensor, attend: AttentionContext) -> Tensor:
        up_NUR, out_NWR = self.up_projections(q_TNU.dtype)
        q_TNC = torch.cat([per_head(q_TNU, up_NUR), q_TNP], -1)
        o_TNR = attend(self.layer, q_TNC, kept_T1C, kept_T1C, self.scale)[..., : self.mla.kv_rank]
        return per_head(o_TNR, out_NWR.transpose(1, 2))

    def up_projections(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """kv_b by head: what makes the keys [N, U, R], what makes the values [N, W, R]."""
        weight = lora.merged_weight(self.kv_b).to(dtype).unflatten(0, (-1, self.mla.nope_dim + self.mla.v_dim))
        up_NUR, out_NWR = weight.split([self.mla.nope_dim, self.mla.v_dim], 1)
        return up_NUR, out_NWR

    def _halves(self, x_TNP: Tensor) -> Tensor:
        """Pairs (2i, 2i + 1) -> (i, i + P/2), of queries and keys alike: their products stay."""
        return x_TNP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.mla.interleaved else x_TNP


def per_head(x_TNI: Tensor, weight_NIO: Tensor) -> Tensor:
    """One product per head. -> [T, N, O]"""
    return torch.bmm(x_TNI.transpose(0, 1), weight_NIO).transpose(0, 1)


def softmax_scale(config: ModelConfig) -> float:
    """1 / sqrt(H), times YaRN's attention factor squared where the model asks for it (mscale_all_dim)."""
    rule = config.rope_scaling or {}
    return yarn_mscale(rule.get("factor", 1.0), rule.get("mscale_all_dim", 0)) ** 2 / math.sqrt(config.head_dim)


class MlaBlock(Block):
    """A block with latent attention."""

    def add_attention(self, config: ModelConfig) -> None:
        self.mla = Mla(config, self.layer)

    def attention(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor, attend: AttentionContext) -> Tensor:
        return self.mla(x_TD, cos_TH, sin_TH, attend)
