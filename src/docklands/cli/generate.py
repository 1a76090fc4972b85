"""docklands generate"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from docklands.data.tokenizer import Tokenizer


def generate(
    model_dir: Annotated[str, typer.Argument(help="Hugging Face directory, or cache:NAME.", metavar="MODEL_DIR")],
    prompt: Annotated[str, typer.Option(help="The prompt.")],
    n: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 128,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal samples.")] = None,
) -> None:
    """Generate completions of a prompt with the native engine.

    The prompt goes through the model's chat template where it has one.
    """
    from docklands.config.paths import resolve_model_path

    path = resolve_model_path(model_dir)
    key = secrets.randbits(63) if seed is None else seed
    for index, text in enumerate(complete(path, prompt, (n, temperature, max_tokens, key))):
        if n > 1:
            print(f"--- {index + 1}")
        print(text, flush=True)


def complete(path: Path, prompt: str, options: tuple[int, float, int, int]) -> list[str]:
    """Completions of `prompt`; options: samples, temperature, longest response in tokens, seed."""
    n, temperature, max_tokens, seed = options
    import torch

    from docklands import device, models
    from docklands.config.schema import RolloutSection
    from docklands.core.protocols import Request, Sampling
    from docklands.data.tokenizer import load_tokenizer
    from docklands.errors import ConfigError
    from docklands.rollout import NativeEngine, sample_seed

    tokenizer = load_tokenizer(path)
    tokens = tuple(prompt_tokens(tokenizer, prompt))
    limit = models.read_config(path).max_positions
    if not tokens:
        raise ConfigError("the prompt is empty", '--prompt "The capital of France is"')
    if len(tokens) + max_tokens > limit:
        raise ConfigError(
            f"{len(tokens)} prompt + {max_tokens} response tokens exceed the model's {limit} positions",
            f"--max-tokens {max(1, limit - len(tokens))}",
        )
    where = str(device.choose())
    model = models.load(path, dtype=torch.bfloat16 if device.choose().is_accelerator else torch.float32, device=where)
    section = RolloutSection(max_response_tokens=max_tokens, samples_per_prompt=n)
    engine = NativeEngine(model.config, section, dtype=next(model.parameters()).dtype, device=where)
    engine.load_weights(model.named_parameters(), version=0)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, stop_ids=tuple(sorted(tokenizer.eos_ids)))
    requests = [Request(tokens, sampling, sample_seed(seed, 0, 0, k), k) for k in range(n)]
    return [tokenizer.decode([int(i) for i in found.token_ids]) for found in engine.generate(requests)]


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Through the chat template where there is one."""
    if tokenizer.has_chat:
        return tokenizer.render_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)
