"""Model directories that cannot be used: one clear line and exit code 2. A failed write leaves the old one intact."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from docklands import models
from docklands.errors import CheckpointError, ConfigError, DataError
from docklands.models.hf_io import not_finite
from docklands.models.hf_write import COMPANIONS

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
    "eos_token_id": 1,
}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small exported model in one file."""
    path = tmp_path / "model"
    models.export(models.build(models.ModelConfig.from_hf(CONFIG), seed=1), path)
    return path


def change_config(path: Path, **changes: Any) -> None:
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(values))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def refused(path: Path, *parts: str, kind: type[ConfigError] = DataError) -> None:
    with pytest.raises(kind) as caught:
        models.load(path)
    assert caught.value.exit_code == 2
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_directory_no_config_no_weights(directory: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist")
    (directory / "model.safetensors").rename(tmp_path / "away")
    refused(directory, "model.safetensors does not exist")
    (directory / "pytorch_model.bin").touch()
    refused(directory, ".bin weights only", "safe_serialization")
    (directory / "config.json").write_text("{nonsense")
    refused(directory, "config.json cannot be read")
    (directory / "config.json").unlink()
    refused(directory, "config.json does not exist")


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    refused(directory, "model.safetensors", f"({len(whole[:keep])} bytes)", "not a complete safetensors file")


def test_missing_extra_and_misshapen_tensors(directory: Path) -> None:
    change_tensors(directory, lambda t: t.update(extra=torch.zeros(2)))
    refused(directory, "1 tensors that the model does not have", "extra")
    change_tensors(directory, lambda t: (t.pop("extra"), t.update({K_PROJ: torch.zeros(8, 25)})))
    refused(directory, K_PROJ, "(8, 25)", "(8, 24)")
    change_tensors(directory, lambda t: t.update({K_PROJ: torch.zeros(8, 24, dtype=torch.int8)}))
    refused(directory, K_PROJ, "torch.int8")
    change_tensors(directory, lambda t: t.pop(K_PROJ))
    refused(directory, "lacks 1 tensors", K_PROJ)


def test_a_missing_head_hints_at_tying_and_a_tied_model_ignores_one(directory: Path) -> None:
    change_config(directory, tie_word_embeddings=True)
    model = models.load(directory)  # the file still has lm_head.weight
    assert model.head_weight is model.embed.weight
    change_config(directory, tie_word_embeddings=False)
    change_tensors(directory, lambda t: t.pop("lm_head.weight"))
    refused(directory, "lm_head.weight", "tie_word_embeddings")


def test_shards_that_are_missing_or_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    models.export(models.build(models.ModelConfig.from_hf(CONFIG)), path, max_shard_bytes=5000)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2 and models.load(path).config == models.read_config(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in shards for t in load_file(f).values())
    tensors = load_file(shards[1])
    gone = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != gone}, shards[1])
    refused(path, shards[1].name, f"lacks tensor {gone}")
    shards[1].unlink()
    refused(path, shards[1].name, "does not exist")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"use_sliding_window": True}, ["use_sliding_window = True", "sliding-window attention is not implemented"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
        ({"attention_dropout": 0.1}, ["attention_dropout = 0.1"]),
        ({"num_key_value_heads": 2}, ["3 heads are not a multiple of 2 kv heads"]),
        ({"head_dim": 7}, ["head_dim 7 is odd"]),
        ({"head_dim": None, "num_attention_heads": 5}, ["hidden_size 24 is not a multiple of 5 heads"]),
        ({"vocab_size": None}, ["key 'vocab_size' is missing"]),
        ({"vocab_size": "many"}, ["vocab_size is 'many'"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            ["rotary scaling 'longrope'", "llama3", "yarn"],
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["yarn rotary scaling lacks original_max"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, ["lacks low_freq_factor"]),
        ({"quantization_config": {"bits": 4}}, ["quantised weights cannot be trained"]),
        ({"architectures": None, "model_type": None}, ["names neither architectures nor model_type"]),
        ({"vocab_size": 41}, ["lm_head.weight", "(40, 24)", "(41, 24)"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0, it must be from 1"]),
        ({"intermediate_size": -1}, ["intermediate_size is -1, it must be from 1"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers is 1000000000000, it must be from 1 to 10000"]),
        ({"eos_token_id": "x"}, ["eos_token_id is 'x'"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id is [1, -1]"]),
        ({"eos_token_id": 1.5}, ["eos_token_id is 1.5"]),
        ({"pad_token_id": "x"}, ["pad_token_id is 'x'"]),
        ({"architectures": 3}, ["architectures is 3"]),
        ({"rope_scaling": "x", "rope_parameters": None}, ["rope_scaling is 'x', expected an object"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 8}}, ["factor"]),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, ["rotary scaling ['yarn']"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta is 0, expected a number above 0"]),
        ({"rms_norm_eps": "a"}, ["rms_norm_eps is 'a'"]),
        ({"initializer_range": float("inf")}, ["initializer_range is inf"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings is 'false', expected true or false"]),
        ({"layer_types": 3}, ["layer_types = 3"]),
    ],
)
def test_configs_that_are_refused(directory: Path, changes: dict[str, Any], parts: list[str]) -> None:
    change_config(directory, **changes)
    refused(directory, *parts)


def test_sizes_past_any_memory_are_one_line(directory: Path) -> None:
    change_config(directory, hidden_size=3 * 2**28, vocab_size=2**30)
    refused(directory, "cannot be allocated on cpu", "are the sizes in config.json right?")


def test_files_that_are_no_objects_or_lie_elsewhere(directory: Path) -> None:
    change_config(directory, eos_token_id=None)
    generation, index = directory / "generation_config.json", directory / "model.safetensors.index.json"
    for text, part in (("[1]", "is not a JSON object"), ('{"eos_token_id": "x"}', "eos_token_id is 'x'")):
        generation.write_text(text)
        refused(directory, generation.name, part)
    generation.unlink()
    for name in ("../outside.safetensors", "/etc/passwd"):
        index.write_text(json.dumps({"weight_map": {K_PROJ: name}}))
        refused(directory, index.name, name, "which is not in its directory")
    index.write_text("[]")
    refused(directory, index.name, "is not a JSON object")


def test_an_unknown_architecture_lists_the_known_ones(directory: Path) -> None:
    change_config(directory, architectures=["MambaForCausalLM"])
    refused(directory, "MambaForCausalLM", "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM", kind=ConfigError)


def test_a_value_checkpoint_is_not_a_language_model(directory: Path, tmp_path: Path) -> None:
    models.export(models.load_value(directory), tmp_path / "critic", directory)
    refused(tmp_path / "critic", "lm_head.weight")


def test_end_ids_come_from_generation_config_when_config_has_none(directory: Path) -> None:
    change_config(directory, eos_token_id=None)
    assert models.read_config(directory).eos_ids == ()
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert models.read_config(directory).eos_ids == (3, 5)


def test_export_copies_the_companions_and_replaces_whole(directory: Path, tmp_path: Path) -> None:
    for name in COMPANIONS:
        (directory / name).write_text(f"content of {name}")
    change_config(directory, custom_key=7)
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale").touch()
    models.export(models.load(directory), out, directory)
    assert all((out / name).read_text() == f"content of {name}" for name in COMPANIONS)
    assert not (out / "stale").exists() and json.loads((out / "config.json").read_text())["custom_key"] == 7
    models.export(models.load(out), out, out)  # in place
    assert {p.name for p in out.iterdir()} == {*COMPANIONS, "config.json", "model.safetensors"}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_full_disk_leaves_the_old_directory_intact(directory: Path) -> None:
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    model = models.build(models.ModelConfig.from_hf(CONFIG), seed=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # writes past it fail as on a full disk
        with pytest.raises(CheckpointError, match="cannot be written"):
            models.export(model, directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]


def test_not_finite_counts_in_any_dtype() -> None:
    """Also where the sum of squares overflows and nothing is wrong."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        weight = torch.full((3, 4), 6e4, dtype=dtype)
        assert not_finite(weight) == 0
        weight[1, 2], weight[2, 0] = torch.inf, torch.nan
        assert not_finite(weight) == 2
    assert not_finite(torch.full((4,), 3e38)) == 0
