"""Spans: what ran when, for how long, inside what. Written to spans.jsonl; exported for Perfetto.

    with recording(SpanRecorder(run_dir / "spans.jsonl", role="driver")):
        with span("stage/rollout", role="rollout", step=3, rows=64) as attributes:
            ...
            attributes["tokens"] = 812

Safe across threads and tasks (the parent is a context variable). Without a recorder a span costs well under 1 us.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from docklands.obs.files import LineFile, iter_jsonl, write_json

log = logging.getLogger("docklands.obs")


class Open:
    """A span under way."""

    __slots__ = ("attributes", "began", "id", "name", "parent", "rank", "recorder", "role", "step")

    def __init__(self, recorder: SpanRecorder, name: str, place: tuple[Any, ...], attributes: dict[str, Any]) -> None:
        self.recorder = recorder
        self.name = name
        self.role, self.rank, self.step = place
        self.attributes = attributes

    def __enter__(self) -> dict[str, Any]:
        self.parent = parent = CURRENT.get()
        self.id = next(self.recorder.ids)
        if parent is not None:
            self.step = parent.step if self.step is None else self.step
            if self.role is None:
                self.role, self.rank = parent.role, parent.rank if self.rank is None else self.rank
        CURRENT.set(self)
        self.began = time.perf_counter()
        return self.attributes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        duration = time.perf_counter() - self.began
        CURRENT.set(self.parent)
        if kind is not None:
            self.attributes["error"] = kind.__name__
        self.recorder.write(self, duration)


class NoSpan:
    """The span when nobody records."""

    __slots__ = ()

    def __enter__(self) -> dict[str, Any]:
        return {}

    def __exit__(self, *_: object) -> None:
        return None


CURRENT: ContextVar[Open | None] = ContextVar("docklands_span", default=None)
NOTHING = NoSpan()


class SpanRecorder:
    """Appends finished spans to a file, one JSON object a line.

    {name, role, rank, id, parent (an id or null), step, start (Unix seconds), duration (seconds), attributes}
    A disk that refuses costs one warning and the spans after it, never the run.
    """

    def __init__(self, path: Path, role: str = "driver", rank: int = 0) -> None:
        self.role = role
        self.rank = rank
        self.ids = itertools.count(os.getpid() << 32)  # unique over the processes and restarts that share a file
        self._offset = time.time() - time.perf_counter()
        self._file: LineFile | None = LineFile(path)
        self._lock = threading.Lock()

    def write(self, done: Open, duration: float) -> None:
        row = {
            "name": done.name,
            "role": done.role or self.role,
            "rank": self.rank if done.rank is None else done.rank,
            "id": done.id,
            "parent": done.parent.id if done.parent else None,
            "step": done.step,
            "start": round(done.began + self._offset, 6),
            "duration": round(duration, 6),
            "attributes": done.attributes,
        }
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.append(row)
            except OSError as error:
                log.warning("spans are no longer written: %s", error)
                self._file.close()
                self._file = None

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


ACTIVE: SpanRecorder | None = None


def span(
    name: str, *, role: str | None = None, rank: int | None = None, step: int | None = None, **attributes: Any
) -> Open | NoSpan:
    """A context manager around some work; entering gives the dictionary of attributes, open for additions.

    role, rank and step are the enclosing span's unless given; outermost, the recorder's.
    """
    if ACTIVE is None:
        return NOTHING
    return Open(ACTIVE, name, (role, rank, step), attributes)


@contextmanager
def recording(recorder: SpanRecorder | None) -> Iterator[SpanRecorder | None]:
    """Make `recorder` the process's recorder; closes it and restores the former one at the end."""
    global ACTIVE
    before, ACTIVE = ACTIVE, recorder
    try:
        yield recorder
    finally:
        ACTIVE = before
        if recorder is not None:
            recorder.close()


# --- reading back ----------------------------------------------------------------------------------------------


