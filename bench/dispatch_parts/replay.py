"""A peer: a central replay buffer with a driver, which is what a transfer dock replaces (MindSpeed RL, arXiv
2507.19017, the section on the sample flow).

The samples are in one Ray actor, put and got by rows and columns. The driver gets what a stage reads, calls a worker
(a Ray actor) with it, gets what that writes, and puts it back; rewards and advantages it computes itself. Equally well
made as the controller of central.py: jagged numpy arrays, chunks that go on as soon as they can, of the worker whose
turn it is; puts that nobody waits for (an actor does one caller's calls in their order).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray  # noqa: E402

from dispatch_parts.central import Columns, chunk_rows, run  # noqa: E402
from dispatch_parts.work import (  # noqa: E402
    ADVANTAGE,
    REF,
    REWARD,
    TOKENS,
    TRAINED,
    Case,
    Model,
    advantages,
    rewards,
)

PROMPTS, LENGTHS = "prompts", "lengths"
Flow = Generator[Any, Any, None]
"""Yields what it waits for, and is sent its value."""


@ray.remote(num_cpus=0)
class Buffer:
    """(first row of a chunk, column) -> values."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], Any] = {}

    def put(self, start: int, columns: dict[str, Any]) -> None:
        for name, values in columns.items():
            self._held[start, name] = values

    def get(self, starts: list[int], names: tuple[str, ...]) -> list[dict[str, Any]]:
        return [{name: self._held[start, name] for name in names} for start in starts]

    def clear(self) -> None:
        self._held.clear()


class Driver:
    """Runs a step: what waits for something stands in `doing`, under what it waits for."""

    def __init__(self, case: Case, workers: list[Any]) -> None:
        self._case, self._workers, self._model = case, workers, Model(case)
        self._buffer = Buffer.remote()  # type: ignore[attr-defined]
        self._doing: dict[Any, Flow] = {}
        self._total = 0.0

    def step(self, number: int) -> float:
        case, size = self._case, chunk_rows(self._case)
        first, starts, self._total = number * case.rows, list(range(0, case.rows, size)), 0.0
        for start in starts:
            rows = np.arange(first + start, first + min(start + size, case.rows))
            prompts = [self._model.prompt_tokens(int(row) // case.group) for row in rows[:: case.group]]
            self._buffer.put.remote(start, {PROMPTS: prompts})
            self._go_on(self._rollout(start, rows, self._workers[start // size % len(self._workers)]))
        self._run()
        for index, worker in enumerate(self._workers):
            self._go_on(self._update(starts[index :: len(self._workers)], worker))
        self._run()
        self._buffer.clear.remote()
        return self._total

    def _run(self) -> None:
        while self._doing:
            (done,), _ = ray.wait(list(self._doing), num_returns=1)
            self._go_on(self._doing.pop(done), ray.get(done))

    def _go_on(self, flow: Flow, value: Any = None) -> None:
        try:
            self._doing[flow.send(value)] = flow
        except StopIteration:
            pass

    def _get(self, start: int, *names: str) -> Any:
        return self._buffer.get.remote([start], names)

    def _rollout(self, start: int, rows: np.ndarray, worker: Any) -> Flow:
        (found,) = yield self._get(start, PROMPTS)
        lengths, columns = yield worker.rollout.remote(rows, found[PROMPTS])
        self._buffer.put.remote(start, {LENGTHS: lengths, **columns})
        self._go_on(self._ref(start, worker))
        self._go_on(self._reward(start))

    def _ref(self, start: int, worker: Any) -> Flow:
        (found,) = yield self._get(start, TOKENS)
        values = yield worker.ref.remote(found[TOKENS])
        self._buffer.put.remote(start, {REF: values})

    def _reward(self, start: int) -> Flow:
        (found,) = yield self._get(start, TOKENS, LENGTHS)
        self._buffer.put.remote(start, {REWARD: rewards(found[LENGTHS], found[TOKENS])})
        (found,) = yield self._get(start, REWARD)
        self._buffer.put.remote(start, {ADVANTAGE: advantages(found[REWARD], self._case.group)})

    def _update(self, starts: list[int], worker: Any) -> Flow:
        found: list[Columns] = yield self._buffer.get.remote(starts, (LENGTHS, *TRAINED))
        sum_of_losses = yield worker.update.remote([(columns, columns.pop(LENGTHS)) for columns in found])
        self._total += sum_of_losses


def make(case: Case, workers: list[Any]) -> Callable[[int], float]:
    return Driver(case, workers).step


if __name__ == "__main__":
    run(make)
