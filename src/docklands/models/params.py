"""One table per model: every parameter, its Hugging Face names, its shape and how it may be split. No torch.

Legend: V vocabulary, D model, N heads, K kv heads, H head dim, F feed-forward, E experts.

Model files, tensor parallelism and resharding all read this table, so that a parameter is described in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar, overload

from docklands.models.adapters import interleaved
from docklands.models.config import MlaConfig, ModelConfig, MoeConfig

Split = Literal["column", "row", "vocab", "none"]


class Array(Protocol):
    """A tensor, of whichever library."""

    @property
    def shape(self) -> Sequence[int]: ...

    def reshape(self, *shape: int) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)


@dataclass(frozen=True, slots=True)
class HfPart:
    """One Hugging Face tensor: `rows` rows of our parameter (0: the whole of it, same shape).

    Rows count dim 0; of a parameter with experts, [E, rows of one, ...], dims 0 and 1 together.
    """

    name: str
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter.

    name      ours, as in named_parameters()
    shape     full, unsplit
    hf        the Hugging Face tensors that it is made of, stacked by rows in this order
    split     column: along dim 0, each part on its own; row: along dim 1; vocab: along dim 0, padded; none: replicated.
              Dimensions of one expert's weight: those of the parameter are one higher
    unit      rows (column) or columns (row) that stay together: a head
    tied_to   name of the parameter whose storage this one shares; such an entry is never stored twice
    layer     layer index, or None outside the blocks
    expert_dim  0 when dim 0 counts experts, else None
    keep_fp32   held and written in fp32 whatever the model's dtype
    adapts      of an adapter's tensor: the name of the matrix that it is added to
    partial     whole on every tensor-parallel rank, of which each makes a part of its gradient
    """

    name: str
    shape: tuple[int, ...]
    hf: tuple[HfPart, ...]
    split: Split = "none"
    unit: int = 1
    tied_to: str | None = None
    layer: int | None = None
    expert_dim: int | None = None
    keep_fp32: bool = False
    adapts: str = ""
    partial: bool = False

    @property
    def experts(self) -> int:
        """Experts that the parameter holds; 0: it is none of theirs."""
        return 0 if self.expert_dim is None else self.shape[self.expert_dim]

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each fused part (of one expert), in the dimension of the rows; one entry when nothing is fused."""
        own = self.hf[: len(self.hf) // self.experts] if self.experts else self.hf
        return tuple(part.rows or self.shape[0] for part in own)

    @property
    def split_dim(self) -> int | None:
        """Dimension that tensor parallelism splits."""
        dim = {"column": 0, "vocab": 0, "row": 1, "none": None}[self.split]
        return dim if dim is None or self.expert_dim is None else dim + 1

    @property
    def quantized(self) -> bool:
        """Whether a transfer in fp8 quantises it: matrices of the layers, experts' too; not embeddings, the head,
        norms, biases and the router, which models in fp8 keep as they are (DeepSeek-V3, arXiv 2412.19437, 3.3.1).
        """
        matrix = len(self.shape) == (3 if self.experts else 2)
        kept = self.keep_fp32 or self.name.endswith("router.weight") or self.adapts
        return matrix and self.layer is not None and not kept

    def hf_shapes(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(Hugging Face name, shape, first row in ours) of each part; see `by_rows`."""
        found, start = [], 0
        trailing = self.shape[2 if self.experts else 1 :]
        for part, rows in zip(self.hf, self.parts * (self.experts or 1), strict=True):
            found.append((part.name, (rows, *trailing), start))
            start += rows
        return found

    def by_rows(self, whole: ArrayT) -> ArrayT:
        """A view of the parameter, or of a shard of it, that counts all rows in dim 0, those of every expert too."""
        return whole.reshape(-1, *whole.shape[2:]) if self.experts else whole


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
        """Hugging Face name -> (entry, shape there, first row in ours), stored entries only, without adapters."""
        specs = (spec for spec in self.stored() if not spec.adapts)
        return {name: (spec, shape, start) for spec in specs for name, shape, start in spec.hf_shapes()}


