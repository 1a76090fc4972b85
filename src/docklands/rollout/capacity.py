"""What a KV cache must hold, and which requests can be served at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import psutil
import torch
import torch.distributed as dist

from docklands.config.schema import RolloutSection
from docklands.core.protocols import Request
from docklands.errors import ConfigError, RolloutError
from docklands.models import ModelConfig

MEMORY_FRACTION = 0.5


def check_vocabulary(known: int, config: ModelConfig) -> None:
    """ConfigError when a tokenizer that knows `known` ids can give some that the model has no embedding for."""
    if known > config.vocab_size:
        raise ConfigError(
            f"the tokenizer knows {known} ids, the model's vocabulary is {config.vocab_size}",
            "model.path and model.tokenizer do not belong together",
        )


def check_lengths(section: RolloutSection, max_prompt_tokens: int, config: ModelConfig) -> None:
    """ConfigError when a prompt and a response of the longest allowed lengths fit neither model nor KV cache."""
    asked = max_prompt_tokens + section.max_response_tokens
    said = f"data.max_prompt_tokens {max_prompt_tokens} + rollout.max_response_tokens {section.max_response_tokens}"
    if asked > config.max_positions:
        raise ConfigError(
            f"{said} = {asked} tokens exceed the model's {config.max_positions} positions", "lower one of the two"
        )
    size = section.kv_block_tokens
    needed = (-(-max_prompt_tokens // size) - (-section.max_response_tokens // size)) * size
    if 0 < section.kv_cache_tokens < needed:
        raise ConfigError(
            f"{said} need {needed} tokens of KV cache in pages of {size}, rollout.kv_cache_tokens is "
            f"{section.kv_cache_tokens}",
            f"rollout.kv_cache_tokens: {needed} or more, or 0",
        )


def check_requests(requests: Sequence[Request], config: ModelConfig) -> None:
    """RolloutError naming the first request that this model cannot serve."""
    for prompt in dict.fromkeys(request.prompt for request in requests):
        wrong = [t for t in prompt if not 0 <= t < config.vocab_size]
        if not prompt or wrong:
            said = f"token ids {wrong[:4]} outside the vocabulary of {config.vocab_size}" if prompt else "no tokens"
            raise RolloutError(f"request {_first(requests, prompt)}: the prompt has {said}")
    for request in requests:
        s, asked = request.sampling, len(request.prompt) + request.sampling.max_tokens
        if s.max_tokens < 0 or s.temperature < 0 or s.top_k < 0 or not 0 < s.top_p <= 1:
            raise RolloutError(f"request {request.request_id}: {s} is out of range")
        if asked > config.max_positions:
            raise RolloutError(
                f"request {request.request_id}: {len(request.prompt)} prompt + {s.max_tokens} response tokens exceed "
                f"the model's {config.max_positions} positions",
                "lower rollout.max_response_tokens or data.max_prompt_tokens",
            )


def _first(requests: Sequence[Request], prompt: tuple[int, ...]) -> int:
    return next(request.request_id for request in requests if request.prompt == prompt)


def cache_pages(
    requests: Sequence[Request],
    section: RolloutSection,
    config: ModelConfig,
    dtype: torch.dtype,
    agree: Callable[[int], int] = lambda pages: pages,
    device: torch.device | str = "cpu",
) -> int:
    """Pages of the KV cache: as configured, or what max_batch of these requests need, within half of the free memory.

    agree   what there is room for here -> what there is room for everywhere
    device  that the cache will be on
    RolloutError naming a request that does not fit alone.
    """
    size = section.kv_block_tokens
    own = [-(-request.sampling.max_tokens // size) for request in requests]
    prompt = [-(-len(request.prompt) // size) for request in requests]
    if section.kv_cache_tokens:
        pages = section.kv_cache_tokens // size + 1
    else:
        shared = sorted({r.prompt: n for r, n in zip(requests, prompt)}.values(), reverse=True)
        wanted = sum(sorted(own, reverse=True)[: section.max_batch]) + sum(shared[: section.max_batch])
        spare = section.max_batch // 4 + 2  # headroom that admission keeps
        page_bytes = config.kv_bytes_per_token * dtype.itemsize * size
        pages = agree(min(wanted + spare + 1, max(2, int(MEMORY_FRACTION * free_memory(device)) // page_bytes)))
    for request, mine, shared_pages in zip(requests, own, prompt):
        if mine + shared_pages > pages - 1:
            raise RolloutError(
                f"request {request.request_id}: {len(request.prompt)} prompt + {request.sampling.max_tokens} response "
                f"tokens need {mine + shared_pages} pages of {size} tokens, the KV cache has {pages - 1}",
                "raise rollout.kv_cache_tokens or lower rollout.max_response_tokens",
            )
    return max(pages, 2)


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that this process can still have: of the accelerator, what torch holds free included; of the host,
    reclaimable caches included, its part among the ranks there (LOCAL_WORLD_SIZE, else all of the process group).
    """
    kind = torch.device(device).type
    if kind != "cpu":
        module = getattr(torch, kind)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + unused)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return int(psutil.virtual_memory().available) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
