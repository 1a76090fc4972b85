"""A role whose resource lives in worker processes: rows go there, outcomes and figures come back, tensors stay away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Learner, Stage
from docklands.dock.distributed import DistributedDock
from docklands.errors import DocklandsError
from docklands.fleet.local_backend import Device, LocalRole
from docklands.fleet.reader import READ, with_read
from docklands.fleet.workers import Workers
from docklands.obs.metrics import Metrics


class Remote(Protocol):
    """The handle of a resource in worker processes; its calls block."""

    workers: Workers

    def run_stage(self, stage: Stage, rows: Rows) -> Sequence[Outcome | DocklandsError | None]: ...

    def update(self, rows: Rows, learner: Learner) -> Mapping[str, tuple[float, float]]: ...


class WorkerRole(LocalRole):
    """As LocalRole; device: the lease of the workers' devices, and the thread that waits for them."""

    resource: Remote

    def __init__(
        self,
        name: str,
        resource: Remote,
        dock: DistributedDock,
        device: Device,
        beat: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(name, resource, dock, device, beat)
        self._connected = dock

    async def _stage(self, stage: Stage, rows: Rows) -> Outcome:
        outcome = merged(await self.device.call(self._run, stage, self._connected.homes(rows)))
        return replace(outcome, metrics=self._read(rows, outcome.metrics))

    def _run(self, stage: Stage, rows: Rows) -> Sequence[Outcome | DocklandsError | None]:
        self.resource.workers.connect(self._connected)
        return self.resource.run_stage(stage, rows)

    async def _update(self, learner: Learner, rows: Rows) -> Mapping[str, tuple[float, float]]:
        async with self.lease():
            found = await self.device.call(self._learn, self._connected.homes(rows), learner)
            return self._read(rows, found)

    def _read(self, rows: Rows, metrics: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Metrics, without what the dock is to be told of the reading."""
        found = dict(metrics)
        self._connected.read_there(rows, *map(int, found.pop(READ, (0, 0))))
        return found

    def _learn(self, rows: Rows, learner: Learner) -> Mapping[str, tuple[float, float]]:
        self.resource.workers.connect(self._connected)
        return self.resource.update(rows, learner)


def merged(outcomes: Sequence[Outcome | DocklandsError | None]) -> Outcome:
    """What all replicas report, as one. Raises the first error among them."""
    metrics, dropped, later = Metrics(), dict[int, Any](), list[int]()
    for outcome in outcomes:
        if isinstance(outcome, DocklandsError):
            raise outcome
        if outcome is not None:
            metrics.merge({name: pair for name, pair in outcome.metrics.items() if name != READ})
            dropped.update(outcome.dropped)
            later += outcome.later
    found = (outcome.metrics for outcome in outcomes if isinstance(outcome, Outcome))
    return Outcome(dropped, with_read(metrics.pairs(), found), later)
