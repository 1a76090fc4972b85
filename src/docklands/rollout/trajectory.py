"""An episode under way: what the model sampled and what it was shown, token by token.

Legend: T tokens of an episode, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from docklands.core.fields import FINISH_LENGTH
from docklands.core.protocols import Generation


class Env(Protocol):
    """One episode of an environment; see docklands.envs.base."""

    @property
    def max_turns(self) -> int: ...

    async def reset(self, row: dict[str, Any]) -> None: ...

    async def step(self, completion: str, finish: str) -> Any: ...


@dataclass(eq=False)
class Episode:
    """One sample under way; token lists are of equal length and begin with the prompt.

    routes     router choices, int16 [tokens fed to the model so far, L, k]; None when they are not recorded
    turn_from  where the model's present turn begins in `tokens`
    paused     the turn is not over, but this visit's tokens are
    """

    tokens: list[int]
    prompt_length: int
    prompt_id: int
    sample_index: int
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    reward: float = 0.0
    finish: int = FINISH_LENGTH
    turns: int = 0
    turn_from: int = 0
    paused: bool = False
    done: bool = False
    error: str = ""
    env: Env | None = None

    def __post_init__(self) -> None:
        if not self.mask:
            self.extend_masked([])

    @property
    def response_length(self) -> int:
        """Sampled and observed tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def turn(self) -> list[int]:
        """Tokens of the model's present turn."""
        return self.tokens[self.turn_from :]

    def extend_sampled(self, generation: Generation, whole: bool = True) -> None:
        """Append a model turn exactly as sampled, or (`whole` false) a part that another visit goes on with."""
        self.tokens += generation.token_ids
        self.mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions
        self.finish = generation.finish
        self.turns += whole
        self.paused = not whole
        if generation.routes is not None:
            self._take_routes(generation.routes)

    def extend_masked(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample; brings the other columns up to the same length."""
        self.tokens += ids
        more = len(self.tokens) - len(self.mask)
        self.mask += [False] * more
        self.logprobs += [0.0] * more
        self.versions += [-1] * more
        self.turn_from = len(self.tokens)

    def _take_routes(self, routes_TLk: np.ndarray) -> None:
        """Choices of a turn, for all tokens so far. Another turn computes the earlier tokens again: what they were
        sampled with stays, and only what was not fed before is taken (the last sampled token, the observation).
        """
        if self.routes is not None:
            known = np.flatnonzero(self.routes[:, 0, 0] >= 0)
            routes_TLk = routes_TLk.copy()
            routes_TLk[known] = self.routes[known]
        self.routes = routes_TLk

    def routes_of(self, shape: tuple[int, ...]) -> np.ndarray:
        """One entry per token, -1 where nothing is recorded. int16 [T, *shape]"""
        found = np.full((len(self.tokens), *shape), -1, np.int16)
        if self.routes is not None:
            found[: len(self.routes)] = self.routes
        return found
