"""Tiny models with experts and with latent attention, from transformers, and what ours must share with them.

Sizes are not square and head counts are odd.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from docklands import models
from docklands.config.schema import RolloutSection
from docklands.core.protocols import Sampling
from docklands.models import CausalLM
from docklands.rollout import NativeEngine
from tests import rollout_cases
from tests.model_cases import V, logits_of, pack

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
QWEN: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 20,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
MLA: dict[str, Any] = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "num_nextn_predict_layers": 0,
}
MOE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", QWEN),
    "qwen3_moe_plain_tied": ("Qwen3Moe", {**QWEN, "norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3_moe_some_layers_yarn": (
        "Qwen3Moe",
        {
            **QWEN,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("mscale")},
        },
    ),
    "qwen3_moe_aligned_bias": (
        "Qwen3Moe",
        {**QWEN, "hidden_size": 48, "moe_intermediate_size": 24, "num_experts": 8, "attention_bias": True},
    ),
}
MLA_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("DeepseekV3", MLA),
    "deepseek_yarn_tied": (
        "DeepseekV3",
        {
            **MLA,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": YARN,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_wide_values_no_rank": (
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": None,
            "v_head_dim": 18,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.4, "truncate": False},
        },
    ),
    "deepseek_half_pairs": ("DeepseekV3", {**MLA, "rope_interleave": False, "first_k_dense_replace": 0}),
}


def reference(case: str) -> Any:
    """The model of transformers, fp32, with weights far enough from their initial values to matter."""
    family, extra = {**MOE_CASES, **MLA_CASES}[case]
    settings = {
        "vocab_size": V,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "intermediate_size": 56,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **extra,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction" in n)]
        for name, parameter in named:
            center, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.15)
            parameter.copy_(torch.empty_like(parameter).normal_(center, spread, generator=generator))
    return model


def saved(case: str, path: Path, **save: Any) -> Any:
    """The reference, written to `path`."""
    model = reference(case)
    model.save_pretrained(path, **save)
    return model


def hf_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients under the names that files use: transformers fuses the experts in memory only."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for e, gradient in enumerate(parameter.grad):
                for part, half in zip(("gate", "up"), gradient.chunk(2)):
                    found[f"{name.removesuffix('gate_up_proj')}{e}.{part}_proj.weight"] = half
        elif name.endswith("experts.down_proj"):
            for e, gradient in enumerate(parameter.grad):
                found[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = gradient
        else:
            found[name] = parameter.grad
    return found


def file_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, by name."""
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def check_logits_and_gradients(case: str, path: Path) -> None:
    """Ours against the reference on a ragged pack, fp32, every element within 1e-4."""
    lengths = [7, 13, 1, 7, 70]
    theirs, ours = saved(case, path), models.load(path)
    ids_T, positions_T = pack(lengths)
    logits_TV = logits_of(ours, lengths, ids_T, positions_T)
    expected_TV = torch.cat([theirs(ids[None]).logits[0] for ids in ids_T.split(lengths)])
    assert expected_TV.abs().max() > 1  # a comparison of near-zero logits would show nothing
    assert (logits_TV - expected_TV).abs().max() < 1e-4

    weight_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(5)) / len(ids_T)
    (logits_TV.log_softmax(-1) * weight_TV).sum().backward()
    (expected_TV.log_softmax(-1) * weight_TV).sum().backward()
    gradients = hf_gradients(theirs)
    idle, count = [], len(gradients)  # experts that no token chose, and key biases: softmax ignores an equal shift
    for spec in ours.table.stored():
        gradient = ours.get_parameter(spec.name).grad
        if spec.keep_fp32:
            assert gradient is None  # the router's bias is not trained by gradient
            continue
        assert gradient is not None
        for name, shape, start in spec.hf_shapes():
            expected = gradients.pop(name)
            idle += [] if expected.abs().max() > 0 else [name]
            assert (spec.by_rows(gradient)[start : start + shape[0]] - expected).abs().max() < 1e-4, name
    assert not gradients and len(idle) < count / 4
    assert all(".experts." in name or name.endswith("k_proj.bias") for name in idle)


def check_round_trip(case: str, path: Path) -> None:
    """transformers -> ours -> transformers: every tensor bitwise, no key missing or extra, equal logits."""
    theirs = saved(case, path / "in", max_shard_size="20KB")
    models.export(models.load(path / "in"), path / "out", path / "in", max_shard_bytes=20_000)
    one, two = file_tensors(path / "in"), file_tensors(path / "out")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    back, info = type(theirs).from_pretrained(path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state = back.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    ids = pack([9])[0][None]
    assert torch.equal(back(ids).logits, theirs(ids).logits)
    assert models.read_config(path / "out") == models.read_config(path / "in")


def check_generation(case: str, path: Path) -> None:
    """The engine's log-probs are the trainer's, and a sample's do not depend on its company, to the bit."""
    saved(case, path)
    source = models.load(path)
    requests = rollout_cases.groups(4, 5, Sampling(45))
    together = rollout_cases.engine(source).generate(requests)
    for request, found in zip(requests, together):
        want = rollout_cases.full_logprobs(source, request, list(found.token_ids))
        assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-5
    for dtype in (torch.float32, torch.bfloat16):
        alone, many = (engine_in(source, dtype).generate(some) for some in (requests[6:7], requests))
        assert alone[0].token_ids == many[6].token_ids
        assert list(alone[0].logprobs) == list(many[6].logprobs)


def engine_in(source: CausalLM, dtype: torch.dtype, **section: int) -> NativeEngine:
    """An engine that holds the model's weights in `dtype`."""
    engine = NativeEngine(source.config, RolloutSection(max_batch=16, **section), dtype=dtype)  # type: ignore[arg-type]
    engine.load_weights(source.named_parameters(), 0)
    return engine
