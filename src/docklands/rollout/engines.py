"""Which generation engine a run has. vLLM is imported only when it is asked for."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from docklands.config.schema import Config, RolloutSection
from docklands.core.protocols import RolloutEngine
from docklands.errors import ConfigError
from docklands.models import ModelConfig
from docklands.rollout.native import NativeEngine


def check_engine(config: Config, shape: ModelConfig) -> None:
    """ConfigError, before anything is built, when rollout.engine is vllm and cannot serve this run."""
    if config.rollout.engine != "vllm":
        return
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine is vllm, but the package vllm is not installed",
            "an environment of its own, from requirements/vllm.txt: docs/howto/vllm.md",
        )
    cannot = {
        "worker processes (layout, rollout.layout, fleet.backend: ray)": config.has_workers,
        "several engines in one process (fleet.rollout_workers)": config.fleet.rollout_workers > 1,
        "models with experts or latent attention": shape.moe is not None or shape.mla is not None,
        "recorded router choices (rollout.record_routes)": bool(config.rollout.record_routes),
    }
    for what, asked in cannot.items():
        if asked:
            raise ConfigError(f"rollout.engine: vllm does not serve {what}", "rollout.engine: native does")


def build_engine(
    config: Config, shape: ModelConfig, section: RolloutSection, dtype: torch.dtype, device: str
) -> RolloutEngine:
    """The engine that rollout.engine names, without weights."""
    if config.rollout.engine == "native":
        return NativeEngine(shape, section, dtype=dtype, device=device)
    try:
        from docklands.rollout.vllm_engine import VllmEngine
    except ImportError as error:
        raise ConfigError(f"vllm cannot be imported: {error}", "docs/howto/vllm.md") from error
    longest = config.data.max_prompt_tokens + section.max_response_tokens
    return VllmEngine(shape, section, dtype=dtype, device=device, longest=longest)
