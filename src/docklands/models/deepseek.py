"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention, YaRN, experts chosen by biased sigmoid scores in groups."""

from __future__ import annotations

from typing import Any

from docklands.models.config import MANY, Family, HfConfig, MlaConfig, ModelConfig, MoeConfig, common_hf, families


def read(hf: HfConfig) -> ModelConfig:
    """ModelConfig from the config.json of DeepseekV3ForCausalLM, DeepSeek's own or that of transformers."""
    hf.refuse("scoring_func", ("sigmoid",), "the router of DeepSeek-V3 scores by sigmoid")
    hf.refuse(
        "topk_method", ("noaux_tc",), "the router of DeepSeek-V3 chooses experts by a bias, without auxiliary loss"
    )
    hf.refuse("moe_layer_freq", (1,), "every layer after the first dense ones has experts")
    mla = MlaConfig(
        q_rank=hf.integer("q_lora_rank", 0, least=0),
        kv_rank=hf.integer("kv_lora_rank"),
        nope_dim=hf.integer("qk_nope_head_dim"),
        rope_dim=hf.integer("qk_rope_head_dim"),
        v_dim=hf.integer("v_head_dim"),
        interleaved=hf.flag("rope_interleave", True),
    )
    size = hf.integer("moe_intermediate_size")
    shared = hf.integer("n_shared_experts", 0 if "n_shared_experts" in hf.values else 1, least=0, most=MANY)
    moe = MoeConfig(
        experts=hf.integer("n_routed_experts", most=MANY),
        top_k=hf.integer("num_experts_per_tok"),
        expert_size=size,
        shared_size=size * shared,
        scoring="sigmoid",
        normalize=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        groups=hf.integer("n_group", 1),
        top_groups=hf.integer("topk_group", 1),
        first_dense=hf.integer("first_k_dense_replace", 0, least=0),
    )
    bias = hf.flag("attention_bias", False)
    fields = hf.common(mla.nope_dim + mla.rope_dim)
    fields["num_kv_heads"] = fields["num_heads"]
    mtp = hf.integer("num_nextn_predict_layers", 0, least=0, most=MANY)
    return ModelConfig("DeepseekV3ForCausalLM", qkv_bias=bias, o_bias=bias, moe=moe, mla=mla, mtp_layers=mtp, **fields)


def write(config: ModelConfig) -> dict[str, Any]:
    """config.json of DeepseekV3ForCausalLM, with the keys that other engines ask for."""
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None
    return {
        "model_type": "deepseek_v3",
        **common_hf(config),
        "head_dim": mla.rope_dim,  # as transformers writes it: the part that its rotary embedding turns
        "attention_bias": config.qkv_bias,
        "q_lora_rank": mla.q_rank or None,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rope_interleave": mla.interleaved,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": config.mtp_layers,
    }


families.add("DeepseekV3ForCausalLM", "DeepseekV3ForTokenClassification", "deepseek_v3")(
    Family(read, write, "DeepseekV3ForTokenClassification")
)
