"""Which generation engine a run has. vLLM is imported only when it is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from docklands.config.schema import Config, RolloutSection
from docklands.core.protocols import RolloutEngine
from docklands.errors import ConfigError
from docklands.models import ModelConfig
from docklands.parallel.mesh import Mesh
from docklands.rollout.native import NativeEngine

VOCABULARY = 64
"""vLLM pads a vocabulary to a multiple of this before it cuts it."""


def check_engine(config: Config, shape: ModelConfig) -> None:
    """ConfigError, before anything is built, when rollout.engine is vllm and cannot serve this run."""
    if config.rollout.engine != "vllm":
        return
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine is vllm, but the package vllm is not installed",
            "an environment of its own, from requirements/vllm.txt: docs/howto/vllm.md",
        )
    layout = config.rollout.layout
    cannot = {
        f"a vocabulary of {shape.vocab_size} over {layout.tp} ranks (rollout.layout.tp; only multiples of "
        f"{VOCABULARY} x {layout.tp} are cut alike)": layout.tp > 1 and shape.vocab_size % (VOCABULARY * layout.tp) > 0,
        "worker processes under Ray (fleet.backend)": config.fleet.backend == "ray",
        "experts on different ranks (rollout.layout.ep)": layout.ep > 1,
        "whole experts on tensor ranks (rollout.layout.etp: tp splits them)": (
            shape.moe is not None and layout.etp != layout.tp
        ),
        "shared experts": shape.moe is not None and shape.moe.shared_size > 0,
        "several engines in one process (fleet.rollout_workers; rollout.layout.dp makes processes)": (
            config.fleet.rollout_workers > 1
        ),
        "latent attention": shape.mla is not None,
        "recorded router choices (rollout.record_routes)": bool(config.rollout.record_routes),
        "adapters in worker processes or beside experts (lora.publish: adapter; merged works)": (
            config.lora.publish == "adapter" and (config.has_workers or shape.moe is not None)
        ),
    }
    for what, asked in cannot.items():
        if asked:
            raise ConfigError(f"rollout.engine: vllm does not serve {what}", "rollout.engine: native does")


def build_shard(
    section: RolloutSection, shape: ModelConfig, mesh: Mesh, dtype: torch.dtype, device: str, longest: int
) -> Any:
    """This rank's part of the generators over a mesh, without weights: MeshEngine or VllmReplica.

    longest  tokens of a prompt with its response
    """
    if section.engine == "native":
        from docklands.rollout.mesh import MeshEngine

        return MeshEngine(shape, section, mesh, dtype=dtype, device=device)
    try:
        from docklands.rollout.vllm_replica import VllmReplica
    except ImportError as error:
        raise ConfigError(f"vllm cannot be imported: {error}", "docs/howto/vllm.md") from error
    return VllmReplica(shape, section, mesh, dtype=dtype, device=device, longest=longest)


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
