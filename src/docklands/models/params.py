"""One table per model: every parameter, its Hugging Face names, its shape and how it may be split. No torch.

Legend: V vocabulary, D model, N heads, K kv heads, H head dim, F feed-forward.

Model files, tensor parallelism and resharding all read this table, so that a parameter is described in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, overload

from docklands.models.config import ModelConfig

Split = Literal["column", "row", "vocab", "none"]


@dataclass(frozen=True, slots=True)
class HfPart:
    """One Hugging Face tensor: `rows` rows of dim 0 of our parameter (0: the whole of it, same shape)."""

    name: str
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter.

    name      ours, as in named_parameters()
    shape     full, unsplit
    hf        the Hugging Face tensors that it is made of, stacked along dim 0 in this order
    split     column: along dim 0, each part on its own; row: along dim 1; vocab: along dim 0, padded; none: replicated
    unit      rows (column) or columns (row) that stay together: a head
    tied_to   name of the parameter whose storage this one shares; such an entry is never stored twice
    layer     layer index, or None outside the blocks
    expert_dim  dimension that counts experts, or None in a dense model
    """

    name: str
    shape: tuple[int, ...]
    hf: tuple[HfPart, ...]
    split: Split = "none"
    unit: int = 1
    tied_to: str | None = None
    layer: int | None = None
    expert_dim: int | None = None

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of dim 0 of each fused part; one entry when nothing is fused."""
        return tuple(part.rows or self.shape[0] for part in self.hf)

    @property
    def split_dim(self) -> int | None:
        """Dimension that tensor parallelism splits."""
        return {"column": 0, "vocab": 0, "row": 1, "none": None}[self.split]

    def hf_shapes(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(Hugging Face name, shape, first row in ours) of each part."""
        found, start = [], 0
        for part, rows in zip(self.hf, self.parts, strict=True):
            found.append((part.name, (rows, *self.shape[1:]), start))
            start += rows
        return found


class ParamTable(Sequence[ParamSpec]):
    """All parameters of a model, in the order of named_parameters(); tied entries last."""

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        self._specs = tuple(specs)
        self._by_name = {spec.name: spec for spec in self._specs}

    @overload
    def __getitem__(self, index: int) -> ParamSpec: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ParamSpec, ...]: ...

    def __getitem__(self, index: int | slice) -> ParamSpec | tuple[ParamSpec, ...]:
        return self._specs[index]

    def __len__(self) -> int:
        return len(self._specs)

    def by_name(self, name: str) -> ParamSpec:
        """The entry of our parameter `name`. KeyError if there is none."""
        return self._by_name[name]

    def stored(self) -> Iterator[ParamSpec]:
        """The entries that hold storage of their own (not tied)."""
        return (spec for spec in self._specs if spec.tied_to is None)

    def hf_index(self) -> dict[str, tuple[ParamSpec, tuple[int, ...], int]]:
        """Hugging Face name -> (entry, shape there, first row in ours), stored entries only."""
        return {name: (spec, shape, start) for spec in self.stored() for name, shape, start in spec.hf_shapes()}


def _block(config: ModelConfig, layer: int) -> list[ParamSpec]:
    c, ours, hf = config, f"layers.{layer}.", f"model.layers.{layer}."
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fused = q_rows + 2 * kv_rows

    def qkv(kind: str) -> tuple[HfPart, ...]:
        rows = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        return tuple(HfPart(f"{hf}self_attn.{x}_proj.{kind}", n) for x, n in rows)

    def one(name: str) -> tuple[HfPart, ...]:
        return (HfPart(hf + name),)

    mlp = tuple(HfPart(f"{hf}mlp.{x}_proj.weight", c.intermediate_size) for x in ("gate", "up"))
    specs = [
        ParamSpec(ours + "attn_norm.weight", (c.hidden_size,), one("input_layernorm.weight"), layer=layer),
        ParamSpec(ours + "qkv.weight", (fused, c.hidden_size), qkv("weight"), "column", c.head_dim, layer=layer),
    ]
    if c.qkv_bias:
        specs.append(ParamSpec(ours + "qkv.bias", (fused,), qkv("bias"), "column", c.head_dim, layer=layer))
    if c.qk_norm:
        for x in ("q", "k"):
            specs.append(
                ParamSpec(f"{ours}{x}_norm.weight", (c.head_dim,), one(f"self_attn.{x}_norm.weight"), layer=layer)
            )
    o_name = "self_attn.o_proj."
    specs.append(
        ParamSpec(ours + "o.weight", (c.hidden_size, q_rows), one(o_name + "weight"), "row", c.head_dim, layer=layer)
    )
    if c.o_bias:
        specs.append(ParamSpec(ours + "o.bias", (c.hidden_size,), one(o_name + "bias"), layer=layer))
    width = c.intermediate_size
    return [
        *specs,
        ParamSpec(ours + "mlp_norm.weight", (c.hidden_size,), one("post_attention_layernorm.weight"), layer=layer),
        ParamSpec(ours + "gate_up.weight", (2 * width, c.hidden_size), mlp, "column", layer=layer),
        ParamSpec(ours + "down.weight", (c.hidden_size, width), one("mlp.down_proj.weight"), "row", layer=layer),
    ]


@lru_cache(maxsize=32)
def table_for(config: ModelConfig, value_head: bool = False) -> ParamTable:
    """The table of a language model, or of the same trunk with a scalar head (`value_head`)."""
    c = config
    specs = [ParamSpec("embed.weight", (c.vocab_size, c.hidden_size), (HfPart("model.embed_tokens.weight"),), "vocab")]
    for layer in range(c.num_layers):
        specs += _block(c, layer)
    specs.append(ParamSpec("final_norm.weight", (c.hidden_size,), (HfPart("model.norm.weight"),)))
    if value_head:
        specs.append(ParamSpec("value_head.weight", (1, c.hidden_size), (HfPart("score.weight"),)))
        specs.append(ParamSpec("value_head.bias", (1,), (HfPart("score.bias"),)))
    else:
        tied = "embed.weight" if c.tie_embeddings else None
        head = (HfPart("lm_head.weight"),)
        specs.append(ParamSpec("head.weight", (c.vocab_size, c.hidden_size), head, "vocab", tied_to=tied))
    return ParamTable(specs)
