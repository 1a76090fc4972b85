"""One step's samples and what the stages compute of them, the same on both sides. The peer runs it too: numpy only.

Legend: B rows, T tokens of rows end to end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
    """Sizes of a step. Responses are log-normal, cut to shortest..longest; a prompt has 3/4 to 5/4 of `prompt` tokens.

    chunk  rows of a hand-out; 0: all that a worker gets of a step at once
    """

    prompts: int = 512
    group: int = 8
    prompt: int = 128
    shortest: int = 16
    longest: int = 1024
    chunk: int = 0
    seed: int = 1

    @property
    def rows(self) -> int:
        return self.prompts * self.group


class Model:
    """What a worker computes with: a small model would take milliseconds for this, so nothing hides the hand-outs.

    Row r of every step has the tokens of row r modulo the step's rows.
    """

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self.case = case
        self.prompts = rng.integers(case.prompt * 3 // 4, case.prompt * 5 // 4 + 1, case.prompts).astype(np.int64)
        drawn = np.exp(rng.normal(np.log(170.0), 0.7, case.rows))
        self.responses = np.clip(drawn, case.shortest, case.longest).astype(np.int64)
        self.lengths = np.repeat(self.prompts, case.group) + self.responses
        self.pool = rng.integers(0, 150_000, int(self.lengths.max()) + case.rows, dtype=np.int32)

    def prompt_tokens(self, group: int) -> np.ndarray:
        group %= self.case.prompts
        return self.pool[group : group + int(self.prompts[group])]

    def rollout(self, row_ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """-> lengths int64 [B]; token columns [T]."""
        rows = row_ids % self.case.rows
        lengths = self.lengths[rows]
        prompts = self.prompts[rows // self.case.group]
        starts = np.cumsum(lengths) - lengths
        within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
        tokens = self.pool[within + np.repeat(rows // self.case.group, lengths)]
        mask = within >= np.repeat(prompts, lengths)
        return lengths, {TOKENS: tokens, MASK: mask, LOGPROBS: np.where(mask, logprobs(tokens), np.float32(0))}


def logprobs(tokens: np.ndarray) -> np.ndarray:
    """Stands in for a forward pass: fp32 [T]."""
    return tokens.astype(np.float32) * np.float32(-1e-5)


def rewards(lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """fp32 [B]: whether a row's last token is even."""
    return (tokens[np.cumsum(lengths) - 1] % 2 == 0).astype(np.float32)


def advantages(reward: np.ndarray, group: int) -> np.ndarray:
    """fp32 [B]: reward less the mean of its group; groups are whole and follow one another."""
    per_group = reward.reshape(-1, group)
    return (per_group - per_group.mean(1, keepdims=True)).ravel()


def update(columns: dict[str, np.ndarray], lengths: np.ndarray) -> float:
    """Stands in for a loss: reads every byte of every column once."""
    weight = np.repeat(columns[ADVANTAGE], lengths)
    return float(np.where(columns[MASK], weight * (columns[LOGPROBS] - columns[REF]), 0).sum()) + float(
        columns[TOKENS].sum()
    )


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
