"""What the dashboard reads: files that grow, are cut, are huge or hostile. And what a run writes for it."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import IO, Any

import pytest
from tests.dashboard_run import EVIL, GRAPH, build, span_row

from docklands.dashboard import files, spans
from docklands.dashboard.files import Tail, read_end
from docklands.dashboard.runs import RunReader
from docklands.dashboard.samples import read_step
from docklands.dashboard.series import MetricStore, Series
from docklands.dashboard.spans import SpanFile, waits
from docklands.errors import ControlLost
from docklands.obs.files import write_lines
from docklands.obs.flow import FlowLog
from docklands.obs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return build(tmp_path / "run")


def reader(run: RunDir) -> RunReader:
    """A reader that looks at the files whenever it is asked."""
    return RunReader(run.path, again_s=0.0)


# --- files that grow, are cut, are huge ----------------------------------------------------------------------------


def test_a_tail_gives_each_line_once_and_waits_for_torn_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() == (False, [])
    whole = b"".join(b'{"step": %d}\n' % i for i in range(50))
    seen: list[dict[str, Any]] = []
    for end in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:end])
        again, rows = tail.read()
        assert not again
        seen += rows
        assert tail.left == 0, "a torn line is nothing to come back for"
    path.write_bytes(whole)
    assert seen + tail.read()[1] == [{"step": i} for i in range(50)]


def test_a_tail_reads_a_bounded_part_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_lines(path, ({"step": i, "pad": "x" * 100} for i in range(100)))
    tail = Tail(path, part=2000, longest=500)
    parts, steps = 0, []
    while True:
        rows = tail.read()[1]
        if not rows:
            break
        assert len(rows) <= 2000 // 100
        steps += [row["step"] for row in rows]
        parts += 1
        assert (tail.left > 0) == (len(steps) < 100)
    assert steps == list(range(100)) and parts > 5


@pytest.mark.parametrize("new", [b'{"step": 1}\n', b'{"step": 9}\n{"step": 8}\n{"step": 7}\n{"step": 6}\n'])
def test_a_tail_starts_anew_when_the_file_was_cut(new: bytes, tmp_path: Path) -> None:
    """A resumed run cuts its files and goes on; the new end may lie before or behind the old one."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    tail = Tail(path)
    assert len(tail.read()[1]) == 3
    path.write_bytes(new)
    again, rows = tail.read()
    assert again and len(rows) == new.count(b"\n")


def test_a_tail_passes_over_what_is_no_line_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\nnot json\n[1]\n' + b"[" * 3000 + b"\n" + b'"' + b"x" * 9000 + b'"\n{"b": 2}\n')
    tail = Tail(path, part=4000, longest=4000)
    found: list[dict[str, Any]] = []
    for _ in range(6):
        found += tail.read()[1]
    assert found == [{"a": 1}, {"b": 2}]


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"password": 1}\n')
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(secret)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path):
        assert Tail(path).read() == (False, [])
        assert read_end(path) == ""


def test_the_end_of_a_log_begins_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    told = read_end(path, 100)
    assert told.endswith("line 999\n") and told.startswith("line ") and len(told) <= 100


# --- metrics -------------------------------------------------------------------------------------------------------


def test_a_series_keeps_a_bounded_number_of_means() -> None:
    series = Series(most=8)
    for step in range(1, 101):
        series.add(step, float(step))
    steps, values = series.after(0)
    assert series.per == 16 and len(steps) < 8 and series.last == (100, 100.0)
    assert values == [sum(range(s - 15, s + 1)) / 16 for s in steps]
    assert series.after(steps[-2]) == (steps[-1:], values[-1:])


def test_a_step_that_comes_again_replaces_what_followed() -> None:
    store = MetricStore()
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0)):
        store.add({"step": step, "metrics": {"a": value}})
    before = store.epoch
    store.add({"step": 2, "metrics": {"a": 20.0}})
    assert store.series["a"].after(0) == ([1, 2], [1.0, 20.0]) and store.epoch > before


def test_metrics_of_no_known_kind_are_passed_over() -> None:
    store = MetricStore()
    for row in ({}, {"step": True, "metrics": {"a": 1}}, {"step": 1, "metrics": [1]}, {"step": 1e9, "metrics": {}}):
        store.add(row)
    store.add({"step": 1, "metrics": {"a": "x", "b": True, "c": 10**400, "d": float("inf"), "e": None, "f" * 999: 1.0}})
    assert store.series == {}
    assert store.bad == {"e": (1, 1)}


