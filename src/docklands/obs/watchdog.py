"""The watchdog: a run that makes no progress says where it stands and ends, instead of hanging."""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

EXIT_CODE = 3


class Watchdog:
    """A thread that waits for beats.

    deadline_s  seconds without a beat after which the run counts as stuck
    describe    says what the queues hold; called once, when stuck
    report      file for stacks and description (log/watchdog.txt of the run directory)
    on_stuck    called with one line that names the last stage; default: print it and exit with code 3
    answer_s    seconds that `describe` gets; a hanging one is left behind

    Use as a context manager. Entered inside a running event loop, it lists that loop's tasks too.
    """

    def __init__(
        self,
        deadline_s: float,
        describe: Callable[[], str],
        report: Path,
        on_stuck: Callable[[str], None] | None = None,
        answer_s: float = 5.0,
    ) -> None:
        if not deadline_s > 0:
            raise ValueError(f"a watchdog's deadline must be positive, not {deadline_s}")
        self.deadline_s = deadline_s
        self._describe = describe
        self._report = Path(report)
        self._on_stuck = on_stuck or exit_stuck
        self._answer_s = answer_s
        self._changed = threading.Condition()
        self._stage = "start"
        self._last = time.monotonic()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, stage: str) -> None:
        """Progress: `stage` has just done something."""
        with self._changed:
            self._stage, self._last = stage, time.monotonic()

    def __enter__(self) -> Watchdog:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._answer_s + 1)

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                left = self._last + self.deadline_s - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._stopped:
                return
            stage, silent_s = self._stage, time.monotonic() - self._last
        line = f"stuck: no progress for {silent_s:.1f} s, last stage {stage!r}; stacks and queues in {self._report}"
        try:
            self._dump(line)
        except OSError as error:
            line += f" (not written: {error})"
        self._on_stuck(line)

    def _dump(self, line: str) -> None:
        """Stacks first: they need nobody's help. The description may itself hang, so it gets a deadline."""
        self._report.parent.mkdir(parents=True, exist_ok=True)
        with open(self._report, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{line}\n\n== threads ==\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(f"\n== tasks ==\n{within(self._answer_s, lambda: tasks_text(self._loop))}\n")
            file.write(f"\n== state ==\n{within(self._answer_s, self._describe)}\n")


def within(seconds: float, function: Callable[[], str]) -> str:
    """The function's text, or why there is none. It runs on a thread of its own, so it can neither raise nor hang."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(function()), name="watchdog-describe", daemon=True)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    return f"(no answer within {seconds:g} s)" if thread.is_alive() else "(it raised; see stderr)"


def tasks_text(loop: asyncio.AbstractEventLoop | None) -> str:
    """Name and stack of every task of an event loop."""
    if loop is None:
        return "(no event loop)"
    text = io.StringIO()
    for task in asyncio.all_tasks(loop):
        task.print_stack(limit=8, file=text)
    return text.getvalue() or "(none)"


def exit_stuck(line: str) -> None:
    """Print the line and leave at once: threads that hang cannot be joined."""
    print(line, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)
