"""A whole run of a fleet seen from outside: its processes by what they are, and what is left of them.

`Fleet` starts `docklands train` as a user does, and looks on: the operating system says which processes there are, the
run directory what they do. Used by fleet_chaos.py (one is killed) and fleet_soak.py (all are weighed).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from docklands.dock.hosted import read_address
from docklands.dock.warehouse.arena import SHM
from docklands.dock.wire.near import name_of
from docklands.errors import DocklandsError
from docklands.obs.rundir import RunDir
from tests.e2e.runs import ROOT, environment, train_arguments

PROGRAMS = {
    "multiprocessing.forkserver": "forkserver",
    "multiprocessing.resource_tracker": "tracker",
    "docklands.dock.warehouse.server": "warehouse",
    "docklands.dock.control.server": "control",
    "docklands.rewards.worker": "reward",
}
"""Word in a process's command line -> what it is. That of the server that forks names what it has loaded, too."""
TOLD = re.compile(r"workers by rank, from (\d+): (.*)")
PLAIN = ("-m", "docklands.cli.main")
QUICK = (
    "-c",
    "import sys; from tests.dock_processes import Forked; from docklands.dock import hosted, launch; "
    "hosted.Launcher = lambda *given: launch.Launcher(*given, spawn=Forked); "
    "from docklands.cli.main import main; main()",
)
"""The command, and the same with a dock whose processes are forked: in a second instead of five."""


def quick(*arguments: str) -> list[str]:
    """The command line of a QUICK run."""
    return [sys.executable, *QUICK, *arguments]


GONE_S = 180.0
"""Seconds that processes get to end after their driver."""


class Fleet:
    """One run and the processes that it has had.

    words    arguments of `docklands train`
    program  how Python is told to run it: PLAIN or QUICK
    """

    def __init__(self, recipe: str, run: RunDir, more: Sequence[str], program: Sequence[str] = PLAIN) -> None:
        self.run, self.program = run, program
        self.words = train_arguments(recipe, run.path, more)
        self.seen: dict[int, psutil.Process] = {}
        self.sockets: set[str] = set()
        self.process: Any = None

    def start(self, resume: bool = False) -> None:
        """Begin, or go on."""
        words = [sys.executable, *self.program, *self.words, *(["--resume"] if resume else [])]
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True
            )

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """The driver stands still, so that a look at the run takes none of its time."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def output(self) -> Path:
        """File for what the driver prints."""
        return self.run.path.with_suffix(".txt")

    @property
    def said(self) -> str:
        """What the driver has printed."""
        return self.output.read_text("utf-8", "replace")

    @property
    def steps(self) -> int:
        """Lines of metrics.jsonl."""
        return self.run.metrics.read_bytes().count(b"\n") if self.run.metrics.exists() else 0

    @property
    def log(self) -> str:
        """Of the driver."""
        path = self.run.log / "driver.0.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def members(self) -> dict[str, psutil.Process]:
        """Living processes by name: "driver 0", "trainer 1", "rollout 0", "warehouse 0", "control 0", "reward 0", and
        whatever else there is by its own name.
        """
        workers = self._workers()
        found: dict[str, psutil.Process] = {}
        counted: dict[str, int] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            for each in sorted([driver, *driver.children(recursive=True)], key=lambda process: process.pid):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    kind = workers.get(each.pid) or self._kind(each)
                    self.seen[each.pid] = each
                    found[f"{kind} {counted.get(kind, 0)}"] = each
                    counted[kind] = counted.get(kind, 0) + 1
        return found

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "driver"
        line = " ".join(process.cmdline())
        known = next((kind for word, kind in PROGRAMS.items() if word in line), "")
        name = process.name()
        return name if name in PROGRAMS.values() else known or name

    def _workers(self) -> dict[int, str]:
        """Process id -> "trainer" or "rollout", as the log says; numbers begin with the trainers'."""
        found: dict[int, str] = {}
        for first, places in TOLD.findall(self.log):
            kind = "trainer" if first == "0" else "rollout"
            found.update({int(pid): kind for pid in re.findall(r"pid (\d+)", places)})
        return found

    def note(self) -> None:
        """Remember what must be gone when the run is: its processes and sockets of now."""
        for process in self.members().values():
            with contextlib.suppress(psutil.Error):
                names = {str(found.laddr) for found in process.net_connections("unix")}
                self.sockets |= {name for name in names if os.path.isabs(name)}
        with contextlib.suppress(DocklandsError):
            address = read_address(self.run.path / "dock")
            peers = (address.control, *address.warehouses)
            self.sockets |= {name_of(peer.public_key).decode().replace("\0", "@") for peer in peers}

    def left(self) -> list[str]:
        """Processes, sockets and shared memory that are still there, in words, after some time."""
        alive = psutil.wait_procs(list(self.seen.values()), GONE_S)[1]
        names = {
            line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7
        }
        docks = [folder.name.removeprefix("dock-") for folder in (self.run.path / "dock").glob("dock-*")]
        sockets = [name for name in self.sockets if name in names or (name[0] == "/" and os.path.exists(name))]
        shared = [str(path) for dock in docks for path in SHM.glob(f"docklands-{dock}-*")]
        return [*(f"process {process.pid}" for process in alive), *sorted(sockets), *shared]

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None when it does not end: then its stacks are in the log, and it is killed."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End all of it, whatever state it is in."""
        for process in [*self.members().values(), *self.seen.values()]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(GONE_S)


def until(condition: Any, seconds: float, pause: float = 0.02) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
