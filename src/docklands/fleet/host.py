"""A worker process: objects by name, each rank holding its part, called on all ranks (or some) at a time.

How a role lives in worker processes:

    factory   a module-level function (context, *args) -> object. `Workers.make(name, factory, *args, ranks=...)` calls
              it on every rank (or those given), at the same time: it may use collectives and read `context.objects`,
              which holds what was made here before ("actor", "reference", "rollout", ...)
    calls     `Workers.call(name, method, *args, ranks=...)` calls a method on these ranks at the same time, on the one
              thread of each that computes; results by rank. Arguments and results are pickled: rows, numbers and
              names, no samples. A method that is a generator is a stream: rank 0's items go to the driver
    stages    an object that serves a role has run_stage(stage, rows) -> Outcome or None and, if it learns,
              update(rows, learner) -> metrics. All ranks of the role get all rows, none of them a tensor; each takes
              its part (see reader.Reader, or `context.dock.fetch` and `put`), computes, and puts. Outcomes of all
              ranks are merged, so each row and each figure must be in one of them
    errors    a DocklandsError that all called ranks raise alike is raised in the driver, and the workers go on: agree
              on it before anybody enters a collective (reader.agree). One that run_stage returns in place of an outcome
              is raised in the driver, too: for an error that the other ranks need not hear of. Anything else ends all
              workers (WorkerLost)
    subsets   calls on disjoint ranks run at the same time; others wait for each other
    worlds    trainers are one torch.distributed world; colocated generators are the same processes. Generators apart
              are worlds of their own, one for each independent replica, so that one can die or join while the others
              go on; trainers and generators meet in a group for publishing (publishing.py)
    groups    `context.mesh` is the mesh of `Setup.layout`, which is the whole world. Another mesh over all ranks:
              Mesh(layout)
    urgent    `Workers.urgent(name, method)`: beside a call in progress, on another thread, without an answer ("abort")

    pulse     a thread tells the driver several times within `Setup.heartbeat_s` that this process runs, and what
              (pulse.py)

Setup of all this: fleet/workers.py on the driver's side, local_carrier.py and ray_carrier.py for where processes run.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from docklands import device as devices
from docklands.core.graph import Graph
from docklands.dock.look import DockAddress
from docklands.dock.rules.options import DockOptions
from docklands.errors import DockError, DocklandsError
from docklands.fleet.dock_client import WorkerDock
from docklands.fleet.pulse import send_beats
from docklands.obs.spans import SpanRecorder, recording, span
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")

Message = tuple[str, str, tuple[Any, ...]]
"""(object's name, method, arguments); the name "" is the host itself."""
Answer = tuple[str, Any, int]
"""("item", "done" or "error"; value; resident bytes of the process)."""


@dataclass(frozen=True)
class Setup:
    """What the worker processes of one torch.distributed world have in common.

    first        number of its rank 0 among all workers of the run: names of logs, devices of this machine
    threads      of each process
    wait_s       deadline of every collective and every call
    log, spans   folder for worker.<number>.log, file for spans; None: neither
    heartbeat_s  seconds without a sign of life after which a process counts as hanging; 0: it may be silent
    pulse        port of the driver, and the word that signs of life begin with
    """

    layout: Layout
    first: int = 0
    device: str = "cpu"
    threads: int = 1
    wait_s: float = 1800.0
    log: Path | None = None
    spans: Path | None = None
    heartbeat_s: float = 0.0
    pulse: tuple[int, str] | None = None

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def trainer_ranks(self) -> range:
        """Of the world that trains: all of them."""
        return range(self.world_size)


@dataclass(frozen=True)
class Seat:
    """Where a worker sits. address: of its node, as other nodes reach it; device_index: among the devices it sees;
    home: address of the driver's node.
    """

    rank: int
    device_index: int = 0
    address: str = "127.0.0.1"
    home: str = "127.0.0.1"


@dataclass
class Context:
    """What an object in a worker knows of its place. See the module."""

    setup: Setup
    rank: int
    device: str
    mesh: Mesh | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    client: WorkerDock | None = None

    @property
    def dock(self) -> WorkerDock:
        """A blocking client of the run's dock. DockError before the driver has opened the dock."""
        if self.client is None:
            raise DockError("this worker has not been told where the dock is", "the driver opens the dock first")
        return self.client


class Host:
    """One worker process. `answer` on the thread that computes, `urgent` on any other."""

    def __init__(self, setup: Setup, seat: Seat) -> None:
        self.setup, self.seat = setup, seat
        self.context = Context(setup, seat.rank, setup.device)
        self._store: TCPStore | None = None
        self._open = ExitStack()
        self._doing = "its start"
        self.number = setup.first + seat.rank
        if setup.log is not None:
            redirect(log_of(setup.log, self.number))
        if setup.pulse is not None:
            send_beats(seat.home, setup.pulse, setup.heartbeat_s, lambda: f"{seat.rank} {self._doing}")
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)

    # --- calls ------------------------------------------------------------------------------------------------

    def answer(self, message: Message) -> Iterator[Answer]:
        """Run one call: the answers that go back, of which the last is "done" or "error"."""
        name, method, args = message
        try:
            target = self if not name else self.context.objects[name]
            self._doing = f"{name} {method}".strip()
            with span(f"{name or 'host'}/{method}"):
                found = getattr(target, method)(*args)
            if inspect.isgenerator(found):
                for item in found:
                    if self.seat.rank == 0:
                        yield "item", item, devices.rss()
                found = None
            self._doing = f"nothing after {self._doing}"
            yield "done", found, devices.rss()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            yield "error", portable(error), devices.rss()

    def urgent(self, message: Message) -> None:
        """A call beside the one in progress; what it raises is logged only."""
        name, method, args = message
        try:
            getattr(self if not name else self.context.objects[name], method)(*args)
        except BaseException:
            traceback.print_exc(file=sys.stderr)

    # --- what the driver asks of the host itself --------------------------------------------------------------

    def open_store(self) -> int:
        """Rank 0: the store at which all ranks meet; its port."""
        wait = timedelta(seconds=self.setup.wait_s)
        self._store = TCPStore(self.seat.address, 0, is_master=True, timeout=wait, wait_for_workers=False)
        return self._store.port

    def join(self, address: str, port: int) -> None:
        """Choose the device and join the process group and the meshes."""
        setup = self.setup
        torch.set_num_threads(setup.threads)  # of this thread: OpenMP counts by thread
        self.context.device = str(devices.choose(setup.device, self.seat.device_index))
        if setup.device != "cpu":
            getattr(torch, setup.device).set_device(self.context.device)
        interface = interface_of(self.seat.address)
        for name in INTERFACES if interface else ():
            os.environ.setdefault(name, interface)
        if setup.spans is not None:
            self._open.enter_context(recording(SpanRecorder(setup.spans, "worker", self.number)))
        wait = timedelta(seconds=setup.wait_s)
        store = self._store or TCPStore(address, port, is_master=False, timeout=wait, wait_for_workers=False)
        dist.init_process_group(
            BACKENDS[setup.device], store=store, rank=self.seat.rank, world_size=setup.world_size, timeout=wait
        )
        self.context.mesh = Mesh(setup.layout, timeout_s=setup.wait_s)

    def make(self, name: str, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Make this rank's part of an object; one of that name is replaced."""
        self.context.objects[name] = factory(self.context, *args)

    def connect(self, graph: Graph, options: DockOptions, address: DockAddress) -> None:
        """Become a client of the dock; of another one than before, if there was one."""
        if self.context.client is not None:
            self.context.client.close()
        self.context.client = WorkerDock(graph, options, address, f"worker {self.number}")

    def stacks(self) -> None:
        """Stacks of all threads into the log; works also while this process hangs in native code."""
        os.kill(os.getpid(), signal.SIGUSR1)


def portable(error: BaseException) -> BaseException:
    """An error that another process can read."""
    return error if isinstance(error, DocklandsError) else RuntimeError(f"{type(error).__name__}: {error}")


def log_of(folder: Path, number: int) -> Path:
    """Where a worker writes what it prints."""
    return folder / f"worker.{number}.log"


def redirect(path: Path) -> None:
    """Whatever this process prints, its native code included, goes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def interface_of(address: str) -> str:
    """Name of the network interface that has this address; empty: none here has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return ""


def end_soon(seconds: float) -> None:
    """The driver has gone: end, by force when a call is still under way after some seconds."""
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
