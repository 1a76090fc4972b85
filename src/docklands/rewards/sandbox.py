"""A pool of killable processes for rewards that may hang, crash or leak.

One thread owns one process: it starts it when there is work, talks to it with deadlines, kills it (with everything it
started) when a deadline passes, and starts another for the next sample. What a process was at when somebody else killed
it is scored once more. No process outlives the pool or this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from docklands.rewards.base import RewardOutcome, RewardSample, failed
from docklands.rewards.scoring import Target
from docklands.rewards.worker import HEADER, frame

log = logging.getLogger("docklands.rewards")

START_S = 120.0
GRACE_S = 0.5  # for async batch functions, which keep the deadline themselves and so lose only the late samples
MOST_TIMEOUTS = 16
LOST = "lost_with_its_process"


class DeadlinePassed(Exception):
    """No reply in time."""


class ProcessEnded(Exception):
    """The process went away; says how. killed: by a SIGKILL of somebody else, which is nothing that its sample did."""

    def __init__(self, how: str, killed: bool = False) -> None:
        super().__init__(how)
        self.killed = killed


class CannotStart(Exception):
    """No process, or it cannot load the reward."""


@dataclass
class Job:
    """Samples to score with one reward.

    each        one reply per sample; a deadline costs one sample, and `MOST_TIMEOUTS` in a row end the job
    deadline_s  for one reply
    result      one outcome per sample
    """

    target: Target
    samples: Sequence[RewardSample]
    each: bool
    deadline_s: float
    result: Future[list[RewardOutcome]] = field(default_factory=Future)


class Process:
    """One worker process and the pipe to it. Not thread-safe: one owner."""

    def __init__(self, log: Path | None) -> None:
        self._buffer = b""
        self._loaded: Target | None = None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with contextlib.ExitStack() as stack:
            stderr = stack.enter_context(log.open("ab")) if log else subprocess.DEVNULL
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "docklands.rewards.worker", str(os.getpid())],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,  # its own process group: killed whole, and deaf to Ctrl-C
                )
            except OSError as error:
                raise CannotStart(f"the reward's process does not start: {error}") from error
        assert self._child.stdin is not None and self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        os.set_blocking(self._child.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self._child.pid

    def load(self, target: Target) -> None:
        """Make `target` the reward that `run` calls. CannotStart with the reason."""
        if self._loaded == target:
            return
        self._send({"load": target.to_json(), "path": sys.path})
        try:
            reply = self._receive(START_S)
        except DeadlinePassed:
            raise CannotStart(f"reward {target.name!r} does not load within {START_S:g} s") from None
        if "failed" in reply:
            raise CannotStart(f"reward {target.name!r} does not load in its process: {reply['failed']}")
        self._loaded = target

    def send(self, samples: Sequence[RewardSample], each: bool, deadline_s: float) -> None:
        """Ask for outcomes; `receive` them: one reply per sample, or one for all."""
        self._send({"run": [sample.to_json() for sample in samples], "each": each, "deadline_s": deadline_s})

    def receive(self, deadline_s: float) -> list[RewardOutcome]:
        """The next reply. DeadlinePassed or ProcessEnded."""
        return [RewardOutcome(**outcome) for outcome in self._receive(deadline_s)["outcomes"]]

    def kill(self) -> None:
        """End the process and everything in its group, and collect it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._child.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        descriptor = self._child.stdin.fileno()
        left, end = memoryview(frame(message)), time.monotonic() + START_S
        try:
            while left:
                if not select.select([], [descriptor], [], max(0.0, end - time.monotonic()))[1]:
                    raise DeadlinePassed
                left = left[os.write(descriptor, left) :]
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        length: int | None = None
        while True:
            if length is None and len(self._buffer) >= HEADER.size:
                length = HEADER.unpack(self._buffer[: HEADER.size])[0]
            if length is not None and len(self._buffer) >= HEADER.size + length:
                body = self._buffer[HEADER.size : HEADER.size + length]
                self._buffer = self._buffer[HEADER.size + length :]
                return json.loads(body)
            self._buffer += self._read(end)

    def _read(self, end: float) -> bytes:
        """Some bytes, once there are any."""
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        left = end - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise DeadlinePassed
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            raise self._ended()
        return chunk

    def _ended(self) -> ProcessEnded:
        """How the process ended."""
        try:
            code = self._child.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            return ProcessEnded("the reward's process closed its pipe")
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return ProcessEnded(f"the reward's process (pid {self.pid}) ended: {how}", code == -signal.SIGKILL)


