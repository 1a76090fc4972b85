"""The worker processes of a torch.distributed world, as the driver sees them: one for each rank.

What runs in them, and how a role lives there: fleet/host.py. Where they run is a carrier's business: on this machine
(local_carrier.py), or wherever Ray places them (ray_carrier.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from docklands.dock.distributed import DistributedDock
from docklands.dock.look import DockAddress
from docklands.errors import DocklandsError, WorkerLost
from docklands.fleet.host import Answer, Message, Setup, log_of
from docklands.fleet.pulse import Pulse
from docklands.fleet.warehouses import Reach
from docklands.obs.log import log_tail

log = logging.getLogger("docklands.fleet")

START_S = 300.0
"""Deadline of starting the processes: loading torch, and room on a busy cluster."""
STACKS_S = 1.0
"""How long a process that hangs gets to write its stacks."""
GRACE_S = 5.0
"""How long the other ranks' answers are waited for once one has failed."""
AGAIN = "start the run again; it resumes from the last checkpoint"
ENDED = "the workers have been ended"


class Line(Protocol):
    """One worker process. address: of its node; where: for people, as "pid 123 on 10.0.0.7"."""

    address: str

    @property
    def where(self) -> str: ...

    def send(self, message: Message) -> None:
        """Begin a call. OSError when the process has gone."""
        ...

    def receive(self) -> Answer:
        """The next answer; when the carrier has said that there is one. EOFError when the process has gone."""
        ...

    def urgent(self, message: Message) -> None:
        """A call beside the one in progress. Never raises."""
        ...

    def fate(self) -> str:
        """How the process ended, as far as that is known: "died with exit code 1"."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...

    def leave(self) -> None:
        """Ask the process to end."""
        ...

    def close(self) -> None:
        """Wait until it has, by force if need be."""
        ...


class Carrier(Protocol):
    """Starts worker processes somewhere, and waits for them. home: this node's address, as workers reach it."""

    home: str

    @property
    def reach(self) -> Callable[[], Reach] | None:
        """What makes a way to start programs of the dock on other nodes; None: there are no other nodes."""
        ...

    def start(self, setup: Setup, deadline_s: float) -> list[Line]:
        """One for each rank. ConfigError when there is no room, WorkerLost when one does not come."""
        ...

    def give_up(self) -> None:
        """What waits in `start` ends soon, with WorkerLost. From any thread."""
        ...

    def wait(self, lines: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of these lines that have an answer, or have gone; none at the deadline."""
        ...

    def close(self) -> None:
        """Give back what was taken to start them."""
        ...


class Workers:
    """The processes. They start with the first call; a rank that is lost ends all of them.

    Calls may come from several threads: those with ranks in common wait for each other.

    on_hang  told, on another thread, when a process was killed because it gave no sign of life (Setup.heartbeat_s)
    """

    def __init__(self, setup: Setup, carrier: Carrier, on_hang: Callable[[], None] = lambda: None) -> None:
        self.setup, self.carrier, self._on_hang = setup, carrier, on_hang
        self._pulse: Pulse | None = None
        self.lines: list[Line] = []
        self._busy = [threading.Lock() for _ in range(setup.world_size)]
        self._starting = threading.Lock()
        self._memory = [0] * setup.world_size
        self._lost = ""
        self._dock: DockAddress | None = None

    @property
    def lost(self) -> WorkerLost | None:
        """What every further call raises: a process is gone; None: all stand."""
        return WorkerLost(self._lost, AGAIN) if self._lost else None

    # --- calls ------------------------------------------------------------------------------------------------

    def make(self, name: str, factory: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Make an object on these ranks (None: all); see host.py. Raises what all of them raise."""
        return self.call("", "make", name, factory, args, ranks=ranks)

    def call(self, name: str, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a method of an object on these ranks (None: all); -> results in their order.

        An error that every rank raises is raised here. WorkerLost when a rank dies, hangs, or fails alone.
        """
        return list(self.stream(name, method, *args, ranks=ranks))[-1]

    def stream(self, name: str, method: str, *args: Any, ranks: Sequence[int] | None = None) -> Iterator[Any]:
        """As `call`; first what rank 0 yields on the way, then the list of results. A reader may stop early."""
        self._start()
        chosen = list(range(self.setup.world_size) if ranks is None else ranks)
        with ExitStack() as held:
            for rank in sorted(chosen):
                held.enter_context(self._busy[rank])
            self._check()
            try:
                for rank in chosen:
                    self.lines[rank].send((name, method, args))
            except OSError:
                pass  # a rank is gone: waiting for answers says which
            answers = self._answers(chosen, f"{name} {method}".strip(), self.setup.wait_s)
            try:
                yield from answers
            except GeneratorExit:  # nobody wants the rest, but the next call must not find it
                for _ in answers:
                    pass
                raise

    def urgent(self, name: str, method: str, *args: Any, ranks: Sequence[int] | None = None) -> None:
        """Call a method beside the call in progress, without waiting for it."""
        for rank in range(len(self.lines)) if ranks is None else ranks:
            self.lines[rank].urgent((name, method, args))

    def connect(self, dock: DistributedDock) -> None:
        """Tell all ranks where the dock is, once."""
        if self._dock != dock.address:
            self.call("", "connect", dock.graph, dock.options, dock.address)
            self._dock = dock.address

    def describe(self) -> str:
        """For a stuck run: every worker writes its stacks into its log. Works while workers hang."""
        self.urgent("", "stacks")
        folder = self.setup.log
        return "\n".join(
            f"{self.name(rank)}: {line.where}" + (f"; its stacks are in {self._log_of(rank)}" if folder else "")
            for rank, line in enumerate(self.lines)
        )

    def name(self, rank: int) -> str:
        """For people."""
        return f"worker {self.setup.first + rank}"

    def _log_of(self, rank: int) -> Path | None:
        return None if self.setup.log is None else log_of(self.setup.log, self.setup.first + rank)

    # --- processes --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._lost:
            raise WorkerLost(self._lost, AGAIN)

    def _start(self) -> None:
        """Start the processes and let them meet, once."""
        with self._starting:
            self._check()
            if self.lines:
                return
            everyone = list(range(self.setup.world_size))
            try:
                if self.setup.heartbeat_s:
                    self._pulse = Pulse(self.setup.heartbeat_s, self._hangs)
                    self.setup = replace(self.setup, pulse=self._pulse.address)
                self.lines = self.carrier.start(self.setup, START_S)
                self._check()
                self._ask([0], "open_store", ())
                port = list(self._answers([0], "start", START_S))[-1][0]
                self._ask(everyone, "join", (self.lines[0].address, port))
                list(self._answers(everyone, "start", START_S))
                said = "; ".join(line.where for line in self.lines)
                log.info("workers by rank, from %d: %s", self.setup.first, said)
            except BaseException:
                self.close()
                raise

    def _ask(self, ranks: Sequence[int], method: str, args: tuple[Any, ...]) -> None:
        try:
            for rank in ranks:
                self.lines[rank].send(("", method, args))
        except OSError:
            pass

    def _answers(self, ranks: list[int], what: str, wait_s: float) -> Iterator[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        end = time.monotonic() + wait_s
        while len(answers) + len(errors) < len(ranks):
            left = min(end, time.monotonic() + GRACE_S if errors else end) - time.monotonic()
            try:
                waiting = {id(self.lines[r]): r for r in ranks if r not in answers and r not in errors}
                ready = self.carrier.wait([self.lines[rank] for rank in waiting.values()], max(0.0, left))
            except (OSError, ValueError, IndexError):
                self._check()
                raise
            self._check()  # another thread may have lost a worker, or ended all
            if not ready:
                if errors:
                    break
                late = sorted(self.setup.first + rank for rank in waiting.values())
                self._lose(f"workers {late} did not answer within {wait_s:.0f} s to {what}")
            for line in ready:
                rank = waiting[id(line)]
                try:
                    kind, value, self._memory[rank] = line.receive()
                except (EOFError, OSError):
                    self._check()
                    self._lose(self._death(rank, what))
                if kind == "item":
                    yield value
                elif kind == "done":
                    answers[rank] = value
                else:
                    errors[rank] = value
        if errors:
            rank, error = min(errors.items())
            if answers or len(errors) < len(ranks) or not isinstance(error, DocklandsError):
                self._lose(f"{self.name(rank)} failed during {what}: {error}{self._tail(rank)}")
            raise error
        yield [answers[rank] for rank in ranks]

    def _death(self, rank: int, what: str) -> str:
        """Who died, how, doing what, how large it was, and the end of its log."""
        line = self.lines[rank]
        size = f", {self._memory[rank] / 2**20:.0f} MiB resident before" if self._memory[rank] else ""
        return f"{self.name(rank)} ({line.where}) {line.fate()} during {what}{size}{self._tail(rank)}"

    def _lose(self, message: str) -> None:
        """A rank is lost: the others hang in a collective or soon will, so all end."""
        self._lost = message
        for line in self.lines:
            line.kill()
        raise WorkerLost(message, AGAIN)

    def _hangs(self, rank: int, doing: str) -> None:
        """A process gives no sign of life: its stacks, where it can still write them, and the end of all."""
        if rank >= len(self.lines):
            return  # they are just being started, which has a deadline of its own
        line, silent = self.lines[rank], f"gave no sign of life for {self.setup.heartbeat_s:g} s"
        line.urgent(("", "stacks", ()))
        time.sleep(min(STACKS_S, self.setup.heartbeat_s))
        self._lost = f"{self.name(rank)} ({line.where}) {silent} during {doing}{self._tail(rank)}"
        for each in self.lines:
            each.kill()
        self._on_hang()

    def give_up(self) -> None:
        """Whoever waits for these processes to start or to answer hears of their end soon. From any thread."""
        self._lost = self._lost or ENDED
        self.carrier.give_up()
        for line in self.lines:
            line.kill()

    def _tail(self, rank: int) -> str:
        """The last lines of a rank's log."""
        path = self._log_of(rank)
        text = log_tail(path, 8) if path is not None else ""
        return f"\n{text}" if text else ""

    def close(self) -> None:
        """End the processes."""
        self._lost = self._lost or ENDED
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None
        for line in self.lines:
            line.leave()
        for line in self.lines:
            line.close()
        self.lines = []
        self.carrier.close()
