"""A dock with processes of its own, the batches of the sharded cases in it, and roles in workers that read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from docklands.algorithms.stages import old_logprobs, run_update, values
from docklands.config.schema import TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import ADVANTAGE, GROUP_ID, LOSS_MASK, OLD_LOGPROBS, RETURNS, TOKEN_IDS, VALUES
from docklands.core.graph import Graph
from docklands.core.protocols import Rows
from docklands.core.stage import Learner, Stage
from docklands.dock.distributed import DistributedDock
from docklands.dock.rules.options import DockOptions
from docklands.fleet.engines import EngineSpec, RemoteEngine
from docklands.fleet.local_backend import Device
from docklands.fleet.worker_role import WorkerRole
from docklands.fleet.workers import Workers
from tests.distributed.cases import OPTIM, TRAIN, batches
from tests.dock_processes import client, launcher
from tests.train_cases import ACTOR_WITH_ENTROPY, CRITIC

GROUPS, SAMPLES = 3, 4
SOURCES = (GROUP_ID, TOKEN_IDS, LOSS_MASK, ADVANTAGE, RETURNS)
ACTOR = replace(ACTOR_WITH_ENTROPY, reads=(*SOURCES, OLD_LOGPROBS))
VALUE = replace(CRITIC, reads=(*SOURCES, VALUES))
STAGES = (old_logprobs(()), values(()))
UPDATE = Stage("update", "actor", (*SOURCES, OLD_LOGPROBS, VALUES), (), run_update, "step")
GRAPH = Graph((*STAGES, UPDATE), (ACTOR, VALUE), SOURCES)


def spec(path: Path, value: bool = False) -> EngineSpec:
    settings = (("max_tokens", 8), ("total_updates", 10))
    return EngineSpec(path / ("critic" if value else "policy"), TrainSection(**TRAIN), OPTIM, value, None, settings)


def learner(loss: Callable[..., Any]) -> Learner:
    """The actor with another loss."""
    return replace(ACTOR, loss=loss, entropy=False)


def numbered(index: int) -> Batch:
    """The cases' batch `index`, under ids that no other batch has."""
    batch = batches()[index]
    groups = batch[GROUP_ID] + 10 * index
    return Batch(batch.row_ids + 100 * index, {**{f: batch[f] for f in batch.fields}, GROUP_ID: groups}).only(SOURCES)


@dataclass
class Flow:
    """A dock, and the roles of two engines."""

    dock: DistributedDock
    actor: WorkerRole
    critic: WorkerRole

    async def admit(self, index: int) -> None:
        """The cases' batch `index`, group by group."""
        batch = numbered(index)
        for group in np.unique(batch[GROUP_ID].numpy()):
            await self.dock.admit(batch.select(batch[GROUP_ID].numpy() == group))

    async def forward(self) -> tuple[Rows, Batch]:
        """Log-probs and values of a step; -> its rows, and what was written."""
        for stage, role in zip(STAGES, (self.actor, self.critic)):
            rows = await self.dock.take(stage)
            async with role.lease():
                outcome = await role.run(stage, rows)
            await self.dock.finish(rows, outcome)
        rows = await self.dock.take(UPDATE)
        return rows, await self.dock.fetch(rows, (OLD_LOGPROBS, VALUES))


@asynccontextmanager
async def flow(workers: Workers, models: Path, folder: Path, **more: Any) -> AsyncIterator[Flow]:
    """Both engines of a model on the workers, and a dock between them and this process."""
    options = DockOptions(prompts_per_step=GROUPS, group_size=SAMPLES, wait_s=60.0, **more)
    device = Device("workers")
    try:
        with launcher(GRAPH, options, folder) as made:
            async with client(made) as dock:
                names = ("actor", "critic")  # made on a thread: the dock's lines are looked after while processes start
                made_of = [(workers, name, spec(models, name == "critic")) for name in names]
                engines = [await asyncio.to_thread(RemoteEngine, *arguments) for arguments in made_of]
                roles = [WorkerRole(name, engine, dock, device) for name, engine in zip(names, engines)]
                yield Flow(dock, *roles)
    finally:
        device.close()
