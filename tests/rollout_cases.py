"""Small models, engines and requests for the generation tests."""

from __future__ import annotations

import numpy as np
import torch

from docklands import models
from docklands.config.schema import RolloutSection
from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, PROMPT, PROMPT_ID, PROMPT_TOKENS, SAMPLE_INDEX
from docklands.core.protocols import Request, Sampling
from docklands.data.tokenizer import CharTokenizer
from docklands.models import CausalLM, ModelConfig, PackedCausal
from docklands.rollout import NativeEngine, sample_seed

CHARACTERS = "0123456789+-*=<>/ abcdefghijklmnopqrstuvwxyz"

FAMILIES = {
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 24},
    "llama": {"architecture": "LlamaForCausalLM", "tie_embeddings": True, "num_kv_heads": 3},
}


def config(family: str = "qwen2", **changes: object) -> ModelConfig:
    """A tiny config with a query-head size that differs from D / N where the family allows."""
    values = {
        "vocab_size": len(CHARACTERS) + 2,
        "hidden_size": 48,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 80,
        "init_std": 0.08,
        "max_positions": 512,
    }
    return ModelConfig(**{**values, **FAMILIES[family], **changes})  # type: ignore[arg-type]


def model(shape: ModelConfig | None = None, seed: int = 1) -> CausalLM:
    """Random weights; biases too."""
    built = models.build(shape or config(), seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for name, parameter in built.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1, generator=generator)
    return built


def engine(source: CausalLM, version: int = 0, **section: object) -> NativeEngine:
    """An engine that holds the model's weights."""
    built = NativeEngine(source.config, RolloutSection(**{"max_batch": 16, **section}))  # type: ignore[arg-type]
    built.load_weights(source.named_parameters(), version)
    return built


def prompt(length: int, seed: int = 0, vocabulary: int = len(CHARACTERS)) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(2, vocabulary, (length,), generator=generator).tolist())


def groups(prompts: int, samples: int, sampling: Sampling, ragged: bool = True) -> list[Request]:
    """`samples` requests for each of `prompts` prompts of different lengths."""
    return [
        Request(prompt(3 + 7 * p if ragged else 9, p), sampling, sample_seed(5, 0, p, k), p * samples + k)
        for p in range(prompts)
        for k in range(samples)
    ]


@torch.no_grad()
def full_logits(source: CausalLM, ids: list[int] | tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] of one sequence by the plain forward pass."""
    tokens = torch.tensor(ids)
    return source.logits(source(tokens, torch.arange(len(ids)), PackedCausal([len(ids)]))).float()


def full_logprobs(source: CausalLM, request: Request, response: list[int]) -> torch.Tensor:
    """Log-probabilities of a response under the plain forward pass at the request's temperature."""
    ids, start = (*request.prompt, *response), len(request.prompt)
    temperature = request.sampling.temperature or 1.0
    table = torch.log_softmax(full_logits(source, ids) / temperature, -1)
    return table[start - 1 : -1].gather(1, torch.tensor(response)[:, None]).squeeze(1)


def tokenizer() -> CharTokenizer:
    """Ids 0 (pad) and 1 (eos), then CHARACTERS."""
    return CharTokenizer(CHARACTERS)


def admitted(texts: list[str], samples: int = 4, rows: list[dict[str, object]] | None = None) -> Batch:
    """Rows as admission writes them."""
    count = len(texts) * samples
    group = np.arange(count) // samples
    return Batch(
        100 + np.arange(count),
        {
            PROMPT_ID: group + 40,
            GROUP_ID: group,
            SAMPLE_INDEX: (np.arange(count) % samples).astype(np.int32),
            PROMPT_TOKENS: [tokenizer().encode(texts[g]) for g in group],
            PROMPT: [(rows or [{"prompt": t} for t in texts])[g] for g in group],
        },
    )
