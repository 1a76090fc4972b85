"""The peer: a single controller, one Ray actor that holds the step's batch and hands it out.

It calls the workers (Ray actors, too) with the columns that a stage reads, gets the columns that it writes, and keeps
them; rewards and advantages it computes itself. Calls are not waited for one by one: whatever a chunk of rows is ready
for is asked for at once, of the worker whose turn it is. Arrays are jagged numpy, which Ray carries without a pickle of
their bytes, in shared memory when they are large.
"""

from __future__ import annotations

import os
import sys
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
    LOGPROBS,
    MASK,
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


@ray.remote(num_cpus=0)
class Worker:
    """Generates, gives reference log-probs, trains."""

    def __init__(self, case: Case) -> None:
        self._model = Model(case)

    def rollout(self, row_ids: np.ndarray, prompts: list[np.ndarray]) -> tuple[np.ndarray, Columns]:
        assert len(prompts) * self._model.case.group == len(row_ids)
        return self._model.rollout(row_ids)

    def ref(self, tokens: np.ndarray) -> np.ndarray:
        return logprobs(tokens)

    def update(self, columns: Columns, lengths: np.ndarray) -> float:
        return update(columns, lengths)


@ray.remote(num_cpus=0)
class Controller:
    """Holds the columns of a step by chunk, and runs the step."""

    def __init__(self, case: Case, workers: list[Any]) -> None:
        self._case, self._workers, self._model = case, workers, Model(case)

    def step(self, number: int) -> float:
        case = self._case
        size = case.chunk or case.rows // len(self._workers)
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
        trained = [
            self._of(index).update.remote({name: columns[name] for name in TRAINED}, lengths)
            for index, (_, (lengths, columns)) in enumerate(sorted(held.items()))
        ]
        return sum(ray.get(trained))

    def _of(self, index: int) -> Any:
        return self._workers[index % len(self._workers)]


def main() -> None:
    case, rounds = arguments(sys.argv[1:])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=1 << 30,
        runtime_env={"env_vars": {"PYTHONPATH": BENCH}},
    )
    workers = [Worker.remote(case) for _ in range(WORKERS)]  # type: ignore[attr-defined]
    controller = Controller.remote(case, workers)  # type: ignore[attr-defined]
    ray.get(workers[0].ref.remote(np.zeros(1, np.int32)))
    side(lambda number: ray.get(controller.step.remote(number)), case, rounds, ray.shutdown)


assert {MASK, LOGPROBS} <= set(TRAINED)

if __name__ == "__main__":
    main()
