"""The flow that every side runs, and the data that it carries. Needs numpy and psutil only: peers run it too.

Legend: B rows, T tokens of all rows.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
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
    """Sizes. Response lengths are lognormal, cut to shortest..longest; prompts have 3/4 to 5/4 of `prompt` tokens.

    chunk     rows of a put of the rollout
    hand_out  rows that ref and reward are handed at once
    step      rows that the actor is handed at once: a hand-out, but not less than this
    micro     rows of a read of the actor, out of what it was handed
    """

    prompts: int = 512
    group: int = 8
    prompt: int = 256
    shortest: int = 64
    longest: int = 2048
    chunk: int = 64
    hand_out: int = 512
    step: int = 256
    micro: int = 32
    seed: int = 1

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def taken(self) -> int:
        """Rows that the actor is handed."""
        return min(max(self.hand_out, self.step), self.rows)


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

    def check(self, name: str, start: int, got: np.ndarray | Sequence[np.ndarray]) -> None:
        """The bytes, in one piece or several, are those of the rows from `start` on."""
        first = start if name == REWARD else int(self.offsets[start])
        for values in [got] if isinstance(got, np.ndarray) else got:
            if not np.array_equal(values, self._values[name][first : first + len(values)]):
                raise SystemExit(f"dock_flow: column {name} of rows from {start} on came back wrong")
            first += len(values)


class Held:
    """Columns as they were put, chunk by chunk: what a plain buffer keeps."""

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[list[int], list[tuple[np.ndarray, np.ndarray]]]] = {}

    def put(self, name: str, start: int, values: np.ndarray, lengths: np.ndarray | None) -> None:
        """Rows from `start` on; chunks come in order."""
        rows = np.ones(len(values), np.int64) if lengths is None else lengths
        starts, held = self._chunks.setdefault(name, ([], []))
        starts.append(start)
        held.append((values, np.concatenate([[0], np.cumsum(rows)])))

    def pieces(self, name: str, start: int, stop: int) -> list[np.ndarray]:
        """Views of the values of rows start..stop, one of each chunk."""
        starts, held = self._chunks[name]
        found = []
        for number in range(bisect_right(starts, start) - 1, len(starts)):
            if (begin := starts[number]) >= stop:
                break
            values, offsets = held[number]
            first, last = max(start - begin, 0), min(stop - begin, len(offsets) - 1)
            found.append(values[int(offsets[first]) : int(offsets[last])])
        return found

    def clear(self) -> None:
        self._chunks.clear()


class Carrier(Protocol):
    """What carries rows between the stages. `take` comes before the reads (`get`) and the put of a stage."""

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None: ...

    def take(self, stage: str, start: int, stop: int, names: Sequence[str]) -> None: ...

    def get(
        self, stage: str, start: int, stop: int, names: Sequence[str]
    ) -> Mapping[str, np.ndarray | Sequence[np.ndarray]]: ...

    def clear(self, rows: int) -> None: ...

    def close(self) -> None: ...


def run(carrier: Carrier, work: Work, check: bool) -> None:
    """Streaming: a hand-out that is there goes through ref and reward; the actor reads a step in micro-batches."""
    case = work.case
    for first in range(0, case.rows, case.taken):
        last = min(first + case.taken, case.rows)
        for begin in range(first, last, case.hand_out):
            end = min(begin + case.hand_out, last)
            for start in range(begin, end, case.chunk):
                stop = min(start + case.chunk, end)
                made = {name: work.column(name, start, stop) for name in (TOKENS, LOGPROBS)}
                carrier.put("rollout", start, stop, made)
            for stage, name in (("ref", REF), ("reward", REWARD)):
                carrier.take(stage, begin, end, (TOKENS,))
                carrier.get(stage, begin, end, (TOKENS,))
                carrier.put(stage, begin, end, {name: work.column(name, begin, end)})
        carrier.take("actor", first, last, ALL)
        for start in range(first, last, case.micro):
            got = carrier.get("actor", start, min(start + case.micro, last), ALL)
            if check:
                for name, values in got.items():
                    work.check(name, start, values)
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
