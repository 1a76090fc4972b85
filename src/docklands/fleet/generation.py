"""The role "rollout" and the object "sync" in worker processes: generation over a mesh, weights published by plan.

`GenerationShard` is on every generator rank: the leader of each replica plays episodes (rollout.RolloutWorker) on rows
that it reads from the dock, the other ranks of its tensor group help. `make_publisher` is on every rank of the world:
trainers and generators hand weights over among themselves. The driver's handles send rows and get outcomes.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from docklands.algorithms.stages import run_rollout
from docklands.config.layouts import SyncSection
from docklands.config.lora import LoraSection
from docklands.config.schema import Config, EnvSection, RolloutSection
from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, Field
from docklands.core.protocols import Outcome, Request, Rows, Sampling
from docklands.core.stage import Result, Stage
from docklands.errors import ConfigError, DocklandsError, LayoutError, RolloutError, WarehouseLost
from docklands.fleet.engines import EngineShard
from docklands.fleet.host import Context
from docklands.fleet.local_backend import LocalRole, as_result
from docklands.fleet.reader import Reader, agree
from docklands.models.adapters import with_lora
from docklands.obs.metrics import Metrics
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh

if TYPE_CHECKING:
    from docklands.fleet.workers import Workers
    from docklands.models import ModelConfig
    from docklands.sync.publish import Publisher
    from docklands.train.resident import TrainState

ROLE, SYNC = "rollout", "sync"
ABORT_S = 60.0
"""How long a rollout is told to end."""
AGAIN_S = 0.05
"""How long rows that are turned away are held, so that they are not asked for again all the time."""


@dataclass(frozen=True)
class GenerationSpec:
    """What generators are made of.

    layout   of one world: of all colocated generators, or of one independent replica
    dtype    of their weights
    routes   the column of router choices, when recorded
    longest_prompt  tokens that a prompt has at most, where a replica takes groups by its load
    longest  tokens of the longest prompt with its response; 0: the model's positions
    lora     adapters that generators apply themselves; None: there are none, or they come merged
    """

    layout: Layout
    model: Path
    tokenizer: Path
    rollout: RolloutSection
    env: EnvSection
    seed: int
    dtype: str
    routes: Field[Any] | None = None
    longest_prompt: int = 0
    longest: int = 0
    lora: LoraSection | None = None

    def shape(self) -> ModelConfig:
        """Of what generators compute: with the adapters that they apply themselves."""
        from docklands.models import read_config

        config = read_config(self.model)
        return config if self.lora is None else with_lora(config, self.lora)


def generation_of(config: Config, model: ModelConfig) -> Layout:
    """Layout of generation in worker processes. LayoutError when it does not fit the model or the trainers' devices."""
    from docklands.rollout.mesh import generation_layout

    if config.fleet.rollout_workers > 1:
        raise ConfigError(
            f"fleet.rollout_workers is {config.fleet.rollout_workers}, but generators are in worker processes",
            "rollout.layout.dp says how many there are",
        )
    apart, ranks = config.fleet.placement == "disaggregated", config.training_ranks
    if apart and config.rollout.partial_tokens:
        raise ConfigError(
            f"rollout.partial_tokens is {config.rollout.partial_tokens}, but generators have processes of their own",
            "set it to 0: there a long sample goes on beside the training in any case, under the weights of then",
        )
    if not apart and config.fleet.publish != "in_flight":
        raise ConfigError(
            f"fleet.publish is {config.fleet.publish}, but colocated generators rest while weights are published",
            "leave it out, or set fleet.placement=disaggregated",
        )
    layout = generation_layout(config.rollout.layout, model, 0 if apart else ranks)
    if not apart and layout.world_size != ranks:
        raise LayoutError(
            f"rollout.layout: tp {layout.tp} x dp {layout.dp} = {layout.world_size} ranks, layout: {ranks}; colocated "
            "generators are the trainers' processes",
            "change rollout.layout.dp, or set fleet.placement=disaggregated",
        )
    return layout


def replica_of(layout: Layout) -> tuple[Layout, int]:
    """Ranks that must step together (they share a tensor group, or experts), and how many such replicas there are."""
    lanes = math.lcm(layout.tp, layout.ep * layout.etp) // layout.tp
    return replace(layout, dp=lanes), layout.dp // lanes


