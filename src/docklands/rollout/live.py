"""Groups by load: rows join those that an engine is at work on, and leave as their groups end, visit by visit.

A call of `RolloutWorker.rollout` ends with its longest sample: whoever waits for it finds most of the batch empty by
then. Here a replica has room again as soon as a sample has ended, and asks for another group (continuous batching over
the dock; Orca, OSDI 2022, does it over a queue of requests). Between two visits nothing is lost: running samples keep
their pages of the KV cache, and go on under newer weights when some have been published meanwhile; each token says
which version made it.

Legend: B samples.
"""

from __future__ import annotations

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, PROMPT_ID, PROMPT_TOKENS, SAMPLE_INDEX
from docklands.core.protocols import Request
from docklands.core.stage import Result
from docklands.rollout.episode import RolloutWorker
from docklands.rollout.queue import LiveQueue
from docklands.rollout.trajectory import Episode
from docklands.rollout.turns import How, request_of, said


class LiveRollout:
    """What a replica's leader has begun, by row. Single-turn episodes."""

    def __init__(self, worker: RolloutWorker, queue: LiveQueue) -> None:
        self.worker, self.queue = worker, queue
        self._how = How(worker.sampling, 0, 0, True)
        self._begun: dict[int, tuple[Episode, int]] = {}
        self._open: dict[int, set[int]] = {}

    def __contains__(self, row_id: int) -> bool:
        """It has been begun, and its group has not ended."""
        return row_id in self._begun

    def begin(self, batch: Batch) -> list[Request]:
        """Requests for rows that join; columns as RolloutWorker.rollout reads them."""
        prompts, ids, ks = batch[PROMPT_TOKENS], batch[PROMPT_ID].tolist(), batch[SAMPLE_INDEX].tolist()
        requests, groups = [], batch[GROUP_ID].tolist()
        for row, prompt, prompt_id, k, group in zip(batch.row_ids.tolist(), prompts, ids, ks, groups):
            episode = Episode(prompt.tolist(), len(prompt), prompt_id, k)
            self._begun[row] = episode, group
            self._open.setdefault(group, set()).add(row)
            requests.append(request_of(episode, row, self._how, self.worker.seed))
        return requests

    def ended(self) -> Result:
        """Rows of the groups that have ended; those that an abort has cut are asked for again."""
        whole: list[int] = []
        for generation in self.queue.take_ended():
            episode, group = self._begun[generation.request_id]
            said(episode, generation, self._how, self.worker.text)
            self._open[group].discard(generation.request_id)
            if not self._open[group]:
                del self._open[group]
                whole.append(group)
        rows = [row for row, (_, group) in self._begun.items() if group in set(whole)]
        found = {row: self._begun.pop(row) for row in rows}
        cut = {group for episode, group in found.values() if episode.paused}
        done = [row for row, (_, group) in found.items() if group not in cut]
        result = self.worker.result(np.array(done, np.int64), [found[row][0] for row in done], {})
        later = [row for row, (_, group) in found.items() if group in cut]
        return Result(result.batch, result.dropped, result.metrics, later)

    def reset(self) -> None:
        """Forget what was begun: an error has ended it."""
        self.queue.reset()
        self._begun.clear()
        self._open.clear()
