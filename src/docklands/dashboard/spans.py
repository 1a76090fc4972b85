"""A window of spans.jsonl, found by bisection: a file of many gigabytes is opened at once and never read whole.

Spans are appended when they end, so their ends rise along the file (from several processes nearly so: SLACK_S).
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from docklands.dashboard.files import number, open_plain
from docklands.obs.files import parse_line
from docklands.obs.spans import assign_lanes, is_span, nesting

Row = dict[str, Any]

SLACK_S = 2.0
"""Seconds by which a span may stand too late in the file."""
CHUNK = 1 << 16
LOOK = 4 << 20
"""Bytes that are looked through for one span of a kind."""
MOST_BYTES = 24 << 20
"""Bytes that a window reads at most."""
PAST = 1 << 19
"""Bytes read past a window's end, for spans that began in it and end later."""
MOST_SPANS = 4000
SHORT_S = 1e-3
"""Gaps that are not told."""
NEVER = (-math.inf, "")
NEAR = 200
"""Spans before one that are asked whether they held its device."""


class SpanFile:
    """The spans of a run, a window at a time. Keeps nothing between two calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def window(self, start: float, end: float, named: Callable[[str], bool] = bool) -> dict[str, Any]:
        """Spans that touch [start, end] (Unix seconds), by start; of these names only.

        {spans, hidden: short ones left out, cut: whether the end of the window was not reached}
        """
        found, cut = self._touching(start, end, named)
        hidden = max(0, len(found) - MOST_SPANS)
        if hidden:
            found = sorted(found, key=lambda row: -row["duration"])[:MOST_SPANS]
        found.sort(key=lambda row: (row["start"], -row["duration"]))
        lanes = assign_lanes(found)
        depths = nesting(found, lanes)
        return {"spans": [told(*parts) for parts in zip(found, lanes, depths)], "hidden": hidden, "cut": cut}

    def extent(self) -> tuple[float, float] | None:
        """When the first spans began and the last ones ended; None without a span."""
        file = open_plain(self.path)
        if file is None:
            return None
        with file:
            size = file.seek(0, os.SEEK_END)
            head = [row for _, row in spans_from(file, 0, min(size, CHUNK))]
            tail = [row for _, row in spans_from(file, line_start(file, max(0, size - CHUNK)), size)]
        if not head and not tail:
            return None
        ends = [end_of(row) for row in tail or head]
        return min(row["start"] for row in head or tail), max(ends)

    def last_step(self) -> int:
        """Number of the last whole step, counted from 0; -1 when none is found near the end of the file."""
        file = open_plain(self.path)
        if file is None:
            return -1
        with file:
            size = file.seek(0, os.SEEK_END)
            for reach in (CHUNK, 8 * CHUNK, LOOK):
                rows = spans_from(file, line_start(file, max(0, size - reach)), size)
                found = max((row["step"] for _, row in rows if is_step(row)), default=-1)
                if found >= 0:
                    return found
        return -1

    def step(self, wanted: int) -> tuple[float, float] | None:
        """From start to end of the span "step" of that number (spans count steps from 0); None when there is none."""
        file = open_plain(self.path)
        if file is None:
            return None

        def before(row: Row) -> bool:
            return row["step"] < wanted

        with file:
            size = file.seek(0, os.SEEK_END)
            low = bisect(file, size, before, is_step)
            end = min(size, low + 2 * LOOK)
            found = next((row for _, row in spans_from(file, low, end) if is_step(row) and row["step"] >= wanted), None)
        return (found["start"], end_of(found)) if found is not None and found["step"] == wanted else None

    def _touching(self, start: float, end: float, named: Callable[[str], bool]) -> tuple[list[Row], bool]:
        file = open_plain(self.path)
        if file is None:
            return [], False
        found: list[Row] = []
        with file:
            size = file.seek(0, os.SEEK_END)
            low = bisect(file, size, lambda row: end_of(row) < start - SLACK_S, lambda row: True)
            over = None
            for offset, row in spans_from(file, low, min(size, low + MOST_BYTES)):
                if row["start"] <= end and end_of(row) >= start and named(row["name"]):
                    found.append(row)
                if end_of(row) > end + SLACK_S and over is None:
                    over = offset
                if over is not None and offset > over + PAST:
                    return found, False
        return found, size > low + MOST_BYTES


def bisect(file: IO[bytes], size: int, before: Callable[[Row], bool], wanted: Callable[[Row], bool]) -> int:
    """A line's start from which on every wanted span is read that `before` is false of; at most CHUNK bytes early."""
    low, high = 0, size
    while high - low > CHUNK:
        middle = (low + high) // 2
        row = next(
            (r for _, r in spans_from(file, line_start(file, middle), min(size, middle + LOOK)) if wanted(r)), None
        )
        if row is not None and before(row):
            low = middle
        else:
            high = middle
    return line_start(file, low)


