"""What the parts promise each other. Engines, roles and docks come in several kinds; the loop sees only these.

Legend: B samples, T packed tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from docklands.core.fields import Field
from docklands.core.stage import Learner, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from docklands.core.batch import Batch, Jagged


# --- sample flow -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Leased rows: ids and metadata, no tensor. What travels through the driver.

    row_ids, group_ids  int64 [B], in deterministic order (by admission, then sample index)
    lengths             int64 [B]: tokens of TOKEN_IDS, 0 before rollout
    places              warehouse of each row, int32 [B]
    lease               id that acknowledges or returns them; 0: not leased
    lives               int64 [B], how often each row has been lost and made anew; None: none of them
    homes               for a process that the rows are passed to: all rows of their lease, and where those columns lie
                        in shared memory, a hint (dock/rules/addresses.py)
    """

    row_ids: np.ndarray
    group_ids: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    stage: str = ""
    lease: int = 0
    lives: np.ndarray | None = None
    homes: tuple[Rows, Mapping[str, list[int]]] | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.row_ids)

    def select(self, index: np.ndarray | slice) -> Rows:
        """Rows by position (views, of a slice); they stay under the same lease."""
        ids, groups, lengths, places = (
            self.row_ids[index],
            self.group_ids[index],
            self.lengths[index],
            self.places[index],
        )
        lives = None if self.lives is None else self.lives[index]
        return Rows(ids, groups, lengths, places, self.stage, self.lease, lives)

    def split(self, row_ids: Sequence[int]) -> tuple[Rows, Rows]:
        """(those that are not among `row_ids`, those that are); both stay under the same lease."""
        chosen = np.isin(self.row_ids, np.asarray(row_ids, np.int64))
        return self.select(np.flatnonzero(~chosen)), self.select(np.flatnonzero(chosen))

    def minibatches(self, samples: int) -> list[Rows]:
        """Consecutive pieces of at most `samples` rows."""
        return [self.select(slice(i, i + samples)) for i in range(0, len(self), samples)]


@dataclass(frozen=True)
class Outcome:
    """What a worker reports of a stage run: ids and numbers, no tensor. See Result for what they mean."""

    dropped: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    later: Sequence[int] = ()


class DockClient(Protocol):
    """What a worker sees of the dock: bytes in and out."""

    async def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch: ...

    async def put(self, batch: Batch, rows: Rows | None = None) -> None: ...


class Dock(DockClient, Protocol):
    """The whole dock, as the loop sees it: in the driver's process, or in processes of its own.

    open, leave  start what it needs, in the event loop that uses it; leave nothing behind
    describe     for people; from any thread, also when the event loop is stuck
    save, load   a state, and files that are moved to the checkpoint's `folder`
    """

    async def open(self) -> None: ...

    async def leave(self) -> None: ...

    async def slots(self) -> int: ...

    async def admit(self, batch: Batch) -> None: ...

    async def here(self, row_ids: np.ndarray) -> np.ndarray: ...

    async def end_of_prompts(self) -> None: ...

    async def take(self, stage: Stage, *, groups: int | None = None, max_tokens: int | None = None) -> Rows: ...

    def stream(self, stage: Stage) -> AsyncIterator[Rows]: ...

    async def finish(self, rows: Rows, outcome: Outcome) -> None: ...

    async def give_back(self, rows: Rows) -> None: ...

    async def drop(self, rows: Rows, reason: str) -> None: ...

    async def retire(self, rows: Rows) -> None: ...

    async def close(self) -> None: ...

    async def counts(self) -> Mapping[str, float]: ...

    def describe(self) -> str: ...

    async def save(self) -> tuple[dict[str, Any], Sequence[Path]]: ...

    async def load(self, state: Mapping[str, Any], folder: Path) -> None: ...


class Role(Protocol):
    """A handle on a worker group."""

    def lease(self) -> AbstractAsyncContextManager[None]: ...

    async def serve(self, stage: Stage, pump: Callable[[Stage, Any], Awaitable[None]]) -> None: ...

    async def run(self, stage: Stage, rows: Rows) -> Outcome: ...

    async def update(self, learner: Learner, rows: Rows) -> Mapping[str, tuple[float, float]]: ...


# --- generation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One sample to generate. Requests with equal `prompt` share one prefill.

    seed   64-bit key of this sample's random stream; position p of the response draws from hash(seed, p)
    drawn  positions of the response that `prompt` holds already: a sample that goes on where it was interrupted
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    request_id: int = 0
    drawn: int = 0


@dataclass(frozen=True)
class Generation:
    """One finished sample; the first three sequences are of equal length.

    logprobs  log p of each sampled token under softmax(logits / temperature), before top-k/top-p truncation
    versions  weight version that produced each token
    finish    FINISH_STOP (a stop id, kept as the last token), FINISH_LENGTH, FINISH_ABORT
    routes    router choices of prompt and response, int16 [tokens of both, layers, k], -1 for a token that was not fed
              to the model (the last one); None when they are not recorded
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: int
    request_id: int = 0
    routes: np.ndarray | None = None


class RolloutEngine(Protocol):
    """Generates with one set of weights at a time."""

    version: int

    def generate(self, requests: Sequence[Request]) -> list[Generation]: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def abort(self) -> None: ...


# --- training --------------------------------------------------------------------------------------------------


class TrainEngine(Protocol):
    """Four verbs: forward (logprobs, values), forward_backward, optim_step, save/load (state_dict, load_state_dict)."""

    version: int

    def logprobs(self, batch: Batch) -> Jagged: ...

    def values(self, batch: Batch) -> Jagged: ...

    def forward_backward(self, batch: Batch, learner: Learner) -> Mapping[str, tuple[float, float]]: ...

    def optim_step(self) -> Mapping[str, tuple[float, float]]: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class WeightSync(Protocol):
    """Closes the loop: every generator holds `version` when this returns."""

    async def publish(self, version: int) -> None: ...
