"""Prompt and response lengths for the simulation: from a distribution, or from what a run produced.

Legend: G groups, n samples of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from docklands.config.schema import Config
from docklands.errors import ConfigError
from docklands.obs.files import iter_jsonl

FORM = "lognormal:mean=M[,max=X][,sigma=1][,prompt=P], fixed:tokens=N[,prompt=P], or a run directory"


@dataclass(frozen=True)
class Lengths:
    """What to draw from. responses: seen lengths, drawn with replacement; empty: lognormal, cut at `most`.

    mean, sigma  of the responses before they are cut, and of their logarithm
    distinct     share of the tokens that the trainer computes: equal samples of a group, and what all of them begin
                 with, are computed once
    """

    prompt: float
    mean: float
    most: int
    sigma: float = 1.0
    responses: tuple[int, ...] = ()
    where: str = ""
    distinct: float = 1.0

    def draw(self, groups: int, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """-> prompt tokens [G], response tokens [G, n], each at least 1."""
        shape = (groups, samples)
        if self.responses:
            found = random.choice(np.array(self.responses, float), shape)
        elif self.sigma == 0:
            found = np.full(shape, self.mean)
        else:
            found = random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, shape)
        return np.full(groups, self.prompt), np.clip(np.round(found), 1, self.most)

    def average(self) -> float:
        """Mean response as it is drawn, after the cut."""
        return float(self.draw(2048, 4, np.random.default_rng(0))[1].mean())

    def __str__(self) -> str:
        most = f"{self.average():.0f} on average, {self.most} at most"
        return f"{self.where}: prompts of {self.prompt:.0f} tokens, responses of {most}"


def read_lengths(text: str, config: Config) -> Lengths:
    """`--lengths`. Empty: lognormal, a third of the longest on average. ConfigError for what is no such text."""
    most, prompt = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    if not text:
        return Lengths(prompt, most / 3, most, where="assumed, lognormal")
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("lognormal", "fixed"):
        return of_run(Path(text), config)
    given = numbers(rest, ("tokens", "prompt") if kind == "fixed" else ("mean", "max", "sigma", "prompt"))
    wanted = "tokens" if kind == "fixed" else "mean"
    if wanted not in given:
        raise ConfigError(f"--lengths {text!r} lacks {wanted}", FORM)
    most = int(given.get("max", most))
    sigma = 0.0 if kind == "fixed" else given.get("sigma", 1.0)
    if given[wanted] > most:
        raise ConfigError(
            f"--lengths {text!r}: a mean of {given[wanted]:g} is above the longest response of {most}", FORM
        )
    return Lengths(given.get("prompt", prompt), given[wanted], most, sigma, where=kind)


def numbers(text: str, known: tuple[str, ...]) -> Mapping[str, float]:
    """ "mean=2000,max=8192" -> numbers above 0 (sigma also 0)."""
    found: dict[str, float] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        name, _, value = item.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--lengths: {item!r} is not NAME=NUMBER", FORM) from None
        least = 0 if name == "sigma" else 1
        if name not in known or not math.isfinite(found[name]) or found[name] < least:
            raise ConfigError(f"--lengths: {item!r}", FORM)
    return found


def of_run(path: Path, config: Config) -> Lengths:
    """Responses as written to samples/step_*.jsonl, prompts by their mean. ConfigError when a run has none."""
    if not path.is_dir():
        raise ConfigError(f"--lengths {str(path)!r}: no run directory, and no distribution", FORM)
    seen = [
        int(row["response_tokens"])
        for file in sorted((path / "samples").glob("step_*.jsonl"))
        for row in iter_jsonl(file)
        if isinstance(row.get("response_tokens"), int)
    ]
    steps = [row["metrics"] for row in iter_jsonl(path / "metrics.jsonl") if isinstance(row.get("metrics"), dict)]
    prompts = [float(step["prompt_length/mean"]) for step in steps if "prompt_length/mean" in step]
    most = config.rollout.max_response_tokens
    if not seen or not prompts:
        raise ConfigError(f"{path}: no samples/step_*.jsonl with response_tokens, or no metrics.jsonl", FORM)
    return Lengths(
        float(np.mean(prompts)),
        float(np.mean(seen)),
        most,
        responses=tuple(seen),
        where=str(path.name),
        distinct=distinct(steps, config),
    )


def distinct(steps: list[dict[str, float]], config: Config) -> float:
    """Tokens through the model over the step's responses with each prompt once; 1 where a run does not tell."""
    wanted, found = {"actor/packed_tokens", "training/samples", "response_length/mean", "prompt_length/mean"}, []
    for step in (step for step in steps if wanted <= step.keys()):
        each = step["response_length/mean"] + step["prompt_length/mean"] / config.rollout.samples_per_prompt
        packed = step["actor/packed_tokens"] / config.algorithm.epochs_per_step
        found.append(packed / (step["training/samples"] * each))
    return min(1.0, float(np.mean(found))) if found else 1.0
