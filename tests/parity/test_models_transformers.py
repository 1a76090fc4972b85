"""Our modules against transformers: logits, gradients, and files that travel both ways without changing a bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tests.model_cases import CASES, V, logits_of, pack, saved

from docklands import models
from docklands.models import PackedCausal
from docklands.models.hf_io import hf_tensors

LENGTHS = [7, 13, 1, 7, 70]  # past the 64 positions of the llama3 case's original context


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path)
    ours = models.load(tmp_path)
    ids_T, positions_T = pack(LENGTHS)
    logits_TV = logits_of(ours, LENGTHS, ids_T, positions_T)
    expected_TV = torch.cat([theirs(ids[None]).logits[0] for ids in ids_T.split(LENGTHS)])
    assert expected_TV.abs().max() > 1  # a comparison of near-zero logits would show nothing
    assert (logits_TV - expected_TV).abs().max() < 1e-4

    weight_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(5)) / len(ids_T)
    (logits_TV.log_softmax(-1) * weight_TV).sum().backward()
    (expected_TV.log_softmax(-1) * weight_TV).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    compared = 0
    for spec in ours.table.stored():
        gradient = ours.get_parameter(spec.name).grad
        assert gradient is not None
        for name, shape, start in spec.hf_shapes():
            expected = gradients.pop(name)
            assert expected.abs().max() > 0 or name.endswith("k_proj.bias")  # softmax ignores an equal shift of keys
            assert (gradient[start : start + shape[0]] - expected).abs().max() < 1e-4, name
            compared += 1
    assert compared and not gradients


@pytest.mark.parametrize("case", ["qwen2", "qwen3_tied", "llama3_rope_tied"])
def test_a_pack_equals_its_sequences_alone(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path)
    model = models.load(tmp_path)
    ids_T, positions_T = pack(LENGTHS)
    together = logits_of(model, LENGTHS, ids_T, positions_T).split(LENGTHS)
    for length, ids, logits in zip(LENGTHS, ids_T.split(LENGTHS), together):
        alone = logits_of(model, [length], ids, torch.arange(length))
        assert (logits - alone).abs().max() < 1e-5


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bitwise(case: str, shard: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path / "in", max_shard_size=shard)
    limit = {"1GB": 10**9, "20KB": 20_000}[shard]
    assert (tmp_path / "in" / "model.safetensors.index.json").exists() == (shard == "20KB")
    models.export(models.load(tmp_path / "in"), tmp_path / "out", tmp_path / "in", max_shard_bytes=limit)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1 or shard == "20KB"
    back, info = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state = back.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    ids = pack([9])[0][None]
    assert torch.equal(back(ids).logits, theirs(ids).logits)


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    theirs = saved("qwen2", tmp_path / "fp32").bfloat16()
    theirs.save_pretrained(tmp_path / "in")
    ours = models.load(tmp_path / "in", dtype=torch.bfloat16)
    models.export(ours, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(
        torch.equal(t, theirs.state_dict()[n]) and t.dtype == torch.bfloat16 for n, t in back.state_dict().items()
    )
    # fp32 masters of the same weights write the same bf16 file when asked to
    models.export(models.load(tmp_path / "in"), tmp_path / "masters", dtype=torch.bfloat16)
    one, two = (tmp_path / x / "model.safetensors" for x in ("out", "masters"))
    assert one.read_bytes() == two.read_bytes()


def test_older_rotary_keys_are_read(tmp_path: Path) -> None:
    saved("llama3_rope_tied", tmp_path)
    new = models.read_config(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rule = values.pop("rope_parameters")
    values |= {"rope_theta": rule.pop("rope_theta"), "rope_scaling": rule}
    (tmp_path / "config.json").write_text(json.dumps(values))
    old = models.read_config(tmp_path)
    assert old == new and old.rope_scaling is not None and old.rope_scaling["factor"] == 8.0


@pytest.mark.parametrize("case", ["qwen2", "qwen3_wide_heads", "llama3_rope_tied"])
def test_value_model_is_a_token_classifier_of_transformers(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "in")
    ours = models.load_value(tmp_path / "in")
    ids_T, positions_T = pack([5, 9])
    assert torch.equal(ours(ids_T, positions_T, PackedCausal([5, 9])), torch.zeros(14))
    torch.nn.init.normal_(ours.value_head.weight)
    assert ours.value_head.bias is not None
    torch.nn.init.constant_(ours.value_head.bias, 0.5)
    models.export(ours, tmp_path / "out", tmp_path / "in")
    classifier = getattr(transformers, f"{CASES[case][0]}ForTokenClassification")
    theirs, info = classifier.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    values_T = ours(ids_T, positions_T, PackedCausal([5, 9]))
    expected_T = torch.cat([theirs.eval()(ids[None]).logits[0, :, 0] for ids in ids_T.split([5, 9])])
    assert values_T.dtype == torch.float32 and (values_T - expected_T).abs().max() < 1e-4
    again = models.load_value(tmp_path / "out")
    assert torch.equal(again(ids_T, positions_T, PackedCausal([5, 9])), values_T)


@pytest.mark.parametrize("case", ["qwen2", "qwen3_tied"])
def test_recomputation_changes_no_bit(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path)
    gradients = []
    for recompute in (False, True):
        model = models.load(tmp_path)
        model.recompute = recompute
        ids_T, positions_T = pack([11, 5])
        logits_of(model, [11, 5], ids_T, positions_T).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_autocast_over_fp32_masters_equals_bf16_weights(tmp_path: Path) -> None:
    saved("qwen3_tied", tmp_path)
    masters, copies = models.load(tmp_path), models.load(tmp_path, dtype=torch.bfloat16)
    ids_T, positions_T = pack([11, 5])
    with torch.autocast("cpu", torch.bfloat16):
        trained_TD = masters(ids_T, positions_T, PackedCausal([11, 5]))
    generated_TD = copies(ids_T, positions_T, PackedCausal([11, 5]))
    assert trained_TD.dtype == torch.bfloat16 and torch.equal(trained_TD, generated_TD)
    trained_TD.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in masters.parameters())
    wide_TD = masters(ids_T, positions_T, PackedCausal([11, 5]))
    assert (wide_TD - generated_TD).abs().mean() < 0.05


def test_hf_tensors_names_every_tensor_once(tmp_path: Path) -> None:
    theirs = saved("llama_attention_bias", tmp_path)
    tensors = dict(hf_tensors(models.load(tmp_path)))
    assert tensors.keys() == theirs.state_dict().keys()
    assert tensors["model.embed_tokens.weight"].shape == (V, 48)
