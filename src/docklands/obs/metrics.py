"""Measurements: accumulated as (sum, count) and divided once, after all merging.

A measurement of reduction `mean` is a pair (sum, count), so splitting a batch into more micro-batches cannot change
it. For `max`, `min` and `last` the first of the pair is the value itself and the second the number of observations.
Sums are exact (Shewchuk's expansions), so the result does not depend on how work was split between workers either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from docklands.errors import DocklandsError
from docklands.obs.catalog import Metric, Reduction
from docklands.obs.names import CATALOG, declare, find

__all__ = ["CATALOG", "ExactSum", "Metric", "Metrics", "declare", "find"]


class ExactSum:
    """A sum of floats without rounding: non-overlapping partial sums (Shewchuk 1997, grow-expansion).

    The rounded total therefore does not depend on the order or the grouping of the additions.
    """

    __slots__ = ("partials",)

    def __init__(self, partials: Iterable[float] = ()) -> None:
        self.partials = list(partials)

    def add(self, value: float) -> None:
        if not math.isfinite(value) or (self.partials and not math.isfinite(self.partials[0])):
            self.partials = [sum(self.partials, value)]
            return
        kept = []
        for part in self.partials:
            big, small = (value, part) if abs(value) >= abs(part) else (part, value)
            value = big + small
            rest = small - (value - big)
            if rest:
                kept.append(rest)
        self.partials = [*kept, value] if math.isfinite(value) else [value]

    def value(self) -> float:
        """The total, rounded once."""
        if self.partials and not math.isfinite(self.partials[0]):
            return self.partials[0]
        return math.fsum(self.partials)


@dataclass
class Cell:
    """The state of one metric: exact sum, or the extreme or last value, and the number of observations."""

    reduction: Reduction
    total: ExactSum = field(default_factory=ExactSum)
    value: float = math.nan
    count: float = 0.0

    def take(self, parts: Iterable[float], count: float) -> None:
        """Fold in partial sums (mean, sum) or values (the rest) that stand for `count` > 0 observations."""
        for part in parts:
            if self.reduction in ("mean", "sum"):
                self.total.add(part)
            elif self.reduction == "last" or self.count == 0:
                self.value = part
            else:
                self.value = extreme(self.reduction, [self.value, part])
        self.count += count

    @property
    def parts(self) -> list[float]:
        return list(self.total.partials) if self.reduction in ("mean", "sum") else [self.value]

    def result(self) -> float:
        if self.reduction == "mean":
            return self.total.value() / self.count
        return self.total.value() if self.reduction == "sum" else self.value


def extreme(reduction: Reduction, numbers: list[float]) -> float:
    """Maximum or minimum; a NaN among the numbers wins whatever their order."""
    if any(map(math.isnan, numbers)):
        return math.nan
    return max(numbers) if reduction == "max" else min(numbers)


def folded(reduction: Reduction, numbers: list[float]) -> list[float]:
    """Many observations as few parts: a total and its rounding rests for sums, else the extreme or the last value."""
    if reduction == "last":
        return numbers[-1:]
    if reduction in ("max", "min"):
        return [extreme(reduction, numbers)]
    if not all(map(math.isfinite, numbers)):
        return [sum(numbers)]
    parts: list[float] = []
    try:
        while rest := math.fsum([*numbers, *(-part for part in parts)]):  # each 2^53 times smaller: two or three rounds
            parts.append(rest)
    except OverflowError:
        return [sum(numbers)]
    return parts or [0.0]


class Metrics:
    """Accumulates the measurements of one step.

    Every name must be declared (`DocklandsError` with the nearest match otherwise). Merging is associative and, but
    for `last`, commutative.
    """

    def __init__(self, pairs: Mapping[str, tuple[Any, Any]] | None = None) -> None:
        self._cells: dict[str, Cell] = {}
        if pairs:
            self.add_pairs(pairs)

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, name: str) -> bool:
        return name in self._cells

    def _take(self, name: str, parts: Iterable[float], count: float) -> None:
        reduction = find(name).reduction
        if not 0 <= count < math.inf:
            raise DocklandsError(f"metric {name!r} was given a count of {count} observations")
        if count:
            self._cells.setdefault(name, Cell(reduction)).take(parts, count)

    def add(self, name: str, value: Any, count: Any = 1) -> None:
        """One measurement: for `mean` and `sum`, `value` is the sum over `count` observations.

        `value` and `count` are anything that `float()` takes. A count of 0 means "nothing observed": no trace is left.
        """
        self._take(name, [float(value)], float(count))

    def add_many(self, name: str, values: Any) -> None:
        """One observation per entry of a list, a flat array or a flat tensor; none is fine."""
        numbers = [float(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]
        self._take(name, folded(find(name).reduction, numbers) if numbers else [], len(numbers))

    def add_pairs(self, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        """Measurements as stages, losses and engines report them: name -> (sum, count)."""
        for name, (value, count) in pairs.items():
            self.add(name, value, count)

    def add_values(self, values: Mapping[str, Any]) -> None:
        """One observation of each name (gauges)."""
        for name, value in values.items():
            self.add(name, value)

    def merge(self, other: Metrics | Mapping[str, tuple[Any, Any]]) -> Metrics:
        """Fold another accumulator, or (sum, count) pairs, in (`last`: the other is the later one). Returns self."""
        if isinstance(other, Metrics):
            for name, cell in other._cells.items():
                self._take(name, cell.parts, cell.count)
        else:
            self.add_pairs(other)
        return self

    def result(self) -> dict[str, float]:
        """name -> value, sorted by name; names with no observation are absent."""
        return {name: cell.result() for name, cell in sorted(self._cells.items())}

    def pairs(self) -> dict[str, tuple[float, float]]:
        """name -> (sum or value, count): the form that travels in stage results, rounded once."""
        return {n: (math.fsum(c.parts) if len(c.parts) > 1 else c.parts[0], c.count) for n, c in self._cells.items()}

    def to_dict(self) -> dict[str, list[Any]]:
        """Plain numbers, exact, for another process: name -> [parts, count]."""
        return {name: [cell.parts, cell.count] for name, cell in self._cells.items()}

    @classmethod
    def from_dict(cls, state: Mapping[str, list[Any]]) -> Metrics:
        """The inverse of `to_dict`."""
        made = cls()
        for name, (parts, count) in state.items():
            made._take(name, parts, count)
        return made
