"""One step's samples and what the stages compute of them, the same on both sides. The peer runs it too: numpy only.

Legend: B rows, T tokens of rows end to end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dock_flow_parts.flow import cpu_seconds  # noqa: E402
from vs_trl_parts.turns import Turns  # noqa: E402

WORKERS = 2
TOKENS, MASK, LOGPROBS, REF, REWARD, ADVANTAGE = (
    "token_ids", "loss_mask", "rollout_logprobs", "ref_logprobs", "reward", "advantage",
)  # fmt: skip
TRAINED = (TOKENS, MASK, LOGPROBS, REF, ADVANTAGE)
"""What the update reads."""


@dataclass(frozen=True)
class Case:
    """Sizes of a step. Responses are log-normal about `typical` tokens, cut to shortest..longest; a prompt has 3/4 to
    5/4 of `prompt` tokens.

    chunk  rows that a worker gets at once; 0: all that it gets of a step
    """

    prompts: int = 512
    group: int = 8
    prompt: int = 128
    shortest: int = 16
    longest: int = 1024
    typical: int = 170
    chunk: int = 0
    seed: int = 1

    @property
    def rows(self) -> int:
        return self.prompts * self.group


class Model:
    """What a worker computes with. What generation writes is made ahead: nothing hides the hand-outs.

    Row r of every step has the tokens of row r modulo the step's rows.
    """

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self.case = case
        self.prompts = rng.integers(case.prompt * 3 // 4, case.prompt * 5 // 4 + 1, case.prompts).astype(np.int64)
        drawn = np.exp(rng.normal(np.log(self.case.typical), 0.7, case.rows))
        self.responses = np.clip(drawn, case.shortest, case.longest).astype(np.int64)
        self.lengths = np.repeat(self.prompts, case.group) + self.responses
        self.pool = rng.integers(0, 150_000, int(self.lengths.max()) + case.rows, dtype=np.int32)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self._made: dict[str, np.ndarray] = {}

    def prompt_tokens(self, group: int) -> np.ndarray:
        group %= self.case.prompts
        return self.pool[group : group + int(self.prompts[group])]

    def rollout(self, row_ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """-> lengths int64 [B]; token columns [T]."""
        self._made = self._made or self._all()
        rows = row_ids % self.case.rows
        cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        found = [self.offsets[[rows[first], rows[last - 1] + 1]] for first, last in pairwise(cuts)]
        columns = {}
        for name, values in self._made.items():
            pieces = [values[start:stop] for start, stop in found]
            columns[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return self.lengths[rows], columns

    def _all(self) -> dict[str, np.ndarray]:
        """Columns of all rows of a step."""
        group = np.arange(self.case.rows) // self.case.group
        within = np.arange(int(self.offsets[-1])) - np.repeat(self.offsets[:-1], self.lengths)
        tokens = self.pool[within + np.repeat(group, self.lengths)]
        mask = within >= np.repeat(self.prompts[group], self.lengths)
        return {TOKENS: tokens, MASK: mask, LOGPROBS: np.where(mask, logprobs(tokens), np.float32(0))}


def logprobs(tokens: np.ndarray) -> np.ndarray:
    """Stands in for a forward pass: fp32 [T]."""
    return np.multiply(tokens, np.float32(-1e-5), dtype=np.float32)


def rewards(lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """fp32 [B]: whether a row's last token is even."""
    return (tokens[np.cumsum(lengths) - 1] % 2 == 0).astype(np.float32)


def advantages(reward: np.ndarray, group: int) -> np.ndarray:
    """fp32 [B]: reward less the mean of its group; groups are whole and follow one another."""
    per_group = reward.reshape(-1, group)
    return (per_group - per_group.mean(1, keepdims=True)).ravel()


def update(columns: dict[str, np.ndarray], lengths: np.ndarray) -> float:
    """Stands in for a loss: reads every byte of every column once. The same sum in whatever pieces."""
    tokens = columns[TOKENS]
    last = tokens[np.cumsum(lengths) - 1] % 1000
    sums = [float(columns[name].sum(dtype=np.float64)) for name in (LOGPROBS, REF)]
    counts = 1e-6 * float(tokens.sum(dtype=np.int64)) + float(np.count_nonzero(columns[MASK]))
    return sums[0] + 2 * sums[1] + counts + float(np.dot(columns[ADVANTAGE].astype(np.float64), last * lengths))


def side(run_step: Callable[[int], float], case: Case, rounds: int, close: Callable[[], None]) -> None:
    """The main program of a side: a step in each turn. run_step: (number of the step) -> sum of its updates."""
    turns, laps = Turns(), []
    try:
        for number in range(rounds):
            turns.next()
            before = cpu_seconds()
            total = run_step(number)
            laps.append({"cpu_s": cpu_seconds() - before, "total": total})
        turns.end({"laps": laps})
    finally:
        close()


def arguments_of(case: Case, rounds: int) -> list[str]:
    return [json.dumps(asdict(case)), str(rounds)]


def arguments(given: list[str]) -> tuple[Case, int]:
    """What `arguments_of` made."""
    return Case(**json.loads(given[0])), int(given[1])
