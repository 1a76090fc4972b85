"""Adapters out of a run: merged into a Hugging Face directory, or apart, as the package peft reads them.

Legend: none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from docklands.errors import CheckpointError, ConfigError
from docklands.models import hf_io
from docklands.models.config import ModelConfig
from docklands.models.fp8 import block_of
from docklands.models.hf_export import export_stream
from docklands.models.hf_write import whole
from docklands.models.lora import merged
from docklands.models.params import ParamTable, table_for

PREFIX = "base_model.model."
"""Of every tensor's name in a directory of peft."""
ADAPTER_CONFIG, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"

Named = Iterable[tuple[str, Tensor]]


def base_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(our name, fp32 tensor) of a model directory, one at a time, in the table's order. DataError."""
    files, table = hf_io.tensor_files(path), table_for(replace(config, lora=None))
    block = block_of(hf_io.read_json(path / "config.json"), str(path))
    for spec in table.stored():
        weight = torch.empty(spec.shape)
        rows, places = spec.by_rows(weight), {name: (start, shape[0]) for name, shape, start in spec.hf_shapes()}
        for name, tensor in hf_io.read_tensors(files, places, block):
            start, count = places[name]
            rows[start : start + count].copy_(tensor)
        yield spec.name, weight


def export_merged(config: ModelConfig, base: Named, adapters: Named, path: Path, source: Path) -> None:
    """Write W + s B A as hf_io.export would, one module at a time. base: in the table's order.

    CheckpointError when it cannot be written, or the adapters are not the config's.
    """
    assert config.lora is not None
    table = table_for(config)
    named = merged(_joined(table, base, checked(table, adapters)), table, config.lora.scale)
    export_stream(replace(config, lora=None), named, path, source)


def _joined(table: ParamTable, base: Named, adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    rest = iter(base)
    for spec in table.stored():
        yield (spec.name, adapters[spec.name]) if spec.adapts else next(rest)


def checked(table: ParamTable, adapters: Named) -> dict[str, Tensor]:
    """By name. CheckpointError when one is missing, too many, or of another shape."""
    found = dict(adapters)
    shapes = {spec.name: spec.shape for spec in table.stored() if spec.adapts}
    if odd := sorted(found.keys() ^ shapes.keys()):
        raise CheckpointError(f"{len(odd)} adapter tensors do not match (first: {odd[0]})", "the lora section differs")
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise CheckpointError(f"{name} has shape {list(found[name].shape)}, needed {list(shape)}", "another rank?")
    return found


def export_adapters(config: ModelConfig, adapters: Named, path: Path, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft's PeftModel.from_pretrained reads them.

    base  what users call the model: written for them to find it

    ConfigError for adapters of feed-forward projections in a model with experts, CheckpointError as `export_merged`.
    """
    lora, table = config.lora, table_for(config)
    assert lora is not None
    apart = [name for name in lora.targets if name in ("gate_proj", "up_proj", "down_proj")]
    if config.moe is not None and apart:  # peft 0.21 on transformers 5 takes these names for stacked experts
        raise ConfigError(
            f"in a model with experts, peft takes {', '.join(apart)} for all experts in one, which these adapters are "
            "not",
            "leave --adapter out: a merged directory",
        )
    found = checked(table, adapters)
    tensors = {}
    for spec in table.stored():
        if spec.adapts:
            (part,) = spec.hf
            tensors[PREFIX + part.name] = found[spec.name].float().contiguous()
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with whole(path) as scratch:
        save_file(tensors, scratch / ADAPTER_MODEL, metadata={"format": "pt"})
        (scratch / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
