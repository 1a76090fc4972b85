"""The resource of the reward stage: a weighted sum of rewards over a batch of rows.

Legend: B samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docklands.config.schema import RewardItem, RewardSection
from docklands.core.batch import Batch
from docklands.core.fields import (
    COMPLETION,
    ENV_REWARD,
    FINISH_NAMES,
    FINISH_REASON,
    LOSS_MASK,
    PROMPT,
    REWARD,
    REWARD_INFO,
)
from docklands.core.stage import Result
from docklands.errors import ConfigError, UnknownField
from docklands.rewards.base import ErrorBudget, OutcomeCounts, Reward, RewardOutcome, RewardSample, storable
from docklands.rewards.builtin import REWARDS
from docklands.rewards.runners import runner
from docklands.rewards.sandbox import LOST, Sandbox
from docklands.rewards.scoring import RAISED, Scoring, Target, adapt, load


class WeightedSum:
    """Several rewards, one value: the sum of weight x value.

    A sample that one of them cannot score has no value: a sum that lacks a term is another reward. The sum is `wrong`
    as soon as one part is. Parts stand in info['components'], before their weights.
    """

    def __init__(self, parts: Sequence[tuple[Reward, float]]) -> None:
        self.name = "+".join(reward.name for reward, _ in parts)
        self.parts = tuple(parts)
        self.labels = _unique([reward.name for reward, _ in parts])

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome per sample; the parts run side by side."""
        columns = await asyncio.gather(*(reward.score(samples) for reward, _ in self.parts))
        return [self._combine(outcomes) for outcomes in zip(*columns)]

    def _combine(self, outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
        components = {label: outcome.value for label, outcome in zip(self.labels, outcomes)}
        infos = {
            label: {k: v for k, v in outcome.info.items() if not (outcome.dropped and k in (RAISED, LOST))}
            for label, outcome in zip(self.labels, outcomes)
            if outcome.info
        }
        info: dict[str, Any] = {"components": components, **({"info": infos} if infos else {})}
        for label, outcome in zip(self.labels, outcomes):
            if outcome.dropped:
                return RewardOutcome(outcome.status, None, {**info, "detail": f"{label}: {outcome.detail}"})
        value = sum(weight * (outcome.value or 0.0) for (_, weight), outcome in zip(self.parts, outcomes))
        if not storable(value):
            return RewardOutcome("error", None, {**info, "detail": f"the weighted sum is {value}, no finite float32"})
        status = "wrong" if any(outcome.status == "wrong" for outcome in outcomes) else "ok"
        return RewardOutcome(status, float(value), info)

    def close(self) -> None:
        """Close every part."""
        for reward, _ in self.parts:
            reward.close()


class Scorer:
    """`score(batch)` for the reward stage: writes REWARD and REWARD_INFO, drops and counts what has no reward.

    Raises TooManyRewardErrors when the share of failures passes the limit.
    """

    def __init__(self, reward: WeightedSum, budget: ErrorBudget, sandbox: Sandbox) -> None:
        self.reward = reward
        self.budget = budget
        self.sandbox = sandbox

    @property
    def counts(self) -> OutcomeCounts:
        """Outcomes since the start."""
        return self.budget.counts

    async def score(self, batch: Batch, limited: bool = True) -> Result:
        """PROMPT, COMPLETION (and FINISH_REASON, ENV_REWARD, LOSS_MASK) -> REWARD, REWARD_INFO.

        limited  failures count towards the limit; those of an evaluation do not
        """
        outcomes = await self.score_samples(samples_of(batch))
        if limited:
            self.budget.add(outcomes)
        kept = [i for i, outcome in enumerate(outcomes) if not outcome.dropped]
        written = Batch(
            batch.row_ids[kept],
            {
                REWARD: [outcomes[i].value for i in kept],
                REWARD_INFO: [{"status": outcomes[i].status, **outcomes[i].info} for i in kept],
            },
        )
        dropped = {
            int(batch.row_ids[i]): f"reward_{outcome.status}: {outcome.detail}"
            for i, outcome in enumerate(outcomes)
            if outcome.dropped
        }
        return Result(written, dropped, self.metrics(outcomes))

    async def score_samples(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """Outcomes without the table, e.g. for evaluation; does not count towards the limit."""
        return await self.reward.score(samples)

    def metrics(self, outcomes: Sequence[RewardOutcome]) -> Mapping[str, tuple[float, float]]:
        """Names of the reward metrics -> (sum, count)."""
        by_status = {status: sum(o.status == status for o in outcomes) for status in ("error", "timeout")}
        lost = sum(by_status.values())
        found = {
            "reward/scored": (float(len(outcomes) - lost), 1.0),
            "reward/errors": (float(by_status["error"]), 1.0),
            "reward/timeouts": (float(by_status["timeout"]), 1.0),
            "reward/error_fraction": (float(lost), float(len(outcomes))),
        }
        for label in self.reward.labels:
            values = [outcome.info["components"][label] for outcome in outcomes if not outcome.dropped]
            if values:
                found[f"reward/{label}/mean"] = (float(sum(values)), float(len(values)))
        for name, flags in self._flags(outcomes).items():
            found[f"reward/{name}/mean"] = (float(sum(flags)), float(len(flags)))
        return found

    def _flags(self, outcomes: Sequence[RewardOutcome]) -> dict[str, list[bool]]:
        """component.remark -> every true-or-false remark of the rewards, e.g. whether working was shown."""
        found: dict[str, list[bool]] = {}
        infos = [outcome.info.get("info", {}) for outcome in outcomes if not outcome.dropped]
        for label in self.reward.labels:
            for info in infos:
                for key, value in info.get(label, {}).items():
                    if isinstance(value, bool):
                        found.setdefault(f"{label}.{in_metric(key)}", []).append(value)
        return dict(sorted(found.items()))

    def close(self) -> None:
        """End the rewards and their processes."""
        self.reward.close()
        self.sandbox.close()


def samples_of(batch: Batch) -> list[RewardSample]:
    """What the rewards see of a batch; columns that it lacks keep their defaults, except the two that must be there."""
    for needed in (PROMPT, COMPLETION):
        if needed not in batch:
            raise UnknownField(f"the reward stage needs the column {needed.name}")
    size = len(batch)
    finishes = batch[FINISH_REASON].tolist() if FINISH_REASON in batch else [0] * size
    paid = batch[ENV_REWARD].tolist() if ENV_REWARD in batch else [0.0] * size
    tokens = [int(mask_T.sum()) for mask_T in batch[LOSS_MASK]] if LOSS_MASK in batch else [0] * size
    rows = zip(batch[PROMPT], batch[COMPLETION], tokens, finishes, paid)
    return [
        RewardSample(row, completion, count, FINISH_NAMES[finish], reward)
        for row, completion, count, finish, reward in rows
    ]


def build_scorer(section: RewardSection, log: Path | None = None) -> Scorer:
    """The config's rewards. ConfigError for an empty list, an unknown name, wrong arguments, an odd signature.

    log  file for what isolated rewards print; None: thrown away
    """
    if not section.functions:
        raise ConfigError(
            "reward.functions is empty: nothing would score the samples",
            f"e.g. reward.functions: [{{name: exact_match}}]; built in: {', '.join(REWARDS.names())}",
        )
    sandbox = Sandbox(section.workers, log)
    parts = [(_build(item, section, sandbox), item.weight) for item in section.functions]
    return Scorer(WeightedSum(parts), ErrorBudget(section.max_error_fraction, section.error_window), sandbox)


def _build(item: RewardItem, section: RewardSection, sandbox: Sandbox) -> Reward:
    target = Target(item.name, item.args)
    return runner(target, load(target), item.isolate, sandbox, section.deadline_s)


def function_reward(function: Any, deadline_s: float = 30.0, name: str = "") -> Reward:
    """A Python function as a reward, from code instead of a config: in a thread of this process."""
    label = name or getattr(function, "__name__", type(function).__name__)
    scoring: Scoring = adapt(label, function)
    scoring.isolate = False
    return runner(Target(label), scoring, False, Sandbox(), deadline_s)


def in_metric(name: str) -> str:
    """A name as one part of a metric's name, in which '/' parts the parts."""
    return name.replace("/", "_") or "_"


def _unique(names: Sequence[str]) -> list[str]:
    """Labels for metrics: the attribute of module:attr, numbered where two are equal."""
    short = [in_metric(name.rpartition(":")[2]) for name in names]
    return [name if short.count(name) == 1 else f"{name}_{short[: i + 1].count(name)}" for i, name in enumerate(short)]
