"""A model turn of an episode: what an engine is asked for, and what becomes of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from docklands.core.fields import FINISH_ABORT, FINISH_LENGTH
from docklands.core.protocols import Generation, Request, Sampling
from docklands.rollout.sampling import sample_seed
from docklands.rollout.trajectory import Episode


@dataclass(frozen=True)
class How:
    """Of one visit: how to sample, the part of seeds that it decides, tokens of a turn at most (0: all it needs)."""

    sampling: Sampling
    visit: int
    most: int
    training: bool


def request_of(e: Episode, row_id: int, how: How, run_seed: int) -> Request:
    """The next turn, or what a visit may sample of it. run_seed: of the run; the sample's own follows from it."""
    sampling = how.sampling
    left, early = sampling.max_tokens - e.response_length, sampling.min_tokens - sum(e.mask)
    seed = sample_seed(run_seed, how.visit, e.prompt_id, e.sample_index)
    seed = seed if e.turns == 0 else sample_seed(seed, e.turns, 0, 0)
    most = min(left, how.most or left)
    limits = replace(sampling, max_tokens=most, min_tokens=min(most, max(0, early)))
    return Request(tuple(e.tokens), limits, seed, row_id, len(e.turn))


def said(e: Episode, generation: Generation, how: How, text: Callable[[Sequence[int], int], str]) -> None:
    """The engine's answer, or what it had of it when it was interrupted. text: (ids, finish) -> what was said."""
    made = len(generation.token_ids)
    cut = generation.finish == FINISH_LENGTH and 0 < made == how.most < how.sampling.max_tokens - e.response_length
    stopped = how.training and generation.finish == FINISH_ABORT
    e.extend_sampled(generation, whole=not (cut or stopped))
    if not e.paused:
        e.messages.append({"role": "assistant", "content": text(e.turn, generation.finish)})
