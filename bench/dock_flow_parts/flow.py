"""The flow that every side runs, and the data that it carries. Needs numpy and psutil only: peers run it too.

Legend: B rows, T tokens of all rows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vs_trl_parts.turns import Turns  # noqa: E402

TOKENS, LOGPROBS, REF, REWARD = "token_ids", "rollout_logprobs", "ref_logprobs", "reward"
ALL = (TOKENS, LOGPROBS, REF, REWARD)


@dataclass(frozen=True)
class Case:
    """Sizes. Response lengths are lognormal, cut to shortest..longest; prompts have 3/4 to 5/4 of `prompt` tokens."""

    prompts: int = 512
    group: int = 8
    prompt: int = 256
    shortest: int = 64
    longest: int = 2048
    chunk: int = 64
    micro: int = 32
    seed: int = 1

    @property
    def rows(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True)
class Column:
    """Values end to end and the length of each row; lengths None: one value per row."""

    values: np.ndarray
    lengths: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class Work:
    """All rows of a run: int32 tokens, two fp32 log-prob columns, a reward."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        prompts = np.repeat(rng.integers(case.prompt * 3 // 4, case.prompt * 5 // 4 + 1, case.prompts), case.group)
        drawn = np.exp(rng.normal(np.log(340.0), 0.7, case.rows))
        self.case = case
        self.lengths = prompts + np.clip(drawn, case.shortest, case.longest).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        total = int(self.offsets[-1])
        self._values = {
            TOKENS: rng.integers(0, 150_000, total, dtype=np.int32),
            LOGPROBS: -rng.random(total, dtype=np.float32),
            REF: -rng.random(total, dtype=np.float32),
            REWARD: rng.random(case.rows, dtype=np.float32),
        }

    def column(self, name: str, start: int, stop: int) -> Column:
        """Rows start..stop of a column, in memory of their own, as a stage has just made them."""
        if name == REWARD:
            return Column(self._values[name][start:stop].copy())
        first, last = self.offsets[start], self.offsets[stop]
        return Column(self._values[name][first:last].copy(), self.lengths[start:stop])

    @property
    def stored_bytes(self) -> int:
        return sum(values.nbytes for values in self._values.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes that are put and got in one run of the flow."""
        return 2 * self.stored_bytes + 2 * self._values[TOKENS].nbytes

    def check(self, name: str, start: int, got: np.ndarray) -> None:
        """The bytes are those of the rows from `start` on."""
        first = start if name == REWARD else int(self.offsets[start])
        if not np.array_equal(got, self._values[name][first : first + len(got)]):
            raise SystemExit(f"dock_flow: column {name} of rows from {start} on came back wrong")


class Carrier(Protocol):
    """What carries rows between the stages."""

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None: ...

    def get(self, stage: str, start: int, stop: int, names: Sequence[str]) -> Mapping[str, np.ndarray]: ...

    def clear(self, rows: int) -> None: ...

    def close(self) -> None: ...


def run(carrier: Carrier, work: Work, check: bool) -> None:
    """Streaming: each chunk goes from the rollout through ref and reward, then the actor reads it in micro-batches."""
    case = work.case
    for start in range(0, case.rows, case.chunk):
        stop = min(start + case.chunk, case.rows)
        carrier.put("rollout", start, stop, {name: work.column(name, start, stop) for name in (TOKENS, LOGPROBS)})
        for stage, name in (("ref", REF), ("reward", REWARD)):
            carrier.get(stage, start, stop, (TOKENS,))
            carrier.put(stage, start, stop, {name: work.column(name, start, stop)})
        for first in range(start, stop, case.micro):
            got = carrier.get("actor", first, min(first + case.micro, stop), ALL)
            if check:
                for name, values in got.items():
                    work.check(name, first, values)
    carrier.clear(case.rows)


def cpu_seconds() -> float:
    """CPU time of this process and everything below it."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def side(make: Any, arguments: Sequence[str]) -> None:
    """The main program of a side: case as JSON, rounds, and the side's own option.

    It is a Carrier that is driven by `run`, or has a `run` of its own that does the same work.
    """
    case, rounds, option = Case(**json.loads(arguments[0])), int(arguments[1]), arguments[2]
    work = Work(case)
    carrier: Any = make(option)
    turns = Turns()
    laps = []
    try:
        for number in range(rounds):
            turns.next()
            wall, cpu = time.perf_counter(), cpu_seconds()
            own = getattr(carrier, "run", None)
            own(work, number == 0) if own else run(carrier, work, check=number == 0)
            laps.append({"wall_s": time.perf_counter() - wall, "cpu_s": cpu_seconds() - cpu})
        turns.end({"laps": laps, "stored_bytes": work.stored_bytes, "moved_bytes": work.moved_bytes})
    finally:
        carrier.close()


def arguments_of(case: Case, rounds: int, option: str) -> list[str]:
    return [json.dumps(asdict(case)), str(rounds), option]
