"""Two processes take turns, a training step each: while one computes, the other waits in a read.

The driver writes a line to a side's standard input for every step; the side answers with JSON lines on a pipe of
its own: {"lap": k, "wall_s", "cpu_s"} after each step, {"result": {...}} at the end. Standard output is left
to the logs.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PIPE = "DOCKLANDS_BENCH_PIPE"


class Turns:
    """The side's end: `next()` before each step, `end()` after the last."""

    def __init__(self) -> None:
        self._out = os.fdopen(int(os.environ[PIPE]), "w")
        self._lap = -1
        self._wall = self._cpu = 0.0

    def next(self) -> None:
        """Report the step that ended, wait for the turn, start the clocks."""
        self._report()
        if not sys.stdin.readline():
            raise SystemExit("the driver is gone")
        self._lap += 1
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self, result: Mapping[str, Any]) -> None:
        """Report the last step and everything that the side itself has counted."""
        self._report()
        self._send({"result": result})

    def _report(self) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self._send({"lap": self._lap, "wall_s": wall, "cpu_s": cpu})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


class Side:
    """The driver's end: a process that trains one step per turn. Every wait has a deadline."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        read, write = os.pipe()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environment, PIPE: str(write)},
                pass_fds=(write,),
            )
        os.close(write)
        self._read = read
        self._buffer = b""
        self.laps: list[dict[str, float]] = []
        self.result: dict[str, Any] = {}

    def ready(self, deadline_s: float) -> None:
        """Wait until the side stands before its first step."""
        self._message(deadline_s)

    def step(self, deadline_s: float) -> None:
        """Let it do one step."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("ended early")
        self.laps.append(self._message(deadline_s))

    def finish(self, deadline_s: float) -> None:
        """Wait for the side's own counts and its end."""
        self.result = self._message(deadline_s)["result"]
        self._process.wait(deadline_s)

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)
        os.close(self._read)

    def _message(self, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._fail(f"did not answer within {deadline_s:g} s")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                self._fail("ended early")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _fail(self, why: str) -> None:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"vs_trl: the {self.name} side {why}; the end of {self.log}:\n{tail}")
