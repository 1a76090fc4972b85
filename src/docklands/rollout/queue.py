"""Work shared by engines: groups are handed out as engines have room, results come back in request order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from docklands.core.protocols import Generation, Request
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
