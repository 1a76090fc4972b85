"""Checkpoints in fp8 with a scale per block: read dequantised, written without quantisation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.expert_cases import file_tensors, saved
from tests.model_cases import logits_of, pack

from docklands import models
from docklands.errors import DataError
from docklands.models.fp8 import dequantize

BLOCK = (16, 8)  # tiny weights need tiny blocks: 40 x 56 has whole blocks and cut ones


def quantize(weight_OI: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 weight, scales), block by block: the largest of a block becomes 448, the largest fp8 number."""
    rows, columns = weight_OI.shape
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for x in range(scale.shape[0]):
        for y in range(scale.shape[1]):
            part = slice(x * block[0], (x + 1) * block[0]), slice(y * block[1], (y + 1) * block[1])
            scale[x, y] = weight_OI[part].abs().max() / 448
            out[part] = (weight_OI[part] / scale[x, y]).to(torch.float8_e4m3fn)
    return out, scale


def expand(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """The plain way: a scale for every element."""
    return weight.float() * torch.kron(scale, torch.ones(block))[: weight.shape[0], : weight.shape[1]]


def in_fp8(source: Path, target: Path, config: dict[str, object] | None = None) -> dict[str, torch.Tensor]:
    """Write the directory's matrices in fp8, as DeepSeek does: embedding, head, norms and router stay; scales lie in
    another file than their weights. -> what they dequantise to.
    """
    values = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}
    values["quantization_config"] = config or quantization
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values))
    weights, scales, expected = {}, {}, {}
    for name, tensor in file_tensors(source).items():
        if tensor.dim() == 2 and "_proj" in name:
            weights[name], scales[name + "_scale_inv"] = quantize(tensor)
            expected[name] = expand(weights[name], scales[name + "_scale_inv"])
        else:
            weights[name] = expected[name] = tensor
    save_file(weights, target / "weights.safetensors")
    save_file(scales, target / "scales.safetensors")
    files = dict.fromkeys(weights, "weights.safetensors") | dict.fromkeys(scales, "scales.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return expected


@pytest.mark.parametrize("shape", [(32, 16), (33, 9), (7, 5), (16, 80)])
def test_dequantize(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(shape) * torch.rand(shape[0], 1).exp()
    quantized, scale = quantize(weight_OI)
    found = dequantize(quantized, scale, BLOCK)
    assert found.dtype == torch.float32 and torch.equal(found, expand(quantized, scale))
    assert (found - weight_OI).abs().max() <= weight_OI.abs().max() / 16  # 3 bits of mantissa


@pytest.mark.parametrize("case", ["deepseek", "qwen3_moe"])
def test_an_fp8_directory_is_read_and_written_without(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "fp32")
    expected = in_fp8(tmp_path / "fp32", tmp_path / "fp8")
    ours = models.load(tmp_path / "fp8")
    models.export(ours, tmp_path / "out", tmp_path / "fp8")
    found = file_tensors(tmp_path / "out")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    ids_T, positions_T = pack([9])
    exact = models.load(tmp_path / "fp32")
    gap = logits_of(ours, [9], ids_T, positions_T) - logits_of(exact, [9], ids_T, positions_T)
    assert 0 < gap.abs().mean() < 0.2  # near the original, and not it


def test_an_fp8_mtp_layer_is_carried_dequantised(tmp_path: Path) -> None:
    saved("deepseek", tmp_path / "fp32")
    expected = in_fp8(tmp_path / "fp32", tmp_path / "fp8")
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    name = "model.layers.3.self_attn.o_proj.weight"
    quantized, scale = quantize(torch.randn(20, 30))
    norm = torch.randn(4).bfloat16()
    extra = {name: quantized, name + "_scale_inv": scale, "model.layers.3.enorm.weight": norm}
    save_file(extra, tmp_path / "fp8" / "mtp.safetensors")
    index["weight_map"] |= dict.fromkeys(extra, "mtp.safetensors")
    (tmp_path / "fp8" / "model.safetensors.index.json").write_text(json.dumps(index))
    values = json.loads((tmp_path / "fp8" / "config.json").read_text())
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 1}))
    models.export(models.load(tmp_path / "fp8"), tmp_path / "out", tmp_path / "fp8", dtype=torch.bfloat16)
    found = file_tensors(tmp_path / "out")
    assert found.keys() == {*expected, name, "model.layers.3.enorm.weight"}
    assert torch.equal(found[name], expand(quantized, scale).bfloat16())
    assert torch.equal(found["model.layers.3.enorm.weight"], norm)


def test_what_is_refused(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "fp32")
    other = [
        ({"quant_method": "gptq", "bits": 4}, "quantised weights cannot be trained"),
        ({"quant_method": "fp8"}, "quantised weights cannot be trained"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is \\[128\\]"),
    ]
    for i, (config, said) in enumerate(other):
        in_fp8(tmp_path / "fp32", tmp_path / f"other{i}", config)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=said):
            models.load(tmp_path / f"other{i}")
    wide = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    in_fp8(tmp_path / "fp32", tmp_path / "wide", wide)
    with pytest.raises(DataError, match=r"scale_inv has shape \(\d+, \d+\), expected \(1, 1\)"):
        models.load(tmp_path / "wide")

    in_fp8(tmp_path / "fp32", tmp_path / "lost")
    index = json.loads((tmp_path / "lost" / "model.safetensors.index.json").read_text())
    names = {n: f for n, f in index["weight_map"].items() if n != "model.layers.1.self_attn.o_proj.weight_scale_inv"}
    (tmp_path / "lost" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(DataError, match=r"layers.1.self_attn.o_proj.weight is torch.float8_e4m3fn"):
        models.load(tmp_path / "lost")
