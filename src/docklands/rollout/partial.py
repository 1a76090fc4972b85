"""Samples that are not finished in one visit of the rollout stage: they wait with what they have, and go on later.

With `rollout.partial_tokens`, a visit samples at most so many tokens of each sample. A group of which a sample has not
ended by then goes back to the dock whole; it is the oldest there, so the next visit takes it again, beside new groups,
and the few long samples of one step are generated together with the many of the next (partial rollout: Kimi k1.5, arXiv
2501.12599, section 2.6.2). Nothing is thrown away or cut: a sample goes on where it stopped, each token with the weight
version and the log-probability that it was sampled with, its draws from the same stream, so that with the same weights
it is the sample that one visit would have made.

They wait in the worker's memory. What a worker loses, or another worker gets, begins anew. Their keys and values are
computed again with the weights of each visit; rollout/keeping.py keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from docklands.config.schema import RolloutSection
from docklands.errors import ConfigError
from docklands.rollout.trajectory import Episode

REMEMBERED = 65_536
"""Episodes that wait at most; older ones (of groups that were dropped meanwhile) begin anew."""


def check_partial(section: RolloutSection, max_staleness: int, alone: bool = True) -> None:
    """ConfigError when samples may be interrupted and no newer weights could ever continue them, or when their keys and
    values are to be kept where that cannot be. alone: one engine, in the driver's process, without an environment.
    """
    if section.partial_kv == "keep" and not (section.partial_tokens and alone and section.engine == "native"):
        raise ConfigError(
            "rollout.partial_kv is keep, which needs rollout.partial_tokens, and one native engine in one process, "
            "without an environment",
            "leave it out: unfinished samples are then computed again",
        )
    if section.partial_tokens and not max_staleness:
        raise ConfigError(
            f"rollout.partial_tokens is {section.partial_tokens}, but with dock.max_staleness 0 a step waits for its "
            "longest sample",
            "set dock.max_staleness to 1 or more, or rollout.partial_tokens to 0",
        )


class Unfinished:
    """Episodes by row id, in the order in which they came. Thread-safe: a checkpoint reads them beside a visit.

    What is kept is never changed: a visit goes on with a copy, so that a checkpoint in the middle of it holds each
    sample as the last visit left it. An environment cannot be copied: an episode with one is handed out itself.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Episode] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def resume(self, row_id: int) -> Episode | None:
        """The episode of a row, to go on with; None: the row is new here."""
        with self._lock:
            episode = self._waiting.get(row_id)
            if episode is None:
                return None
            if episode.env is not None:
                del self._waiting[row_id]
        return going_on(episode)

    def keep(self, row_ids: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Until their rows come again."""
        with self._lock:
            for row, episode in zip(row_ids, episodes, strict=True):
                self._waiting.pop(row, None)  # to the end of the line
                self._waiting[row] = episode
            while len(self._waiting) > REMEMBERED:
                del self._waiting[next(iter(self._waiting))]

    def forget(self, row_ids: Sequence[int]) -> None:
        """These rows' episodes have ended."""
        with self._lock:
            for row in row_ids:
                self._waiting.pop(row, None)

    def state_dict(self) -> dict[str, Any]:
        """Plain data. An episode with an environment is left out: an environment lives in its process only."""
        with self._lock:
            kept = {row: episode for row, episode in self._waiting.items() if episode.env is None}
        names = [field.name for field in fields(Episode) if field.name not in ("env", "routes")]
        return {
            "rows": list(kept),
            "episodes": [{name: getattr(e, name) for name in names} for e in kept.values()],
            "routes": [None if e.routes is None else torch.from_numpy(e.routes) for e in kept.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, here or (under "replicas") in the workers of another layout."""
        for part in state.get("replicas", (state,)):
            for row, found, routes in zip(part["rows"], part["episodes"], part["routes"], strict=True):
                self._waiting[row] = Episode(**found, routes=None if routes is None else routes.numpy())


def going_on(episode: Episode) -> Episode:
    """A copy that may grow, paused no longer. Its environment, if any, is the same; an array of routes is replaced
    whole, never written to.
    """
    lists = ("tokens", "mask", "logprobs", "versions", "messages")
    return replace(episode, paused=False, **{name: list(getattr(episode, name)) for name in lists})


def of_unfinished_groups(groups: np.ndarray, episodes: Sequence[Episode]) -> np.ndarray:
    """Whether each episode belongs to a group with a paused one, bool [B]. groups: int64 [B]."""
    paused = np.array([e.paused for e in episodes], bool)
    return np.isin(groups, groups[paused])
