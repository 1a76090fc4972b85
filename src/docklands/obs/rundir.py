"""The run directory: the one interface between a run and everything that looks at it.

config.yaml  graph.json  plan.json  env.json     what was asked for, and where
metrics.jsonl  spans.jsonl  evals.jsonl          one JSON object a line, appended
dock.jsonl                                       where the samples stood (obs/flow.py)
samples/step_000003.jsonl                        some rows of a step
checkpoints/  log/<role>.<rank>.log  report.html
.lock                                            held by the process that writes here, and its number
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

from docklands.errors import ConfigError, DocklandsError
from docklands.obs.files import LineFile, parse_line, read_json, read_jsonl, write_atomic, write_json, write_lines

log = logging.getLogger("docklands.obs")

PACKAGES = ("docklands", "torch", "numpy", "transformers", "tokenizers", "safetensors", "pydantic", "ray", "vllm")


class RunDir:
    """Paths, writers and readers of one run directory. Making one touches no file; `create` and `resume` do.

    Those two also lock it: of two processes, the second is refused. The lock ends with `release` or the process.
    Readers take a crashed run as it is: missing files are empty, torn lines are passed over.
    Writers raise DocklandsError, with the file's name, when the disk refuses.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.graph = self.path / "graph.json"
        self.plan = self.path / "plan.json"
        self.env = self.path / "env.json"
        self.metrics = self.path / "metrics.jsonl"
        self.spans = self.path / "spans.jsonl"
        self.evals = self.path / "evals.jsonl"
        self.flow = self.path / "dock.jsonl"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.log = self.path / "log"
        self.watchdog = self.log / "watchdog.txt"
        self.report = self.path / "report.html"
        self.lock = self.path / ".lock"
        self._held: IO[str] | None = None
        self._fresh = False

    @classmethod
    def create(cls, path: Path | str) -> RunDir:
        """A new run. Raises ConfigError when `path` is a file, in use, holds anything, or cannot be made.

        What a start leaves that ended before its config.yaml was written does not count: logs and empty files.
        """
        run = cls(path)
        if run.path.exists() and not run.path.is_dir():
            raise ConfigError(f"{run.path} is not a directory", "choose another run.name or run.dir")
        return run._made(new=True)

    @classmethod
    def resume(cls, path: Path | str) -> RunDir:
        """A run that goes on. Raises ConfigError when there is nothing to go on from."""
        run = cls(path)
        if not run.config.is_file():
            raise ConfigError(f"{run.path} holds no run (no config.yaml)", "start it without --resume")
        return run._made(new=False)

    def _made(self, new: bool) -> RunDir:
        try:
            self._fresh = new and not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            if new and not self._unused():
                self.release()
                hint = "go on with --resume, or choose another run.name, or remove the directory"
                raise ConfigError(f"run directory {self.path} is not empty", hint)
            for folder in (self.samples, self.checkpoints, self.log):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run directory {self.path} cannot be made: {error.strerror}", "see run.dir") from error
        return self

    def _take(self) -> None:
        """Lock the directory. ConfigError names the process that holds it."""
        held = open(self.lock, "a+", encoding="utf-8")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            who = held.read().strip() or "of unknown number"
            held.close()
            raise ConfigError(
                f"run directory {self.path} is in use by process {who}",
                "wait for it, stop it, or choose another run.name",
            ) from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): start no second run in it", self.path, error.strerror)
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        self._held = held

    def _unused(self) -> bool:
        """Nothing was started here: see `create`."""
        empty = (self.samples, self.checkpoints, self.metrics)
        passed_over = (*empty, self.lock, self.log, self.spans, self.path / "dock")
        return all(path in passed_over for path in self.path.iterdir()) and not any(map(holds, empty))

    def release(self) -> None:
        """Let other processes write here."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def discard(self) -> None:
        """Undo `create` for a run that was refused: its directory goes, if it was made here and nothing began."""
        if self._fresh and self._unused():
            shutil.rmtree(self.path, ignore_errors=True)

    # --- writing ---

    def write_config(self, text: str) -> None:
        """The resolved configuration, as YAML text."""
        with writing(self.config):
            write_atomic(self.config, text)

    def write_graph(self, graph: dict[str, Any]) -> None:
        with writing(self.graph):
            write_json(self.graph, graph)

    def write_plan(self, plan: dict[str, Any]) -> None:
        with writing(self.plan):
            write_json(self.plan, plan)

    def write_env(self, **more: Any) -> None:
        """Versions, machine, command line; `more` is added."""
        with writing(self.env):
            write_json(self.env, {**environment(), **more})

    def write_samples(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Some rows of a step; replaces what an earlier try of the step wrote."""
        with writing(self.sample_file(step)):
            write_lines(self.sample_file(step), rows)

    def append_eval(
        self, step: int, source: str, metrics: dict[str, float], samples: Sequence[dict[str, Any]] = ()
    ) -> None:
        """One held-out evaluation, after `step` steps (0: before training)."""
        with writing(self.evals), closing(LineFile(self.evals)) as lines:
            lines.append({"step": step, "source": source, "metrics": metrics, "samples": list(samples)})

    def truncate_after(self, step: int) -> None:
        """Forget what a crashed run wrote beyond the checkpoint of `step`: metrics, evaluations, flow, samples.

        Files are cut in place, so sinks that are open already go on at the new end.
        """
        with writing(self.path):
            cut_after(self.metrics, step)
            cut_after(self.evals, step)
            cut_after(self.flow, step)
            for number, path in self.sample_files():
                if number > step:
                    path.unlink()

    # --- reading ---

    def sample_file(self, step: int) -> Path:
        return self.samples / f"step_{step:06d}.jsonl"

    def sample_files(self) -> list[tuple[int, Path]]:
        """(step, file), by step."""
        found = [(re.fullmatch(r"step_(\d+)\.jsonl", path.name), path) for path in self.samples.glob("step_*.jsonl")]
        return sorted((int(match[1]), path) for match, path in found if match)

    def read_metrics(self) -> list[tuple[int, dict[str, float]]]:
        """(step, metrics), by step; of a step written twice the later line counts. Nulls (non-finite) are left out."""
        by_step: dict[int, dict[str, float]] = {}
        for row in read_jsonl(self.metrics):
            values = row.get("metrics")
            if isinstance(row.get("step"), int) and isinstance(values, dict):
                numbers = {str(k): float(v) for k, v in values.items() if isinstance(v, (int, float))}
                by_step[row["step"]] = {k: v for k, v in numbers.items() if math.isfinite(v)}
        return sorted(by_step.items())

    def read_evals(self) -> list[dict[str, Any]]:
        """Evaluations, by step."""
        rows = [row for row in read_jsonl(self.evals) if isinstance(row.get("step"), int)]
        return sorted(rows, key=step_of)

    def read_samples(self, step: int) -> list[dict[str, Any]]:
        return read_jsonl(self.sample_file(step))

    def read_graph(self) -> dict[str, Any]:
        """graph.json; empty when missing or torn."""
        found = read_json(self.graph)
        return found if isinstance(found, dict) else {}

    def read_env(self) -> dict[str, Any]:
        """env.json; empty when missing or torn."""
        found = read_json(self.env)
        return found if isinstance(found, dict) else {}

    def read_config(self) -> str:
        """config.yaml as text; empty when missing."""
        return self.config.read_text("utf-8", "replace") if self.config.is_file() else ""


def holds(path: Path) -> bool:
    """Whether a file has bytes, or a folder entries."""
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A disk that refuses is one line: DocklandsError with the file and the reason."""
    try:
        yield
    except OSError as error:
        hint = "free some space and go on with --resume"
        raise DocklandsError(f"{path} cannot be written: {error.strerror or error}", hint) from error


def step_of(row: dict[str, Any]) -> int:
    """A row's step; -1 when it has none."""
    step = row.get("step")
    return step if isinstance(step, int) else -1


def cut_after(path: Path, step: int) -> None:
    """Cut a file of JSON lines before the first line of a later step."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        end = 0
        for raw in file:
            row = parse_line(raw)
            if row is not None and step_of(row) > step:
                file.truncate(end)
                return
            end += len(raw)


def environment() -> dict[str, Any]:
    """What the run runs on. Reads package metadata only: imports none of the packages."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "memory_gib": memory_gib(),
        "command": sys.argv,
        "git_commit": git_commit(),
    }


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_model() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return 0.0


def git_commit() -> str:
    """The commit of the source tree (with "+" when changed); empty outside of one."""
    here = str(Path(__file__).parent)
    command = ["git", "-C", here, "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
