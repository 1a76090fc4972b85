"""Sinks: metrics.jsonl to the byte, TensorBoard read back, failures of the required and the optional."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from docklands.errors import ConfigError, DocklandsError
from docklands.obs.log import setup_logging, teardown_logging
from docklands.obs.sinks import JsonlSink, Sinks, TensorBoardSink, WandbSink, strip_times

LIMITED = """
import resource, sys
from pathlib import Path
from docklands.errors import DocklandsError
from docklands.obs.log import setup_logging
from docklands.obs.sinks import JsonlSink, Sinks, TensorBoardSink
setup_logging(None)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))  # writes beyond it fail
"""


class Recording:
    """A sink that keeps what it gets, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.steps: list[int] = []
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


def limited(tmp_path: Path, limit: int, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED + code, str(tmp_path), str(limit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_jsonl_is_sorted_finite_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"b": 0.1 + 0.2, "a": math.nan, "c": -math.inf})
    sink.write(2, {"a": 1e-300})
    sink.close()
    first = b'{"metrics": {"a": null, "b": 0.30000000000000004, "c": null}, "step": 1}\n'
    assert path.read_bytes() == first + b'{"metrics": {"a": 1e-300}, "step": 2}\n'


def test_equal_runs_are_byte_equal_apart_from_times(tmp_path: Path) -> None:
    lines = []
    for run, seconds in (("a", 1.5), ("b", 2.5)):
        sink = JsonlSink(tmp_path / f"{run}.jsonl")
        clocks = {
            "timing_s/gen": seconds,
            "perf/throughput": 9 / seconds,
            "memory/rss_mib": seconds * 7,
            "dock/bytes": seconds,
        }
        sink.write(1, {**clocks, "rollout/decode_tokens": 12.0, "actor/pg_loss": 0.25})
        sink.close()
        lines.append((tmp_path / f"{run}.jsonl").read_text())
    assert lines[0] != lines[1]
    expected = '{"metrics": {"actor/pg_loss": 0.25, "rollout/decode_tokens": 12.0}, "step": 1}'
    assert strip_times(lines[0]) == strip_times(lines[1]) == expected


def test_resuming_cuts_a_torn_line_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"metrics": {}, "step": 1}\n{"metrics": {"actor/pg_lo')
    sink = JsonlSink(path)
    sink.write(2, {})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_metrics_jsonl_on_a_full_disk_is_an_error(tmp_path: Path) -> None:
    code = """
sink = Sinks([JsonlSink(Path(sys.argv[1]) / 'metrics.jsonl')])
try:
    for step in range(1, 100): sink.write(step, {'actor/pg_loss': 0.5})
except DocklandsError as error: print(step, error)
"""
    done = limited(tmp_path, 1000, code)
    assert done.returncode == 0 and "cannot be written: File too large (hint: free some space" in done.stdout
    rows = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert len(rows) == int(done.stdout.split()[0])  # whole lines before the failing step, then the torn rest


def test_optional_sink_on_a_full_disk_costs_one_warning(tmp_path: Path) -> None:
    """TensorBoard's file, which had something in it already, meets the limit; metrics.jsonl does not."""
    code = """
board = TensorBoardSink(Path(sys.argv[1]) / 'tensorboard')
board.write(0, {str(i): 1.0 for i in range(100)})
sinks = Sinks([JsonlSink(Path(sys.argv[1]) / 'metrics.jsonl')], [board])
for step in range(1, 31):
    sinks.write(step, {'p': 1.0})
sinks.close(); print('done')
"""
    done = limited(tmp_path, 1800, code)
    assert done.stdout == "done\n", done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 30
    assert (
        done.stderr == "warning: TensorBoardSink failed and is off for the rest of the run: [Errno 27] File too large\n"
    )


def test_broken_optional_sink_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    teardown_logging()
    broken, fine, required = Recording(OSError(28, "No space left on device")), Recording(), Recording()
    sinks = Sinks([required], [broken, fine])
    with caplog.at_level(logging.WARNING, "docklands"):
        for step in (1, 2, 3):
            sinks.write(step, {})
        sinks.close()
    assert broken.steps == [1] and fine.steps == required.steps == [1, 2, 3] and fine.closed and required.closed
    assert [r.getMessage() for r in caplog.records] == [
        "Recording failed and is off for the rest of the run: [Errno 28] No space left on device"
    ]


def test_required_sink_ends_the_run() -> None:
    with pytest.raises(DocklandsError, match="full"):
        Sinks([Recording(DocklandsError("full"))]).write(1, {})


def test_tensorboard_file_reads_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(step, {"critic/rewards/mean": step / 4, "actor/lr": 1e-6})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/rewards/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert events.Scalars("actor/lr")[0].value == pytest.approx(1e-6)


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from docklands.obs.sinks import TensorBoardSink\n"
        "sink = TensorBoardSink(Path(sys.argv[1])); sink.write(1, {'a': 1.0}); sink.close()\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_missing_package_is_the_users_error(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [package, *(n for n in sys.modules if n.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=f"needs the package {package}.*pip install"):
        WandbSink("p", "n", tmp_path, {}) if package == "wandb" else TensorBoardSink(tmp_path)


def test_log_files_and_console(tmp_path: Path) -> None:
    shown: list[str] = []
    logger = setup_logging(tmp_path, "rollout", 2, show=shown.append)
    logger = setup_logging(tmp_path, "rollout", 2, show=shown.append)  # twice: still one line each
    logging.getLogger("docklands.rollout").info("quiet \udc80")
    logger.warning("disk is %d %% full", 97)
    teardown_logging()
    text = (tmp_path / "log" / "rollout.2.log").read_text()
    assert shown == ["warning: disk is 97 % full"]
    assert "INFO    docklands.rollout: quiet \\udc80\n" in text and text.count("disk is 97 % full") == 1
