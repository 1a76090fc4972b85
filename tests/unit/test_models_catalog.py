"""The real configurations: parameter counts to the digit, against the published ones and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from docklands import models
from docklands.errors import ConfigError
from docklands.models import ModelConfig, table_for
from docklands.models.catalog import active_params, catalog

PUBLISHED = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-r1-671b": 671_026_419_200,  # without the multi-token-prediction layer
}
"""Elements of all tensors in the published safetensors files."""


R1_CONFIG_JSON = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_config_of_r1_is_the_catalog_s() -> None:
    """As DeepSeek spells it: older rotary keys, quantised weights."""
    assert ModelConfig.from_hf(R1_CONFIG_JSON) == catalog.get("deepseek-r1-671b")


def test_counts_are_the_published_ones_to_the_digit() -> None:
    assert {name: catalog.get(name).num_params for name in catalog} == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_the_same_model(name: str) -> None:
    """From the config.json that we write, on the meta device: every tensor's size, experts fused there."""
    config = catalog.get(name)
    values = config.to_hf()
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    assert type(theirs).__name__ == config.architecture
    state = {n: t for n, t in theirs.state_dict().items() if not (config.tie_embeddings and n == "lm_head.weight")}
    assert sum(t.numel() for t in state.values()) == PUBLISHED[name]
    ours: dict[str, int] = {}
    for spec in table_for(config).stored():
        for hf, shape, _ in spec.hf_shapes():
            fused = hf
            if spec.experts:
                kind = "gate_up_proj" if "gate_up" in spec.name else "down_proj"
                fused = hf.split(".experts.")[0] + ".experts." + kind
            ours[fused] = ours.get(fused, 0) + math.prod(shape)
    assert ours == {n: t.numel() for n, t in state.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_round_trip(name: str) -> None:
    config = catalog.get(name)
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-235b-a22b"])
def test_our_modules_have_the_table_s_parameters(name: str) -> None:
    model = models.build(catalog.get(name), device="meta")
    stored = [(spec.name, spec.shape) for spec in model.table.stored()]
    assert stored == [(n, tuple(p.shape)) for n, p in model.named_parameters()]


def test_splits_of_experts_and_latent_attention() -> None:
    """Dimensions that tensor and expert parallelism cut, and what must stay together."""
    table = table_for(catalog.get("deepseek-r1-671b"))
    gate_up, down = (table.by_name(f"layers.3.moe.experts.{name}") for name in ("gate_up", "down"))
    assert (gate_up.shape, gate_up.parts, gate_up.split_dim) == ((256, 4096, 7168), (2048, 2048), 1)
    assert (down.shape, down.parts, down.split_dim) == ((256, 7168, 2048), (7168,), 2)
    assert gate_up.expert_dim == down.expert_dim == 0 and gate_up.experts == 256
    name, shape, start = gate_up.hf_shapes()[5]
    assert (name, shape) == ("model.layers.3.mlp.experts.2.up_proj.weight", (2048, 7168)) and start == 5 * 2048
    whole = torch.arange(2 * 3 * 2).view(2, 3, 2)
    assert gate_up.by_rows(whole).tolist() == whole.view(6, 2).tolist()
    heads = {"q_b": 192, "kv_b": 256, "o": 128}
    for name, unit in heads.items():
        spec = table.by_name(f"layers.0.mla.{name}.weight")
        dim = 1 if name == "o" else 0
        assert (spec.unit, spec.split_dim, spec.shape[dim]) == (unit, dim, 128 * unit)
    for name in ("mla.q_a.weight", "mla.kv_a.weight", "moe.router.weight", "moe.router.bias"):
        assert table.by_name(f"layers.5.{name}").split_dim is None
    assert table.by_name("layers.5.moe.router.bias").keep_fp32


def test_active_parameters() -> None:
    """What the names of the models with experts say, in units of 1e9."""
    found = {name: active_params(catalog.get(name)) for name in PUBLISHED}
    assert found["qwen3-8b"] == PUBLISHED["qwen3-8b"]
    assert found["qwen3-30b-a3b"] == 3_353_032_704
    assert found["qwen3-235b-a22b"] == 22_190_763_520
    assert found["deepseek-r1-671b"] == 37_552_297_472


def test_cache_of_latent_attention_is_small() -> None:
    """Numbers kept of a token: R1 keeps 61 vectors of 576; the same heads in full would be 57 times as many."""
    r1 = catalog.get("deepseek-r1-671b")
    assert r1.kv_bytes_per_token == 61 * 576
    assert catalog.get("qwen2.5-7b").kv_bytes_per_token == 2 * 28 * 4 * 128
    assert r1.sparse_layers == tuple(range(3, 61))


def test_an_unknown_name_is_answered() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3-8b'"):
        catalog.get("qwen3-8")
