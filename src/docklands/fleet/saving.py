"""Checkpoints of engines in worker processes: each rank writes its part, beside the training; none passes the driver.

`CheckpointShard` is on every training rank; it copies what it has to save, and a thread of the rank writes the copy.
At most one checkpoint is on its way. `RemoteCheckpoint` is the driver's handle: paths and numbers go through it.
The directory must be one that the driver and all training ranks see.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from docklands.errors import CheckpointError, NonFinite
from docklands.fleet.engines import SAVING, EngineShard, SumCount
from docklands.fleet.host import Context
from docklands.fleet.reader import agree
from docklands.models.hf_io import not_finite
from docklands.parallel import fsdp

if TYPE_CHECKING:
    from docklands.fleet.workers import Workers
    from docklands.train.checkpoint import Begun
    from docklands.train.sharded import ShardedEngine
    from docklands.train.sharded_checkpoint import Saving

log = logging.getLogger("docklands.fleet")


class CheckpointShard:
    """One rank's part in saving and loading."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._going: Future[float] | None = None
        self._untold: Future[float] | None = None
        self._held: tuple[Saving, NonFinite | None] | None = None

    def _engines(self, roles: Sequence[str]) -> dict[str, ShardedEngine]:
        """These engines, their state on the device."""
        if "sync" in self.context.objects:
            self.context.objects["sync"].for_training()
        shards: dict[str, EngineShard] = {role: self.context.objects[role] for role in roles}
        return {role: shard.engine for role, shard in shards.items()}

    def hold(self, step: int, roles: Sequence[str]) -> None:
        """Copy what the checkpoint of this step is to save; `begin` has it written."""
        from docklands.train.checkpoint import Begun
        from docklands.train.sharded_checkpoint import Saving

        mesh, engines = self.context.mesh, self._engines(roles)
        assert mesh is not None and self._going is None
        self._held = None  # before there are two
        begun = Begun(Path(f"step_{step:06d}"), 0, {})  # in which directory, the driver says later
        saving = Saving.of(begun, engines, mesh.background(), copy=True)
        self._held = saving, _fault(engines, f"in {begun.path.name}", "checkpoints from before are intact")

    def drop(self) -> None:
        """What is held will not be saved."""
        self._held = None

    def begin(self, begun: Begun, roles: Sequence[str]) -> None:
        """Let a thread write what is held of this step, or is copied now. NonFinite, on every rank, rather than save a
        NaN.
        """
        from docklands.train import checkpoint

        if self._held is None or self._held[0].begun.path.name != begun.path.name:
            self.hold(checkpoint.step_of(begun.path), roles)
        assert self._held is not None and self._going is None
        (held, fault), self._held = self._held, None
        self._agree(fault)
        saving = replace(held, begun=begun)

        def write() -> float:
            began = time.monotonic()
            saving.write()
            return time.monotonic() - began

        self._going = self._untold = self._thread.submit(write)

    def settle(self) -> None:
        """Wait for the one on its way. CheckpointError, on every rank, when it could not be written."""
        going, self._going = self._going, None
        if going is not None:
            going.result()

    def figures(self) -> SumCount:
        """What has become of the last one, once."""
        if self._untold is None or not self._untold.done():
            return {}
        done, self._untold = self._untold, None
        if (error := done.exception()) is not None:
            log.warning("a checkpoint was not written: %s", error)
            return {"checkpoint/failed": (1.0, 1.0)}
        return {"timing_s/checkpoint_write": (done.result(), 1.0)}

    def load(self, path: Path, roles: Sequence[str]) -> list[str]:
        """Take the state of these engines from a checkpoint of any layout; -> notes."""
        from docklands.train import checkpoint, sharded_checkpoint

        mesh, engines = self.context.mesh, self._engines(roles)
        assert mesh is not None
        sharded_checkpoint.load(path, engines, mesh.world and mesh.world.pg)
        self._agree(_fault(engines, f"of {path}", checkpoint.REMOVE))
        return [note for engine in engines.values() for note in engine.notes]

    def _agree(self, error: NonFinite | None) -> None:
        agree(None if self.context.mesh is None else self.context.mesh.world, error)


def _fault(engines: Mapping[str, ShardedEngine], what: str, hint: str) -> NonFinite | None:
    """Names the first weight of this rank that holds a NaN or an infinity."""
    for role, engine in engines.items():
        for name, weight in engine.masters().items():
            mine = fsdp.local(weight)
            if mine.numel() and (bad := not_finite(mine)):
                return NonFinite(f"{role} {what}: {bad} elements of weight {name} are not finite", hint)
    return None


class RemoteCheckpoint:
    """The driver's handle. going: the step of a checkpoint that is on its way."""

    def __init__(self, workers: Workers) -> None:
        """When all engines have been made."""
        self.workers = workers
        self.going: int | None = None
        self._ranks = workers.setup.trainer_ranks
        workers.make(SAVING, CheckpointShard, ranks=self._ranks)

    def hold(self, step: int, roles: Sequence[str]) -> None:
        """Copy the state of these engines on every rank, for the checkpoint of this step that will be begun."""
        self.workers.call(SAVING, "hold", step, tuple(roles), ranks=self._ranks)

    def drop(self) -> None:
        """Nothing is to be begun with what is held."""
        self.workers.call(SAVING, "drop", ranks=self._ranks)

    def begin(self, begun: Begun, roles: Sequence[str]) -> Path:
        """Have the state of these engines, as it is held or else as it is, written into a directory that has been
        begun.
        """
        from docklands.train import checkpoint

        try:
            self.workers.call(SAVING, "begin", begun, tuple(roles), ranks=self._ranks)
        except NonFinite:
            checkpoint.abandon(begun.path)
            raise
        self.going = checkpoint.step_of(begun.path)
        return begun.path

    def settle(self) -> None:
        """Wait for the one on its way. CheckpointError when it could not be written."""
        if self.going is None:
            return
        step, self.going = self.going, None
        try:
            self.workers.call(SAVING, "settle", ranks=self._ranks)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint of step {step} was not written: {error.message}", error.hint) from error

    def load(self, path: Path, roles: Sequence[str]) -> list[str]:
        """Take the state of these engines on every rank; -> settings that differ from the saved ones."""
        return self.workers.call(SAVING, "load", path.resolve(), tuple(roles), ranks=self._ranks)[0]
