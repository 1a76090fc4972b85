"""Llama, and what shares its blocks (SmolLM2): no biases, no q/k norm, optional llama3 rotary scaling."""

from __future__ import annotations

from typing import Any

from docklands.models.config import Family, HfConfig, ModelConfig, common_hf, families


def read(hf: HfConfig) -> ModelConfig:
    """ModelConfig from the config.json of LlamaForCausalLM (Touvron et al. 2023; Llama 3: arXiv 2407.21783)."""
    hf.refuse("mlp_bias", (False, None), "biases in the feed-forward block are not implemented")
    bias = hf.flag("attention_bias", False)
    return ModelConfig(architecture="LlamaForCausalLM", qkv_bias=bias, o_bias=bias, **hf.common())


def write(config: ModelConfig) -> dict[str, Any]:
    """config.json of LlamaForCausalLM."""
    return {"model_type": "llama", **common_hf(config), "attention_bias": config.qkv_bias, "mlp_bias": False}


families.add("LlamaForCausalLM", "LlamaForTokenClassification", "llama")(
    Family(read, write, "LlamaForTokenClassification")
)
