"""The parts of a decoder, over packed tokens. Who attends to whom is not their business: a context says.

Legend: T packed tokens, D model, N heads, K kv heads, M = N + 2K heads of the fused projection, H head dim,
F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from docklands import kernels
from docklands.models.config import ModelConfig
from docklands.models.routing import Routes
from docklands.models.savers import again
from docklands.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from docklands.models.lora import Adapters


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
    """weight [out, in], optional bias [out]; computes in the activation's dtype. lora: what is added to the product."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora: Adapters | None = None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """With the adapters' part, where there are any."""
        out = kernels.linear(x, self.weight, bias)
        return out if self.lora is None else self.lora(x, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class ColumnLinear(Linear):
    """First of a tensor-parallel pair: a rank holds some rows of the weight and gives these columns of the output."""

    tp: TensorParallel | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is not None:
            x = self.tp.enter(x)
        return self.product(x, self.bias)


class RowLinear(Linear):
    """Second of a pair: a rank holds columns of the weight, and the ranks' outputs are summed. The bias is whole."""

    tp: TensorParallel | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is None:
            return self.product(x, self.bias)
        out = self.tp.leave(self.product(x, None))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class RmsNorm(nn.Module):
    """Over the last dimension; see kernels.rms_norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """weight [V, D]; looks rows up in `dtype`. Tensor-parallel: the rows from `first_row` on, the others are 0."""

    tp: TensorParallel | None = None
    first_row: int = 0

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, size))

    def forward(self, token_ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        if self.tp is None:
            return nn.functional.embedding(token_ids_T, self.weight).to(dtype)
        row_T = token_ids_T - self.first_row
        outside_T = (row_T < 0) | (row_T >= len(self.weight))
        x_TD = nn.functional.embedding(row_T.masked_fill(outside_T, 0), self.weight).to(dtype)
        return self.tp.leave(x_TD.masked_fill(outside_T[:, None], 0.0))


class FeedForward(nn.Module):
    """SwiGLU of width F; gate and up are one product."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(size, 2 * width)
        self.down = RowLinear(width, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(again(kernels.swiglu_fused, self.gate_up(x)))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream. q, k, v are one product; gate and up one.

    Subclasses put another attention (mla) or another feed-forward part (moe) in its place.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.scale = 1.0 / math.sqrt(c.head_dim)
        self.attn_norm = RmsNorm(c.hidden_size, c.rms_eps)
        self.add_attention(c)
        self.mlp_norm = RmsNorm(c.hidden_size, c.rms_eps)
        self.add_feed_forward(c)

    def add_attention(self, config: ModelConfig) -> None:
        """Make the modules that `attention` uses."""
        c = config
        self.qkv = ColumnLinear(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.qkv_bias)
        self.q_norm = RmsNorm(c.head_dim, c.rms_eps) if c.qk_norm else None
        self.k_norm = RmsNorm(c.head_dim, c.rms_eps) if c.qk_norm else None
        self.o = RowLinear(c.num_heads * c.head_dim, c.hidden_size, c.o_bias)

    def add_feed_forward(self, config: ModelConfig) -> None:
        """Make the modules that `feed_forward` uses."""
        self.gate_up = ColumnLinear(config.hidden_size, 2 * config.intermediate_size)
        self.down = RowLinear(config.intermediate_size, config.hidden_size)

    def forward(
        self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor, attend: AttentionContext, routes: Routes | None = None
    ) -> Tensor:
        """-> x_TD, the residual stream after this block. `routes`: see routing.Routes; unused in a dense block."""
        x_TD = x_TD + self.attention(again(self.attn_norm, x_TD), cos_TH, sin_TH, attend)
        return x_TD + self.feed_forward(again(self.mlp_norm, x_TD), routes)

    def attention(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor, attend: AttentionContext) -> Tensor:
        """Normed input -> what attention adds to the residual stream."""
        q_TNH, k_TKH, v_TKH = self.project(x_TD, cos_TH, sin_TH)
        return self.o(attend(self.layer, q_TNH, k_TKH, v_TKH, self.scale).flatten(1))

    def feed_forward(self, x_TD: Tensor, routes: Routes | None) -> Tensor:
        """Normed input -> what the feed-forward part adds."""
        return self.down(again(kernels.swiglu_fused, self.gate_up(x_TD)))

    def split_heads(self, ranks: int) -> None:
        """Count this rank's heads from now on. A kv head is held by several ranks when there are fewer than ranks."""
        self.heads, self.kv_heads = self.heads // ranks, max(1, self.kv_heads // ranks)

    def project(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed input -> rotated q_TNH and k_TKH, and v_TKH."""
        qkv_TMH = self.qkv(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH, v_TKH = qkv_TMH.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = kernels.rope(q_TNH, k_TKH, cos_TH, sin_TH)
        return q_TNH, k_TKH, v_TKH


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary angle per position for each pair of a head, fp32 [H / 2] (Su et al. 2021; llama3 rule: arXiv 2407.21783;
    YaRN: arXiv 2309.00071, section 3.2).

    The llama3 rule divides the frequency by `factor` where the wavelength is long against the original context, keeps
    it where it is short, and blends linearly in between; YaRN blends linearly in the index of the pair instead.
    """
    exponent = torch.arange(0, config.rope_dim, 2, dtype=torch.int64).float() / config.rope_dim
    plain = 1.0 / (config.rope_theta**exponent)
    rule = config.rope_scaling
    if rule is None:
        return plain
    if rule.get("rope_type") == "yarn":
        keep = _yarn_keep(config, rule)
    else:
        turns = rule["original_max_position_embeddings"] * plain / (2 * math.pi)  # within the original context
        low, high = rule["low_freq_factor"], rule["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rule["factor"]


def _yarn_keep(config: ModelConfig, rule: Mapping[str, Any]) -> Tensor:
    """Share of the plain frequency that each pair keeps: 1 for the pairs that turn beta_fast times within the original
    context or more, 0 for those that turn beta_slow times or less. [H / 2]
    """
    size, original = config.rope_dim, rule["original_max_position_embeddings"]

    def pair(turns: float) -> float:  # the index, not rounded, of the pair that turns so often
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair(rule.get("beta_fast") or 32), pair(rule.get("beta_slow") or 1)
    if rule.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    return 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's growth of the attention logits with the context: 0.1 * mscale * ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_factor(config: ModelConfig) -> float:
    """What cos and sin are multiplied by: 1 but for YaRN."""
    rule = config.rope_scaling or {}
    if rule.get("rope_type") != "yarn":
        return 1.0
    if rule.get("attention_factor") is not None:
        return float(rule["attention_factor"])
    factor, mscale, all_dim = (float(rule.get(key) or 0) for key in ("factor", "mscale", "mscale_all_dim"))
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)


def rotary_tables(inverse: Tensor, positions_T: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos_TH and sin_TH in fp32, both halves of a head alike, times `factor`."""
    angles = positions_T[:, None].float() * inverse
    angles_TH = torch.cat([angles, angles], -1)
    cos_TH, sin_TH = angles_TH.cos(), angles_TH.sin()
    return (cos_TH, sin_TH) if factor == 1.0 else (cos_TH * factor, sin_TH * factor)
