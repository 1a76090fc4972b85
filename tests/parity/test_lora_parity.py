"""Adapters against peft on transformers' models, and against a plain dense computation: outputs, gradients, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.distributed.cases import MODELS
from torch import Tensor

from docklands.config.lora import LoraSection
from docklands.errors import ConfigError
from docklands.models import CausalLM, ModelConfig, PackedCausal, build, export, load, read_config
from docklands.models.adapters import is_adapter, with_lora
from docklands.models.lora import adapters_of, merged
from docklands.models.lora_export import base_weights, export_adapters, export_merged

LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
CASES = [
    ("qwen3_tied", LoraSection(rank=4, alpha=6.0)),
    ("qwen2_two_kv_heads", LoraSection(rank=3, alpha=6.0, targets=["v_proj", "q_proj", "down_proj"], rslora=True)),
    ("llama_bias", LoraSection(rank=4, alpha=2.0, targets=["o_proj", "up_proj"])),
    ("qwen3_moe", LoraSection(rank=4, alpha=6.0)),
    ("deepseek", LoraSection(rank=4, alpha=6.0, targets=[*LATENT, "o_proj"])),
]
LENGTH = 13


def adapted(path: Path, section: LoraSection) -> CausalLM:
    """The directory's model with adapters that have been trained: B is not zero."""
    model = load(path, config=with_lora(read_config(path), section), seed=4)
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".b"):
                parameter.normal_(0.0, 0.2, generator=draw)
    return model


def written(name: str, path: Path) -> Path:
    """A random model as a Hugging Face directory."""
    model = build(ModelConfig.from_hf(MODELS[name]), seed=3)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=draw))
    export(model, path)
    return path


def loss_of(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """Anything that every token has a part in."""
    return torch.nn.functional.cross_entropy(logits_TV[:-1].float(), ids_T[1:])


def logits_of(model: CausalLM, ids_T: Tensor) -> Tensor:
    return model.logits(model(ids_T, torch.arange(LENGTH), PackedCausal([LENGTH])))


@pytest.mark.parametrize(("name", "section"), CASES, ids=[name for name, _ in CASES])
def test_equals_peft(name: str, section: LoraSection, tmp_path: Path) -> None:
    base = written(name, tmp_path / "base")
    ours = adapted(base, section)
    named = dict(ours.named_parameters())
    export_adapters(ours.config, ((n, p.detach()) for n, p in adapters_of(named.items())), tmp_path / "adapter", "base")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    theirs: Any = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    theirs.train(False)
    ids_T = torch.randint(0, 61, (LENGTH,), generator=torch.Generator().manual_seed(1))
    logits_TV = theirs(input_ids=ids_T[None]).logits[0]
    mine_TV = logits_of(ours, ids_T)
    assert float((mine_TV - logits_TV).detach().abs().max()) < 2e-5 * float(logits_TV.detach().abs().max())
    loss_of(logits_TV, ids_T).backward()
    for parameter_name, parameter in named.items():
        parameter.requires_grad_(is_adapter(parameter_name))
    loss_of(logits_of(ours, ids_T), ids_T).backward()
    compared = 0
    for spec in ours.table:
        if spec.adapts:
            hf = "base_model.model." + spec.hf[0].name.replace(".weight", ".default.weight")
            gradient, mine = theirs.get_parameter(hf).grad, named[spec.name].grad
            assert mine is not None
            assert float((mine - gradient).abs().max()) < 1e-5 * float(gradient.abs().max()) + 1e-8, hf
            compared += 1
    trained = [n for n, p in theirs.named_parameters() if p.requires_grad]
    assert compared == len(trained) > 0, "peft found the same modules"
    assert all(p.grad is None for n, p in named.items() if not is_adapter(n))
    check_merged(ours, theirs, tmp_path)


def check_merged(ours: CausalLM, theirs: Any, path: Path) -> None:
    """The merged directory loads in transformers, and holds what peft merges to."""
    adapters = [(n, p.detach()) for n, p in adapters_of(ours.named_parameters())]
    base = path / "base"
    export_merged(ours.config, base_weights(base, read_config(base)), adapters, path / "merged", base)
    again = transformers.AutoModelForCausalLM.from_pretrained(path / "merged", dtype=torch.float32)
    expected = dict(theirs.merge_and_unload().named_parameters())
    for name, parameter in again.named_parameters():
        assert float((parameter - expected[name]).detach().abs().max()) < 1e-5, name


def test_peft_directory_of_what_peft_would_take_for_experts_is_refused(tmp_path: Path) -> None:
    config = with_lora(ModelConfig.from_hf(MODELS["deepseek"]), LoraSection(rank=2))
    with pytest.raises(ConfigError, match="takes gate_proj, up_proj, down_proj for all experts in one"):
        export_adapters(config, [], tmp_path / "adapter", "base")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek"])
def test_adapters_of_experts_equal_a_dense_computation(name: str) -> None:
    """Gradients through W + s B A of one dense model are those of A and B by the chain rule."""
    config = with_lora(ModelConfig.from_hf(MODELS[name]), LoraSection(rank=3, alpha=5.0, experts=True))
    assert config.lora is not None
    model, dense = build(config, seed=3), build(replace(config, lora=None), seed=3)
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".b"):
                parameter.normal_(0.0, 0.2, generator=draw)
        target = dict(dense.named_parameters())
        for weight_name, weight in merged(list(model.named_parameters()), model.table, config.lora.scale):
            target[weight_name].copy_(weight)
    ids_T = torch.randint(0, 61, (LENGTH,), generator=torch.Generator().manual_seed(1))
    loss, expected = loss_of(logits_of(model, ids_T), ids_T), loss_of(logits_of(dense, ids_T), ids_T)
    assert float((loss - expected).detach().abs()) < 1e-5
    loss.backward()
    expected.backward()
    named, checked = dict(model.named_parameters()), 0
    for spec in model.table:
        if not spec.adapts or not spec.name.endswith(".a"):
            continue
        whole = model.table.by_name(spec.adapts)
        own = [part.name.rsplit(".", 2)[-2] for part in whole.hf[: len(whole.hf) // (whole.experts or 1)]]
        rows = named[spec.name[:-1] + "b"].shape[-2]
        at = sum(part.rows for part in whole.hf[: own.index(spec.name.split(".")[-2])])
        grad = target[spec.adapts].grad
        assert grad is not None
        grad = grad[..., at : at + rows, :] * config.lora.scale
        a, b = named[spec.name], named[spec.name[:-1] + "b"]
        for mine, reference in ((a.grad, b.mT @ grad), (b.grad, grad @ a.mT)):
            assert mine is not None
            assert float((mine - reference).detach().abs().max()) < 1e-5 * float(reference.detach().abs().max()) + 1e-8
        checked += spec.experts > 0
    assert checked
