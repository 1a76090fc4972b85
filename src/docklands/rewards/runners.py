"""Where a reward's calls happen: in this process, or in the sandbox; both give one outcome per sample, in time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from docklands.rewards.base import RewardOutcome, RewardSample, failed
from docklands.rewards.sandbox import LOST, Sandbox
from docklands.rewards.scoring import BuiltinScoring, Scoring, Target


class InlineReward:
    """A trusted built-in: called straight away."""

    def __init__(self, name: str, scoring: Scoring) -> None:
        self.name = name
        self._scoring = scoring

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome per sample."""
        return self._scoring.run(samples)

    def close(self) -> None:
        """Nothing to close."""


class ThreadReward:
    """A user's function in a thread of this process (`isolate: false`).

    The limit of a thread: it cannot be killed. A call past its deadline is abandoned, and until it returns the
    function is not called again: its samples are timeouts. A call that never gives up the interpreter lock (some
    regular expressions, some C code) holds up the whole process; such rewards belong into the sandbox.
    """

    def __init__(self, name: str, scoring: Scoring, deadline_s: float) -> None:
        self.name = name
        self._scoring = scoring
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: Future[Any] | None = None

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome per sample; the deadline counts per call: per sample, or per batch for batch functions."""
        outcomes: list[RewardOutcome] = []
        for part in [[sample] for sample in samples] if self._scoring.each else [list(samples)]:
            outcomes += await self._call(part)
        return outcomes

    async def _call(self, samples: list[RewardSample]) -> list[RewardOutcome]:
        if self._stuck is not None and not self._stuck.done():
            why = f"reward {self.name!r} is still busy with an earlier call that passed its deadline"
            return [failed("timeout", why)] * len(samples)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"reward-{self.name}", daemon=True)
            self._thread.start()
        call: Future[Any] = Future()
        self._calls.put((lambda: self._scoring.run(samples, self._deadline_s), call))
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(call)), self._deadline_s + 0.5)
        except TimeoutError:
            self._stuck = call
            return [failed("timeout", f"no result within {self._deadline_s:g} s")] * len(samples)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, result = call
            result.set_result(function())

    def close(self) -> None:
        """Let the thread end once it is free."""
        self._calls.put(None)


class SandboxReward:
    """A reward in killable processes.

    A batch function that misses its deadline is tried sample by sample, so that one bad sample costs only itself;
    where that went well (it was merely slow), it is called sample by sample from then on.
    """

    def __init__(self, target: Target, scoring: Scoring, sandbox: Sandbox, deadline_s: float) -> None:
        self.name = target.name
        self._target = target
        self._sandbox = sandbox
        self._deadline_s = deadline_s
        self._each = scoring.each

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome per sample."""
        if not samples:
            return []
        if self._each:
            return await self._one_by_one(samples)
        future = self._sandbox.submit(self._target, samples, False, self._deadline_s)
        outcomes = await asyncio.wrap_future(future)
        lost = all(outcome.dropped and outcome.info.get(LOST) for outcome in outcomes)
        if not lost or len(samples) == 1:
            return outcomes
        outcomes = await self._one_by_one(samples)
        self._each = all(outcome.status != "timeout" for outcome in outcomes)
        return outcomes

    async def _one_by_one(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """Spread over the workers in equal runs."""
        size = -(-len(samples) // self._sandbox.workers)
        runs = [samples[i : i + size] for i in range(0, len(samples), size)]
        futures = [self._sandbox.submit(self._target, run, True, self._deadline_s) for run in runs]
        found = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return [outcome for outcomes in found for outcome in outcomes]

    def close(self) -> None:
        """The sandbox is shared; its owner closes it."""


def runner(
    target: Target, scoring: Scoring, isolate: bool | None, sandbox: Sandbox, deadline_s: float
) -> InlineReward | ThreadReward | SandboxReward:
    """`isolate` None: as the reward itself says."""
    if scoring.isolate if isolate is None else isolate:
        return SandboxReward(target, scoring, sandbox, deadline_s)
    if isinstance(scoring, BuiltinScoring) and not scoring.isolate:
        return InlineReward(target.name, scoring)
    return ThreadReward(target.name, scoring, deadline_s)
