"""Qwen2 and Qwen2.5 (bias on q, k, v) and Qwen3 dense (q/k norm, head size independent of the model size)."""

from __future__ import annotations

from typing import Any

from docklands.models.config import Family, HfConfig, ModelConfig, common_hf, families

NO_WINDOW = "sliding-window attention is not implemented: set use_sliding_window to false if the contexts are short"


def _refuse_windows(hf: HfConfig) -> None:
    hf.refuse("use_sliding_window", (False, None), NO_WINDOW)
    for kind in hf.values.get("layer_types") or []:
        if kind != "full_attention":
            HfConfig({"layer_types": kind}, hf.where).refuse("layer_types", ("full_attention",), NO_WINDOW)


def read_qwen2(hf: HfConfig) -> ModelConfig:
    """ModelConfig from the config.json of Qwen2ForCausalLM (arXiv 2407.10671)."""
    _refuse_windows(hf)
    return ModelConfig(architecture="Qwen2ForCausalLM", qkv_bias=True, **hf.common())


def read_qwen3(hf: HfConfig) -> ModelConfig:
    """ModelConfig from the config.json of Qwen3ForCausalLM (arXiv 2505.09388)."""
    _refuse_windows(hf)
    bias = bool(hf.values.get("attention_bias", False))
    fields = hf.common()
    fields["head_dim"] = hf.integer("head_dim", 128)
    return ModelConfig(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=bias, o_bias=bias, **fields)


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """config.json of Qwen2ForCausalLM."""
    return {"model_type": "qwen2", **common_hf(config), "use_sliding_window": False}


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """config.json of Qwen3ForCausalLM."""
    extra = {"use_sliding_window": False, "attention_bias": config.qkv_bias}
    return {"model_type": "qwen3", **common_hf(config), **extra}


families.add("Qwen2ForCausalLM", "Qwen2ForTokenClassification", "qwen2")(
    Family(read_qwen2, write_qwen2, "Qwen2ForTokenClassification")
)
families.add("Qwen3ForCausalLM", "Qwen3ForTokenClassification", "qwen3")(
    Family(read_qwen3, write_qwen3, "Qwen3ForTokenClassification")
)
