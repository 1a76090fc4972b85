"""Models from a config: with random weights, or without storage (device "meta") for a loader to fill."""

from __future__ import annotations

from typing import TypeVar

import torch

from docklands.errors import DataError
from docklands.models.config import ModelConfig
from docklands.models.model import CausalLM, Trunk, ValueModel, init_weights

ModelT = TypeVar("ModelT", bound=Trunk)


def build(
    config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int | None = None
) -> CausalLM:
    """A language model with random weights; `seed` None: 0. Device "meta" gives shapes without storage."""
    return _build(CausalLM, config, dtype, device, seed)


def build_value(
    config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int | None = None
) -> ValueModel:
    """A value model with a random trunk and a zero head, so that its first values are 0."""
    return _build(ValueModel, config, dtype, device, seed)


def _build(kind: type[ModelT], config: ModelConfig, dtype: torch.dtype, device: str, seed: int | None) -> ModelT:
    model = allocate(kind, config, dtype, device)
    if device != "meta":
        init_weights(model, 0 if seed is None else seed)
    return model


def allocate(kind: type[ModelT], config: ModelConfig, dtype: torch.dtype, device: str) -> ModelT:
    """A model whose parameters have storage but no values. DataError when the memory is too small."""
    try:
        with torch.device("meta"):
            model = kind(config)
        model = model.to(dtype)
        return model if device == "meta" else model.to_empty(device=device)
    except (RuntimeError, MemoryError) as error:  # torch has no kind of its own for a full memory or a size past 2**63
        gib = config.num_params * dtype.itemsize / 2**30
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"a model of {gib:.4g} GiB ({config.num_params:,} parameters) cannot be allocated on {device}: {first}",
            "are the sizes in config.json right?",
        ) from error
