"""Processes of the dock, here or on other nodes: what a starter is, and the one that starts commands.

A starter is a function (module, its options, file for its errors) -> Child. `start(where)` makes one for a place: the
options go by argument, the secret key by environment, and a process on another node ends when its standard input does,
however the one that started it has ended. Another carrier (Ray, a scheduler) brings a starter of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from docklands.dock.wire.command import SECRET
from docklands.dock.wire.net import STANDARD_INPUT
from docklands.errors import WorkerLost


class Child(Protocol):
    """A process that was started."""

    pid: int
    lost: str
    """Why nothing is known of it any more; "" as long as whoever started it can see it."""

    def announced(self, deadline_s: float) -> dict[str, Any]:
        """What it says once it listens: endpoint, pid. Raises WorkerLost when it ends or says nothing."""
        ...

    def wait(self, deadline_s: float | None = None) -> int | None:
        """Its exit code, negative for a signal; None at the deadline."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Spawn = Callable[[str, msgspec.Struct, Path], Child]
"""(module to run, its options, file for what it writes to its standard error) -> the process."""


class Program:
    """`python -m MODULE`. before: words that put it somewhere else, as `nice`.

    apart  on another node: options by argument, secret by environment, and standard input stays open as its lifeline;
           else the options come on standard input
    """

    lost = ""

    def __init__(
        self, module: str, options: msgspec.Struct, errors: Path, before: Sequence[str] = (), apart: bool = False
    ) -> None:
        self._module, self._errors = module, errors
        environment = dict(os.environ)
        text = msgspec.json.encode(options).decode()
        if apart:
            environment[SECRET] = getattr(options, "secret_key", "")
            text = msgspec.json.encode(msgspec.structs.replace(options, secret_key="", parent=STANDARD_INPUT)).decode()
        with open(errors, "ab") as file:
            self._process = subprocess.Popen(
                [*before, sys.executable, "-m", module, text if apart else "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the driver, which still has a checkpoint to write
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if not apart:
                self._process.stdin.write(text.encode())
                self._process.stdin.close()

    def announced(self, deadline_s: float) -> dict[str, Any]:
        line: list[bytes] = []
        assert self._process.stdout is not None
        reader = threading.Thread(target=lambda pipe: line.append(pipe.readline()), args=(self._process.stdout,))
        reader.daemon = True
        reader.start()
        reader.join(deadline_s)
        if not line or not line[0]:
            tail = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
            raise WorkerLost(f"{self._module} (pid {self.pid}) did not start: {' '.join(tail) or 'it said nothing'}")
        return json.loads(line[0])

    def wait(self, deadline_s: float | None = None) -> int | None:
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@dataclass(frozen=True)
class Where:
    """A place for a process.

    address  of its node: it listens there
    before   words that put a command there, as ("ip", "netns", "exec", NAME) or ("ssh", HOST)
    folder   for its log, spill file and snapshots there; "": as the options say
    apart    another node: nothing is shared with this one, neither memory nor the numbers of processes
    """

    address: str = "127.0.0.1"
    before: tuple[str, ...] = ()
    folder: str = ""
    apart: bool = False


def start(where: Where) -> Spawn:
    """A starter for one place. A part that is started again keeps the port that it had."""

    def spawn(module: str, options: Any, errors: Path) -> Child:
        if options.endpoint.endswith(":*"):
            options = msgspec.structs.replace(options, endpoint=f"tcp://{where.address}:*")
        if hasattr(options, "shared_bytes"):
            options = moved(options, where)
        return Program(module, options, errors, where.before, where.apart)

    return spawn


def moved(options: Any, where: Where) -> Any:
    """The options of a warehouse as they are meant there. It shares its memory with the readers of its own node.

    Its log has the name of its run: another dock may have been given the same folder.
    """
    if not where.folder:
        return options
    log = str(Path(where.folder) / f"wal-{options.run}.{options.place}") if options.log else ""
    return msgspec.structs.replace(options, folder=where.folder, log=log)


def placed(control: Where, warehouses: Sequence[Where]) -> Spawn:
    """A starter that puts the warehouse of place i (and its copy) at the i-th of the places, going round."""

    def spawn(module: str, options: Any, errors: Path) -> Child:
        place = getattr(options, "place", None)
        where = control if place is None else warehouses[place % len(warehouses)]
        return start(where)(module, options, errors)

    return spawn
