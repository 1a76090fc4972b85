"""A Hugging Face directory from weights that come one at a time: no process holds the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from docklands.errors import CheckpointError
from docklands.models.config import ModelConfig
from docklands.models.hf_io import export_plan, hf_parts
from docklands.models.hf_write import MAX_SHARD_BYTES, write_directory
from docklands.models.params import ParamTable, table_for


def export_stream(
    config: ModelConfig,
    named: Iterable[tuple[str, Tensor]],
    path: Path,
    source: Path,
    bucket_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the directory that hf_io.export writes of a model with these fp32 parameters, in any order.

    source        directory whose tokenizer files, other config.json keys and multi-token-prediction layers are kept
    bucket_bytes  held at once beside one parameter: what waits to become a file, and half of a parameter on its way in
                  (if that is more than half of the bucket, so much more)

    CheckpointError when it cannot be written, or when a parameter is missing or of another model.
    """
    table = table_for(config)
    values, more = export_plan(config, torch.float32, source, False)
    largest = max(4 * math.prod(spec.shape) for spec in table.stored())
    tensors = itertools.chain(hf_parts(table, checked(table, named)), more)
    write_directory(path, values, tensors, source, max(bucket_bytes // 2, bucket_bytes - largest // 2))


def checked(table: ParamTable, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same, once it is known that they are the table's."""
    shapes = {spec.name: spec.shape for spec in table.stored()}
    for name, tensor in named:
        shape = shapes.pop(name, None)
        if shape != tuple(tensor.shape):
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}", "the checkpoint is of another model")
        yield name, tensor
        del tensor
    if shapes:
        raise CheckpointError(f"{len(shapes)} weights are missing (first: {next(iter(shapes))})", "of another model")
