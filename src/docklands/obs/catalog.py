"""What a metric is, and the catalogue that holds every declaration. The declarations stand in names.py."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from docklands.errors import DocklandsError

Reduction = Literal["mean", "sum", "max", "min", "last"]

PARAMETERS = {"n": r"\d+", "source": r".+", "task": r".+", "reason": r".+"}
"""What a family's parameter may be; others are one path segment."""

VOLATILE_PREFIXES = ("timing_s/", "perf/", "memory/")
"""Metrics that differ between two runs with one seed: clocks and the machine's memory."""


@dataclass(frozen=True)
class Metric:
    """A declared metric.

    name       the key in metrics.jsonl; `{parameter}` parts make it a family (`timing_s/{stage}`)
    unit       "1" dimensionless, "fraction" 0..1, "nats", "tokens", "samples", "s", "B", "MiB", ...
    reduction  how measurements of one step combine
    volatile   it measures time or memory, or tells of one moment of the flow, so two equal runs differ in it
    """

    name: str
    unit: str
    reduction: Reduction
    doc: str
    volatile: bool = False

    @property
    def is_family(self) -> bool:
        return "{" in self.name

    @property
    def is_volatile(self) -> bool:
        return self.volatile or self.name.startswith(VOLATILE_PREFIXES)

    def pattern(self) -> re.Pattern[str]:
        """A regular expression for the names of this family."""
        parts = re.split(r"\{(\w+)\}", self.name)
        text = "".join(PARAMETERS.get(p, "[^/]+") if i % 2 else re.escape(p) for i, p in enumerate(parts))
        return re.compile(text)


class Catalog:
    """All declared metrics. Names first, then families, in order of declaration."""

    def __init__(self, *metrics: Metric) -> None:
        self._names: dict[str, Metric] = {}
        self._families: dict[str, tuple[re.Pattern[str], Metric]] = {}
        self.find = lru_cache(maxsize=4096)(self._find)
        self.declare(*metrics)

    def __iter__(self) -> Iterator[Metric]:
        yield from self._names.values()
        yield from (metric for _, metric in self._families.values())

    def __len__(self) -> int:
        return len(self._names) + len(self._families)

    def declare(self, *metrics: Metric) -> None:
        """Add metrics; the same declaration twice is fine, a different one under a taken name is an error."""
        for metric in metrics:
            old = self._names.get(metric.name) or self._families.get(metric.name, (None, None))[1]
            if old is not None and old != metric:
                raise DocklandsError(f"metric {metric.name!r} is declared twice, differently", f"first: {old}")
            if metric.is_family:
                self._families[metric.name] = (metric.pattern(), metric)
            else:
                self._names[metric.name] = metric
        self.find.cache_clear()

    def _find(self, name: str) -> Metric:
        """The declaration of `name`. Raises DocklandsError with the nearest declared name."""
        if name in self._names:
            return self._names[name]
        for pattern, metric in self._families.values():
            if pattern.fullmatch(name):
                return metric
        known = [*self._names, *self._families]
        near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "declare it: docklands.obs.metrics.declare(Metric(...))"
        raise DocklandsError(f"metric {name!r} is not declared", hint)
