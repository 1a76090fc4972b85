"""Qwen2 and Qwen2.5 (bias on q, k, v); Qwen3, dense or with experts (q/k norm, head size independent of D)."""

from __future__ import annotations

from typing import Any

from docklands.models.config import MANY, Family, HfConfig, ModelConfig, MoeConfig, common_hf, families

NO_WINDOW = "sliding-window attention is not implemented: set use_sliding_window to false if the contexts are short"


def _refuse_windows(hf: HfConfig) -> None:
    hf.refuse("use_sliding_window", (False, None), NO_WINDOW)
    kinds = hf.values.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            HfConfig({"layer_types": kind}, hf.where).refuse("layer_types", ("full_attention",), NO_WINDOW)


def read_qwen2(hf: HfConfig) -> ModelConfig:
    """ModelConfig from the config.json of Qwen2ForCausalLM (arXiv 2407.10671)."""
    _refuse_windows(hf)
    return ModelConfig(architecture="Qwen2ForCausalLM", qkv_bias=True, **hf.common())


def read_qwen3(hf: HfConfig) -> ModelConfig:
    """ModelConfig from the config.json of Qwen3ForCausalLM (arXiv 2505.09388)."""
    _refuse_windows(hf)
    bias = hf.flag("attention_bias", False)
    fields = hf.common()
    fields["head_dim"] = hf.integer("head_dim", 128)
    return ModelConfig(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=bias, o_bias=bias, **fields)


def read_qwen3_moe(hf: HfConfig) -> ModelConfig:
    """ModelConfig from the config.json of Qwen3MoeForCausalLM (arXiv 2505.09388)."""
    _refuse_windows(hf)
    experts = "num_experts" if "num_experts" in hf.values else "num_local_experts"  # the newer name
    moe = MoeConfig(
        experts=hf.integer(experts, most=MANY),
        top_k=hf.integer("num_experts_per_tok"),
        expert_size=hf.integer("moe_intermediate_size"),
        normalize=hf.flag("norm_topk_prob", False),
        sparse_step=hf.integer("decoder_sparse_step", 1),
        dense_layers=hf.integers("mlp_only_layers"),
    )
    bias = hf.flag("attention_bias", False)
    fields = hf.common()
    return ModelConfig(architecture="Qwen3MoeForCausalLM", qk_norm=True, qkv_bias=bias, o_bias=bias, moe=moe, **fields)


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """config.json of Qwen2ForCausalLM."""
    return {"model_type": "qwen2", **common_hf(config), "use_sliding_window": False}


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """config.json of Qwen3ForCausalLM."""
    extra = {"use_sliding_window": False, "attention_bias": config.qkv_bias}
    return {"model_type": "qwen3", **common_hf(config), **extra}


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """config.json of Qwen3MoeForCausalLM."""
    moe = config.moe
    assert moe is not None
    return {
        "model_type": "qwen3_moe",
        **common_hf(config),
        "use_sliding_window": False,
        "attention_bias": config.qkv_bias,
        "num_experts": moe.experts,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": moe.sparse_step,
        "mlp_only_layers": list(moe.dense_layers),
    }


families.add("Qwen2ForCausalLM", "Qwen2ForTokenClassification", "qwen2")(
    Family(read_qwen2, write_qwen2, "Qwen2ForTokenClassification")
)
families.add("Qwen3ForCausalLM", "Qwen3ForTokenClassification", "qwen3")(
    Family(read_qwen3, write_qwen3, "Qwen3ForTokenClassification")
)
families.add("Qwen3MoeForCausalLM", "Qwen3MoeForTokenClassification", "qwen3_moe")(
    Family(read_qwen3_moe, write_qwen3_moe, "Qwen3MoeForTokenClassification")
)
