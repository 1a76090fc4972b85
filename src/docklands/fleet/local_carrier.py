"""Worker processes on this machine: forked from a server that has torch loaded, spoken to over pipes.

A pipe that ends is a process that died, on either side: a worker whose driver has gone ends itself, whatever it does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from docklands.fleet.host import Host, Message, Seat, Setup, end_soon

PRELOAD = [
    "docklands.fleet.forking",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "docklands.train.sharded",
    "docklands.fleet.engines",
]
LEAVE_S, KILL_S = 2.0, 5.0
"""Seconds that a process gets to end by itself, and to be gone after SIGKILL."""


class LocalLine:
    """A process of this machine."""

    address = "127.0.0.1"

    def __init__(self, process: Any, pipe: Connection, at_exit: Finalize) -> None:
        self.process, self.pipe, self._at_exit = process, pipe, at_exit
        self.pid: int = process.pid
        self._sending = threading.Lock()

    @property
    def where(self) -> str:
        return f"pid {self.pid}"

    def send(self, message: Message) -> None:
        with self._sending:
            self.pipe.send((False, message))

    def receive(self) -> Any:
        return self.pipe.recv()

    def urgent(self, message: Message) -> None:
        if message[:2] == ("", "stacks"):  # a signal is answered by native code, too
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGUSR1)
            return
        with contextlib.suppress(OSError, ValueError), self._sending:
            self.pipe.send((True, message))

    def fate(self) -> str:
        self.process.join(KILL_S)
        code = self.process.exitcode
        return f"died with exit code {code}" + (" (killed, perhaps for memory)" if code == -signal.SIGKILL else "")

    def kill(self) -> None:
        self.process.kill()

    def leave(self) -> None:
        self.pipe.close()

    def close(self) -> None:
        self.process.join(LEAVE_S)
        self.process.kill()
        self.process.join(KILL_S)
        self._at_exit.cancel()


class LocalCarrier:
    """Forks processes of this machine."""

    home = "127.0.0.1"
    reach = None

    def start(self, setup: Setup, deadline_s: float) -> list[Any]:
        """See Carrier. They say nothing until they are asked."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        lines = []
        # A SIGTERM for the whole process group (timeout, scancel, systemd) must reach the driver alone: the server that
        # forks, and what it forks, inherit this mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            for rank in range(setup.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(theirs, setup, rank), daemon=True, name=f"worker-{setup.first + rank}"
                )
                at_exit = Finalize(None, _end, (process,), exitpriority=10)
                process.start()
                theirs.close()
                lines.append(LocalLine(process, ours, at_exit))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return lines

    def give_up(self) -> None:
        """See Carrier: forking waits for nothing."""

    def wait(self, lines: Sequence[LocalLine], timeout_s: float) -> list[Any]:
        """See Carrier."""
        by_pipe = {line.pipe: line for line in lines}
        return [by_pipe[pipe] for pipe in multiprocessing.connection.wait(list(by_pipe), timeout_s)]  # type: ignore[index]

    def close(self) -> None:
        """Nothing was taken but the processes."""


def _end(process: Any) -> None:
    """At the driver's exit, of a process that a second Ctrl-C has kept from being closed: it does not hear the SIGTERM
    that multiprocessing would send it, and would be waited for without end.
    """
    if process.pid is not None:
        process.kill()


# --- in the processes -----------------------------------------------------------------------------------------------


def serve(pipe: Connection, setup: Setup, rank: int) -> None:
    """Body of a process: answer calls until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver decides what an interrupt means
    host = Host(setup, Seat(rank, setup.first + rank))
    calls: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(pipe, host, calls), name="pipe", daemon=True).start()
    while (message := calls.get()) is not None:
        for answer in host.answer(message):
            with contextlib.suppress(OSError):  # the driver has gone, and this process soon will have
                pipe.send(answer)


def listen(pipe: Connection, host: Host, calls: queue.SimpleQueue[Message | None]) -> None:
    """Hand calls to the thread that computes; run urgent ones here."""
    while True:
        try:
            urgent, message = pipe.recv()
        except (EOFError, OSError):
            calls.put(None)
            return end_soon(LEAVE_S / 2)
        if urgent:
            host.urgent(message)
        else:
            calls.put(message)
