"""Adapters in each generation engine: merged or applied by the engine itself, its log-probs are the trainer's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests import rollout_cases as cases
from tests.engines.test_contract import KINDS, SECTION, SHAPES, distance, tokens

from docklands.config.lora import LoraSection
from docklands.core.protocols import Sampling
from docklands.errors import RolloutError
from docklands.models import CausalLM, build
from docklands.models.adapters import with_lora
from docklands.models.lora import adapters_of
from docklands.rollout import NativeEngine

ADAPTED = LoraSection(rank=3, alpha=6.0, rslora=True)


@cache
def model(shape: str, seed: int) -> CausalLM:
    """The same base, adapters by the seed; 0: as they begin."""
    found = build(with_lora(SHAPES[shape], ADAPTED), seed=1)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name.endswith(".b") and seed:
                parameter.normal_(0.0, 0.3, generator=draw)
    return found


def engine_of(kind: str, shape: str) -> Any:
    config = with_lora(SHAPES[shape], ADAPTED)
    if kind == "native":
        return NativeEngine(config, SECTION)
    from docklands.rollout.vllm_engine import VllmEngine

    return VllmEngine(config, SECTION, longest=256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["untied", "qk_norm"])
def test_logprobs_are_the_trainers_after_each_adapter(kind: str, shape: str) -> None:
    engine = engine_of(kind, shape)
    with pytest.raises(RolloutError, match="adapters without a complete set of weights"):
        engine.load_adapters(adapters_of(model(shape, 1).named_parameters()), 0)
    requests = cases.groups(2, 3, Sampling(8))
    seen = []
    for version, seed in enumerate((0, 1, 2, 1)):
        trainer = model(shape, seed)
        if version:
            engine.load_adapters(adapters_of(trainer.named_parameters()), version)
        else:
            engine.load_weights(trainer.named_parameters(), version)
        found = engine.generate(requests)
        assert {v for one in found for v in one.versions} == {version} == {engine.version}
        assert distance(trainer, requests, found) < (1e-5 if kind == "native" else 1e-4)
        seen.append(tokens(found))
    assert seen[1] == seen[3] and seen[1] != seen[2] and seen[0] != seen[1]
