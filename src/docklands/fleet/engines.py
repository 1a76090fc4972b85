"""Train engines in worker processes: each rank holds its shard of every engine, and reads rows from the dock itself.

`make_engine` runs in the workers; `RemoteEngine` is the handle in the driver. Rows go there; outcomes and numbers come
back. Weights and checkpoints still pass as whole tensors, from rank 0.
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

from docklands.config.schema import OptimSection, TrainSection
from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Learner, Stage
from docklands.errors import TrainError
from docklands.fleet.host import Context
from docklands.fleet.local_backend import as_result
from docklands.fleet.reader import reader_of

if TYPE_CHECKING:
    from docklands.fleet.workers import Workers
    from docklands.train.sharded import ShardedEngine

SumCount = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of. `seed` None: weights from `path`; else random ones. `optim` None: frozen."""

    path: Path
    section: TrainSection
    optim: OptimSection | None
    value: bool = False
    seed: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()


class EngineShard:
    """One rank's part of an engine, and of the stages and updates that it runs."""

    def __init__(self, context: Context, spec: EngineSpec) -> None:
        from docklands.models import CausalLM, ValueModel, read_config
        from docklands.models.sharded import ShardedModel
        from docklands.train.sharded import ShardedEngine

        mesh = context.mesh
        if mesh is None:
            raise TrainError(f"rank {context.rank} does not train", f"ranks {context.trainers} do")
        dtype = getattr(torch, spec.section.dtype)
        kind = ValueModel if spec.value else CausalLM
        model = ShardedModel(kind, read_config(spec.path), mesh, dtype=dtype, device=context.device)
        if spec.seed is None:
            model.load(spec.path)
        else:
            model.init_weights(spec.seed)
        self.engine = ShardedEngine(model, spec.section, spec.optim, **dict(spec.settings))
        self.reader = reader_of(context, mesh)
        self.context = context

    def _present(self) -> ShardedEngine:
        """The engine, its state on the device: while the device generated, it may have been elsewhere."""
        if "sync" in self.context.objects:
            self.context.objects["sync"].for_training()
        return self.engine

    def run_stage(self, stage: Stage, rows: Rows) -> Outcome | None:
        """Read this replica's part, compute, write; the outcome, on one rank of the replica."""
        batch = self.reader.fetch(self.reader.mine(rows), stage.reads)
        value = stage.run(self._present(), batch)
        result = as_result(asyncio.run(value) if inspect.iscoroutine(value) else value, batch, stage)
        self.reader.put(result.batch)
        return Outcome(dict(result.dropped), dict(result.metrics)) if self.reader.leads else None

    def update(self, rows: Rows, learner: Learner) -> SumCount:
        """One optimizer update on these rows; metrics, the same on every rank."""
        return self._present().update(self.reader.fetch(self.reader.mine(rows), learner.reads), learner)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) one at a time; a stream of rank 0."""
        yield from self._present().weights()

    def state_dict(self) -> dict[str, Any]:
        """See ShardedEngine: whole, on rank 0."""
        return self._present().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """See ShardedEngine; -> notes."""
        self._present().load_state_dict(state)
        return self.engine.notes


class RemoteEngine:
    """The handle of an engine whose ranks are in worker processes."""

    def __init__(self, workers: Workers, role: str, spec: EngineSpec) -> None:
        """Make it on every training rank. Raises what making it raises: LayoutError, DataError."""
        self.workers, self.role = workers, role
        self.version = 0
        self.notes: list[str] = []
        self._call("make", spec)

    def _call(self, method: str, *args: Any) -> list[Any]:
        ranks = self.workers.setup.trainer_ranks
        if method == "make":
            return self.workers.make(self.role, EngineShard, *args, ranks=ranks)
        return self.workers.call(self.role, method, *args, ranks=ranks)

    def run_stage(self, stage: Stage, rows: Rows) -> list[Outcome | None]:
        """Run a stage on rows; the outcome of each replica."""
        return self._call("run_stage", stage, rows)

    def update(self, rows: Rows, learner: Learner) -> SumCount:
        """One optimizer update on rows."""
        return self._call("update", rows, learner)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) one at a time, as rank 0 gathers them."""
        stream = self.workers.stream(self.role, "weights", ranks=self.workers.setup.trainer_ranks)
        ahead = next(stream)
        for following in stream:  # the last is the list of results
            yield ahead
            ahead = following

    def state_dict(self) -> dict[str, Any]:
        """As TrainEngine's: whole tensors, so a run may resume in another layout."""
        return {**self._call("state_dict")[0], "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See TrainEngine."""
        self.notes = self._call("load_state_dict", state)[0]
        self.version = int(state.get("version", 0))

    def close(self) -> None:
        """End the processes, those of the other engines with them: they are one group."""
        self.workers.close()
