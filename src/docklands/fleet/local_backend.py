"""Roles in this process: one thread per device, handed from role to role by a lease.

A device's work all runs on one thread: torch keeps one OpenMP pool per calling thread, so this keeps cores from being
oversubscribed, and colocated roles cannot overlap by accident.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.protocols import DockClient, Outcome, Rows
from docklands.core.stage import Learner, Result, Stage
from docklands.errors import DocklandsError
from docklands.obs.critical_path import ranges
from docklands.obs.spans import span

TIMING = {
    "rollout": "gen",
    "old_logprobs": "old_log_prob",
    "ref_logprobs": "ref",
    "advantage": "adv",
    "publish": "reshard",
}
"""Stage -> the name that the field's dashboards know it by; others are called as they are."""


class Device:
    """One device of this process: a lock that is the lease, and the thread that does the work."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` on this device's thread. A cancelled caller still waits for it: no call is left behind."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # heard: whoever cancelled has an error of its own to tell
            raise

    def make(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` on this device's thread and wait, before there is anything else to do."""
        return self._thread.submit(function, *args).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class LocalRole:
    """A role whose resource (engine, reward, algorithm) lives in this process.

    device  shared with the other colocated roles; a role off the device (rewards, advantages) has its own
    beat    told the stage's name whenever something is done, for the watchdog
    """

    def __init__(
        self, name: str, resource: Any, dock: DockClient, device: Device, beat: Callable[[str], None] = lambda _: None
    ) -> None:
        self.name = name
        self.resource = resource
        self.device = device
        self._dock = dock
        self._beat = beat
        self._pending: list[Mapping[str, tuple[float, float]]] = []
        self._waited = self._began = 0.0  # of the last lease: how long it was waited for, and when it came

    async def serve(self, stage: Stage, pump: Callable[[Stage, LocalRole], Awaitable[None]]) -> None:
        """Rows of a stage, until the dock is closed: one pump, or (ReplicaRole) one for each independent part."""
        await pump(stage, self)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[None]:
        """Hold the device."""
        began = time.perf_counter()
        async with self.device.lock:
            self._began = time.perf_counter()
            self._waited = self._began - began
            yield

    async def run(self, stage: Stage, rows: Rows) -> Outcome:
        """Fetch the columns that `stage` reads, compute, write back."""
        began = time.perf_counter()
        self._beat(stage.name)
        about = {"rows": len(rows), "groups": ranges(rows.group_ids.tolist()), "waited": round(self._waited, 6)}
        with span(f"stage/{stage.name}", role=self.name, **about):
            outcome = await self._stage(stage, rows)
        self._beat(stage.name)
        name = TIMING.get(stage.name, stage.name)
        took = {f"timing_s/{name}": (time.perf_counter() - began, 1.0), f"timing_s/{name}/wait": (self._waited, 1.0)}
        self._pending.append({**outcome.metrics, **took})
        return Outcome(dict(outcome.dropped), {**outcome.metrics, **took}, outcome.later)

    async def update(self, learner: Learner, rows: Rows) -> Mapping[str, tuple[float, float]]:
        """One optimizer update on `rows`."""
        began = time.perf_counter()
        self._beat(f"update/{learner.name}")
        groups = ranges(rows.group_ids.tolist())
        with span(f"update/{learner.name}", role=self.name, rows=len(rows), groups=groups) as attributes:
            metrics = await self._update(learner, rows)
            attributes["after"] = round(self._began - began, 6)
        self._beat(f"update/{learner.name}")
        return {**metrics, f"timing_s/update_{learner.name}": (time.perf_counter() - began, 1.0)}

    async def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Any other work on the role's device, under its lease."""
        began = time.perf_counter()
        self._beat(name)
        with span(name, role=self.name) as attributes:
            async with self.lease():
                attributes["after"] = round(self._began - began, 6)
                result = await self.device.call(function, *args)
        self._pending.append({f"timing_s/{TIMING.get(name, name)}": (time.perf_counter() - began, 1.0)})
        return result

    def note(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Figures of something done for this role, told with the step's."""
        self._pending.append(metrics)

    def drain(self) -> list[Mapping[str, tuple[float, float]]]:
        """Metrics of the stage runs since the last call."""
        pending, self._pending = self._pending, []
        return pending

    async def _stage(self, stage: Stage, rows: Rows) -> Outcome:
        batch = await self._dock.fetch(rows, stage.reads)
        result = as_result(await self._call(stage.run, batch), batch, stage)
        if result.batch is not None and len(result.batch):
            whole = not result.dropped and not result.later
            await self._dock.put(result.batch, rows if whole else None)
        return Outcome(result.dropped, result.metrics, result.later)

    async def _update(self, learner: Learner, rows: Rows) -> Mapping[str, tuple[float, float]]:
        batch = await self._dock.fetch(rows, learner.reads)
        async with self.lease():
            return await self.device.call(self.resource.update, batch, learner)

    async def _call(self, function: Callable[..., Any], batch: Batch) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(self.resource, batch)
        value = await self.device.call(function, self.resource, batch)
        return await value if inspect.isawaitable(value) else value


def as_result(value: Any, batch: Batch, stage: Stage) -> Result:
    """Normalise what a stage function returned; a row that was neither written nor dropped is an error."""
    if value is None:
        return Result(dropped={int(row): stage.name for row in batch.row_ids})
    result = Result(batch=value) if isinstance(value, Batch) else value
    if not isinstance(result, Result):
        raise DocklandsError(
            f"stage {stage.name!r} returned {type(value).__name__}", "return a Batch, a Result, or None to drop all"
        )
    same = result.batch is not None and np.array_equal(result.batch.row_ids, batch.row_ids)
    if stage.writes and not same:
        written = set() if result.batch is None else set(result.batch.row_ids.tolist())
        elsewhere = written.union(result.dropped, map(int, result.later))
        lost = [row for row in batch.row_ids.tolist() if row not in elsewhere]
        if lost:
            raise DocklandsError(f"stage {stage.name!r} neither wrote nor dropped rows {lost[:8]}")
    return result
