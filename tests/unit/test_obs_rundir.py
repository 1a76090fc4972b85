"""The run directory: made once, resumed with care, readable after a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from docklands.errors import ConfigError, DocklandsError
from docklands.obs.files import clean, read_json, read_jsonl, write_atomic, write_json
from docklands.obs.log import log_path, log_tail
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import JsonlSink


def test_create_makes_the_tree_and_refuses_a_used_one(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "a")
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "checkpoints", "log", "samples"]
    run.write_config("run: {}\n")
    run.release()
    with pytest.raises(ConfigError, match="is not empty.*--resume") as caught:
        RunDir.create(run.path)
    assert caught.value.exit_code == 2
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        RunDir.create(file)
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        RunDir.create(file / "run")


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunDir.resume(tmp_path)
    run = RunDir.create(tmp_path / "a")
    run.write_config("run: {}\n")
    run.release()
    assert RunDir.resume(run.path).read_config() == "run: {}\n"


def test_two_processes_never_write_one_run(tmp_path: Path) -> None:
    """A run that is under way is neither started nor resumed by another process; a killed one leaves no lock."""
    path = tmp_path / "run"
    hold = (
        "import sys; from docklands.obs.rundir import RunDir; run = RunDir.create(sys.argv[1]); "
        "run.write_config('run: {}'); print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for attempt in (RunDir.create, RunDir.resume):
            with pytest.raises(ConfigError, match=f"is in use by process {process.pid} ") as caught:
                attempt(path)
            assert caught.value.exit_code == 2
        process.kill()
    first = RunDir.resume(path)
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} "):
        RunDir.resume(path)
    first.release()
    RunDir.resume(path).release()


def test_a_start_that_came_to_nothing_does_not_block_the_next(tmp_path: Path) -> None:
    refused = RunDir.create(tmp_path / "a")
    (refused.log / "driver.0.log").write_text("x")
    refused.discard()
    assert not refused.path.exists()
    killed = RunDir.create(tmp_path / "b")  # before its config was written
    (killed.log / "driver.0.log").write_text("x")
    killed.metrics.touch()
    killed.release()
    again = RunDir.create(killed.path)
    again.discard()  # it was there before
    assert again.path.exists()
    again.release()
    (again.path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDir.create(again.path)
    (again.path / "notes.txt").unlink()
    (again.checkpoints / "step_000002").mkdir()
    with pytest.raises(ConfigError, match="is not empty"):
        RunDir.create(again.path)


def test_a_disk_that_refuses_is_one_line(tmp_path: Path) -> None:
    """The directories that the files would lie in are files: every write fails."""
    (tmp_path / "run").write_text("")
    run = RunDir(tmp_path / "run")
    writes: list[Callable[[], None]] = [
        lambda: run.write_config("run: {}"),
        lambda: run.write_graph({}),
        lambda: run.write_plan({}),
        lambda: run.write_env(),
        lambda: run.write_samples(1, []),
        lambda: run.append_eval(1, "s", {}),
    ]
    for write in writes:
        with pytest.raises(DocklandsError, match="cannot be written: (Not a directory|File exists).*free some space"):
            write()


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.write_graph({"stages": []})
    run.write_env(seed=np.int64(42))
    rows = [{"prompt": "答 \udc80", "reward": np.float32(0.5), "advantage": float("nan"), "ids": np.arange(3)}]
    run.write_samples(3, rows)
    run.append_eval(0, "gsm8k", {"val-core/gsm8k/mean@1": 0.25}, [{"prompt": "p"}])
    assert run.read_graph() == {"stages": []}
    assert run.read_samples(3) == [{"prompt": "答 \udc80", "reward": 0.5, "advantage": None, "ids": [0, 1, 2]}]
    assert "答" in run.sample_file(3).read_text() and run.sample_files() == [(3, run.samples / "step_000003.jsonl")]
    assert run.read_evals()[0]["metrics"] == {"val-core/gsm8k/mean@1": 0.25}
    env = run.read_env()
    assert env["seed"] == 42 and env["cpus"] >= 1 and env["memory_gib"] > 0 and "numpy" in env["packages"]


def test_readers_accept_torn_and_foreign_lines(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert (run.read_metrics(), run.read_evals(), run.read_graph(), run.read_config()) == ([], [], {}, "")
    good = b'{"metrics": {"a": 1.0, "b": null, "c": "x", "d": Infinity}, "step": 1}\n'
    later = b'{"metrics": {"a": 3}, "step": 2}\n{"metrics": {"a": 2}, "step": 1}\n'
    junk = b"[1]\n\xff\xfe\n\n{}\n"
    run.metrics.write_bytes(good + junk + later + b'{"metrics": {"a": 4.0}, "st')
    assert run.read_metrics() == [(1, {"a": 2.0}), (2, {"a": 3.0})]
    run.graph.write_text('{"stages": [')
    assert run.read_graph() == {} and read_json(tmp_path / "none.json") is None


def test_every_truncation_of_metrics_reads_whole_lines(tmp_path: Path) -> None:
    """A crash at any byte: the finished lines are there, and appending goes on cleanly."""
    whole = tmp_path / "whole.jsonl"
    sink = JsonlSink(whole)
    for step in (1, 2, 3):
        sink.write(step, {"actor/pg_loss": step / 8})
    sink.close()
    data, cut = whole.read_bytes(), tmp_path / "cut.jsonl"
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        finished = data[:size].count(b"\n")
        assert len(read_jsonl(cut)) - finished in (0, 1)  # all but its newline may be there
        sink = JsonlSink(cut)
        sink.write(9, {})
        sink.close()
        assert [row["step"] for row in read_jsonl(cut)] == [*range(1, finished + 1), 9]


def test_truncate_after_forgets_later_steps(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    sink = JsonlSink(run.metrics)
    for step in (1, 2, 3):
        sink.write(step, {"actor/pg_loss": 0.1 * step})
        run.write_samples(step, [{"prompt": "p"}])
        run.append_eval(step, "s", {})
    whole = run.metrics.read_bytes()
    run.truncate_after(2)
    assert run.metrics.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    sink.write(3, {"actor/pg_loss": 0.1 * 3})  # a sink that was open before the cut
    sink.close()
    assert run.metrics.read_bytes() == whole
    assert [n for n, _ in run.sample_files()] == [1, 2] and [row["step"] for row in run.read_evals()] == [1, 2]


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"a": 1})
    path.with_name(f".plan.json.{os.getpid()}.tmp").mkdir()  # the temporary file cannot be made
    with pytest.raises(OSError):
        write_atomic(path, "new")
    assert json.loads(path.read_text()) == {"a": 1}


def test_clean_gives_plain_finite_json() -> None:
    value = {1: float("inf"), "b": (np.float64(0.5), {True}), "c": np.array([[1, 2]]), "d": Path("x"), "e": None}
    assert clean(value) == {"1": None, "b": [0.5, [True]], "c": [[1, 2]], "d": "x", "e": None}


def test_log_tail(tmp_path: Path) -> None:
    path = log_path(tmp_path, "actor", 0)
    assert log_tail(path) == ""
    path.parent.mkdir()
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert log_tail(path, 2) == "line 998\nline 999"
