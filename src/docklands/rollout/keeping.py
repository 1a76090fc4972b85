"""Partial rollouts whose unfinished samples keep their KV cache: nothing is computed again in the next visit.

As rollout/partial.py, with `rollout.partial_kv: keep`: a visit is so many decode steps, in which new samples join those
under way (rollout/live.py); then all pause, keys and values in place, while the device trains. They go on under the
newer weights with keys and values of the older ones, as generators apart do in an update in flight. Each token has the
log-probability that it was sampled with, so importance weights are as right as when all is computed anew; but what is
sampled depends on when weights came, and a checkpoint has nothing of it: after a resume such samples begin anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.protocols import Request, Sampling
from docklands.core.stage import Result
from docklands.rollout.episode import RolloutWorker
from docklands.rollout.live import LiveRollout
from docklands.rollout.partial import REMEMBERED
from docklands.rollout.queue import LiveQueue, largest
from docklands.rollout.visits import Visits


class StepQueue(LiveQueue):
    """Visits of `most` decode steps. The deadline is each visit's: samples under way wait for other roles too."""

    def __init__(self, sizing: Sequence[Request], most: int) -> None:
        super().__init__(sizing)
        self._most = most

    def add(self, requests: Sequence[Request]) -> None:
        """See LiveQueue."""
        super().add(requests)
        self._since = dict.fromkeys(self._since, time.monotonic())

    def due(self) -> bool:
        """See LiveQueue."""
        return self.steps >= self._most


class KeepingWorker(RolloutWorker):
    """A RolloutWorker of one native engine, without environments, whose samples stay in it between two visits."""

    def __init__(self, *parts: Any, longest_prompt: int, vocabulary: int) -> None:
        """parts: of RolloutWorker. longest_prompt in tokens, of `vocabulary` ids: what the KV cache is sized for."""
        super().__init__(*parts)
        (engine,) = self._engines
        assert isinstance(engine, Visits)
        self._engine, section = engine, self._section
        sizing = largest(section.max_batch, longest_prompt, self.sampling, vocabulary)
        self._live = LiveRollout(self, StepQueue(sizing, section.partial_tokens))
        self._ended: dict[int, Batch] = {}  # what ended in a visit that was not asked for these rows

    def rollout(self, batch: Batch, sampling: Sampling | None = None, visit: int = 0) -> Result:
        """See RolloutWorker. An evaluation sets aside what is under way."""
        if sampling is not None:
            aside = self._engine.set_aside()
            try:
                return super().rollout(batch, sampling, visit)
            finally:
                self._engine.take_up(aside)
        if self._stopped.is_set():
            return Result(later=batch.row_ids.tolist())
        self._aborted.clear()
        fresh = np.array([row not in self._live and row not in self._ended for row in batch.row_ids.tolist()], bool)
        try:
            self._engine.visit(self._live.queue, self._live.begin(batch.select(np.flatnonzero(fresh))))
        except BaseException:
            self._live.reset()
            self._ended.clear()
            raise
        found = self._live.ended()
        assert found.batch is not None
        written = self._asked(found.batch, batch.row_ids)
        later = batch.row_ids[~np.isin(batch.row_ids, written.row_ids)].tolist()
        unfinished = {"rollout/unfinished": (float(len(later)), 1.0)}
        return replace(found, batch=written, metrics={**found.metrics, **unfinished}, later=later)

    def _asked(self, ended: Batch, row_ids: np.ndarray) -> Batch:
        """Of what has ended, now or before, the rows of this visit: a lease may have less than what is under way."""
        if not self._ended and np.isin(ended.row_ids, row_ids).all():
            return ended
        self._ended |= {row: ended.select([at]) for at, row in enumerate(ended.row_ids.tolist())}
        mine = [self._ended.pop(row) for row in row_ids.tolist() if row in self._ended]
        while len(self._ended) > REMEMBERED:  # of rows that have left the flow
            del self._ended[next(iter(self._ended))]
        return Batch.concat([ended.select([]), *mine])
