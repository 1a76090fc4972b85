"""Train engines in worker processes: each rank holds its shard of every engine, and reads rows from the dock itself.

`EngineShard` is in the workers; `RemoteEngine` is the handle in the driver. Rows go there; outcomes and numbers come
back. Checkpoints: saving.py.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from docklands.config.lora import LoraSection
from docklands.config.schema import OptimSection, TrainSection
from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Learner, Stage
from docklands.errors import DocklandsError
from docklands.fleet.host import Context
from docklands.fleet.local_backend import as_result
from docklands.fleet.reader import reader_of, with_read
from docklands.models.adapters import with_lora
from docklands.train.lora import BasePolicy

if TYPE_CHECKING:
    from docklands.fleet.workers import Workers
    from docklands.train.sharded import ShardedEngine

SumCount = Mapping[str, tuple[float, float]]
SAVING = "checkpoint"
"""Name of the object that saves and loads; see saving.py."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of. `seed` None: weights from `path`; else random ones. `optim` None: frozen. `adapters`:
    which ones, and the seed of their first values; None: none. `swapped`: state leaves the device between updates.
    """

    path: Path
    section: TrainSection
    optim: OptimSection | None
    value: bool = False
    seed: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    adapters: tuple[LoraSection, int] | None = None
    swapped: bool = False


class EngineShard:
    """One rank's part of an engine, and of the stages and updates that it runs."""

    def __init__(self, context: Context, spec: EngineSpec | None) -> None:
        """spec None: the base of the actor that is here already, its adapters switched off."""
        self.context = context
        if spec is None:
            actor: EngineShard = context.objects["actor"]
            self.engine, self.reader, self.policy = actor.engine, actor.reader, BasePolicy(actor.engine)
            return
        from docklands.models import CausalLM, ValueModel, read_config
        from docklands.models.sharded import ShardedModel
        from docklands.train.sharded import ShardedEngine

        mesh = context.mesh
        assert mesh is not None, "a worker has joined its world before anything is made in it"
        dtype = getattr(torch, spec.section.dtype)
        kind = ValueModel if spec.value else CausalLM
        config = read_config(spec.path)
        if spec.adapters is not None:
            config = with_lora(config, spec.adapters[0])
        model = ShardedModel(kind, config, mesh, dtype=dtype, device=context.device)
        if spec.seed is None:
            model.load(spec.path)
            model.init_adapters(spec.adapters[1] if spec.adapters is not None else 0)
        else:
            model.init_weights(spec.seed)
        self.engine = ShardedEngine(model, spec.section, spec.optim, **dict(spec.settings))
        if self.engine.optimizer is not None and not spec.swapped:
            self.engine.optimizer.hold_once()
        self.policy: Any = self.engine
        self.reader = reader_of(context, mesh)

    def _present(self, update: bool = True) -> ShardedEngine:
        """The engine, its state on the device: while the device generated, it may have been elsewhere. update False: a
        forward pass needs the weights only; moments may still be on their way.
        """
        if "sync" in self.context.objects:
            self.context.objects["sync"].for_training(update)
        return self.engine

    def run_stage(self, stage: Stage, rows: Rows) -> Outcome | DocklandsError | None:
        """Read this replica's part, compute, write; the outcome, on one rank of the replica.

        An error of the dock is returned where no other rank has to hear of it: replicas whose forward passes do not
        meet go on by themselves, and nothing follows the put.
        """
        reader, mine = self.reader, self.reader.mine(rows)
        if getattr(self.engine, "replicas_meet", True):
            batch = reader.fetch(mine, stage.reads, lend=True)
        else:
            try:
                batch = reader.fetch_alone(mine, stage.reads, lend=True)
            except DocklandsError as error:
                self._present(update=False)  # which ranks may do together
                return error
        self._present(update=False)
        value = stage.run(self.policy, batch)
        result = as_result(asyncio.run(value) if inspect.iscoroutine(value) else value, batch, stage)
        error = reader.put_alone(result.batch, mine)
        if error is not None or not reader.leads:
            return error
        return Outcome(dict(result.dropped), {**result.metrics, **reader.figures(rows)})

    def update(self, rows: Rows, learner: Learner) -> SumCount:
        """One optimizer update on these rows; metrics, the same on every rank but for what a save took."""
        batch = self.reader.fetch(self.reader.mine(rows), learner.reads, lend=True)
        found = self._present().update(batch, learner)
        self.reader.check()
        saving = self.context.objects.get(SAVING)
        return {**found, **(saving.figures() if saving is not None else {}), **self.reader.figures(rows)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) one at a time; a stream of rank 0."""
        yield from self._present().weights()


class RemoteEngine:
    """The handle of an engine whose ranks are in worker processes."""

    def __init__(self, workers: Workers, role: str, spec: EngineSpec | None) -> None:
        """Make it on every training rank; spec None: see EngineShard. LayoutError, DataError, as making it raises."""
        self.workers, self.role = workers, role
        self.changed = False  # since somebody last said that it has not
        self._call("make", spec)

    def _call(self, method: str, *args: Any) -> list[Any]:
        ranks = self.workers.setup.trainer_ranks
        if method == "make":
            return self.workers.make(self.role, EngineShard, *args, ranks=ranks)
        return self.workers.call(self.role, method, *args, ranks=ranks)

    def run_stage(self, stage: Stage, rows: Rows) -> list[Outcome | DocklandsError | None]:
        """Run a stage on rows; the outcome of each replica."""
        return self._call("run_stage", stage, rows)

    def update(self, rows: Rows, learner: Learner) -> SumCount:
        """One optimizer update on rows."""
        self.changed = True
        found = self._call("update", rows, learner)
        return with_read(found[0], found)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) one at a time, as rank 0 gathers them."""
        stream = self.workers.stream(self.role, "weights", ranks=self.workers.setup.trainer_ranks)
        ahead = next(stream)
        for following in stream:  # the last is the list of results
            yield ahead
            ahead = following

    def close(self) -> None:
        """End the processes, those of the other engines with them: they are one group."""
        self.workers.close()
