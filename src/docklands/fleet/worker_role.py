"""A role whose resource lives in worker processes: rows go there, outcomes and figures come back, tensors stay away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Learner, Stage
from docklands.dock.distributed import DistributedDock
from docklands.fleet.local_backend import Device, LocalRole
from docklands.fleet.workers import Workers
from docklands.obs.metrics import Metrics


class Remote(Protocol):
    """The handle of a resource in worker processes; its calls block."""

    workers: Workers

    def run_stage(self, stage: Stage, rows: Rows) -> Sequence[Outcome | None]: ...

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
        return merged(await self.device.call(self._run, stage, rows))

    def _run(self, stage: Stage, rows: Rows) -> Sequence[Outcome | None]:
        self.resource.workers.connect(self._connected)
        return self.resource.run_stage(stage, rows)

    async def _update(self, learner: Learner, rows: Rows) -> Mapping[str, tuple[float, float]]:
        async with self.lease():
            return await self.device.call(self._learn, rows, learner)

    def _learn(self, rows: Rows, learner: Learner) -> Mapping[str, tuple[float, float]]:
        self.resource.workers.connect(self._connected)
        return self.resource.update(rows, learner)


def merged(outcomes: Sequence[Outcome | None]) -> Outcome:
    """What all replicas report, as one."""
    metrics, dropped, later = Metrics(), dict[int, Any](), list[int]()
    for outcome in outcomes:
        if outcome is not None:
            metrics.merge(outcome.metrics)
            dropped.update(outcome.dropped)
            later += outcome.later
    return Outcome(dropped, metrics.pairs(), later)
