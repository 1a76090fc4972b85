"""Worker processes placed by Ray, on one node or many: an actor for each rank, a placement group for each world.

A running Ray is joined (fleet.ray_address, RAY_ADDRESS, or the one of this machine); else one is started here and ends
with the run. Actors belong to the driver: when it dies, however it dies, Ray ends them. Ranks follow the nodes, so that
neighbouring ranks (tensor groups) share a node. With ray_programs.py the only place that imports Ray.

All calls of actors are submitted on one thread of the process. Ray names a call by its thread's place in the
program and a count; with several submitting threads two calls got one name, and Ray ended the driver (2.60: "Check
failed: inserted.second" in its task manager).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from docklands.errors import ConfigError, WorkerLost
from docklands.fleet.host import Host, Message, Seat, Setup
from docklands.fleet.reaper import descendants, process_of, reaper
from docklands.fleet.warehouses import Reach
from docklands.fleet.workers import ENDED

RESOURCES = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
"""What Ray calls the devices of a kind."""
STOP_S, KNOCK_S, LOOK_S = 10.0, 10.0, 1.0
"""Seconds that an actor gets to go, and a Ray to be heard of; and between two looks whether a start is given up."""
PRIVATE = "docklands:private"
"""A resource of a Ray that a run has started for itself."""

Place = tuple[str, str, int, float]
"""Of an actor: id of its node, the node's address, process id, when the process began (seconds since 1970)."""


class Actor:
    """A worker process, as Ray runs it."""

    def place(self) -> Place:
        """See Place."""
        context = ray.get_runtime_context()
        return context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), psutil.Process().create_time()

    def begin(self, setup: Setup, seat: Seat) -> None:
        """Take a seat among the ranks."""
        self.host = Host(setup, seat)

    def answer(self, message: Message) -> Any:
        """See Host.answer."""
        yield from self.host.answer(message)

    @ray.method(concurrency_group="urgent")
    def urgent(self, message: Message) -> None:
        """See Host.urgent."""
        self.host.urgent(message)


Submit = Callable[..., Any]
"""(function, *arguments) -> what it gives, on the one thread that submits calls."""


class RayLine:
    """An actor. process: where it runs on this machine, and its number here is its own."""

    def __init__(self, actor: Any, place: Place, submit: Submit) -> None:
        _, self.address, self.pid, began = place
        self.actor, self.submit = actor, submit
        near = self.address == ray.util.get_node_ip_address()
        self.process = process_of(self.pid, began) if near else None
        self.answers: Any = None
        self._fate = "died"

    @property
    def where(self) -> str:
        return f"pid {self.pid} on {self.address}"

    def send(self, message: Message) -> None:
        self.answers = self.submit(self.actor.answer.options(num_returns="streaming").remote, message)

    def receive(self) -> Any:
        try:
            found = ray.get(next(self.answers))
        except (RayError, StopIteration) as error:
            self._fate = f"died: {' '.join(str(error).split())}"
            raise EOFError from None
        if found[0] != "item":
            self.answers = None
        return found

    def urgent(self, message: Message) -> None:
        with contextlib.suppress(RayError, WorkerLost):
            self.submit(self.actor.urgent.remote, message)

    def fate(self) -> str:
        return self._fate

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(psutil.Error):  # one that is stopped would not hear Ray; psutil spares a stranger
                self.process.kill()
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor)

    def leave(self) -> None:
        self.kill()

    def close(self) -> None:
        """Until the process has gone, so that its device is free."""
        with contextlib.suppress(RayError):
            ray.wait([self.submit(self.actor.place.remote)], timeout=STOP_S)


