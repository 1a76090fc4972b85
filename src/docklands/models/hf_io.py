"""Hugging Face directories: config.json and safetensors in, the same out, tensor by tensor.

What goes where is said by the model's parameter table; every fault names the file and the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from docklands.errors import DataError
from docklands.models.build import ModelT, allocate
from docklands.models.config import HfConfig, ModelConfig, families
from docklands.models.fp8 import SCALE, Block, block_of, dequantize
from docklands.models.hf_write import MAX_SHARD_BYTES, write_directory
from docklands.models.lora import init_adapters, merged
from docklands.models.model import CausalLM, ValueModel
from docklands.models.params import ParamTable

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
VALUE_HEAD = ("score.weight", "score.bias")
LM_HEAD = "lm_head.weight"


def read_json(path: Path) -> Any:
    """A parsed JSON file. DataError when it is missing or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", "expected a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise DataError(f"{path} is not a JSON object")
    return values


def _config_json(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise DataError(f"model directory {path} does not exist", "a local Hugging Face directory with config.json")
    values = _object(path / "config.json")
    block_of(values, str(path / "config.json"))
    return values


def read_config(path: str | Path) -> ModelConfig:
    """The model's config from <path>/config.json. DataError or ConfigError (unknown architecture)."""
    path = Path(path)
    config = ModelConfig.from_hf(_config_json(path), str(path / "config.json"))
    generation = path / "generation_config.json"
    if not config.eos_ids and generation.is_file():  # some models name their end only there
        ids = HfConfig(_object(generation), str(generation)).eos_ids()
        config = ModelConfig(**{**vars(config), "eos_ids": ids})
    return config


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file of a directory, single or sharded. DataError for a missing or damaged file."""
    index = path / INDEX
    if index.is_file():
        weight_map = _object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise DataError(f"{index} has no weight_map")
        files = {str(name): path / str(file) for name, file in weight_map.items()}
        for file in sorted(set(files.values())):
            if file.parent != path:
                raise DataError(f"{index} names the file {str(file)!r}, which is not in its directory")
            have = _names_in(file)
            lacking = sorted(name for name, where in files.items() if where == file and name not in have)
            if lacking:
                raise DataError(f"{file} lacks tensor {lacking[0]}, which {INDEX} says it holds")
        return files
    single = path / SINGLE
    if not single.is_file() and list(path.glob("*.bin")):
        raise DataError(f"{path} holds .bin weights only", "save the model with safe_serialization=True")
    return dict.fromkeys(sorted(_names_in(single)), single)


def _names_in(file: Path) -> set[str]:
    if not file.is_file():
        raise DataError(f"weight file {file} does not exist", f"expected {SINGLE}, or {INDEX} and every file it names")
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise DataError(
            f"{file} ({size} bytes) is not a complete safetensors file: {error}", "copy it again"
        ) from error


def read_tensors(
    files: Mapping[str, Path], names: Iterable[str] | None = None, block: Block | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of `names` (None: all), one at a time, each file opened once. Where the files hold a scale beside
    an fp8 tensor, it comes dequantised by `block`, in fp32.
    """
    by_file: dict[Path, list[str]] = {}
    for name in files if names is None else names:
        by_file.setdefault(files[name], []).append(name)
    for file in sorted(by_file):
        with safe_open(file, framework="pt") as handle:
            for name in sorted(by_file[file]):
                tensor = handle.get_tensor(name)
                if block is not None and name + SCALE in files:
                    tensor = dequantize(tensor, _scale(files, name + SCALE, file, handle), block, name)
                yield name, tensor


def _scale(files: Mapping[str, Path], name: str, file: Path, handle: Any) -> Tensor:
    """A scale, from the open `file` of its weight or from another: not every checkpoint keeps them together."""
    if files[name] == file:
        return handle.get_tensor(name)
    with safe_open(files[name], framework="pt") as other:
        return other.get_tensor(name)


def _check_names(files: Mapping[str, Path], expected: set[str], optional: set[str], path: Path) -> None:
    missing = sorted(expected - set(files) - optional)
    if missing:
        hint = "set tie_word_embeddings to true if the head is the embedding" if missing == [LM_HEAD] else ""
        raise DataError(f"{path} lacks {len(missing)} tensors of the model, first {missing[0]}", hint)
    extra = sorted(name for name in set(files) - expected - optional if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise DataError(
            f"{path} has {len(extra)} tensors that the model does not have, first {extra[0]} in {files[extra[0]].name}",
            "config.json describes another architecture than the weights",
        )


@torch.no_grad()
def fill(model: nn.Module, table: ParamTable, files: Mapping[str, Path], optional: set[str], path: Path) -> None:
    """Copy every tensor of `files` into the model in its dtype. Those in `optional` may be absent or unused."""
    index = table.hf_index()
    _check_names(files, set(index), optional, path)
    parameters = dict(model.named_parameters())
    block = block_of(_config_json(path), str(path))
    for name, tensor in read_tensors(files, [name for name in files if name in index], block):
        spec, shape, start = index[name]
        if tuple(tensor.shape) != shape:
            raise DataError(f"{files[name]}: tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        check_values(tensor, files[name], name)
        spec.by_rows(parameters[spec.name].data)[start : start + shape[0]].copy_(tensor)


def check_values(tensor: Tensor, file: Path, name: str) -> None:
    """DataError for a tensor (or a part of one) that cannot be trained: quantised, or not finite."""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise DataError(f"{file}: tensor {name} is {tensor.dtype}", "quantised weights cannot be trained")
    if bad := not_finite(tensor):
        raise DataError(
            f"{file}: tensor {name} has {bad} of {tensor.numel()} elements that are not finite",
            "copy it again; if its source is the same, the training that wrote it had diverged",
        )


def not_finite(tensor: Tensor) -> int:
    """Elements that are NaN or infinite. One read of the tensor, and no copy, where there is none."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return 0 if math.isfinite(float(norm)) else int((~torch.isfinite(tensor)).sum())


def unmodelled(files: Mapping[str, Path], config: ModelConfig) -> tuple[list[str], list[str]]:
    """(tensors of the multi-token-prediction layers, scales of fp8 tensors) among the names."""
    last = config.num_layers + config.mtp_layers
    layers = tuple(f"model.layers.{layer}." for layer in range(config.num_layers, last))
    scales = [name for name in files if name.endswith(SCALE) and name.removesuffix(SCALE) in files]
    return [name for name in files if name.startswith(layers) and not name.endswith(SCALE)], scales


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    config: ModelConfig | None = None,
    seed: int = 0,
) -> CausalLM:
    """The language model of a Hugging Face directory, weights converted to `dtype`. Raises DataError, ConfigError.

    config  None: the directory's; else that with adapters, whose first values `seed` decides on
    """
    optional = {LM_HEAD} if read_config(path).tie_embeddings else set()
    model = _load(CausalLM, Path(path), (dtype, device), optional, config)
    init_adapters(model, model.table, seed)
    return model


def load_value(path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ValueModel:
    """A value model on the trunk of any of our directories; a head that the directory lacks starts at zero."""
    return _load(ValueModel, Path(path), (dtype, device), {LM_HEAD, *VALUE_HEAD})


def _load(
    kind: type[ModelT],
    path: Path,
    where: tuple[torch.dtype, str],
    optional: set[str],
    config: ModelConfig | None = None,
) -> ModelT:
    config = config or read_config(path)
    files = tensor_files(path)
    optional = optional.union(*unmodelled(files, config))
    model = allocate(kind, config, *where)
    if isinstance(model, ValueModel):
        nn.init.zeros_(model.value_head.weight)
        nn.init.zeros_(model.value_head.bias)  # type: ignore[arg-type]
    fill(model, model.table, files, optional, path)  # type: ignore[attr-defined]
    return model


def hf_tensors(model: CausalLM | ValueModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of every stored parameter, adapters merged; `dtype` None: as the model holds it."""
    named: Iterable[tuple[str, Tensor]] = ((name, p.detach()) for name, p in model.named_parameters())
    if model.config.lora is not None:
        named = merged(named, model.table, model.config.lora.scale)
    return hf_parts(model.table, named, dtype)


def hf_parts(
    table: ParamTable, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """As hf_tensors, of whole parameters that come one at a time."""
    for name, whole in named:
        spec = table.by_name(name)
        rows = spec.by_rows(whole)
        to = rows.dtype if dtype is None or spec.keep_fp32 else dtype
        for hf_name, shape, start in spec.hf_shapes():
            yield hf_name, rows[start : start + shape[0]].to(to)
        del whole, rows  # it may be the only one in memory


def carried(source: Path, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the source's multi-token-prediction layers, as they are; fp8 ones dequantised, in `dtype`."""
    block = block_of(_config_json(source), str(source))
    files = tensor_files(source)
    for name, tensor in read_tensors(files, unmodelled(files, config)[0], block):
        yield name, tensor.to(dtype) if block is not None and name + SCALE in files else tensor


def export(
    model: CausalLM | ValueModel,
    path: str | Path,
    source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that transformers loads, whole or not at all: the old one stays until the new one is complete.

    source: directory whose tokenizer files and generation_config.json are copied, and whose other config.json keys are
    kept; so are its multi-token-prediction layers, untouched. dtype None: as the model holds it. A value model becomes
    a token classifier with one label.
    CheckpointError when it cannot be written (disk full).
    """
    stored = dtype or next(model.parameters()).dtype
    value = isinstance(model, ValueModel)
    values, more = export_plan(model.config, stored, source, value)
    tensors = chain(hf_tensors(model, dtype), more)
    write_directory(Path(path), values, tensors, None if source is None else Path(source), max_shard_bytes)


def export_plan(
    config: ModelConfig, stored: torch.dtype, source: str | Path | None, value: bool
) -> tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]:
    """(config.json, tensors that the model does not hold) of an exported directory; see `export`."""
    values: dict[str, Any] = {} if source is None else _config_json(Path(source))
    values.pop("torch_dtype", None)
    values.pop("quantization_config", None)
    values |= config.to_hf()
    if value:
        values["architectures"] = [families.get(config.architecture).value_class]
        values |= {"num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}}
    else:
        for key in ("num_labels", "id2label", "label2id"):
            values.pop(key, None)
    values["dtype"] = str(stored).removeprefix("torch.")
    if config.mtp_layers:
        files = {} if source is None or value else tensor_files(Path(source))
        if source is not None and unmodelled(files, config)[0]:
            return values, carried(Path(source), config, stored)
        values["num_nextn_predict_layers"] = 0
    return values, ()


__all__ = ["export", "fill", "hf_tensors", "load", "load_value", "read_config", "read_tensors", "tensor_files"]
