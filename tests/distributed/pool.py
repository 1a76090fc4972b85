"""Processes that run distributed cases: started once from a forkserver with torch loaded, shared by all cases.

A case is a module-level function; rank r of n runs it inside a process group of its own (gloo) and returns something
that pickles. Every case has a deadline: processes that pass it are killed, and the next case starts fresh ones.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forks import CONTEXT


class CaseFailed(AssertionError):
    """A rank raised: its traceback is the message."""


def serve(pipe: Connection) -> None:
    """Body of a process: take a case, run it, answer, until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, world, store, deadline = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            kind = dist.FileStore(store, world)
            dist.init_process_group(
                "gloo", store=kind, rank=rank, world_size=world, timeout=timedelta(seconds=deadline)
            )
            dist.barrier()  # all are connected before the first one leaves
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))
        if dist.is_initialized():
            if answer[0]:
                with contextlib.suppress(RuntimeError):  # a rank that failed or left the group ends the pool itself
                    dist.barrier()  # none leaves while another still connects
            dist.destroy_process_group()


class Pool:
    """Up to as many processes as the largest case needs."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="docklands-pool-"))
        self._cases = 0

    def run(self, world: int, function: Callable[..., Any], *args: Any, deadline: float = 180.0) -> list[Any]:
        """function(*args) on `world` ranks; their results by rank. CaseFailed names the ranks that raised or hang."""
        while len(self._workers) < world:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._cases += 1
        store = str(self.folder / f"store-{self._cases}")
        for rank in range(world):
            self._workers[rank][1].send((function, args, rank, world, store, deadline))
        answers = self._collect(world, time.monotonic() + deadline)
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            self.close()  # a rank that failed leaves the others in a collective
            raise CaseFailed("\n".join(failed))
        return [value for _, value in answers]

    def _collect(self, world: int, end: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < world:
            left = end - time.monotonic()
            if any(not fine for fine, _ in answers.values()):
                left = min(left, 1.0)  # the others hang or fail too: do not wait for their deadline
            waiting = {self._workers[rank][1]: rank for rank in range(world) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                for rank in waiting.values():
                    answers[rank] = (False, "no answer before the deadline")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"the process died (exit code {self._workers[rank][0].exitcode})")
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """Kill the processes; a later case starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join(10)
        self._workers = []


def pid(delay: float = 0.0) -> int:
    """A case for the pool's own tests: waits, then gives the process id."""
    time.sleep(delay)
    return os.getpid()
