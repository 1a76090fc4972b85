"""What a model is, independent of whose names its files use.

Legend: V vocabulary, D model, L layers, N heads, K kv heads, H head dim, F feed-forward, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from docklands.errors import ConfigError, DataError
from docklands.models.adapters import LoraConfig
from docklands.registry import Registry


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts in place of the feed-forward block of some layers (arXiv 2412.19437, 2505.09388).

    top_k        experts of a token; expert_size: F of each
    shared_size  F of the expert that every token goes through; 0: none
    scoring      router probabilities by softmax over all experts, or by a sigmoid of each
    normalize    the weights of the chosen experts sum to one; scale: then times this
    groups       the experts form so many equal groups, and a token may use `top_groups` of them; 1: no limit
    first_dense, sparse_step, dense_layers   which layers keep a dense block, see `is_sparse`
    """

    experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    first_dense: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.experts, self.top_k, self.expert_size, self.groups, self.top_groups, self.sparse_step) <= 0:
            raise DataError(f"model config: a size of the mixture of experts is not positive: {self}")
        if self.experts % self.groups or self.top_groups > self.groups:
            raise DataError(
                f"model config: {self.experts} experts in {self.groups} groups of which {self.top_groups} are used",
                "experts must be a multiple of groups, and the groups used at most all",
            )
        size = self.experts // self.groups
        if self.top_k > self.top_groups * size:
            raise DataError(
                f"model config: {self.top_k} experts a token, but {self.top_groups} groups of {size} hold fewer"
            )
        if self.groups > 1 and size < 2:
            raise DataError("model config: a group of experts is scored by its two best, so it needs two")

    @property
    def biased(self) -> bool:
        """Whether the choice (not the weight) is corrected by a bias per expert."""
        return self.scoring == "sigmoid"

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer >= self.first_dense and (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (arXiv 2405.04434 section 2.1): low-rank q and kv, rotary part of a head apart.

    q_rank       of the query's bottleneck; 0: none
    kv_rank      of what keys and values are made from
    nope_dim, rope_dim   parts of a query or key head without and with rotary embedding; head_dim is their sum
    v_dim        of a value head
    interleaved  rotary pairs are (2i, 2i + 1) in the files' weights, else (i, i + rope_dim / 2)
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        if min(self.kv_rank, self.nope_dim, self.rope_dim, self.v_dim) <= 0 or self.rope_dim % 2:
            raise DataError(f"model config: sizes must be positive and rope_dim even: {self}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, dense or with experts. `from_hf` and `to_hf` translate the config.json of a Hugging Face directory.

    architecture   Hugging Face class name, the key of the family in the registry
    head_dim       of a query or key head
    rope_scaling   None, or the llama3 rule: factor, low_freq_factor, high_freq_factor,
                   original_max_position_embeddings; or rope_type "yarn": factor, original_max_position_embeddings,
                   and optionally beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, truncate
    qkv_bias       bias on q, k, v projections; o_bias: on the output projection
    qk_norm        RMS norm over each head of q and k, before the rotary embedding
    eos_ids        every id that ends a response; bos_id, pad_id: -1 when the model has none
    moe, mla       None: dense layers, grouped-query attention
    mtp_layers     multi-token-prediction layers after the last one: kept in files, not computed
    lora           low-rank adapters beside the weights; None: none. Not in config.json
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 32768
    eos_ids: tuple[int, ...] = ()
    bos_id: int = -1
    pad_id: int = -1
    init_std: float = 0.02
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    mtp_layers: int = 0
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) <= 0:
                raise DataError(f"model config: {name} is {getattr(self, name)}, it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise DataError(
                f"model config: {self.num_heads} heads are not a multiple of {self.num_kv_heads} kv heads",
                "each kv head serves an equal number of query heads",
            )
        if self.head_dim % 2:
            raise DataError(f"model config: head_dim {self.head_dim} is odd, the rotary embedding needs pairs")
        if self.mla and (self.num_kv_heads, self.head_dim) != (self.num_heads, self.mla.nope_dim + self.mla.rope_dim):
            raise DataError("model config: latent attention has as many kv heads as heads, of nope_dim + rope_dim")

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """From a parsed config.json. ConfigError for an unknown architecture, DataError for an unusable value."""
        names = config.get("architectures") or []
        if not isinstance(names, list):
            raise DataError(f"{where}: architectures is {names!r}, expected a list of one name")
        name = names[0] if names else config.get("model_type")
        if not name:
            raise DataError(f"{where}: names neither architectures nor model_type", "is this a Hugging Face model?")
        return families.get(str(name)).read(HfConfig(config, where))

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers reads (the current rotary keys and the older ones)."""
        return families.get(self.architecture).write(self)

    @property
    def num_params(self) -> int:
        """Parameters, tied ones once."""
        from docklands.models.params import table_for

        return sum(math.prod(spec.shape) for spec in table_for(self) if spec.tied_to is None)

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that the rotary embedding turns."""
        return self.mla.rope_dim if self.mla else self.head_dim

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(heads, numbers of each) that one token keeps in a KV cache per layer, as a key and as a value.

        Latent attention keeps one vector that serves all heads, as key and value at once.
        """
        return (1, self.mla.kv_rank + self.mla.rope_dim) if self.mla else (self.num_kv_heads, self.head_dim)

    @property
    def kv_bytes_per_token(self) -> int:
        """Numbers that one token keeps in a KV cache (times the dtype's size)."""
        return (1 if self.mla else 2) * self.num_layers * math.prod(self.cache_shape)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return tuple(i for i in range(self.num_layers) if self.moe is not None and self.moe.is_sparse(i))

    @property
    def routed(self) -> tuple[int, int] | None:
        """(layers with experts, experts of a token): shape of a token's router choices; None: no layer has experts."""
        return (len(self.sparse_layers), self.moe.top_k) if self.moe is not None and self.sparse_layers else None


ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}
"""Rotary scaling rules: keys that must be there, keys that may be."""

LARGEST = 2**31 - 1
"""No size or id of a model is larger."""

MANY = 10_000
"""No model has more layers or experts: each is a row of a table."""


@dataclass(frozen=True)
class HfConfig:
    """A config.json with errors that say which key of which file is wrong."""

    values: Mapping[str, Any]
    where: str

    def need(self, key: str) -> Any:
        """A value that must be there."""
        value = self.values.get(key)
        if value is None:
            raise DataError(f"{self.where}: key {key!r} is missing")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """An integer from `least` to `most`; `default` None: it must be there."""
        value = self.need(key) if default is None else self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"{self.where}: {key} is {value!r}, expected an integer")
        if not least <= value <= most:
            raise DataError(f"{self.where}: {key} is {value}, it must be from {least} to {most}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Numbers from 0 on: one, a list, or none at all."""
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(x, bool) or not isinstance(x, int) or not 0 <= x <= LARGEST for x in found):
            raise DataError(f"{self.where}: {key} is {value!r}, expected a number from 0 on, or a list of such")
        return tuple(found)

    def number(self, key: str, default: float, zero: bool = False) -> float:
        """A finite number above 0; `zero`: or 0."""
        value = self.values.get(key)
        value = default if value is None else value
        given = not isinstance(value, bool) and isinstance(value, int | float)
        if not given or not (0 < value < math.inf or (zero and value == 0)):
            wanted = "of 0 or more" if zero else "above 0"
            raise DataError(f"{self.where}: {key} is {value!r}, expected a number {wanted}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise DataError(f"{self.where}: {key} is {value!r}, expected true or false")
        return default if value is None else value

    def section(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty when it is not there."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise DataError(f"{self.where}: {key} is {value!r}, expected an object")
        return value

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """DataError when the key has a value that these modules do not compute."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            raise DataError(f"{self.where}: {key} = {value!r} is not supported", why)

    def rope(self) -> tuple[float, Mapping[str, Any] | None]:
        """(theta, scaling) from either generation of keys: rope_parameters, or rope_theta and rope_scaling."""
        rule = {**self.section("rope_scaling"), **self.section("rope_parameters")}
        said = HfConfig(rule, f"{self.where}, rotary embedding")
        theta = said.number("rope_theta", self.number("rope_theta", 10000.0))
        kind = rule.get("rope_type", rule.get("type", "default"))
        if kind == "default":
            return theta, None
        if not isinstance(kind, str) or kind not in ROPE_KEYS:
            known = ", ".join(("default", *ROPE_KEYS))
            raise DataError(f"{self.where}: rotary scaling {kind!r} is not supported", f"supported: {known}")
        keys, optional = ROPE_KEYS[kind]
        missing = [key for key in keys if rule.get(key) is None]
        if missing:
            raise DataError(f"{self.where}: {kind} rotary scaling lacks {', '.join(missing)}")
        kept = {key: rule[key] for key in (*keys, *optional) if rule.get(key) is not None}
        for key in kept:
            said.flag(key, True) if key == "truncate" else said.number(key, 1.0, zero=key.startswith("mscale"))
        return theta, kept if kind == "llama3" else {"rope_type": kind, **kept}

    def eos_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids."""
        return self.integers("eos_token_id")

    def common(self, head_dim: int = 0) -> dict[str, Any]:
        """The fields that every family spells alike. `head_dim` 0: from the file."""
        self.refuse("hidden_act", ("silu",), "the feed-forward block is SwiGLU")
        self.refuse("attention_dropout", (0.0, 0, None), "dropout is not implemented: set it to 0")
        self.refuse("partial_rotary_factor", (1.0, 1, None), "the rotary embedding covers the whole head")
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        if not head_dim and self.values.get("head_dim") is None and hidden % heads:
            raise DataError(f"{self.where}: hidden_size {hidden} is not a multiple of {heads} heads, and no head_dim")
        theta, scaling = self.rope()
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "num_layers": self.integer("num_hidden_layers", most=MANY),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": head_dim or self.integer("head_dim", hidden // heads),
            "intermediate_size": self.integer("intermediate_size"),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rms_eps": self.number("rms_norm_eps", 1e-6),
            "tie_embeddings": self.flag("tie_word_embeddings", False),
            "max_positions": self.integer("max_position_embeddings", 2048),
            "eos_ids": self.eos_ids(),
            "bos_id": self.integer("bos_token_id", -1, least=-1),
            "pad_id": self.integer("pad_token_id", -1, least=-1),
            "init_std": self.number("initializer_range", 0.02),
        }


def common_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that every family spells alike."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **config.rope_scaling}
    eos: Any = list(config.eos_ids) if len(config.eos_ids) > 1 else (config.eos_ids[0] if config.eos_ids else None)
    old_scaling = None if config.rope_scaling is None else {"rope_type": "llama3", **config.rope_scaling}
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": old_scaling,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "eos_token_id": eos,
        "bos_token_id": None if config.bos_id < 0 else config.bos_id,
        "pad_token_id": None if config.pad_id < 0 else config.pad_id,
    }


@dataclass(frozen=True)
class Family:
    """How one family of models spells its config.json. `value_class`: its class with a scalar head per token."""

    read: Callable[[HfConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    value_class: str


class _Families(Registry[Family]):
    def get(self, name: str) -> Family:
        try:
            return super().get(name)
        except ConfigError as error:
            known = ", ".join(n for n in self if n.endswith("ForCausalLM"))
            raise ConfigError(error.message, f"known: {known}") from None


families: Registry[Family] = _Families(
    "architecture", ("docklands.models.qwen", "docklands.models.llama", "docklands.models.deepseek")
)