class Session:
    """This process's part in Ray, shared by its carriers: joined by the first, left by the last.

    nodes  address -> Ray's name of the node where a worker was placed last: one that came back has another name
    seen   resources that there have been: one that is away now may come back
    """

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.seen: set[str] = set()
        self._lock = threading.Lock()
        self._carriers: set[int] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._joined = ""
        self._reaper: subprocess.Popen[bytes] | None = None
        self._reaped: list[psutil.Process] = []
        self._sockets: list[str] = []

    def enter(self, carrier: object, address: str, workers: int) -> None:
        """Join a Ray, or start one. Raises what `join` raises."""
        with self._lock:
            if not self._carriers:
                before = descendants()
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-calls")
                try:
                    self._joined, self._sockets = self._thread.submit(join, address, workers).result()
                except WorkerLost:  # a Ray that has half started
                    for process in (process for process in descendants() if process not in before):
                        with contextlib.suppress(psutil.Error):
                            process.kill()
                    raise
                self._reaped = [process for process in descendants() if process not in before]
                if self._joined == "started":
                    self._reaper = reaper(self._reaped, self._sockets)
            self._carriers.add(id(carrier))

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function gives, on the one thread that submits calls."""
        thread = self._thread
        try:
            if thread is not None:
                return thread.submit(function, *arguments).result()
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
        raise WorkerLost("the workers have been ended")

    def watch(self, processes: list[psutil.Process]) -> None:
        """More processes of a Ray that was started here, which must not outlive this one."""
        with self._lock:
            if self._reaper is not None:
                self._reaper.kill()
                self._reaper.communicate()
                self._reaped = [process for process in [*self._reaped, *processes] if process.is_running()]
                self._reaper = reaper(self._reaped, self._sockets)

    def leave(self, carrier: object) -> None:
        """The last one ends the Ray that was started here."""
        with self._lock:
            if id(carrier) not in self._carriers:
                return
            self._carriers.discard(id(carrier))
            if self._carriers:
                return
            if self._joined:
                ray.shutdown()
            if self._joined == "started":
                for path in self._sockets:
                    Path(path).unlink(missing_ok=True)
            self._joined = ""
            if self._thread is not None:
                self._thread.shutdown(wait=False)
                self._thread = None
            if self._reaper is not None:
                self._reaper.kill()
                self._reaper.communicate()
                self._reaper = None


SESSION = Session()


class RayCarrier:
    """Places the actors of one world, in a placement group of their own.

    address   of a running Ray; empty: see the module
    resource  of which every worker takes one; empty: GPU or NPU on those devices, else CPU
    strategy  of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD
    workers   of the run in all: a Ray that is started here has so many processors; 0: those of this world
    """

    def __init__(self, address: str = "", resource: str = "", strategy: str = "PACK", workers: int = 0) -> None:
        self.address, self.resource, self.strategy, self.workers = address, resource, strategy, workers
        self.home = "127.0.0.1"
        self._group: Any = None
        self._given_up = threading.Event()

    @property
    def reach(self) -> Callable[[], Reach]:
        """See Carrier."""
        from docklands.fleet.ray_programs import RayReach  # which needs this process's part in Ray

        return partial(RayReach, self.address)

    def start(self, setup: Setup, deadline_s: float) -> list[Any]:
        """See Carrier."""
        SESSION.enter(self, self.address, max(self.workers, setup.world_size))
        self.home = ray.util.get_node_ip_address()
        resource = self.resource or RESOURCES[setup.device]
        have = ray.cluster_resources()
        if resource not in have and resource not in SESSION.seen:
            raise ConfigError(
                f"fleet: no node of this Ray has a resource {resource!r}",
                f"it has {', '.join(kinds(have))}; see fleet.ray_resource",
            )
        SESSION.seen.update(have)
        number = setup.world_size
        self._group = SESSION.submit(partial(placement_group, [{resource: 1}] * number, strategy=self.strategy))
        if not self._within(self._group.wait, deadline_s):
            raise ConfigError(
                f"fleet: Ray has no room for {number} workers with one {resource} each within {deadline_s:.0f} s "
                f"(the cluster has {have.get(resource, 0):g} {resource})",
                "add nodes with `ray start`, wait for other jobs to end, or use a smaller layout",
            )
        before = descendants()
        actors, asked = SESSION.submit(self._actors, resource, number)
        self._within(lambda wait_s: not ray.wait(asked, num_returns=number, timeout=wait_s)[1], deadline_s)
        try:
            places = ray.get(asked, timeout=KNOCK_S)
        except (RayError, GetTimeoutError) as error:
            raise WorkerLost(
                f"a worker did not start on Ray: {' '.join(str(error).split())}", "see Ray's logs"
            ) from None
        seated = sorted(zip(places, actors), key=lambda pair: (pair[0][1], pair[0][0]))  # stable: nodes together
        SESSION.watch([process for process in descendants() if process not in before])
        return SESSION.submit(self._seat, setup, seated)

    def _within(self, done: Callable[[float], bool], deadline_s: float) -> bool:
        """Whether that, which asks Ray and waits for a moment, is so within the deadline. WorkerLost when the start is
        given up, or Ray is gone.
        """
        end = time.monotonic() + deadline_s
        while not found(done):
            if self._given_up.is_set():
                raise WorkerLost(ENDED)
            if time.monotonic() > end:
                return False
        return True

    def give_up(self) -> None:
        """See Carrier."""
        self._given_up.set()

    def _actors(self, resource: str, number: int) -> tuple[list[Any], list[Any]]:
        """(actors, what they will say of their places)."""
        remote: Any = ray.remote  # its stubs know no concurrency groups
        kind = remote(concurrency_groups={"urgent": 1})(Actor)
        actors = [
            kind.options(
                **taking(resource),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(number)
        ]
        return actors, [actor.place.remote() for actor in actors]

    def _seat(self, setup: Setup, seated: Sequence[tuple[Place, Any]]) -> list[Any]:
        lines = []
        for rank, (place, actor) in enumerate(seated):
            node, address = place[:2]
            SESSION.nodes[address] = node
            actor.begin.remote(setup, Seat(rank, 0, address, self.home))  # it sees only the device that it was given
            lines.append(RayLine(actor, place, SESSION.submit))
        return lines

    def wait(self, lines: Sequence[RayLine], timeout_s: float) -> list[Any]:
        """See Carrier."""
        asked = [line for line in lines if line.answers is not None]
        ready, _ = ray.wait([line.answers for line in asked], num_returns=1, timeout=timeout_s)
        return [line for line in asked if any(line.answers is found for found in ready)]

    def close(self) -> None:
        """Give the resources back; the last of a process ends the Ray that was started here."""
        if self._group is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        self._group = None
        SESSION.leave(self)


def found(done: Callable[[float], bool]) -> bool:
    """What Ray says within a moment. WorkerLost when it cannot."""
    try:
        return done(LOOK_S)
    except Exception as error:  # Ray has no kind of its own for a group that went with its cluster
        said = " ".join(str(error).split())
        raise WorkerLost(f"Ray was lost while workers started: {said}", "has its cluster ended?") from None


def private() -> bool:
    """Whether this Ray is another run's own, which has as much room as that needs and ends with it, or is ending."""
    try:
        return PRIVATE in ray.cluster_resources()
    except Exception:  # Ray has no kind of its own for a cluster that goes
        return True


