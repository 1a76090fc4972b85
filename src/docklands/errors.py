"""Every error that Docklands raises on purpose: one tree, each with a hint.

DocklandsError                     exit code 3 unless a subclass says otherwise
├── ConfigError                    2  a key, value or file that the user gave is wrong
│   ├── GraphError                 2  the dataflow graph does not hold together
│   ├── LayoutError                2  a parallel layout or batch size does not divide
│   └── DataError                  2  a data file, row or checkpoint directory cannot be used
├── DockError                      3  the sample flow
│   ├── UnknownField               3  a column nobody declared or wrote
│   ├── RowGone                    3  a row that was retired, dropped or never admitted
│   ├── TakeTimeout                3  a wait passed its deadline; says what it waited for
│   ├── DockClosed                 3  a call on a dock that has been closed
│   ├── WireError                  3  a message that is malformed, too large or of another version
│   ├── WarehouseLost              4  a warehouse died and its rows cannot be had back
│   ├── ControlLost                4  the dock's control process died and did not come back
│   └── TooManyDropped             3  groups are dropped faster than they are trained
├── SyncError                      3  the resharding flow
│   ├── MissingWeight              3
│   ├── ShapeMismatch              3
│   ├── VersionMismatch            3
│   └── GateFailed                 3  trainer and generator disagree after a sync
├── TrainError                     3
│   └── NonFinite                  3  a NaN or infinity; names the tensor
├── RolloutError                   3
├── EnvError                       3  one episode's failure: dropped, counted, rate-limited
│   ├── EnvTimeout                 3  it met its deadline
│   └── TooManyEnvErrors           3  the rate limit
├── RewardError                    3  one sample's failure: dropped, counted, rate-limited
│   └── TooManyRewardErrors        3  the rate limit
├── WorkerLost                     4  a worker process died; names role, rank, exit code
├── Stuck                          3  no progress within the watchdog's deadline
└── CheckpointError                3  a checkpoint cannot be written or read
"""

from __future__ import annotations

import re


def reason_of(error: BaseException) -> str:
    """The last line of another library's error, at most 160 characters, without the file that torch puts before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S*\]\s*", "", lines[-1])[:160]


class DocklandsError(Exception):
    """Base of the tree. `message` is one clear line, `hint` says what to change."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.message, self.hint)


class ConfigError(DocklandsError):
    """A key, value or file that the user gave is wrong."""

    exit_code = 2


class GraphError(ConfigError):
    """The dataflow graph does not hold together."""


class LayoutError(ConfigError):
    """A parallel layout or a batch size does not divide; shows the arithmetic."""


class DataError(ConfigError):
    """A data file, a data row or a model directory cannot be used."""


class DockError(DocklandsError):
    """The sample flow."""


class UnknownField(DockError):
    """A column that nobody declared or wrote."""


class RowGone(DockError):
    """A row that was retired, dropped or never admitted."""


class TakeTimeout(DockError):
    """A wait passed its deadline; says stage, columns and rows it waited for."""


class DockClosed(DockError):
    """A call on a dock that has been closed."""


class WireError(DockError):
    """A message between the dock's processes that is malformed, too large or of another version."""


class WarehouseLost(DockError):
    """A warehouse died and its rows cannot be had back."""

    exit_code = 4


class ControlLost(DockError):
    """The dock's control process died and did not come back."""

    exit_code = 4


class TooManyDropped(DockError):
    """Groups are dropped faster than they are trained (dynamic sampling, failing rewards)."""


class SyncError(DocklandsError):
    """The resharding flow."""


class MissingWeight(SyncError):
    """A tensor that the receiver needs was not sent, or one was sent that it does not know."""


class ShapeMismatch(SyncError):
    """A tensor arrived with another shape than the receiver holds."""


class VersionMismatch(SyncError):
    """A generator holds another weight version than was published."""


class GateFailed(SyncError):
    """Trainer and generator disagree after a sync; names the tensor."""


class TrainError(DocklandsError):
    """The train engine."""


class NonFinite(TrainError):
    """A NaN or an infinity; names the tensor."""


class RolloutError(DocklandsError):
    """The generation engine."""


class EnvError(DocklandsError):
    """One episode's failure: dropped, counted, rate-limited."""


class EnvTimeout(EnvError):
    """An environment gave no answer before its deadline."""


class TooManyEnvErrors(EnvError):
    """More environment failures than the configured rate allows."""


class RewardError(DocklandsError):
    """One sample's failure: dropped, counted, rate-limited."""


class TooManyRewardErrors(RewardError):
    """More reward failures than the configured rate allows."""


class WorkerLost(DocklandsError):
    """A worker process died; names role, rank, exit code, last stage, and its log tail."""

    exit_code = 4


class Stuck(DocklandsError):
    """No progress within the watchdog's deadline; names the stage."""


class CheckpointError(DocklandsError):
    """A checkpoint cannot be written or read."""
