"""Programs of the dock on other nodes of a Ray: an actor for each, which runs it there and tells how it fares.

The actor takes no processor. The program's options and keys travel in the actor's arguments; its end of the program's
standard input is the lifeline, so the program ends when the actor does: with its node, by hand, or with the driver, to
which it belongs.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from docklands.dock.start import Program
from docklands.dock.warehouse.arena import sweep
from docklands.errors import WorkerLost
from docklands.fleet.ray_carrier import SESSION

START_S = 120.0
"""Deadline of an actor and its program to start."""


class Keeper:
    """An actor that keeps one program. Its calls run beside each other."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._begun, self._unwanted = threading.Event(), False

    def begin(self, module: str, options: msgspec.Struct, errors: str) -> dict[str, Any] | str:
        """Start it; what it says once it listens, or why it does not."""
        try:
            Path(errors).parent.mkdir(parents=True, exist_ok=True)
            self._program = Program(module, options, Path(errors), apart=True)
            if self._unwanted:
                self._program.kill()
            return self._program.announced(START_S)
        except (WorkerLost, OSError) as error:
            return str(error)
        finally:
            self._begun.set()

    def wait(self) -> int | None:
        """Its exit code, when it has ended. An arena that it has left on this node goes."""
        self._begun.wait()
        code = None if self._program is None else self._program.wait()
        sweep()
        return code

    def end(self, by_force: bool) -> None:
        """Ask it to end, or kill it."""
        if self._program is None:
            self._unwanted = True
        elif by_force:
            self._program.kill()
        else:
            self._program.terminate()


class RayChild:
    """A program, as the driver sees it (dock/start.py: Child). address: of its node."""

    def __init__(self, address: str, program: tuple[str, msgspec.Struct, Path]) -> None:
        self.pid, self.lost, self.address = 0, "", address
        self._program, self._module = program, program[0]
        self._code: int | None = None
        self._killed, self._lock = False, threading.Lock()
        self._end: Any = None
        self._tried: set[str] = set()
        if not self._begin():
            self._lose(LookupError("the node is not up"))

    def _begin(self) -> bool:
        """On the node of that address; whether there is one where it was not tried yet. A node that has just died may
        still be named, beside itself as it came back.
        """
        left = [node for node in names(self.address) if node not in self._tried]
        if left:
            self._tried.add(left[0])
            self.actor, self._begun = SESSION.submit(self._place, left[0])
        return bool(left)

    def _place(self, node: str) -> tuple[Any, Any]:
        module, options, errors = self._program
        remote: Any = ray.remote
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        kind = remote(num_cpus=0, max_restarts=0, max_concurrency=4)(Keeper)
        actor = kind.options(scheduling_strategy=there).remote()
        return actor, actor.begin.remote(module, options, str(errors))

    def announced(self, deadline_s: float) -> dict[str, Any]:
        """See Child."""
        end, found = time.monotonic() + deadline_s, self.lost
        while not found:
            try:
                found: Any = ray.get(self._begun, timeout=max(0.0, end - time.monotonic()))
            except GetTimeoutError:
                raise WorkerLost(f"{self._module} on {self.address} did not start within {deadline_s:.0f} s") from None
            except RayError as error:
                if not self._begin():
                    self._lose(error)
                    raise WorkerLost(f"{self._module} {self.lost}") from None
        if isinstance(found, str):
            raise WorkerLost(f"on {self.address}: {found}")
        self.pid = int(found["pid"])
        return found

    def wait(self, deadline_s: float | None = None) -> int | None:
        """See Child."""
        if self._code is not None or deadline_s == 0:
            return self._code
        try:
            with self._lock:
                self._end = self._end or SESSION.submit(self.actor.wait.remote)
            self._code = ray.get(self._end, timeout=deadline_s) or 0
        except GetTimeoutError:
            if not self._killed:
                return None
            self._lose(TimeoutError("it does not answer"))
        except (RayError, WorkerLost) as error:
            self._lose(error)
        self._forget()
        return self._code

    def terminate(self) -> None:
        """See Child."""
        self._ask_to_end(by_force=False)

    def kill(self) -> None:
        """See Child."""
        self._killed = True
        self._ask_to_end(by_force=True)

    def _ask_to_end(self, by_force: bool) -> None:
        if self._code is None:
            with contextlib.suppress(RayError, WorkerLost):
                SESSION.submit(self.actor.end.remote, by_force)

    def _lose(self, error: BaseException) -> None:
        """Nothing more will be heard of it."""
        self.lost = f"is lost with its actor on {self.address}: {' '.join(str(error).split())[:200]}"
        self._code = -signal.SIGKILL

    def _forget(self) -> None:
        with contextlib.suppress(RayError, ValueError, WorkerLost):
            SESSION.submit(ray.kill, self.actor)


def names(address: str) -> list[str]:
    """Ray's names of the node with that address, of those that it holds for alive: the one with workers first."""
    found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == address]
    return sorted(found, key=lambda node: node != SESSION.nodes.get(address))


class RayReach:
    """The nodes of the Ray that this process is part of, by address. address: of that Ray, as the carrier has it."""

    def __init__(self, address: str) -> None:
        SESSION.enter(self, address, 0)

    def living(self) -> set[str]:
        """See Reach."""
        return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}

    def start(self, address: str, module: str, options: msgspec.Struct, errors: Path) -> RayChild:
        """See Reach."""
        return RayChild(address, (module, options, errors))

    def close(self) -> None:
        """See Reach."""
        SESSION.leave(self)
