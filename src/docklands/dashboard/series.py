"""Metrics over steps in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

MOST_POINTS = 4096
MOST_NAMES = 4000
NAME_LENGTH = 200


class Series:
    """One metric: a point a step; from MOST_POINTS on, each point is the mean of 2, 4, 8, ... steps.

    per  steps of a point
    """

    __slots__ = ("_count", "_most", "_total", "last", "per", "steps", "values")

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.steps, self.values = array("q"), array("d")
        self.per = 1
        self.last: tuple[int, float] | None = None
        self._most = most
        self._total, self._count = 0.0, 0

    def add(self, step: int, value: float) -> bool:
        """The next step's value. True when points that were there before have changed."""
        changed = self.last is not None and step <= self.last[0] and self._forget_from(step)
        self.last = (step, value)
        self._total, self._count = self._total + value, self._count + 1
        if self._count >= self.per:
            self.steps.append(step)
            self.values.append(self._total / self._count)
            self._total, self._count = 0.0, 0
        if len(self.steps) >= self._most:
            self._halve()
            changed = True
        return changed

    def after(self, step: int) -> tuple[list[int], list[float]]:
        """Points of later steps."""
        first = len(self.steps)
        while first and self.steps[first - 1] > step:
            first -= 1
        return self.steps[first:].tolist(), self.values[first:].tolist()

    def _forget_from(self, step: int) -> bool:
        """A step that comes again: what was known from it on no longer counts."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self._total, self._count = 0.0, 0
        return True

    def _halve(self) -> None:
        pairs = len(self.steps) // 2
        means = array("d", ((self.values[2 * i] + self.values[2 * i + 1]) / 2 for i in range(pairs)))
        self.steps, self.values = self.steps[1 : 2 * pairs : 2], means
        self.per *= 2


class MetricStore:
    """All metrics of a run.

    epoch    grows whenever points that were handed out before have changed
    bad      name -> (how often it was not finite, the last such step)
    steps    the last step seen, 0 before the first
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.epoch += 1
        self.series: dict[str, Series] = {}
        self.bad: dict[str, tuple[int, int]] = {}
        self.steps = 0

    def add(self, row: Mapping[str, Any], prefix: str = "") -> None:
        """A line of metrics.jsonl or evals.jsonl; what is no number is passed over."""
        step, metrics = row.get("step"), row.get("metrics")
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) >= 2**53 or not isinstance(metrics, dict):
            return
        self.steps = step
        changed = False
        for name, value in metrics.items():
            name = prefix + name
            if value is None:
                self.bad[name[:NAME_LENGTH]] = (self.bad.get(name[:NAME_LENGTH], (0, 0))[0] + 1, step)
            elif isinstance(value, (int, float)) and not isinstance(value, bool) and len(name) <= NAME_LENGTH:
                changed |= self._take(name, step, value)
        if len(self.bad) > MOST_NAMES:
            self.bad.clear()
        self.epoch += changed

    def _take(self, name: str, step: int, value: float) -> bool:
        try:
            number = float(value)
        except OverflowError:
            return False
        if not math.isfinite(number) or (name not in self.series and len(self.series) >= MOST_NAMES):
            return False
        return self.series.setdefault(name, Series()).add(step, number)