def kinds(have: Mapping[str, float]) -> list[str]:
    """Resources that a worker could take one of."""
    return sorted(name for name in have if ":" not in name and "memory" not in name) or ["none"]


def taking(resource: str) -> dict[str, Any]:
    """Ray's options of an actor that takes one of a resource."""
    if resource == "CPU":
        return {"num_cpus": 1}
    return {"num_cpus": 0, **({"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}})}


def join(address: str, workers: int) -> tuple[str, list[str]]:
    """ "joined" a running Ray, or "started" one on this machine; "" when this process was part of one before. And the
    socket files of one that was started: Ray itself leaves one behind for each session.

    ConfigError when none answers at an address that was asked for; the address "local" starts one in any case.
    WorkerLost when one cannot be started.
    """
    if ray.is_initialized():
        return "", []
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": "docklands", "log_to_driver": False, "logging_level": logging.ERROR}
    wanted = address or os.environ.get("RAY_ADDRESS", "")
    if wanted != "local":
        if ":" in wanted and "//" not in wanted:
            knock(wanted)
        try:
            ray.init(address=wanted or "auto", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if wanted:
                raise nobody(wanted, error) from None
        else:
            if wanted or not private():
                return "joined", []
            ray.shutdown()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default runs workers at the lowest priority
    options |= {"num_cpus": max(os.cpu_count() or 1, workers), "include_dashboard": False, "resources": {PRIVATE: 1}}
    try:
        made: Any = ray.init(address="local", **options)  # its stubs say less than there is
    except Exception as error:  # Ray has no kind of its own for this: a busy machine, a full disk
        ray.shutdown()
        said = " ".join(str(error).split())
        raise WorkerLost(f"no Ray could be started here: {said}", "its logs are under /tmp/ray") from error
    known = (made.address_info.get(key) for key in ("object_store_address", "raylet_socket_name"))
    return "started", [path for path in known if path and os.path.isabs(path)]


def knock(address: str) -> None:
    """ConfigError when nothing listens at HOST:PORT: Ray itself would wait for it for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise nobody(address, error) from None


def nobody(address: str, error: Exception) -> ConfigError:
    """No Ray where one was asked for."""
    return ConfigError(
        f"fleet: no Ray answers at {address}: {' '.join(str(error).split())}", "start it with `ray start --head`"
    )
