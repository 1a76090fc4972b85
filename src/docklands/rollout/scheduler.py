"""Who runs: admission as sequences finish, one prefill per prompt, preemption when the cache is full.

Never a deadlock: a request that cannot fit alone is refused at the start; when pages run out, prompts nobody is running
are evicted first, then the youngest sequence starts over later (its seed gives it the same tokens again), so the oldest
always goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from docklands.core.protocols import Request
from docklands.errors import RolloutError
from docklands.rollout.kv_cache import PagedCache
from docklands.rollout.running import Prompt, RunningBatch


class Scheduler:
    """Waiting samples, running samples and the prompts in the cache.

    requests     all requests; samples are named by their index
    routed       (layers with experts, experts of a token) to record router choices
    sizing       where requests come later: such as those
    preemptions  sequences sent back so far
    """

    def __init__(
        self,
        cache: PagedCache,
        requests: Sequence[Request],
        max_rows: int,
        routed: tuple[int, int] | None = None,
        sizing: Sequence[Request] = (),
    ) -> None:
        self.cache, self.requests = cache, requests
        stops = max((len(r.sampling.stop_ids) for r in sizing or requests), default=0)
        self.running = RunningBatch(max_rows, stops, routed)
        self.waiting: deque[int] = deque()
        self.preemptions = 0
        self._prompts: dict[tuple[int, ...], Prompt] = {}
        self._wanted: dict[tuple[int, ...], int] = {}  # waiting samples of each prompt
        self._order = 0
        self._full = False  # after a preemption nobody is admitted until somebody has finished

    def enqueue(self, indices: list[int]) -> None:
        """Samples to run, after those that wait already."""
        self.waiting.extend(indices)
        for index in indices:
            prompt = self.requests[index].prompt
            self._wanted[prompt] = self._wanted.get(prompt, 0) + 1

    def admit(self, prefill_tokens: int) -> tuple[list[int], list[Prompt]]:
        """Start what fits. -> (new rows, prompts to be computed first, about `prefill_tokens` tokens at most)."""
        rows: list[int] = []
        fresh: list[Prompt] = []
        budget = prefill_tokens
        while self.waiting and self.running.room and not (self._full and self.running.count):
            index = self.waiting[0]
            tokens = self.requests[index].prompt
            prompt = self._prompts.get(tokens)
            if prompt is None and fresh and len(tokens) > budget:
                break
            need = 1 if prompt else self.cache.pages_for(len(tokens)) + 1
            spare = len(rows) + (self.running.count + 3) // 4  # pages that new rows, and some old ones, soon begin
            if not self._make_room(need + spare, keep=tokens) and (
                self.running.count or not self._make_room(need, tokens)
            ):
                break
            if prompt is None:
                prompt = Prompt(tokens, self.cache.take(need - 1, top=True))
                self._prompts[tokens] = prompt
                fresh.append(prompt)
                budget -= len(tokens)
            self.waiting.popleft()
            self.cache.hold(prompt.pages)
            rows.append(self.running.add(index, self.requests[index], prompt, self._order))
            self._order += 1
            self._forget_unwanted(tokens)
        if self.waiting and not self.running.count:
            raise RolloutError(f"no room in an idle KV cache for request {self.requests[self.waiting[0]].request_id}")
        return rows, fresh

    def _forget_unwanted(self, tokens: tuple[int, ...]) -> None:
        """A sample of this prompt started; after the last one, only running samples hold its pages."""
        self._wanted[tokens] -= 1
        if not self._wanted[tokens]:
            del self._wanted[tokens]
            self.cache.release(self._prompts.pop(tokens).pages)

    def _make_room(self, pages: int, keep: tuple[int, ...] = ()) -> bool:
        """Have `pages` free pages, evicting prompts that only wait; -> whether there are."""
        if self.cache.free >= pages:
            return True
        for tokens in [t for t, prompt in self._prompts.items() if not prompt.places and t != keep]:
            self.cache.release(self._prompts.pop(tokens).pages)
            if self.cache.free >= pages:
                return True
        return False

    def grow(self) -> bool:
        """A page for each sequence that begins one, preempting the youngest while there are too few. -> any given."""
        size = self.cache.page_tokens
        rows = self.running.short_of_pages(size)
        while not self._make_room(len(rows)):
            youngest = int(self.running.order[: self.running.count].argmax())
            self._preempt(youngest)
            rows = self.running.short_of_pages(size)
        if len(rows):
            self.running.give_pages(rows, self.cache.take(len(rows), top=False), size)
        return bool(len(rows))

    def _preempt(self, row: int) -> None:
        index = int(self.running.index[row])
        prompt = self.requests[index].prompt
        self.release(np.array([row]))
        self.waiting.appendleft(index)
        self._wanted[prompt] = self._wanted.get(prompt, 0) + 1
        self.preemptions += 1
        self._full = True

    def release(self, rows: np.ndarray) -> None:
        """Rows that have ended: their pages and places are free."""
        for row in rows.tolist():
            self.cache.release(self.running.pages_of(row))
            self.cache.release(self.running.prompts[row].pages)
        self.running.remove(rows)
        self._full = False

    def forget_prompts(self) -> None:
        """Weights changed: samples that start from now on compute their prompts anew."""
        for prompt in self._prompts.values():
            self.cache.release(prompt.pages)
        self._prompts.clear()

    def clear(self) -> None:
        """Give every page back."""
        self.forget_prompts()
        self.release(np.arange(self.running.count))
        self.waiting.clear()
        self._wanted.clear()

    def compact(self) -> None:
        """Keep the range of own pages dense."""
        moved = self.cache.compact()
        if moved:
            self.running.renumber(moved)
