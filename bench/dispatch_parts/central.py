"""A peer: a single controller, one Ray actor that holds the step's batch and hands it out. The hardest one to beat.

It calls the workers (Ray actors, too) with the columns that a stage reads, gets the columns that it writes, and keeps
them; rewards and advantages it computes itself. Calls are not waited for one by one: whatever a chunk of rows is ready
for is asked for at once, of the worker whose turn it is. Arrays are jagged numpy, which Ray carries without a pickle of
their bytes, in shared memory when they are large. Nothing else is between it and the workers: who drives and who holds
the samples is one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would run its actors at 15, and so behind everything else
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402

BENCH = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, BENCH)

from dispatch_parts.work import (  # noqa: E402
    ADVANTAGE,
    REF,
    TOKENS,
    TRAINED,
    WORKERS,
    Case,
    Model,
    advantages,
    arguments,
    logprobs,
    rewards,
    side,
    update,
)

Columns = dict[str, np.ndarray]


class Worker:
    """Generates, gives reference log-probs, trains."""

    def __init__(self, case: Case) -> None:
        self._model = Model(case)

    def rollout(self, row_ids: np.ndarray, prompts: list[np.ndarray]) -> tuple[np.ndarray, Columns]:
        assert len(prompts) * self._model.case.group == len(row_ids)
        return self._model.rollout(row_ids)

    def ref(self, tokens: np.ndarray) -> np.ndarray:
        return logprobs(tokens)

    def update(self, chunks: list[tuple[Columns, np.ndarray]]) -> float:
        """On all chunks of the step that are this worker's: columns by name, lengths of the rows."""
        return sum(update(columns, lengths) for columns, lengths in chunks)


@ray.remote(num_cpus=0)
class Controller:
    """Holds the columns of a step by chunk, and runs the step."""

    def __init__(self, case: Case, workers: list[Any]) -> None:
        self._case, self._workers, self._model = case, workers, Model(case)

    def step(self, number: int) -> float:
        case = self._case
        size = chunk_rows(case)
        held: dict[int, tuple[np.ndarray, Columns]] = {}
        first = number * case.rows
        doing: dict[Any, tuple[str, int]] = {}
        for start in range(0, case.rows, size):
            rows = np.arange(first + start, first + min(start + size, case.rows))
            prompts = [self._model.prompt_tokens(int(row) // case.group) for row in rows[:: case.group]]
            doing[self._of(start // size).rollout.remote(rows, prompts)] = "rollout", start
        while doing:
            (done,), _ = ray.wait(list(doing), num_returns=1)
            stage, start = doing.pop(done)
            found = ray.get(done)
            if stage == "rollout":
                lengths, columns = held[start] = found
                doing[self._of(start // size).ref.remote(columns[TOKENS])] = "ref", start
                columns[ADVANTAGE] = advantages(rewards(lengths, columns[TOKENS]), case.group)
            else:
                held[start][1][REF] = found
        chunks = [
            ({name: columns[name] for name in TRAINED}, lengths) for _, (lengths, columns) in sorted(held.items())
        ]
        count = len(self._workers)
        return sum(ray.get([worker.update.remote(chunks[i::count]) for i, worker in enumerate(self._workers)]))

    def _of(self, index: int) -> Any:
        return self._workers[index % len(self._workers)]


def chunk_rows(case: Case) -> int:
    """Rows of a call of a worker."""
    return case.chunk or case.rows // WORKERS


def run(make: Callable[[Case, list[Any]], Callable[[int], float]]) -> None:
    """Main program of a peer. make: (case, the workers' handles) -> what runs a step."""
    case, rounds = arguments(sys.argv[1:])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=1 << 30,
        runtime_env={"env_vars": {"PYTHONPATH": BENCH}},
    )
    kind = ray.remote(num_cpus=0)(Worker)
    workers = [kind.remote(case) for _ in range(WORKERS)]
    step = make(case, workers)
    ray.get([worker.ref.remote(np.zeros(1, np.int32)) for worker in workers])
    side(step, case, rounds, ray.shutdown)


def make(case: Case, workers: list[Any]) -> Callable[[int], float]:
    controller = Controller.remote(case, workers)  # type: ignore[attr-defined]
    return lambda number: ray.get(controller.step.remote(number))


if __name__ == "__main__":
    run(make)