def read_spans(run_dir: Path) -> list[dict[str, Any]]:
    """The finished spans of a run, by start. Lines that are no spans are passed over."""
    rows = (row for row in iter_jsonl(Path(run_dir) / "spans.jsonl") if is_span(row))
    return sorted(rows, key=lambda row: (row["start"], -row["duration"]))


def is_span(row: dict[str, Any]) -> bool:
    """Whether a line has what the readers of spans need."""
    numbers = all(isinstance(row.get(key), (int, float)) for key in ("start", "duration"))
    return numbers and isinstance(row.get("name"), str) and isinstance(row.get("role"), str)


def assign_lanes(spans: Iterable[dict[str, Any]]) -> list[int]:
    """A lane for each span (in the order given, by start), so that spans of one lane nest or follow each other.

    A child goes under its parent where that fits; concurrent spans get lanes of their own. Lanes are counted from 0
    for each (role, rank).
    """
    stacks: dict[tuple[str, int], list[list[tuple[float, Any]]]] = {}
    lane_of: dict[Any, int] = {}
    lanes = []
    for row in spans:
        end = row["start"] + row["duration"]
        rows = stacks.setdefault((row["role"], row.get("rank", 0)), [])
        for stack in rows:
            while stack and stack[-1][0] <= row["start"]:
                stack.pop()
        home = lane_of.get(row.get("parent"))
        if home is not None and home < len(rows) and fits_under(rows[home], row.get("parent"), end):
            lane = home
        else:
            lane = next((i for i, stack in enumerate(rows) if not stack), len(rows))
        if lane == len(rows):
            rows.append([])
        rows[lane].append((end, row.get("id")))
        lane_of[row.get("id")] = lane
        lanes.append(lane)
    return lanes


def fits_under(stack: list[tuple[float, Any]], parent: Any, end: float) -> bool:
    """Whether a child of `parent` that ends at `end` nests on top of this lane (start and end are rounded to 1 us)."""
    return bool(stack) and stack[-1][1] == parent and end <= stack[-1][0] + 2e-6


def nesting(spans: Sequence[dict[str, Any]], lanes: Sequence[int]) -> list[int]:
    """How many spans of its own lane enclose each span."""
    stacks: dict[tuple[Any, ...], list[float]] = {}
    depths = []
    for row, lane in zip(spans, lanes):
        stack = stacks.setdefault((row["role"], row.get("rank"), lane), [])
        while stack and stack[-1] <= row["start"]:
            stack.pop()
        depths.append(len(stack))
        stack.append(row["start"] + row["duration"])
    return depths


def to_chrome_trace(run_dir: Path) -> dict[str, Any]:
    """The run's spans in Chrome's trace format, which Perfetto opens: a process per role, a thread per rank and lane.

    Times are microseconds since the first span.
    """
    spans = read_spans(run_dir)
    zero = spans[0]["start"] if spans else 0.0
    pids = {role: i + 1 for i, role in enumerate(dict.fromkeys(row["role"] for row in spans))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}} for role, pid in pids.items()
    ]
    threads: set[tuple[int, int, int]] = set()
    for row, lane in zip(spans, assign_lanes(spans), strict=True):
        rank = int(row.get("rank") or 0)
        pid, tid = pids[row["role"]], rank * 1000 + lane
        threads.add((pid, rank, lane))
        args = {**(row.get("attributes") or {}), "step": row.get("step"), "rank": rank}
        event = {"ph": "X", "name": row["name"], "cat": row["role"], "pid": pid, "tid": tid, "args": args}
        events.append({**event, "ts": round((row["start"] - zero) * 1e6, 3), "dur": round(row["duration"] * 1e6, 3)})
    for pid, rank, lane in sorted(threads):
        name = f"rank {rank}" + (f" lane {lane}" if lane else "")
        tid = rank * 1000 + lane
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def export_chrome_trace(run_dir: Path, path: Path | None = None) -> Path:
    """Write `to_chrome_trace` to `path` (default: trace.json in the run directory), for ui.perfetto.dev."""
    path = path or Path(run_dir) / "trace.json"
    write_json(path, to_chrome_trace(run_dir))
    return path
