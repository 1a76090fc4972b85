"""Spans: nesting over tasks and threads, cheap when off, crash-safe, readable by Perfetto."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import timeit
from itertools import combinations
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.obs.spans import (
    SpanRecorder,
    assign_lanes,
    export_chrome_trace,
    read_spans,
    recording,
    span,
    to_chrome_trace,
)


def recorder(path: Path, role: str = "driver") -> SpanRecorder:
    return SpanRecorder(path / "spans.jsonl", role)


def by_name(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in read_spans(path)}


def test_nested_spans_keep_parent_step_and_role(tmp_path: Path) -> None:
    before = time.time()
    with recording(recorder(tmp_path)):
        with span("outer", role="actor", rank=3, step=7, rows=64) as attributes:
            attributes["tokens"] = 12
            with span("inner"):
                time.sleep(0.02)
        with span("after"):
            pass
    rows = by_name(tmp_path)
    outer, inner, after = rows["outer"], rows["inner"], rows["after"]
    assert outer["attributes"] == {"rows": 64, "tokens": 12} and outer["parent"] is None
    assert inner["parent"] == outer["id"] and (inner["role"], inner["rank"], inner["step"]) == ("actor", 3, 7)
    assert (after["role"], after["rank"], after["step"], after["parent"]) == ("driver", 0, None, None)
    assert inner["duration"] >= 0.02 and outer["duration"] >= inner["duration"]
    assert before - 1 <= outer["start"] <= inner["start"] <= time.time() + 1


def test_tasks_and_threads_do_not_mix_parents(tmp_path: Path) -> None:
    async def work(name: str) -> None:
        with span(name):
            await asyncio.sleep(0.01)
            with span(f"{name}/child"):
                await asyncio.sleep(0.01)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    with recording(recorder(tmp_path)):
        with span("root"):
            asyncio.run(both())
            thread = threading.Thread(target=lambda: asyncio.run(work("c")))
            thread.start()
            thread.join()
    rows = by_name(tmp_path)
    for name in "abc":
        assert rows[f"{name}/child"]["parent"] == rows[name]["id"]
    assert rows["a"]["parent"] == rows["b"]["parent"] == rows["root"]["id"]
    assert rows["c"]["parent"] is None  # a new thread starts without a context


def test_an_error_is_recorded_and_passes_on(tmp_path: Path) -> None:
    raised = False
    with recording(recorder(tmp_path)):
        try:
            with span("fails"):
                raise KeyError("x")
        except KeyError:
            raised = True
    assert raised and by_name(tmp_path)["fails"]["attributes"] == {"error": "KeyError"}


def test_without_a_recorder_a_span_is_nearly_free(tmp_path: Path) -> None:
    def once() -> None:
        with span("stage/rollout", step=3, rows=64) as attributes:
            attributes["x"] = 1

    assert min(timeit.repeat(once, number=20_000, repeat=5)) / 20_000 < 2e-6  # 0.35 us on a quiet machine
    assert not list(tmp_path.iterdir())


def test_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing: every span finished before is there; resuming appends whole lines."""
    code = (
        "import sys; from pathlib import Path; from docklands.obs.spans import *\n"
        "with recording(SpanRecorder(Path(sys.argv[1]) / 'spans.jsonl')):\n"
        "    for i in range(10**9):\n"
        "        with span('work', i=i, text='x' * 500): pass\n"
        "        if i == 200: print('ready', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        os.kill(child.pid, signal.SIGKILL)
    numbers = sorted(row["attributes"]["i"] for row in read_spans(tmp_path))
    assert len(numbers) > 200 and numbers == list(range(len(numbers)))
    with open(tmp_path / "spans.jsonl", "ab") as file:
        file.write(b'{"name": "torn')
    with recording(recorder(tmp_path)), span("again"):
        pass
    lines = (tmp_path / "spans.jsonl").read_bytes().splitlines()
    assert len(lines) == len(numbers) + 1 and json.loads(lines[-1])["name"] == "again"


def test_full_disk_costs_the_spans_not_the_run(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from docklands.obs.spans import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "with recording(SpanRecorder(Path(sys.argv[1]) / 'spans.jsonl')):\n"
        "    for i in range(100):\n"
        "        with span('work', i=i): pass\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=180)
    assert done.stdout == "done\n" and done.stderr.count("spans are no longer written") == 1, done.stderr
    assert 5 < len(read_spans(tmp_path)) < 100


def test_chrome_trace(tmp_path: Path) -> None:
    with recording(recorder(tmp_path)), span("step", step=1):
        with span("stage/rollout", role="rollout", rows=8):
            time.sleep(0.005)
    trace = to_chrome_trace(tmp_path)
    path = export_chrome_trace(tmp_path)
    assert json.loads(path.read_text()) == trace and path.name == "trace.json"
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert [processes[event["pid"]] for event in complete] == ["driver", "rollout"]
    assert complete[0]["ts"] == 0 and complete[1]["dur"] >= 5000  # microseconds
    assert complete[1]["args"] == {"rows": 8, "step": 1, "rank": 0}
    assert all(isinstance(event[key], int) for event in complete for key in ("pid", "tid"))


def test_chrome_trace_of_nothing(tmp_path: Path) -> None:
    assert to_chrome_trace(tmp_path) == {"traceEvents": [], "displayTimeUnit": "ms"}


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 1)), max_size=25)


@settings(max_examples=200, deadline=None)
@given(SPANS)
def test_spans_of_one_lane_nest_or_follow(times: list[tuple[int, int, int]]) -> None:
    """What Perfetto needs of a thread: no two events overlap in part."""
    rows = [
        {
            "id": i,
            "parent": i - 1 if nested and i else None,
            "role": "r",
            "start": float(start),
            "duration": float(length),
        }
        for i, (start, length, nested) in enumerate(times)
    ]
    rows.sort(key=lambda row: (row["start"], -row["duration"]))
    for (a, lane), (b, other) in combinations(zip(rows, assign_lanes(rows)), 2):
        if lane == other:
            a_end, b_end = a["start"] + a["duration"], b["start"] + b["duration"]
            assert b["start"] >= a_end or b_end <= a_end, (a, b)
