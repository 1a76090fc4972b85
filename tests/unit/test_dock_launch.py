"""Starting processes of the dock: the rules, without processes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.dock_parts import PLAIN, options

from docklands.dock.launch import Launcher, Where
from docklands.dock.start import moved
from docklands.dock.supervise import PAUSE_S, PAUSES_S, Part
from docklands.dock.warehouse.store import WarehouseOptions
from docklands.errors import WorkerLost


def test_docks_that_were_given_one_folder_of_a_node_have_logs_of_their_own() -> None:
    """Else each would go on with what the other one wrote, and serve its bytes under the same row ids."""
    there = Where(folder="/node")
    logs = [
        moved(WarehouseOptions(place=place, columns=[], run=run, log=f"/{run}/wal.{place}"), there).log
        for run in ("one", "two")
        for place in (0, 1)
    ]
    assert len(set(logs)) == 4 and {str(Path(log).parent) for log in logs} == {"/node"}
    assert moved(WarehouseOptions(place=0, columns=[]), there).log == ""


class Pauses(threading.Event):
    """Notes how long it is waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return self.is_set()


class Dead:
    """A child that has ended already. starts: it has said before where it listens."""

    pid, lost = 1, ""

    def __init__(self, starts: bool) -> None:
        self.starts = starts

    def announced(self, deadline_s: float) -> dict[str, Any]:
        if not self.starts:
            raise WorkerLost("no space left on device")
        return {"endpoint": "tcp://127.0.0.1:1"}

    def wait(self, deadline_s: float | None = None) -> int | None:
        return 1

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def test_a_process_that_does_not_start_is_tried_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    """A control process on a full disk has to outlive the time that it takes to make room."""
    began: list[Dead] = []

    def spawn(module: str, options: Any, errors: Path) -> Dead:
        began.append(Dead(starts=len(began) == 8))
        return began[-1]

    made = Launcher(PLAIN, options(1), tmp_path, spawn=spawn, max_restarts=10)
    made._stopping = pauses = Pauses()
    part = Part("control", "none", WarehouseOptions(place=0, columns=[], endpoint="tcp://127.0.0.1:1"), Dead(True))
    made._watch(part)
    assert len(made.deaths) == 11 and len(began) == 10
    longer = [PAUSE_S * 2**n for n in range(6)]
    assert pauses.waits == pytest.approx([0.0, *longer, PAUSES_S, PAUSES_S, 0.0])