def test_only_new_points_are_sent_while_the_epoch_holds(run: RunDir) -> None:
    watched = reader(run)
    first = watched.series({"critic/rewards/mean": -1, "nope": -1})
    assert first["whole"] and first["series"]["critic/rewards/mean"]["steps"] == [1, 2, 3, 4]
    with open(run.metrics, "a") as file:
        file.write('{"step": 5, "metrics": {"critic/rewards/mean": 0.5}}\n{"step": 6, "metr')
    again = watched.series({"critic/rewards/mean": 4}, first["epoch"])
    assert not again["whole"] and again["series"]["critic/rewards/mean"] == {"steps": [5], "values": [0.5], "per": 1}
    run.truncate_after(2)
    cut = watched.series({"critic/rewards/mean": 5}, again["epoch"])
    assert cut["whole"] and cut["series"]["critic/rewards/mean"]["steps"] == [1, 2]
    assert watched.series({"val-core/held/mean@1": -1})["series"] == {}, "the evaluation came after step 2"
    assert watched.graph()["flow"][-1]["step"] == 2


# --- spans ---------------------------------------------------------------------------------------------------------


class Counting:
    """A file that counts what is read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.taken = file, 0

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.taken += len(data)
        return data

    def readline(self, size: int) -> bytes:
        data = self.file.readline(size)
        self.taken += len(data)
        return data

    def seek(self, *place: int) -> int:
        return self.file.seek(*place)

    def tell(self) -> int:
        return self.file.tell()


@pytest.fixture
def long_trace(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """6,000 steps of 3 spans, 2.5 MB, as several processes append them: in order of their ends, nearly."""
    rng, rows = random.Random(1), []
    for step in range(6000):
        zero = 10_000.0 + step * 3
        rows += [
            span_row("stage/rollout", "rollout", zero, 1 + rng.random()),
            span_row("step", "driver", zero, 3.0, step=step),
        ]
        rows.append(span_row("update/actor", "actor", zero + 2.2, 0.7))
    rows.sort(key=lambda r: r["start"] + r["duration"] + rng.random())
    path = tmp_path / "spans.jsonl"
    write_lines(path, rows)
    return path, rows


def test_a_window_of_spans_is_what_a_whole_read_would_find(
    long_trace: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = long_trace
    opened: list[Counting] = []

    def counted(place: Path) -> Counting | None:
        file = files.open_plain(place)
        opened.append(Counting(file)) if file is not None else None
        return opened[-1]

    monkeypatch.setattr(spans, "open_plain", counted)
    monkeypatch.setattr(spans, "CHUNK", 1 << 13)
    monkeypatch.setattr(spans, "PAST", 1 << 14)
    rng, trace = random.Random(2), SpanFile(path)
    for _ in range(25):
        start = 9_990 + rng.random() * 18_020
        end = start + rng.random() * 30
        found = trace.window(start, end)
        wanted = [(r["name"], r["start"]) for r in rows if r["start"] <= end and r["start"] + r["duration"] >= start]
        assert sorted((s["name"], s["start"]) for s in found["spans"]) == sorted(wanted)
        assert not found["hidden"] and not found["cut"]
    assert max(file.taken for file in opened) < 400_000 < path.stat().st_size // 5
    assert trace.last_step() == 5999
    assert trace.extent() == (10_000.0, 10_000.0 + 5999 * 3 + 3)
    assert [trace.step(n) for n in (0, 3210, 5999, 6000)] == [
        (10_000.0, 10_003.0), (19_630.0, 19_633.0), (27_997.0, 28_000.0), None,
    ]  # fmt: skip


def test_a_window_is_bounded_and_says_so(
    long_trace: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = SpanFile(long_trace[0])
    monkeypatch.setattr(spans, "MOST_SPANS", 50)
    found = trace.window(10_000, 10_300)
    assert len(found["spans"]) == 50 and found["hidden"] == 101 + 101 + 100 - 50
    assert {s["name"] for s in found["spans"]} == {"step"}, "the longest are kept"
    monkeypatch.setattr(spans, "MOST_BYTES", 100_000)
    assert trace.window(10_000, 28_000)["cut"]


def test_spans_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    odd = [
        {"name": 3, "role": "a", "start": 1, "duration": 1}, span_row("a", "b", float("nan"), 1),
        span_row("a", "b", 1e300, 1), span_row("a", "b", 5, -1), span_row("a", "b", 5, 1, id=[1]),
        span_row("a", "b", 5, 1, parent={"x": 1}), span_row("a", "b", 5, 1, rank="0"),
        span_row("a", "b", 5, 1, step=1 << 99),
    ]  # fmt: skip
    good = span_row(EVIL, "b", 5, 1, attributes={"n": 1, "bad": float("inf"), "deep": {"x": [1] * 999}})
    path.write_text("\n".join(json.dumps(row) for row in [*odd, good]) + "\n" + "x" * 70_000)
    found = SpanFile(path).window(0, 100)["spans"]
    assert [s["name"] for s in found] == [EVIL]
    json.dumps(found, allow_nan=False)
    assert len(str(found[0]["attributes"]["deep"])) <= 200


def test_who_waits_for_whom() -> None:
    """The reward waits for the rollout; the second rollout for new weights, then 0.2 s for its device."""
    rows = [
        span_row("stage/rollout", "rollout", 0.0, 1.0),
        span_row("stage/reward", "reward", 1.0, 0.1),
        span_row("update/actor", "actor", 1.2, 0.8),
        span_row("publish", "actor", 2.0, 0.1),
        span_row("stage/rollout", "rollout", 2.5, 1.0, attributes={"waited": 0.2}),
        span_row("stage/reward", "reward", 3.5, 0.1),
    ]
    found = [
        (w["role"], round(w["start"], 3), round(w["end"], 3), w["cause"], w["by"]) for w in waits(rows, GRAPH["stages"])
    ]
    assert found == [
        ("rollout", 1.0, 2.1, "input", "publish"),
        ("rollout", 2.1, 2.3, "rows", ""),
        ("rollout", 2.3, 2.5, "device", "publish"),
        ("reward", 1.1, 3.5, "input", "stage/rollout"),
    ]


def test_the_maker_of_an_input_is_found_behind_a_thousand_ranks() -> None:
    """A reward that waits for the rollout, while a thousand others have their turn in between."""
    others = [span_row("stage/reward", "reward", 2.1 + i / 4000, 0.1, rank=i) for i in range(1, 1001)]
    rows = [span_row("stage/reward", "reward", 0.0, 0.5), span_row("stage/rollout", "rollout", 0.4, 1.6)]
    found = waits([*rows, *others, span_row("stage/reward", "reward", 2.5, 0.1)], GRAPH["stages"])
    assert [(w["rank"], w["start"], w["end"], w["cause"], w["by"]) for w in found] == [
        (0, 0.5, 2.0, "input", "stage/rollout"),
        (0, 2.0, 2.5, "rows", ""),
    ]


# --- samples -------------------------------------------------------------------------------------------------------


def test_samples_come_by_group_with_the_way_to_their_neighbours(run: RunDir) -> None:
    found = read_step(run.samples, None)
    assert (found["step"], found["previous"], found["next"], found["first"]) == (4, 3, None, 1)
    assert [(g["prompt"], len(g["rows"])) for g in found["groups"]] == [("p0", 2), ("p1", 2)]
    assert read_step(run.samples, 2)["next"] == 3 and read_step(run.samples, 99)["step"] == 4
    assert read_step(run.samples, 0)["step"] == 1 and read_step(run.samples / "none", 1) == {"step": None}


def test_samples_are_bounded_and_of_known_kinds(tmp_path: Path) -> None:
    tokens = {"text": ["a", "b", 3], "mask": "1", "rollout": [1, None, "x"], "old": [1], "versions": [[4, 2], [5, 99]]}
    rows = [{"prompt": "x" * 10**6, "completion": {"a": 1}, "reward": "high", "advantage": 1e999, "tokens": tokens}]
    write_lines(tmp_path / "step_000001.jsonl", rows + [{"group_id": [1], "versions": {"a": 1}}] * 2000)
    found = read_step(tmp_path, 1)
    first = found["groups"][0]["rows"][0]
    assert found["cut"] and sum(len(g["rows"]) for g in found["groups"]) == 512
    assert len(found["groups"][0]["prompt"]) < 21_000
    assert first["tokens"] == {"text": ["a", "b", "3"], "all": 3, "rollout": [1, None, None], "versions": [4, 4, 5]}
    assert "reward" not in first and "advantage" not in first
    json.dumps(found, allow_nan=False)
    ids = ["NaN", "1e999", "-1e999", '{"a": 1}', "true", "7"]
    (tmp_path / "step_000002.jsonl").write_text("".join(f'{{"group_id": {i}, "prompt": {i}}}\n' for i in ids))
    found = read_step(tmp_path, 2)
    assert [group["id"] for group in found["groups"]] == [None] * 5 + [7]
    json.dumps(found, allow_nan=False)


# --- what a run writes for it --------------------------------------------------------------------------------------


def test_the_flow_log_has_a_line_for_each_change(tmp_path: Path) -> None:
    counts = {
        "dock/in_flight": 2.0,
        "dock/bytes": 7.0,
        "dock/rollout/ready": 3.0,
        "dock/rollout/leased": 1.0,
        "dock/puts": 9.0,
    }
    looks: list[int] = []
    log = FlowLog(tmp_path / "dock.jsonl")

    async def look() -> dict[str, float]:
        looks.append(1)
        if len(looks) == 6:
            raise ControlLost("gone")
        return {**counts, "dock/rollout/leased": float(min(len(looks), 3))}

    async def watch() -> None:
        with log.watching(4, look, every_s=0.001):
            while len(looks) < 6:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
        assert len(looks) == 6, "a look that failed is the last one"

    assert not log._path.exists(), "nothing is made before there is something to say"
    asyncio.run(asyncio.wait_for(watch(), 120))
    log.close()
    rows = [json.loads(line) for line in log._path.read_text().splitlines()]
    assert [row["stages"]["rollout"] for row in rows] == [{"ready": 3, "leased": n} for n in (1, 2, 3)]
    assert {(row["step"], row["in_flight"], row["bytes"]) for row in rows} == {(4, 2, 7)}
