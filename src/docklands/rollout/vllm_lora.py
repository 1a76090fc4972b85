"""Adapters in a vLLM engine, by its own requests for adapters: it applies A and B itself, beside its base.

An adapter goes there as a directory (in memory where the machine has such a folder), and takes the place of the one
before under the same number, so that running samples go on with the new one as they do with new weights.

Legend: none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from docklands.errors import ConfigError, MissingWeight
from docklands.models import ModelConfig
from docklands.models.adapters import LoraConfig, is_adapter
from docklands.models.lora_export import export_adapters

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""
NUMBER, MEMORY = 1, Path("/dev/shm")


def engine_arguments(lora: LoraConfig | None) -> dict[str, Any]:
    """Of an engine with room for one adapter. ConfigError for a rank that vLLM has no room for."""
    if lora is None:
        return {}
    if lora.rank > RANKS[-1]:
        raise ConfigError(f"lora.rank {lora.rank}: vLLM has room for {RANKS[-1]}", "lora.publish: merged")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank)}


class VllmAdapter:
    """The adapter of one engine. request: with which samples ask for it; None before it has come."""

    def __init__(self, engine: Any, config: ModelConfig) -> None:
        self._engine, self._config = engine, config
        self._came: list[tuple[str, Tensor]] = []
        self.request: Any = None

    def aside(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream without the adapter's tensors, which are kept for `take`."""
        for name, tensor in weights:
            if is_adapter(name):
                self._came.append((name, tensor))
            else:
                yield name, tensor

    def take(self, weights: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Let vLLM have what was put aside, or these. CheckpointError when some are missing or of another shape."""
        from docklands.rollout.vllm_start import adapter_request

        came, self._came = [*self._came, *weights], []
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            path = Path(folder) / "adapter"
            export_adapters(self._config, came, path, "")
            if not self._engine.add_lora(adapter_request(NUMBER, path, instead=True)):
                raise MissingWeight("vLLM did not take the adapter", "lora.publish: merged")
        self.request = adapter_request(NUMBER, path)  # known by its number: the directory is gone
