"""What is killed when the driver has gone, or by its number: never another process that has that number by then."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from docklands.fleet import reaper as reapers
from docklands.fleet.reaper import born, descendants, process_of, reaper


def test_the_reaper_kills_those_that_it_knows_and_spares_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, stranger = (subprocess.Popen(["sleep", "120"]) for _ in range(2))
    try:
        file = tmp_path / "a socket"
        file.touch()
        assert {known.pid, stranger.pid} <= {process.pid for process in descendants()}
        monkeypatch.setattr(reapers, "born", lambda pid: "7" if pid == stranger.pid else born(pid))
        watch = reaper([psutil.Process(each.pid) for each in (known, stranger)], [str(file)])
        assert watch.stdin is not None
        watch.stdin.close()  # as the driver's end does
        assert watch.wait(60) == 0 and known.wait(60) == -9 and not file.exists()
        assert stranger.poll() is None
    finally:
        for each in (known, stranger):
            each.kill()
            each.wait()


def test_a_process_is_the_one_that_began_then() -> None:
    me = psutil.Process()
    assert process_of(me.pid, me.create_time()) == me
    assert process_of(me.pid, me.create_time() - 60) is None
    assert process_of(2**22 + 1, 0) is None
