"""Where a step's metrics go: metrics.jsonl always; TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from docklands.errors import ConfigError, DocklandsError
from docklands.obs.catalog import VOLATILE_PREFIXES
from docklands.obs.files import LineFile, write_atomic
from docklands.obs.names import find

log = logging.getLogger("docklands.obs")


class Sink(Protocol):
    """Takes each step's metrics; `step` counts finished steps, from 1.

    `write` may raise OSError, RuntimeError or ValueError when its medium fails.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Several sinks as one. The first failure of an optional sink costs one warning and that sink, not the run.

    required  failures of these end the run (DocklandsError)
    """

    def __init__(self, required: Sequence[Sink], optional: Sequence[Sink] = ()) -> None:
        self._required = list(required)
        self._optional = list(optional)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises DocklandsError when a required sink fails."""
        for sink in self._required:
            sink.write(step, metrics)
        for sink in list(self._optional):
            self._guarded(sink, lambda sink=sink: sink.write(step, metrics))

    def close(self) -> None:
        for sink in self._required:
            sink.close()
        for sink in list(self._optional):
            self._guarded(sink, sink.close)
        self._optional.clear()

    def _guarded(self, sink: Sink, call: Any) -> None:
        try:
            call()
        except (OSError, RuntimeError, ValueError, DocklandsError) as error:
            self._optional.remove(sink)
            log.warning("%s failed and is off for the rest of the run: %s", type(sink).__name__, error)


class JsonlSink:
    """metrics.jsonl: `{"metrics": {name: value}, "step": step}`, keys sorted, non-finite values as null.

    Two runs with one seed give equal bytes but for times: compare lines through `strip_times`.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises DocklandsError when the line cannot be written."""
        try:
            self._file.append({"step": step, "metrics": dict(metrics)})
        except OSError as error:
            hint = "free some space and go on with --resume"
            raise DocklandsError(f"{self._file.path} cannot be written: {error.strerror or error}", hint) from error

    def close(self) -> None:
        self._file.close()


def strip_times(line: str) -> str:
    """A line of metrics.jsonl without the metrics in which two equal runs differ: times, memory."""
    row = json.loads(line)
    row["metrics"] = {name: value for name, value in row["metrics"].items() if not is_volatile(name)}
    return json.dumps(row, sort_keys=True, ensure_ascii=False)


def is_volatile(name: str) -> bool:
    """Whether two runs with one seed may differ in this metric."""
    return name.startswith(VOLATILE_PREFIXES) or find(name).is_volatile


class TensorBoardSink:
    """TensorBoard event files, through tensorboard's own record writer (no torch, no tensorflow needed).

    Each step is on disk when `write` returns. A resumed run adds a file; TensorBoard joins them.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            hint = "pip install tensorboard, or set obs.tensorboard: false"
            raise ConfigError("obs.tensorboard needs the package tensorboard", hint) from error
        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}", "xb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises OSError when the disk refuses."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """Weights & Biases (extra `wandb`). Honours WANDB_MODE=offline and the other variables of its client."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            hint = 'pip install "docklands[wandb]", or leave obs.wandb empty'
            raise ConfigError("obs.wandb needs the package wandb", hint) from error
        self._error: type[Exception] = wandb.Error
        id_file = folder / "wandb_id"  # a resumed run goes on under the id it began with
        if not id_file.is_file():
            write_atomic(id_file, uuid.uuid4().hex[:12])
        run_id = id_file.read_text().strip()
        try:
            self._run = wandb.init(
                project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(config)
            )
        except wandb.Error as error:
            raise ConfigError(f"Weights & Biases: {error}", "wandb login, or WANDB_MODE=offline") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises RuntimeError when the client does."""
        try:
            self._run.log(dict(metrics), step=step)
        except self._error as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        self._run.finish()
