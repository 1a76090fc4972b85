"""Pitfall 28: a run without progress ends, and says where it stood."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from docklands.obs.watchdog import Watchdog


def test_pitfall_28_stuck_run_names_the_stage_and_exits(tmp_path: Path) -> None:
    """A main thread that hangs for good: stacks and queues are dumped, the exit code is 3."""
    code = (
        "import sys, threading; from pathlib import Path; from docklands.obs.watchdog import Watchdog\n"
        "def wait_for_rows(): threading.Event().wait()\n"
        "def describe(): return 'update waits for reward on 12 rows'\n"
        "with Watchdog(0.3, describe, Path(sys.argv[1]) / 'log/watchdog.txt') as dog:\n"
        "    dog.beat('rollout'); wait_for_rows()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 3
    assert "stuck: no progress for 0.3 s, last stage 'rollout'" in done.stderr and done.stderr.count("\n") == 1
    text = (tmp_path / "log" / "watchdog.txt").read_text()
    assert "last stage 'rollout'" in text and "wait_for_rows" in text and "update waits for reward on 12 rows" in text


def test_beats_keep_it_quiet(tmp_path: Path) -> None:
    stuck: list[str] = []
    with Watchdog(1.0, lambda: "", tmp_path / "w.txt", stuck.append) as dog:
        for _ in range(12):
            time.sleep(0.1)
            dog.beat("rollout")
    time.sleep(1.05)  # after the end nobody watches
    assert stuck == [] and not (tmp_path / "w.txt").exists()


def test_tasks_of_the_event_loop_are_listed(tmp_path: Path) -> None:
    async def pump_for_ever() -> None:
        await asyncio.Event().wait()

    async def run() -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        tell = asyncio.get_running_loop().call_soon_threadsafe
        task = asyncio.create_task(pump_for_ever(), name="pump/reward")
        with Watchdog(0.1, lambda: "state", tmp_path / "w.txt", lambda line: tell(found.set_result, line)) as dog:
            dog.beat("reward")
            line = await asyncio.wait_for(found, 120)
        task.cancel()
        return line

    assert "last stage 'reward'" in asyncio.run(run())
    text = (tmp_path / "w.txt").read_text()
    assert "pump/reward" in text and "pump_for_ever" in text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("describe", "answer"),
    [
        (lambda: str(threading.Event().wait()), "(no answer within 0.1 s)"),
        (lambda: str(1 / 0), "(it raised; see stderr)"),
    ],
)
def test_a_description_that_hangs_or_raises_does_not_stop_it(
    describe: Callable[[], str], answer: str, tmp_path: Path
) -> None:
    lines: queue.Queue[str] = queue.Queue()
    with Watchdog(0.05, describe, tmp_path / "w.txt", lines.put, answer_s=0.1):
        assert lines.get(timeout=120).startswith("stuck: ")
    assert answer in (tmp_path / "w.txt").read_text()


def test_unwritable_report_is_said_in_the_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file")
    lines: queue.Queue[str] = queue.Queue()
    with Watchdog(0.05, lambda: "", tmp_path / "log" / "w.txt", lines.put):
        assert "(not written: " in lines.get(timeout=120)


@pytest.mark.parametrize("deadline", [0, -1, float("nan")])
def test_a_deadline_must_be_positive(deadline: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Watchdog(deadline, lambda: "", tmp_path / "w.txt")