class _Layer:
    """Makes the entries of one layer: our names under layers.i, theirs under model.layers.i."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.config, self.layer = config, layer
        self.ours, self.hf = f"layers.{layer}.", f"model.layers.{layer}."

    def one(self, name: str, shape: tuple[int, ...], hf: str, split: Split = "none", unit: int = 1) -> ParamSpec:
        """An entry that is one Hugging Face tensor."""
        return ParamSpec(self.ours + name, shape, (HfPart(self.hf + hf),), split, unit, layer=self.layer)

    def block(self) -> list[ParamSpec]:
        c = self.config
        sparse = c.moe is not None and c.moe.is_sparse(self.layer)
        return [
            self.one("attn_norm.weight", (c.hidden_size,), "input_layernorm.weight"),
            *(self.grouped_query() if c.mla is None else self.latent(c.mla)),
            self.one("mlp_norm.weight", (c.hidden_size,), "post_attention_layernorm.weight"),
            *(self.mixture(c.moe) if sparse and c.moe else self.feed_forward("", "mlp.", c.intermediate_size)),
        ]

    def grouped_query(self) -> list[ParamSpec]:
        c = self.config
        rows = (("q", c.num_heads * c.head_dim), *((x, c.num_kv_heads * c.head_dim) for x in "kv"))
        fused = sum(n for _, n in rows)
        specs = []
        for kind, shape in (("weight", (fused, c.hidden_size)), ("bias", (fused,))):
            if kind == "weight" or c.qkv_bias:
                hf = tuple(HfPart(f"{self.hf}self_attn.{x}_proj.{kind}", n) for x, n in rows)
                specs.append(ParamSpec(f"{self.ours}qkv.{kind}", shape, hf, "column", c.head_dim, layer=self.layer))
        if c.qk_norm:
            specs += [self.one(f"{x}_norm.weight", (c.head_dim,), f"self_attn.{x}_norm.weight") for x in "qk"]
        return [*specs, *self.output("o", c.head_dim)]

    def output(self, name: str, unit: int) -> list[ParamSpec]:
        """The attention's output projection, from heads of `unit`."""
        c, hf = self.config, "self_attn.o_proj."
        bias = [self.one(name + ".bias", (c.hidden_size,), hf + "bias")] if c.o_bias else []
        return [
            self.one(name + ".weight", (c.hidden_size, c.num_heads * unit), hf + "weight", "row", unit),
            *bias,
        ]

    def latent(self, mla: MlaConfig) -> list[ParamSpec]:
        c, kv_a, kv_unit = self.config, mla.kv_rank + mla.rope_dim, mla.nope_dim + mla.v_dim
        heads = c.num_heads * c.head_dim
        kinds = ("weight", "bias") if c.qkv_bias else ("weight",)

        def low(name: str, hf: str, rows: int) -> list[ParamSpec]:
            shapes = {"weight": (rows, c.hidden_size), "bias": (rows,)}
            return [self.one(f"mla.{name}.{kind}", shapes[kind], f"self_attn.{hf}.{kind}") for kind in kinds]

        def norm(name: str, size: int) -> ParamSpec:
            return self.one(f"mla.{name}_norm.weight", (size,), f"self_attn.{name}_layernorm.weight")

        def up(name: str, rows: int, columns: int, unit: int) -> ParamSpec:
            return self.one(f"mla.{name}.weight", (rows, columns), f"self_attn.{name}_proj.weight", "column", unit)

        query = [up("q", heads, c.hidden_size, c.head_dim)]
        if mla.q_rank:
            rank = mla.q_rank
            query = [*low("q_a", "q_a_proj", rank), norm("q_a", rank), up("q_b", heads, rank, c.head_dim)]
        return [
            *query,
            *low("kv_a", "kv_a_proj_with_mqa", kv_a),
            norm("kv_a", mla.kv_rank),
            up("kv_b", c.num_heads * kv_unit, mla.kv_rank, kv_unit),
            *self.output("mla.o", mla.v_dim),
        ]

    def feed_forward(self, name: str, hf: str, width: int) -> list[ParamSpec]:
        size = self.config.hidden_size
        parts = tuple(HfPart(f"{self.hf}{hf}{x}_proj.weight", width) for x in ("gate", "up"))
        return [
            ParamSpec(f"{self.ours}{name}gate_up.weight", (2 * width, size), parts, "column", layer=self.layer),
            self.one(f"{name}down.weight", (size, width), f"{hf}down_proj.weight", "row"),
        ]

    def mixture(self, moe: MoeConfig) -> list[ParamSpec]:
        size, width, experts = self.config.hidden_size, moe.expert_size, range(moe.experts)
        hf, ours, layer = self.hf + "mlp.experts.", self.ours + "moe.experts.", self.layer
        gate_up = tuple(HfPart(f"{hf}{e}.{x}_proj.weight", width) for e in experts for x in ("gate", "up"))
        down = tuple(HfPart(f"{hf}{e}.down_proj.weight", size) for e in experts)
        bias = self.one("moe.router.bias", (moe.experts,), "mlp.gate.e_score_correction_bias")
        return [
            self.one("moe.router.weight", (moe.experts, size), "mlp.gate.weight"),
            *([replace(bias, keep_fp32=True)] if moe.biased else []),
            ParamSpec(ours + "gate_up", (moe.experts, 2 * width, size), gate_up, "column", layer=layer, expert_dim=0),
            ParamSpec(ours + "down", (moe.experts, size, width), down, "row", layer=layer, expert_dim=0),
            *(self.feed_forward("moe.shared.", "mlp.shared_experts.", moe.shared_size) if moe.shared_size else []),
        ]


@lru_cache(maxsize=32)
def table_for(config: ModelConfig, value_head: bool = False) -> ParamTable:
    """The table of a language model, or of the same trunk with a scalar head (`value_head`)."""
    c = config
    specs = [ParamSpec("embed.weight", (c.vocab_size, c.hidden_size), (HfPart("model.embed_tokens.weight"),), "vocab")]
    for layer in range(c.num_layers):
        specs += _Layer(c, layer).block()
    specs.append(ParamSpec("final_norm.weight", (c.hidden_size,), (HfPart("model.norm.weight"),)))
    if value_head:
        specs.append(ParamSpec("value_head.weight", (1, c.hidden_size), (HfPart("score.weight"),)))
        specs.append(ParamSpec("value_head.bias", (1,), (HfPart("score.bias"),)))
    else:
        tied = "embed.weight" if c.tie_embeddings else None
        head = (HfPart("lm_head.weight"),)
        specs.append(ParamSpec("head.weight", (c.vocab_size, c.hidden_size), head, "vocab", tied_to=tied))
    return ParamTable(interleaved(specs, c.lora))