class Sandbox:
    """A pool of `workers` processes, started when first needed. `log`: file for what the rewards print."""

    def __init__(self, workers: int = 1, log: Path | None = None) -> None:
        self._log = log
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._processes: dict[int, Process] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.workers = workers
        self._threads: list[threading.Thread] = []
        _pools.add(self)

    def submit(
        self, target: Target, samples: Sequence[RewardSample], each: bool, deadline_s: float
    ) -> Future[list[RewardOutcome]]:
        """Outcomes of the samples, in order: always one each, within a bounded time. Does not raise for failures."""
        job = Job(target, list(samples), each, deadline_s)
        with self._lock:
            if self._closed:
                job.result.set_result([failed("error", "the reward sandbox is closed")] * len(job.samples))
                return job.result
            if len(self._threads) < self.workers:
                name = f"reward-sandbox-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, args=(len(self._threads),), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)
        return job.result

    @property
    def pids(self) -> list[int]:
        """Processes alive now."""
        with self._lock:
            return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """Kill every process; jobs that wait get error outcomes. Safe to call twice."""
        with self._lock:
            self._closed = True
            processes = list(self._processes.values())
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _serve(self, slot: int) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                job.result.set_result(self._score(job, slot))
            except Exception as error:  # a fault of this module, not of the reward: still no hang
                job.result.set_exception(error)
        self._stop(slot)

    def _score(self, job: Job, slot: int) -> list[RewardOutcome]:
        outcomes: list[RewardOutcome] = []
        in_a_row, again = 0, -1
        while len(outcomes) < len(job.samples):
            rest = job.samples[len(outcomes) :]
            if self._closed or in_a_row >= MOST_TIMEOUTS:
                why = "the reward sandbox is closed" if self._closed else f"not tried: {in_a_row} timeouts in a row"
                outcomes += [failed("error" if self._closed else "timeout", why)] * len(rest)
                break
            try:
                process = self._process(slot)
                process.load(job.target)
                process.send(rest, job.each, job.deadline_s)
                for _ in rest if job.each else [rest]:
                    outcomes += process.receive(job.deadline_s if job.each else job.deadline_s + GRACE_S)
                    in_a_row = 0
            except DeadlinePassed:
                self._stop(slot)
                in_a_row += 1
                outcomes += _lost(
                    "timeout", f"no result within {job.deadline_s:g} s; its process was killed", job, rest
                )
            except ProcessEnded as error:
                self._stop(slot)
                if error.killed and again != len(outcomes) and not self._closed:
                    again = len(outcomes)  # a sample that loses a second process may have used up the memory
                    log.warning("%s; what it was at is scored again", error)
                    continue
                outcomes += _lost("error", str(error), job, rest)
            except CannotStart as error:
                self._stop(slot)
                outcomes += [failed("error", str(error))] * len(rest)
        return outcomes

    def _process(self, slot: int) -> Process:
        with self._lock:
            process = self._processes.get(slot)
        if process is None:
            process = Process(self._log)
            with self._lock:
                self._processes[slot] = process
        return process

    def _stop(self, slot: int) -> None:
        with self._lock:
            process = self._processes.pop(slot, None)
        if process is not None:
            process.kill()


def _lost(status: Literal["timeout", "error"], why: str, job: Job, rest: Sequence[RewardSample]) -> list[RewardOutcome]:
    """Outcomes of what the process took with it: the sample it was at, or the whole batch of a batch function."""
    outcome = failed(status, why)
    outcome.info[LOST] = True
    return [outcome] * (1 if job.each else len(rest))


_pools: weakref.WeakSet[Sandbox] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()
