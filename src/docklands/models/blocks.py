"""The parts of a dense decoder, over packed tokens. Who attends to whom is not their business: a context says.

Legend: T packed tokens, D model, N heads, K kv heads, M = N + 2K heads of the fused projection, H head dim,
F feed-forward.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from docklands import kernels
from docklands.models.config import ModelConfig


class AttentionContext(Protocol):
    """Attention of one forward pass: packed or prefix-shared in training, a paged cache in generation."""

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        """-> o_TNH. q and k are rotated already."""
        ...


class PackedCausal:
    """The plain context: sequences end to end, each causal, none sees another."""

    def __init__(self, seqlens: list[int]) -> None:
        self.seqlens = [int(length) for length in seqlens]

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        return kernels.packed_attention(q_TNH, k_TKH, v_TKH, self.seqlens, scale)


class Linear(nn.Module):
    """weight [out, in], optional bias [out]; computes in the activation's dtype."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    """Over the last dimension; see kernels.rms_norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """weight [V, D]; looks rows up in `dtype`."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, size))

    def forward(self, token_ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.functional.embedding(token_ids_T, self.weight).to(dtype)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream. q, k, v are one product; gate and up one."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.scale = 1.0 / math.sqrt(c.head_dim)
        self.attn_norm = RmsNorm(c.hidden_size, c.rms_eps)
        self.qkv = Linear(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.qkv_bias)
        self.q_norm = RmsNorm(c.head_dim, c.rms_eps) if c.qk_norm else None
        self.k_norm = RmsNorm(c.head_dim, c.rms_eps) if c.qk_norm else None
        self.o = Linear(c.num_heads * c.head_dim, c.hidden_size, c.o_bias)
        self.mlp_norm = RmsNorm(c.hidden_size, c.rms_eps)
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size)
        self.down = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor, attend: AttentionContext) -> Tensor:
        """-> x_TD, the residual stream after this block."""
        q_TNH, k_TKH, v_TKH = self.project(self.attn_norm(x_TD), cos_TH, sin_TH)
        o_TNH = attend(self.layer, q_TNH, k_TKH, v_TKH, self.scale)
        x_TD = x_TD + self.o(o_TNH.flatten(1))
        return x_TD + self.down(kernels.swiglu_fused(self.gate_up(self.mlp_norm(x_TD))))

    def project(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed input -> rotated q_TNH and k_TKH, and v_TKH."""
        qkv_TMH = self.qkv(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH, v_TKH = qkv_TMH.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = kernels.rope(q_TNH, k_TKH, cos_TH, sin_TH)
        return q_TNH, k_TKH, v_TKH


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary angle per position for each pair of a head, fp32 [H / 2] (Su et al. 2021; llama3 rule: arXiv 2407.21783).

    The llama3 rule divides the frequency by `factor` where the wavelength is long against the original context, keeps
    it where it is short, and blends linearly in between.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponent)
    rule = config.rope_scaling
    if rule is None:
        return plain
    original, low, high = (rule[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    turns = original * plain / (2 * math.pi)  # full rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rule["factor"]


def rotary_tables(inverse: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos_TH and sin_TH in fp32, both halves of a head alike."""
    angles = positions_T[:, None].float() * inverse
    angles_TH = torch.cat([angles, angles], -1)
    return angles_TH.cos(), angles_TH.sin()
