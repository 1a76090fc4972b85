"""Visits of an engine: requests join those under way; it pauses when there is news, and nothing that runs is lost.

`Visits` is what NativeEngine is made of for this, `MeshVisits` MeshEngine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from docklands.config.schema import RolloutSection
from docklands.core.protocols import Request
from docklands.errors import DocklandsError, RolloutError
from docklands.models import ModelConfig
from docklands.rollout.capacity import check_requests
from docklands.rollout.kv_cache import PagedCache
from docklands.rollout.queue import LiveQueue, WorkQueue, too_late
from docklands.rollout.scheduler import Scheduler

COUNTED = ("prefill_tokens", "decode_tokens", "decode_steps", "preemptions", "aborted", "kv_blocks_peak")

Aside = tuple[Scheduler | None, PagedCache | None]


class Visits:
    """The engine's own parts that visits use are declared here."""

    config: ModelConfig
    _section: RolloutSection
    _scheduler: Scheduler | None
    _cache: PagedCache | None
    _abort: threading.Event
    _serving: threading.Lock
    _step_lock: threading.RLock
    _counts: Counter[str]

    def _open(self, queue: WorkQueue) -> None: ...

    def _close(self) -> None: ...

    def _iterate(self, queue: WorkQueue) -> bool: ...

    def visit(self, queue: LiveQueue, requests: Sequence[Request]) -> None:
        """Generate these beside those under way, until `queue.due`, or nothing is left; the others go on in the next.

        After an error nothing is under way any more: reset the queue.
        """
        for _ in self.visiting(queue, requests):
            pass

    @torch.inference_mode()
    def visiting(self, queue: LiveQueue, requests: Sequence[Request]) -> Iterator[None]:
        """As `visit`, step by step."""
        if not self._serving.acquire(blocking=False):
            raise RolloutError("a visit while generating", "one call at a time")
        try:
            check_requests(requests, self.config)
            queue.add(requests)
            if requests and self._scheduler is None:
                self._abort.clear()
                self._open(queue)
            limit, more = self._section.sample_deadline_s, self._scheduler is not None
            while more and not queue.due():
                more = self._iterate(queue)
                queue.steps += 1
                if time.monotonic() > queue.deadline(limit):
                    too_late(queue, limit)
                yield
            self._pause(more)
        except BaseException:
            self._close()
            raise
        finally:
            self._serving.release()

    def _pause(self, more: bool) -> None:
        """End of a visit; more: samples are under way."""
        with self._step_lock:
            if not more:
                self._close()
            elif self._scheduler is not None:
                self._tally(self._scheduler)

    def _tally(self, scheduler: Scheduler) -> None:
        """Count what a scheduler has seen since the last time."""
        self._counts["preemptions"] += scheduler.preemptions
        scheduler.preemptions = 0
        self._counts["kv_blocks_peak"] = max(self._counts["kv_blocks_peak"], scheduler.cache.peak)

    def take_metrics(self) -> dict[str, tuple[float, float]]:
        """(sum, count) of what was done since the last call, under the names of obs/names.py."""
        counts, self._counts = self._counts, Counter()
        found = {f"rollout/{name}": (float(counts[name]), 1.0) for name in COUNTED}
        return {**found, "rollout/batch_size": (float(counts["rows"]), float(max(1, counts["decode_steps"])))}

    def set_aside(self) -> Any:
        """Between two visits: what is under way, with its KV cache, for another `generate` in between."""
        aside = self._scheduler, self._cache
        if self._scheduler is not None:
            self._scheduler = self._cache = None
        return aside

    def take_up(self, aside: Any) -> None:
        """Go on with what was set aside."""
        if aside[0] is not None:
            self._scheduler, self._cache = aside


class MeshVisits(Visits):
    """On every rank at once, outside a session; leaders have requests, the others none."""

    instance: Any
    is_leader: Any
    _left: bool
    _error: DocklandsError | None
    _deadline: float

    def _tell(self, requests: Sequence[Request]) -> Sequence[Request]: ...

    def _try(self, queue: WorkQueue, function: Any, *args: Any) -> Any: ...

    def _lost(self, error: RuntimeError) -> RolloutError: ...

    def visit(self, queue: LiveQueue, requests: Sequence[Request]) -> None:
        """See Visits."""
        requests = self._tell(requests)
        if self.instance is None:
            return super().visit(queue, requests)
        if not self._serving.acquire(blocking=False):
            raise RolloutError("a visit while generating", "one call at a time")
        self._left, self._error = False, None
        try:
            with torch.inference_mode():
                self._together(queue, requests)
        except RuntimeError as error:
            self._close()
            raise self._lost(error) from error
        except DocklandsError:
            self._close()
            raise
        finally:
            self._serving.release()
        if self._error is not None and self.is_leader:
            raise self._error

    def _together(self, queue: LiveQueue, requests: Sequence[Request]) -> None:
        check_requests(requests, self.config)
        queue.add(requests)
        if requests and self._scheduler is None:
            self._abort.clear()
            self._try(queue, self._open, queue)
        self._deadline = queue.deadline(self._section.sample_deadline_s)
        while self._iterate(queue):
            queue.steps += 1
        self._pause(queue.unfinished > 0)
