"""What a model is, independent of whose names its files use.

Legend: V vocabulary, D model, L layers, N heads, K kv heads, H head dim, F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from docklands.errors import ConfigError, DataError
from docklands.registry import Registry


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder. `from_hf` and `to_hf` translate the config.json of a Hugging Face directory.

    architecture   Hugging Face class name, the key of the family in the registry
    rope_scaling   None, or the llama3 rule: factor, low_freq_factor, high_freq_factor,
                   original_max_position_embeddings
    qkv_bias       bias on q, k, v projections; o_bias: on the output projection
    qk_norm        RMS norm over each head of q and k, before the rotary embedding
    eos_ids        every id that ends a response; bos_id, pad_id: -1 when the model has none
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

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """From a parsed config.json. ConfigError for an unknown architecture, DataError for an unusable value."""
        names = config.get("architectures") or []
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
    def kv_bytes_per_token(self) -> int:
        """Numbers that one token keeps in a KV cache (times the dtype's size)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


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

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; `default` None: it must be there."""
        value = self.need(key) if default is None else self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"{self.where}: {key} is {value!r}, expected an integer")
        return value

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """DataError when the key has a value that these modules do not compute."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            raise DataError(f"{self.where}: {key} = {value!r} is not supported", why)

    def rope(self) -> tuple[float, Mapping[str, Any] | None]:
        """(theta, scaling) from either generation of keys: rope_parameters, or rope_theta and rope_scaling."""
        new = self.values.get("rope_parameters") or {}
        old = self.values.get("rope_scaling") or {}
        rule = {**old, **new}
        theta = float(rule.get("rope_theta", self.values.get("rope_theta", 10000.0)))
        kind = rule.get("rope_type", rule.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise DataError(f"{self.where}: rotary scaling {kind!r} is not supported", "supported: default, llama3")
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [key for key in keys if key not in rule]
        if missing:
            raise DataError(f"{self.where}: llama3 rotary scaling lacks {', '.join(missing)}")
        return theta, {key: rule[key] for key in keys}

    def eos_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids."""
        value = self.values.get("eos_token_id")
        return () if value is None else tuple(value) if isinstance(value, list) else (int(value),)

    def common(self) -> dict[str, Any]:
        """The fields that every dense family spells alike."""
        self.refuse("hidden_act", ("silu",), "the feed-forward block is SwiGLU")
        self.refuse("attention_dropout", (0.0, 0, None), "dropout is not implemented: set it to 0")
        self.refuse("partial_rotary_factor", (1.0, 1, None), "the rotary embedding covers the whole head")
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        if self.values.get("head_dim") is None and hidden % heads:
            raise DataError(f"{self.where}: hidden_size {hidden} is not a multiple of {heads} heads, and no head_dim")
        theta, scaling = self.rope()
        pad = self.values.get("pad_token_id")
        bos = self.values.get("bos_token_id")
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.integer("head_dim", hidden // heads),
            "intermediate_size": self.integer("intermediate_size"),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rms_eps": float(self.values.get("rms_norm_eps", 1e-6)),
            "tie_embeddings": bool(self.values.get("tie_word_embeddings", False)),
            "max_positions": self.integer("max_position_embeddings", 2048),
            "eos_ids": self.eos_ids(),
            "bos_id": -1 if bos is None else int(bos),
            "pad_id": -1 if pad is None else int(pad),
            "init_std": float(self.values.get("initializer_range", 0.02)),
        }


def common_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that every dense family spells alike."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope = {**rope, "rope_type": "llama3", **config.rope_scaling}
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


families: Registry[Family] = _Families("architecture", ("docklands.models.qwen", "docklands.models.llama"))