@dataclass(frozen=True)
class Visit:
    """What a leader reports of a visit.

    ended    rows that are done here, or (outcome.later) asked for again
    lost     rows whose bytes were out of reach: to be given back
    free     samples that could join in the next visit
    whole    none can join while one lasts: it ends with all of its rows
    """

    ended: Sequence[int]
    outcome: Outcome
    lost: Sequence[int]
    free: int
    whole: bool = False


class GenerationShard:
    """One rank's part of the generators."""

    def __init__(self, context: Context, spec: GenerationSpec) -> None:
        from docklands.data.tokenizer import load_tokenizer
        from docklands.envs import build_env_factory
        from docklands.rollout import RolloutWorker
        from docklands.rollout.engines import build_shard
        from docklands.rollout.live import LiveRollout
        from docklands.rollout.queue import LiveQueue, largest

        self.context = context
        self.mesh = mesh = Mesh(spec.layout, timeout_s=context.setup.wait_s)
        section = spec.rollout.model_copy(update={"record_routes": spec.routes is not None})
        dtype = getattr(torch, spec.dtype)
        shape = spec.shape()
        self.engine = build_shard(section, shape, mesh, dtype, context.device, spec.longest)
        self.reader = Reader(context, mesh.world, mesh.tp, mesh.coords["dp"], spec.layout.dp)
        tokenizer, env = load_tokenizer(spec.tokenizer), build_env_factory(spec.env)
        worker = RolloutWorker([self.engine], tokenizer, env, section, spec.seed, spec.routes)
        self.worker: RolloutWorker | None = worker if self.engine.is_leader else None
        self.queue = LiveQueue(largest(section.max_batch, spec.longest_prompt, worker.sampling, shape.vocab_size))
        lives = hasattr(self.engine, "visit")
        self._alive, self.rows = lives and worker.single_turn and spec.longest_prompt > 0, section.max_batch
        self.live = LiveRollout(worker, self.queue) if self.engine.is_leader else None
        self._stop, self._idle = threading.Event(), threading.Event()
        self._idle.set()

    def run_stage(self, stage: Stage, rows: Rows) -> Outcome | DocklandsError | None:
        """Read this replica's prompts, play, write the samples; on its leader the outcome, or what the put raised."""
        with self._busy():
            self.reader.begin(rows)
            mine = rows.select(self._mine(rows.group_ids))
            batch = self.reader.fetch(mine, stage.reads)

            def play() -> Result:
                if self._stop.is_set():
                    return self._turn_away(batch)
                value = stage.run(self.worker, batch)
                return as_result(asyncio.run(value) if inspect.iscoroutine(value) else value, batch, stage)

            result = self._together(play)
        if SYNC in self.context.objects:
            self.context.objects[SYNC].generated()
        if result is None:
            return None
        error = self.reader.put_alone(result.batch, mine)
        return error or Outcome(result.dropped, {**result.metrics, **self.reader.figures(rows)}, result.later)

    def visit(self, stage: Stage, rows: Rows) -> Visit | None:
        """Rows join those that this replica is at work on; what has ended meanwhile, on each leader. The others go on
        in the next visit (rollout/live.py). A stage with a function of its own, and episodes with an environment, are
        done with their rows when this returns.
        """
        if not self._alive or stage.run is not run_rollout:
            outcome = self.run_stage(stage, rows)
            agree(self.mesh.world, outcome if isinstance(outcome, DocklandsError) else None)
            if not isinstance(outcome, Outcome):
                return None
            mine = rows.row_ids[self._mine(rows.group_ids)].tolist()
            return Visit(mine, outcome, (), self.rows, whole=True)
        try:
            batch = self.reader.fetch(rows.select(self._mine(rows.group_ids)), stage.reads)
        except WarehouseLost:  # said on all ranks; its rows are made anew
            return Visit((), Outcome(), rows.row_ids.tolist(), self._free)
        with self._busy():
            result = self._go_on(batch)
        ended = [] if result is None else [*result.dropped, *result.later]
        written = [] if result is None or result.batch is None else result.batch.row_ids.tolist()
        try:
            self.reader.put(None if result is None else result.batch)
        except WarehouseLost:
            return Visit(ended, self._outcome(result), written, self._free)
        return None if result is None else Visit([*ended, *written], self._outcome(result), (), self._free)

    @property
    def _free(self) -> int:
        """Samples that could be generated beside those that are."""
        return self.rows - self.queue.unfinished

    def _outcome(self, result: Result | None) -> Outcome:
        return Outcome() if result is None else Outcome(result.dropped, result.metrics, result.later)

    def _go_on(self, batch: Batch) -> Result | None:
        """One visit of the engine; on leaders, what has ended. What one rank raises is raised on all."""
        requests: list[Request] = []
        error, turned_away = None, []
        try:
            if self.live is not None and self._stop.is_set():
                turned_away = list(self._turn_away(batch).later)
            elif self.live is not None:
                requests = self.live.begin(batch)
            self.engine.visit(self.queue, requests)
        except DocklandsError as failure:
            error = failure
        try:
            agree(self.mesh.world, error)
        except DocklandsError:
            (self.live or self.queue).reset()
            raise
        if self.live is None:
            self.queue.take_ended()
            return None
        result = self.live.ended()
        return replace(result, later=[*result.later, *turned_away])

    def _turn_away(self, batch: Batch) -> Result:
        """Rows after an abort. They are asked for again until the step under way is done: not too often."""
        time.sleep(AGAIN_S)
        return Result(later=batch.row_ids.tolist())

    def nudge(self) -> None:
        """More rows wait for this replica; called beside a visit."""
        self.queue.nudge()

    def rollout(self, batch: Batch, sampling: Sampling, visit: int) -> Result | None:
        """Rows that are not in the dock (evaluation): this replica's part of them, on its leader."""
        mine = batch.select(self._mine(batch[GROUP_ID].numpy()))
        aside = self.engine.set_aside()
        try:
            with self._busy():
                return self._together(lambda: self.worker.rollout(mine, sampling, visit))  # type: ignore[union-attr]
        finally:
            self.engine.take_up(aside)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """A rollout that an abort should end."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

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
        """End a running rollout soon, and begin none any more; called beside it.

        Said until it has been heard: an engine that has not begun yet would not hear it.
        """
        self._stop.set()
        end = time.monotonic() + ABORT_S
        while self.worker is not None and not self._idle.wait(0.05) and time.monotonic() < end:
            self.worker.abort()


class RemoteGenerator:
    """The driver's handle of the generators."""

    def __init__(self, workers: Workers, spec: GenerationSpec) -> None:
        """Make them on every generator rank. Raises what that raises."""
        self.workers, self.spec = workers, spec
        workers.make(ROLE, GenerationShard, spec)

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.workers.call(ROLE, method, *args)

    def run_stage(self, stage: Stage, rows: Rows) -> list[Outcome | DocklandsError | None]:
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
        self.workers.urgent(ROLE, "abort")

    def close(self) -> None:
        """End the processes."""
        self.workers.close()


@dataclass(frozen=True)
class SyncSpec:
    """How weights are published. temperature: by which trainers divide their logits; training: the trainers' layout,
    where generators are apart.
    """

    section: SyncSection
    generation: GenerationSpec
    temperature: float
    training: Layout | None = None


def train_state(context: Context) -> TrainState:
    """What this rank trains, as a publisher sees it."""
    from docklands.train.resident import TrainState

    engines = {name: found.engine for name, found in context.objects.items() if isinstance(found, EngineShard)}
    return TrainState(engines.pop("actor"), engines)


def make_publisher(context: Context, spec: SyncSpec) -> Publisher:
    """This rank's part in publishing to colocated generators; made after engines and generators."""
    from docklands.sync.publish import Publisher, Route

    setup, made = context.setup, spec.generation
    dtype = getattr(torch, made.dtype)
    route = Route(made.shape(), setup.layout, made.layout, dtype, temperature=spec.temperature)
    generator = context.objects[ROLE].engine
    return Publisher(
        route, spec.section, train_state(context), generator, device=context.device, timeout_s=setup.wait_s
    )


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
