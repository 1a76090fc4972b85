"""The role "rollout" and the object "sync" in worker processes: generation over a mesh, weights published by plan.

`GenerationShard` is on every generator rank: the leader of each replica plays episodes (rollout.RolloutWorker) on rows
that it reads from the dock, the other ranks of its tensor group help. `make_publisher` is on every rank of the world:
trainers and generators hand weights over among themselves. The driver's handles send rows and get outcomes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from docklands.config.layouts import SyncSection
from docklands.config.schema import Config, EnvSection, RolloutSection
from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, Field
from docklands.core.protocols import Outcome, Rows, Sampling
from docklands.core.stage import Result, Stage
from docklands.errors import ConfigError, DocklandsError, LayoutError, RolloutError
from docklands.fleet.engines import EngineShard
from docklands.fleet.host import Context
from docklands.fleet.local_backend import LocalRole, as_result
from docklands.fleet.reader import Reader, agree
from docklands.obs.metrics import Metrics
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh

if TYPE_CHECKING:
    from docklands.fleet.workers import Workers
    from docklands.models import ModelConfig
    from docklands.sync.publish import Publisher

ROLE, SYNC = "rollout", "sync"


@dataclass(frozen=True)
class GenerationSpec:
    """What generators are made of. dtype: of their weights; routes: the column of router choices, when recorded."""

    layout: Layout
    model: Path
    tokenizer: Path
    rollout: RolloutSection
    env: EnvSection
    seed: int
    dtype: str
    routes: Field[Any] | None = None


def generation_of(config: Config, model: ModelConfig) -> Layout:
    """Layout of generation in worker processes. LayoutError when it does not fit the model or the trainers' devices."""
    from docklands.rollout.mesh import generation_layout

    if config.fleet.rollout_workers > 1:
        raise ConfigError(
            f"fleet.rollout_workers is {config.fleet.rollout_workers}, but generators are in worker processes",
            "rollout.layout.dp says how many there are",
        )
    apart, ranks = config.fleet.placement == "disaggregated", config.training_ranks
    layout = generation_layout(config.rollout.layout, model, 0 if apart else ranks)
    if not apart and layout.world_size != ranks:
        raise LayoutError(
            f"rollout.layout: tp {layout.tp} x dp {layout.dp} = {layout.world_size} ranks, layout: {ranks}; colocated "
            "generators are the trainers' processes",
            "change rollout.layout.dp, or set fleet.placement=disaggregated",
        )
    return layout


