"""dock.jsonl: where the samples of a run stood, for whoever looks at it.

{"step": steps done, "time": Unix seconds, "in_flight": groups, "bytes": B,
 "stages": {name: {"ready": rows, "leased": rows, "done": rows}}}

A line when a step's rows have been taken, and one for each look in between that found something changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docklands.errors import DocklandsError
from docklands.obs.files import LineFile

log = logging.getLogger("docklands.obs")

LOOK_S = 1.0
"""Seconds between two looks at the dock."""
COUNTS = ("ready", "leased", "done")


class FlowLog:
    """Writes dock.jsonl, made with the first line. A disk that refuses costs one warning and the lines after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFile | None = None
        self._last: dict[str, Any] = {}
        self._off = False

    def write(self, step: int, counts: Mapping[str, float]) -> None:
        """`counts`: the dock's metrics under their declared names. The same as last time leaves no line."""
        row = {"step": step, **standing(counts)}
        if self._off or row == self._last:
            return
        self._last = row
        try:
            self._file = self._file or LineFile(self._path)
            self._file.append({**row, "time": round(time.time(), 3)})
        except OSError as error:
            log.warning("%s is no longer written: %s", self._path, error)
            self._off = True

    @contextmanager
    def watching(
        self, step: int, look: Callable[[], Awaitable[Mapping[str, float]]], every_s: float = LOOK_S
    ) -> Iterator[None]:
        """Look every `every_s` seconds while the body waits in an event loop; a look that fails ends the looking."""
        over = asyncio.Event()

        async def watch() -> None:
            while not over.is_set():
                try:
                    await asyncio.wait_for(over.wait(), every_s)
                except TimeoutError:
                    try:
                        self.write(step, await look())
                    except DocklandsError as error:
                        return log.debug("the dock was not looked at: %s", error)

        task = asyncio.get_running_loop().create_task(watch())
        try:
            yield
        finally:
            over.set()  # not cancelled: a call to the dock's processes is let finish
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def standing(counts: Mapping[str, float]) -> dict[str, Any]:
    """In flight, bytes, and rows by stage, of the dock's metrics."""
    stages: dict[str, dict[str, int]] = {}
    for name, value in counts.items():
        head, _, what = name.removeprefix("dock/").rpartition("/")
        if head and what in COUNTS:
            stages.setdefault(head, {})[what] = int(value)
    found = {key: int(counts[f"dock/{key}"]) for key in ("in_flight", "bytes") if f"dock/{key}" in counts}
    return {**found, "stages": stages}