def line_start(file: IO[bytes], offset: int) -> int:
    """Where the first line begins that begins at `offset` or later."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    while (chunk := file.read(CHUNK)) and file.tell() < offset + LOOK:
        cut = chunk.find(b"\n")
        if cut >= 0:
            return file.tell() - len(chunk) + cut + 1
    return file.tell()


def spans_from(file: IO[bytes], offset: int, end: int) -> Iterator[tuple[int, Row]]:
    """(offset, span) of each whole line that begins in [offset, end)."""
    file.seek(offset)
    while offset < end:
        raw = file.readline(LOOK)
        if not raw:
            return
        if raw.endswith(b"\n"):
            row = parse_line(raw)
            if row is not None and is_span(row) and sound(row):
                yield offset, row
        offset += len(raw)


def sound(row: Row) -> bool:
    """Numbers within reason: nothing downstream stumbles over a foreign line."""
    ids = (row.get("rank", 0), row.get("id"), row.get("parent"), row.get("step"))
    plain = all(i is None or (isinstance(i, int) and abs(i) < 1 << 63) for i in ids)
    return plain and abs(row["start"]) < 1e11 and 0 <= row["duration"] < 1e9


def is_step(row: Row) -> bool:
    return row["name"] == "step" and isinstance(row.get("step"), int)


def end_of(row: Row) -> float:
    return row["start"] + row["duration"]


def told(row: Row, lane: int, depth: int) -> Row:
    """A span as the page gets it."""
    extra = row.get("attributes")
    attributes = {str(k)[:60]: v for k, v in list(extra.items())[:20]} if isinstance(extra, dict) else {}
    plain = {k: v if number(v) is not None else str(v)[:200] for k, v in attributes.items()}
    return {
        "name": row["name"][:80],
        "role": row["role"][:40],
        "rank": row.get("rank") or 0,
        "step": row.get("step") if isinstance(row.get("step"), int) else None,
        "start": row["start"],
        "duration": row["duration"],
        "lane": lane,
        "depth": depth,
        "attributes": plain,
    }


# --- who waits for whom ------------------------------------------------------------------------------------------


def waits(spans: Sequence[Row], graph: Sequence[Row]) -> list[Row]:
    """The gaps before each stage's spans and what filled them, from `told` spans and the graph's stages.

    A worker (role, rank) that has finished one span and begins its next only later waited: at the end of the gap for
    its device, for as long as the span says ("waited"), held by the stage that ran most of that time; before that for
    its input, until the last stage that makes what it reads was done; else it was handed no rows.
    {role, rank, start, end, cause: "input" | "device" | "rows", by: name of the span waited for}
    """
    work = sorted((s for s in spans if stage_of(s)), key=lambda s: s["start"])
    sources = upstream(graph)
    ends: dict[str, list[tuple[float, str]]] = defaultdict(list)  # of each stage's spans, in order, with their names
    for span in sorted(work, key=end_of):
        ends[stage_of(span)].append((end_of(span), span["name"]))
    idle_since: dict[tuple[str, int], float] = {}
    found: list[Row] = []
    for i, span in enumerate(work):
        key: tuple[str, int] = (span["role"], span["rank"])
        start: float = span["start"]
        since = idle_since.get(key, start)
        idle_since[key] = max(idle_since.get(key, 0.0), end_of(span))
        if start - since < SHORT_S:
            continue
        near = work[max(0, i - NEAR) : i]
        others = [s for s in near if end_of(s) > since and s["start"] < start and (s["role"], s["rank"]) != key]
        made = [last_before(ends[stage], start + SHORT_S) for stage in sources.get(stage_of(span), ())]
        place = {"role": span["role"], "rank": span["rank"]}
        found += [
            {**place, **p}
            for p in gap(span, since, others, max(made, default=NEVER))
            if p["end"] - p["start"] > SHORT_S
        ]
    return found


def last_before(ends: Sequence[tuple[float, str]], time: float) -> tuple[float, str]:
    """The last of these ends that is not after a time; NEVER when there is none."""
    at = bisect_right(ends, time, key=lambda end: end[0])
    return ends[at - 1] if at else NEVER


def gap(span: Row, since: float, others: Sequence[Row], last: tuple[float, str]) -> list[Row]:
    """The parts of a worker's gap [since, start of the span]: see `waits`. others: spans of other workers in it; last:
    when its input was there, and by whom."""
    start = span["start"]
    leased = max(since, start - max(0.0, number(span["attributes"].get("waited")) or 0.0))
    made, maker = last if last[0] > since else (since, "")
    made = min(made, leased)
    held = max(others, key=lambda s: min(end_of(s), start) - max(s["start"], leased), default=None)
    return [
        {"start": since, "end": made, "cause": "input", "by": maker},
        {"start": made, "end": leased, "cause": "rows", "by": ""},
        {"start": leased, "end": start, "cause": "device", "by": held["name"] if held else "another role"},
    ]


def stage_of(span: Row) -> str:
    """The stage that a span is a run of; "update" for the learners', "publish" for new weights; else empty."""
    head, _, rest = span["name"].partition("/")
    if head == "stage" and rest:
        return rest
    return head if head in ("update", "publish") else ""


def upstream(graph: Sequence[Row]) -> dict[str, set[str]]:
    """Stage -> the stages that it waits for: writers of what it reads; the rollout waits for new weights."""
    writer = {column: stage["name"] for stage in graph for column in stage["writes"]}
    found = {stage["name"]: {writer[c] for c in stage["reads"] if c in writer} for stage in graph}
    found["publish"] = {"update"}
    found.get("update", set()).add("describe")  # the driver measures the rows before they are trained
    for sources in found.values():
        if not sources:
            sources.add("publish")
    return found