class GenerationShard:
    """One rank's part of the generators."""

    def __init__(self, context: Context, spec: GenerationSpec) -> None:
        from docklands.data.tokenizer import load_tokenizer
        from docklands.envs import build_env_factory
        from docklands.models import read_config
        from docklands.rollout import RolloutWorker
        from docklands.rollout.mesh import MeshEngine

        self.context = context
        first = context.generators[0] if context.setup.generators else None
        self.mesh = mesh = Mesh(spec.layout, timeout_s=context.setup.wait_s, first=first)
        section = spec.rollout.model_copy(update={"record_routes": spec.routes is not None})
        dtype = getattr(torch, spec.dtype)
        self.engine = MeshEngine(read_config(spec.model), section, mesh, dtype=dtype, device=context.device)
        self.reader = Reader(context, mesh.world, mesh.tp, mesh.coords["dp"], spec.layout.dp)
        self.worker: RolloutWorker | None = None
        if self.engine.is_leader:
            tokenizer, env = load_tokenizer(spec.tokenizer), build_env_factory(spec.env)
            self.worker = RolloutWorker([self.engine], tokenizer, env, section, spec.seed, spec.routes)

    def run_stage(self, stage: Stage, rows: Rows) -> Outcome | None:
        """Read this replica's prompts, play them, write the samples; the outcome, on the replica's leader."""
        batch = self.reader.fetch(rows.select(self._mine(rows.group_ids)), stage.reads)

        def play() -> Result:
            value = stage.run(self.worker, batch)
            return as_result(asyncio.run(value) if inspect.iscoroutine(value) else value, batch, stage)

        result = self._together(play)
        if SYNC in self.context.objects:
            self.context.objects[SYNC].generated()
        self.reader.put(None if result is None else result.batch)
        return None if result is None else Outcome(dict(result.dropped), dict(result.metrics), list(result.later))

    def rollout(self, batch: Batch, sampling: Sampling, visit: int) -> Result | None:
        """Rows that are not in the dock (evaluation): this replica's part of them, on its leader."""
        mine = batch.select(self._mine(batch[GROUP_ID].numpy()))
        return self._together(lambda: self.worker.rollout(mine, sampling, visit))  # type: ignore[union-attr]

    def _mine(self, groups: np.ndarray) -> np.ndarray:
        """Positions of this replica's rows. A group comes to the same replica again, which may have begun it."""
        return np.flatnonzero(groups % self.reader.number == self.reader.index)

    def _together(self, play: Callable[[], Result]) -> Result | None:
        """Leaders play, the others help. What one rank raises is raised on all."""
        if SYNC in self.context.objects:
            self.context.objects[SYNC].for_generation()
        result, error = None, None
        try:
            result = self.engine.together(play if self.engine.is_leader else None)
        except DocklandsError as failure:
            error = failure
        agree(self.mesh.world, error)
        return result

    def state_dict(self) -> dict[str, Any] | None:
        """Samples that wait for another visit, on the replica's leader."""
        return None if self.worker is None else self.worker.state_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Those of this replica, of as many replicas as there are; else none: what another has begun begins anew."""
        if self.worker is not None and len(states) == self.reader.number:
            self.worker.load_state_dict(states[self.reader.index])

    def abort(self) -> None:
        """End a running rollout soon; called beside it."""
        if self.worker is not None:
            self.worker.abort()


class RemoteGenerator:
    """The driver's handle of the generators."""

    def __init__(self, workers: Workers, spec: GenerationSpec) -> None:
        """Make them on every generator rank. Raises what that raises."""
        self.workers, self.spec = workers, spec
        workers.make(ROLE, GenerationShard, spec, ranks=workers.setup.generator_ranks)

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.workers.call(ROLE, method, *args, ranks=self.workers.setup.generator_ranks)

    def run_stage(self, stage: Stage, rows: Rows) -> list[Outcome | None]:
        """Run the stage on rows; the outcome of each replica."""
        return self._call("run_stage", stage, rows)

    def update(self, rows: Rows, learner: Any) -> Any:
        """Generators do not learn."""
        raise RolloutError("an update of generators", "the role that learns is actor or critic")

    def rollout(self, batch: Batch, sampling: Sampling, visit: int = 0) -> Result:
        """See RolloutWorker: for evaluation, whose prompts are not in the dock. Rows in the order of the replicas."""
        found: list[Result] = [part for part in self._call("rollout", batch, sampling, visit) if part is not None]
        batches = [part.batch for part in found if part.batch is not None and len(part.batch)]
        dropped = {row: why for part in found for row, why in part.dropped.items()}
        return Result(Batch.concat(batches) if batches else None, dropped, {})

    def state_dict(self) -> dict[str, Any]:
        """Samples that wait for another visit, by replica."""
        return {"replicas": [state for state in self._call("state_dict") if state is not None]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self._call("load_state_dict", state.get("replicas", ()))

    def abort(self) -> None:
        """End a running rollout soon, from any thread."""
        self.workers.urgent(ROLE, "abort", ranks=self.workers.setup.generator_ranks)

    def close(self) -> None:
        """End the processes."""
        self.workers.close()


@dataclass(frozen=True)
class SyncSpec:
    """How weights are published. temperature: by which trainers divide their logits."""

    section: SyncSection
    generation: GenerationSpec
    temperature: float


def make_publisher(context: Context, spec: SyncSpec) -> Publisher:
    """This rank's part in publishing; made after engines and generators."""
    from docklands.models import read_config
    from docklands.sync.publish import Publisher, Route
    from docklands.train.resident import TrainState

    setup, made = context.setup, spec.generation
    engines = {name: found.engine for name, found in context.objects.items() if isinstance(found, EngineShard)}
    trainer = TrainState(engines.pop("actor"), engines) if context.rank in context.trainers else None
    generator = context.objects[ROLE].engine if context.rank in context.generators else None
    dtype = getattr(torch, made.dtype)
    apart = bool(setup.generators)
    route = Route(read_config(made.model), setup.layout, made.layout, dtype, apart, spec.temperature)
    return Publisher(route, spec.section, trainer, generator, device=context.device, timeout_s=setup.wait_s)


class PlannedSync:
    """publish(version): every process takes its part; see sync/publish.py. The driver moves nothing."""

    def __init__(self, workers: Workers, role: LocalRole, spec: SyncSpec) -> None:
        """role: whose device's lease publishing holds, and with whose metrics its own are told."""
        self._workers, self._role = workers, role
        workers.make(SYNC, make_publisher, spec)

    async def publish(self, version: int) -> None:
        """Raises SyncError and its kind."""
        found = await self._role.call("publish", self._workers.call, SYNC, "publish", version)
        metrics = Metrics()
        for mine in found:
            metrics.merge(mine)
        self._role.note(metrics.pairs())
