"""Train engines in processes of their own: one per rank of the layout, on this machine, each holding its part of every
engine of the run (actor, critic, reference).

The handle that a role gets has the verbs of a train engine. A batch is split over replicas here and goes to the ranks
by shared memory; what comes back is the same on all ranks of a replica, so one of them is listened to.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.config.schema import OptimSection, TrainSection
from docklands.core.batch import Batch, Jagged
from docklands.core.fields import LOSS_MASK
from docklands.core.stage import Learner
from docklands.errors import DocklandsError, WorkerLost
from docklands.parallel.layout import Layout
from docklands.train.share import rows_of_replicas

START_S = 300.0
GRACE_S = 5.0
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "docklands.train.sharded"]


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of. `seed` None: weights from `path`; else random ones. `optim` None: frozen."""

    path: Path
    section: TrainSection
    optim: OptimSection | None
    value: bool = False
    seed: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Setup:
    """What a process needs to join: its device type, threads, the deadline of collectives, where its log goes."""

    layout: Layout
    device: str = "cpu"
    threads: int = 1
    wait_s: float = 1800.0
    log: Path | None = None


class Trainers:
    """The processes. They start with the first engine; a rank that is lost ends all of them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: Path | None = None
        self._lost = ""

    def engine(self, role: str, spec: EngineSpec) -> RemoteEngine:
        """Make an engine on every rank. Raises what making it raises: LayoutError, DataError."""
        self.call(role, "make", spec)
        return RemoteEngine(self, role)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process, _ in self._workers]

    # --- processes --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="docklands-trainers-"))
        for rank in range(self.setup.layout.world_size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, self.setup, str(self._folder / "store"))
            process = context.Process(target=serve, args=args, daemon=True, name=f"trainer-{rank}")
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        list(self._answers("start", "", START_S))

    def call(self, role: str, method: str, *args: Any, each: list[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of the engine on every rank; -> results by rank. `each`: arguments by rank.

        An error that every rank raises is raised here. WorkerLost when a rank dies, hangs, or fails alone.
        """
        return list(self.stream(role, method, *args, each=each))[-1]

    def stream(self, role: str, method: str, *args: Any, each: list[tuple[Any, ...]] | None = None) -> Iterator[Any]:
        """As `call`; first what rank 0 yields on the way, then the list of results."""
        if self._lost:
            raise WorkerLost(self._lost, "start the run again; it resumes from the last checkpoint")
        if not self._workers:
            self._start()
        try:
            for rank, (_, pipe) in enumerate(self._workers):
                pipe.send((role, method, args if each is None else each[rank]))
        except OSError:
            pass  # a rank is gone: waiting for answers says which
        yield from self._answers(method, role, self.setup.wait_s)

    def _answers(self, method: str, role: str, wait_s: float) -> Iterator[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        end = time.monotonic() + wait_s
        while len(answers) + len(errors) < len(self._workers):
            waiting = {w[1]: r for r, w in enumerate(self._workers) if r not in answers and r not in errors}
            left = min(end, time.monotonic() + GRACE_S if errors else end) - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                if errors:
                    break
                self._lose(
                    f"trainers {sorted(waiting.values())} did not answer within {wait_s:.0f} s to {role} {method}"
                )
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    process = self._workers[rank][0]
                    process.join(GRACE_S)
                    self._lose(
                        f"trainer {rank} (pid {process.pid}) died with exit code {process.exitcode} during "
                        f"{role} {method}{self._tail(rank)}"
                    )
                if kind == "item":
                    yield value
                elif kind == "done":
                    answers[rank] = value
                else:
                    errors[rank] = value
        if errors:
            rank, error = min(errors.items())
            if answers or len(errors) < len(self._workers) or not isinstance(error, DocklandsError):
                self._lose(f"trainer {rank} failed during {role} {method}: {error}{self._tail(rank)}")
            raise error
        yield [answers[rank] for rank in range(len(self._workers))]

    def _lose(self, message: str) -> None:
        self._lost = message
        self.close()
        raise WorkerLost(message, "start the run again; it resumes from the last checkpoint")

    def _tail(self, rank: int) -> str:
        """The last lines of a rank's log."""
        if self.setup.log is None:
            return ""
        with contextlib.suppress(OSError):
            lines = log_of(self.setup.log, rank).read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n" + "\n".join(lines[-8:]) if lines else ""
        return ""

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.join(0.2)
            process.kill()
            process.join(GRACE_S)
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class RemoteEngine:
    """A train engine whose ranks are elsewhere: the same verbs, on whole batches and whole tensors."""

    def __init__(self, trainers: Trainers, role: str) -> None:
        self.trainers, self.role = trainers, role
        self.version = 0
        self.notes: list[str] = []
        layout = trainers.setup.layout
        self._replica = [c["dp"] * layout.fsdp + c["fsdp"] for c in map(layout.coords, range(layout.world_size))]

    @property
    def layout(self) -> Layout:
        return self.trainers.setup.layout

    def _split(self, batch: Batch) -> tuple[list[np.ndarray], list[Batch]]:
        """(rows of each replica, the batch of each rank)."""
        rows = rows_of_replicas(batch, self.layout.data)
        batches = [batch.select(index) for index in rows]
        return rows, [batches[replica] for replica in self._replica]

    def logprobs(self, batch: Batch) -> Jagged:
        """See TrainEngine."""
        return self._per_token("logprobs", batch)

    def values(self, batch: Batch) -> Jagged:
        """See TrainEngine."""
        return self._per_token("values", batch)

    def _per_token(self, method: str, batch: Batch) -> Jagged:
        rows, batches = self._split(batch)
        found = self.trainers.call(self.role, method, each=[(each,) for each in batches])
        whole = Jagged(torch.zeros(batch.num_tokens), batch[LOSS_MASK].offsets)
        for replica, index in enumerate(rows):
            part = found[self._replica.index(replica)]
            for at, row in enumerate(index):
                whole[int(row)].copy_(part[at])
        return whole

    def update(self, batch: Batch, learner: Learner) -> dict[str, tuple[float, float]]:
        """See TrainEngine."""
        _, batches = self._split(batch)
        return self.trainers.call(self.role, "update", each=[(each, learner) for each in batches])[0]

    def forward_backward(self, batch: Batch, learner: Learner) -> dict[str, tuple[float, float]]:
        """See TrainEngine."""
        _, batches = self._split(batch)
        return self.trainers.call(self.role, "forward_backward", each=[(each, learner) for each in batches])[0]

    def optim_step(self) -> dict[str, tuple[float, float]]:
        """See TrainEngine."""
        return self.trainers.call(self.role, "optim_step")[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) one at a time, as rank 0 gathers them."""
        stream = self.trainers.stream(self.role, "stream_weights")
        ahead = next(stream)
        for following in stream:  # the last is the list of results
            yield ahead
            ahead = following

    def state_dict(self) -> dict[str, Any]:
        """As TrainEngine's: whole tensors, so a run may resume in another layout."""
        return {**self.trainers.call(self.role, "state_dict")[0], "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See TrainEngine."""
        self.notes = self.trainers.call(self.role, "take_state", state)[0]
        self.version = int(state.get("version", 0))

    def close(self) -> None:
        """End the processes, those of the other engines with them: they are one group."""
        self.trainers.close()


# --- in the processes ---------------------------------------------------------------------------------------------


def log_of(folder: Path, rank: int) -> Path:
    """Where a rank writes what it prints."""
    return folder / f"trainer.{rank}.log"


def serve(pipe: Connection, rank: int, setup: Setup, store: str) -> None:
    """Body of a process: join the group, then answer calls until the pipe closes."""
    import torch.distributed as dist

    if setup.log is not None:
        setup.log.mkdir(parents=True, exist_ok=True)
        with open(log_of(setup.log, rank), "a", encoding="utf-8", buffering=1) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    torch.set_num_threads(setup.threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt means
    try:
        host = Host(rank, setup, store)
        pipe.send(("done", None))
    except BaseException as error:
        pipe.send(("error", portable(error)))
        return
    while True:
        try:
            role, method, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            found = host.answer(role, method, args, lambda item: pipe.send(("item", item)))
            pipe.send(("done", found))
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            pipe.send(("error", portable(error)))
    dist.destroy_process_group()


def portable(error: BaseException) -> BaseException:
    """An error that another process can read."""
    return error if isinstance(error, DocklandsError) else RuntimeError(f"{type(error).__name__}: {error}")


class Host:
    """One rank: its mesh, and its part of each engine by role."""

    def __init__(self, rank: int, setup: Setup, store: str) -> None:
        import torch.distributed as dist

        from docklands import device as devices
        from docklands.parallel.mesh import Mesh

        self.device = str(devices.choose(setup.device, rank))
        if setup.device != "cpu":
            getattr(torch, setup.device).set_device(self.device)
        world, wait = setup.layout.world_size, timedelta(seconds=setup.wait_s)
        dist.init_process_group(
            BACKENDS[setup.device], init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait
        )
        self.mesh = Mesh(setup.layout, timeout_s=setup.wait_s)
        self.engines: dict[str, Any] = {}

    def answer(self, role: str, method: str, args: tuple[Any, ...], say: Callable[[Any], None]) -> Any:
        """Run one call; -> what goes back."""
        if method == "make":
            self.engines[role] = self.make(*args)
            return None
        engine = self.engines[role]
        if method == "stream_weights":
            for item in engine.weights():
                if self.mesh.rank == 0:
                    say(item)
            return None
        if method == "take_state":
            engine.load_state_dict(*args)
            return engine.notes
        return getattr(engine, method)(*args)

    def make(self, spec: EngineSpec) -> Any:
        """This rank's part of an engine."""
        from docklands.models import CausalLM, ValueModel, read_config
        from docklands.models.sharded import ShardedModel
        from docklands.train.sharded import ShardedEngine

        dtype = getattr(torch, spec.section.dtype)
        kind = ValueModel if spec.value else CausalLM
        model = ShardedModel(kind, read_config(spec.path), self.mesh, dtype=dtype, device=self.device)
        if spec.seed is None:
            model.load(spec.path)
        else:
            model.init_weights(spec.seed)
        return ShardedEngine(model, spec.section, spec.optim, **dict(spec.settings))
