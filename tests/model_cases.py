"""Tiny random models of transformers and ours with the same weights. Sizes are not square and head counts are odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from docklands.models import CausalLM, PackedCausal

V = 97
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2_tied_one_kv_head": (
        "Qwen2",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3_wide_heads": ("Qwen3", {"hidden_size": 40, "head_dim": 12, "num_key_value_heads": 2}),
    "qwen3_tied": (
        "Qwen3",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20, "tie_word_embeddings": True},
    ),
    "llama": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 14}),
    "llama_attention_bias": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": True}),
    "llama3_rope_tied": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
}


def reference(case: str) -> Any:
    """The model of transformers, fp32, with weights far enough from their initial values to matter."""
    family, extra = CASES[case]
    settings = {
        "vocab_size": V,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": 56,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **extra,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.15)
            parameter.copy_(torch.empty_like(parameter).normal_(center, spread, generator=generator))
    return model


def saved(case: str, path: Path, **save: Any) -> Any:
    """The reference, written to `path`."""
    model = reference(case)
    model.save_pretrained(path, **save)
    return model


def pack(lengths: list[int], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Random token ids and the positions of sequences packed end to end."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(0, V, (sum(lengths),), generator=generator)
    return ids_T, torch.cat([torch.arange(n) for n in lengths])


def logits_of(model: CausalLM, lengths: list[int], ids_T: Tensor, positions_T: Tensor) -> Tensor:
    """logits_TV of a pack."""
    return model.logits(model(ids_T, positions_T, PackedCausal(lengths)))
