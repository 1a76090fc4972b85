"""What a reward takes and gives, and how its failures are counted.

A failure of the infrastructure is not a reward: `timeout` and `error` carry no value, and their samples are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from docklands.core.failures import FailureWindow
from docklands.errors import RewardError, TooManyRewardErrors

Status = Literal["ok", "wrong", "timeout", "error"]
STATUSES: tuple[Status, ...] = ("ok", "wrong", "timeout", "error")


FLOAT32_MAX = 3.4028234663852886e38
"""Rewards are float32 in the table; a larger one would be infinite there."""


def storable(value: float) -> bool:
    """A number that stays finite in the reward column."""
    return -FLOAT32_MAX <= value <= FLOAT32_MAX


@dataclass(frozen=True)
class RewardSample:
    """One finished sample, as a reward sees it.

    row              the data row in plain JSON, its prompt under 'prompt'
    completion       response text without special tokens; multi-turn: list of messages
    response_tokens  tokens that the policy sampled
    finish           'stop', 'length' or 'abort'
    env_reward       what the environment paid over the episode
    """

    row: Mapping[str, Any]
    completion: str | list[dict[str, Any]]
    response_tokens: int = 0
    finish: str = "stop"
    env_reward: float = 0.0

    @property
    def text(self) -> str:
        """The completion's text; of several turns the last one of the model."""
        if isinstance(self.completion, str):
            return self.completion
        said = [turn["content"] for turn in self.completion if turn.get("role") == "assistant"]
        return said[-1] if said else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "row": dict(self.row),
            "completion": self.completion,
            "response_tokens": int(self.response_tokens),
            "finish": self.finish,
            "env_reward": float(self.env_reward),
        }


@dataclass(frozen=True)
class RewardOutcome:
    """A sample's score. ok/wrong carry a finite value; timeout/error carry none, and the sample must be dropped.

    info  JSON for people: 'detail' says in one line what went wrong; 'said' is the answer that a verifier read in the
          reply (a majority vote compares it); 'components' of a weighted sum
    """

    status: Status
    value: float | None
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise RewardError(f"outcome status {self.status!r} is not one of {', '.join(STATUSES)}")
        if (self.value is not None) != (self.status in ("ok", "wrong")):
            raise RewardError(f"outcome {self.status!r} with value {self.value!r}: only ok and wrong carry a value")
        if self.value is not None and not storable(self.value):
            raise RewardError(f"outcome {self.status!r} with the value {self.value}: no finite float32")

    @property
    def dropped(self) -> bool:
        """No reward exists: the sample leaves the flow."""
        return self.value is None

    @property
    def detail(self) -> str:
        """One line on a failure."""
        return str(self.info.get("detail", ""))

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "value": self.value, "info": self.info}


def ok(value: float, **info: Any) -> RewardOutcome:
    """A score; for verifiers: the answer is right."""
    return RewardOutcome("ok", float(value), info)


def wrong(value: float = 0.0, **info: Any) -> RewardOutcome:
    """A score for a wrong answer."""
    return RewardOutcome("wrong", float(value), info)


def judged(right: bool, **info: Any) -> RewardOutcome:
    """1 and ok, or 0 and wrong."""
    return ok(1.0, **info) if right else wrong(0.0, **info)


def failed(status: Literal["timeout", "error"], detail: str) -> RewardOutcome:
    """No score, with the reason on one line."""
    return RewardOutcome(status, None, {"detail": " ".join(detail.split())[:500]})


class Reward(Protocol):
    """Scores a batch. Never raises for one sample's sake, never outlasts its deadlines."""

    name: str

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]: ...

    def close(self) -> None: ...


@dataclass
class OutcomeCounts:
    """Outcomes by status, and groups by what they can teach (the counts of a dynamic-sampling stop).

    all_equal     groups of at least two scored samples with one value; `all_zero` and `all_one` are the known kinds
    mixed         groups with different values: the only ones with a learning signal
    unscored      groups of which fewer than two samples were scored
    """

    by_status: Counter[str] = field(default_factory=Counter)
    all_zero: int = 0
    all_one: int = 0
    all_equal: int = 0
    mixed: int = 0
    unscored: int = 0

    def add(self, outcomes: Iterable[RewardOutcome]) -> None:
        """Count samples."""
        self.by_status.update(outcome.status for outcome in outcomes)

    def add_group(self, outcomes: Sequence[RewardOutcome]) -> None:
        """Count the samples of one group, and the group."""
        self.add(outcomes)
        values = [outcome.value for outcome in outcomes if outcome.value is not None]
        if len(values) < 2:
            self.unscored += 1
        elif max(values) > min(values):
            self.mixed += 1
        else:
            self.all_equal += 1
            self.all_zero += values[0] == 0
            self.all_one += values[0] == 1

    @property
    def total(self) -> int:
        return sum(self.by_status.values())

    @property
    def failures(self) -> int:
        """Samples without a reward."""
        return self.by_status["timeout"] + self.by_status["error"]

    def text(self) -> str:
        """One line for a message."""
        samples = ", ".join(f"{status} {self.by_status[status]}" for status in STATUSES)
        groups = f"all 0: {self.all_zero}, all 1: {self.all_one}, all equal: {self.all_equal}, mixed: {self.mixed}"
        return f"samples: {samples}; groups: {groups}, unscored: {self.unscored}"


class ErrorBudget:
    """Ends the run when more than `max_fraction` of a window of `window` samples have no reward."""

    def __init__(self, max_fraction: float, window: int) -> None:
        self.counts = OutcomeCounts()
        self._window = FailureWindow(max_fraction, window)

    def add(self, outcomes: Iterable[RewardOutcome]) -> None:
        """Count outcomes; raise TooManyRewardErrors, with counts and the commonest reason, when over the limit."""
        outcomes = list(outcomes)
        self.counts.add(outcomes)
        said = self._window.add((f"{o.status}: {o.detail}" if o.dropped else "" for o in outcomes), "rewards")
        if said:
            raise TooManyRewardErrors(
                said, "repair the reward, or raise reward.deadline_s or reward.max_error_fraction"
            )


def ground_truth(row: Mapping[str, Any], column: str = "answer") -> Any:
    """The expected answer: `column`, else 'ground_truth', else reward_model.ground_truth. RewardError without any."""
    model = row.get("reward_model")
    within = model.get("ground_truth") if isinstance(model, Mapping) else None
    for found in (row.get(column), row.get("ground_truth"), within):
        if found is not None:
            return found
    raise RewardError(f"the row has no answer: no {column!r}, no reward_model.ground_truth; it has {', '.join(row)}")


def has_ground_truth(row: Mapping[str, Any]) -> bool:
    """Whether `ground_truth` would find one."""
    try:
        ground_truth(row)
    except RewardError:
        return False
    return True
