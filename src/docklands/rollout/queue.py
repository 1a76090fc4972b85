"""Work shared by engines: groups are handed out as engines have room, results come back in request order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from docklands.core.protocols import Generation, Request, Sampling
from docklands.errors import RolloutError


class WorkQueue:
    """Requests, grouped by equal prompt, for one or more engines. Thread-safe.

    An engine gets whole groups, a share of what is left that shrinks with it (guided self-scheduling, Polychronopoulos
    and Kuck 1987): large pieces while there is much, single groups at the end, so no engine idles while another queues.
    """

    def __init__(self, requests: Sequence[Request], engines: int = 1) -> None:
        self.requests = tuple(requests)
        self._engines = max(1, engines)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(self.requests):
            groups.setdefault(request.prompt, []).append(index)
        self._groups = deque(groups.values())
        self._results: list[Generation | None] = [None] * len(self.requests)
        self._lock = threading.Lock()

    def pull(self, room: int) -> list[int]:
        """Indices of whole groups for an engine with room for `room` samples; empty: nothing is left, or no room."""
        found: list[int] = []
        with self._lock:
            share = -(-len(self._groups) // (2 * self._engines)) if self._engines > 1 else len(self._groups)
            while self._groups and share > 0 and len(found) < room:
                found += self._groups.popleft()
                share -= 1
        return found

    def close(self) -> None:
        """Hand out nothing more (an engine failed)."""
        with self._lock:
            self._groups.clear()

    def finish(self, index: int, generation: Generation) -> None:
        """Store the result of a request."""
        self._results[index] = generation

    def results(self) -> list[Generation]:
        """All results in request order; RolloutError naming the requests without one."""
        missing = [r.request_id for r, found in zip(self.requests, self._results) if found is None]
        if missing:
            raise RolloutError(f"{len(missing)} samples were never generated: request ids {missing[:16]}")
        return [found for found in self._results if found is not None]

    def pending(self) -> list[int]:
        """Request ids without a result."""
        return [r.request_id for r, found in zip(self.requests, self._results) if found is None]

    @property
    def empty(self) -> bool:
        """Nothing left to hand out."""
        return not self._groups

    @property
    def sizing(self) -> Sequence[Request]:
        """Requests that the KV cache is sized for."""
        return self.requests

    def due(self) -> bool:
        """Whether an engine pauses here, samples under way."""
        return False


LEAST_STEPS, MOST_STEPS = 2, 256
"""Decode steps of a visit once a sample has ended in it, and at most."""


class LiveQueue(WorkQueue):
    """Requests join while others run, what has ended is taken out; for one engine, whose visits pause in between.

    sizing  requests of the largest sizes that may come, as many as run at once
    steps   decode steps of this visit
    """

    def __init__(self, sizing: Sequence[Request]) -> None:
        super().__init__(())
        self._sizing = tuple(sizing)
        self._nudged = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.requests: list[Request | None] = []  # type: ignore[assignment]
        self._groups.clear()
        self._since: dict[int, float] = {}
        self._ended: list[Generation] = []
        self.steps = 0

    @property
    def sizing(self) -> Sequence[Request]:
        """See WorkQueue."""
        return self._sizing

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._since)

    def add(self, requests: Sequence[Request]) -> None:
        """Requests that join; those with equal prompts stay together. A visit begins."""
        if not self._since:
            self.requests.clear()  # in place: nothing refers to what is over
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests, len(self.requests)):
            groups.setdefault(request.prompt, []).append(index)
            self._since[index] = time.monotonic()
        self.requests += requests
        self._groups.extend(groups.values())
        self.steps = 0

    def finish(self, index: int, generation: Generation) -> None:
        """A request has ended."""
        self._ended.append(generation)
        self.requests[index] = None
        del self._since[index]

    def take_ended(self) -> list[Generation]:
        """What has ended since the last call."""
        self._nudged.clear()
        ended, self._ended = self._ended, []
        return ended

    def nudge(self) -> None:
        """End the visit soon, from any thread: more requests have come."""
        self._nudged.set()

    def due(self) -> bool:
        """The visit may end: more have come, a sample has ended, or it is long enough."""
        if not self.steps:
            return False
        return self._nudged.is_set() or self.steps >= (LEAST_STEPS if self._ended else MOST_STEPS)

    def deadline(self, limit_s: float) -> float:
        """When the oldest request is overdue, seconds of the monotonic clock; inf: there is none."""
        return min(self._since.values(), default=float("inf")) + limit_s

    def pending(self) -> list[int]:
        """See WorkQueue."""
        return [request.request_id for index in self._since if (request := self.requests[index]) is not None]


def largest(rows: int, prompt_tokens: int, sampling: Sampling, vocabulary: int) -> list[Request]:
    """As many requests with prompts of their own as run at once, each as long as may come."""
    prompts = (tuple(i // vocabulary**at % vocabulary for at in range(prompt_tokens)) for i in range(rows))
    return [Request(prompt, sampling, 0, i) for i, prompt in enumerate(prompts)]


def too_late(queue: WorkQueue, limit_s: float) -> None:
    """Close the queue and raise RolloutError naming what is pending."""
    queue.close()
    pending = queue.pending()
    more = " ..." if len(pending) > 32 else ""
    raise RolloutError(
        f"{len(pending)} of {len(queue.requests)} samples are not finished after {limit_s:g} s; "
        f"pending request ids: {pending[:32]}{more}",
        "raise rollout.sample_deadline_s, or lower rollout.max_response_tokens",
    )
