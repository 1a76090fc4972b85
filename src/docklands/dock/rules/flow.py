"""What the graph means for the dock: who is told of a column, what a stage waits for, whose drops it sees.

A *filter* is a stage before the update that writes nothing: it exists to drop rows. The stages after it wait for its
verdict, which is carried as one more column, named after it.
"""

from __future__ import annotations

import difflib
from typing import Any

from docklands.core.fields import Field
from docklands.core.graph import UPDATE, Graph
from docklands.core.stage import Stage
from docklands.errors import UnknownField


class Flow:
    """The graph by names.

    reads       stage -> columns and verdicts that make a row ready for it
    readers     column or verdict -> stages that read it
    told        column -> stages whose controllers are told of it: its readers, and the stage that must write it
    writes      stage -> columns it must write for every row it does not drop
    descendants stage -> stages that wait, directly or not, for what it does
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.fields: dict[str, Field[Any]] = {field.name: field for field in graph.fields}
        self.sources = tuple(field.name for field in graph.sources)
        self.stages = {stage.name: stage for stage in graph.stages}
        self.writes = {stage.name: tuple(field.name for field in stage.writes) for stage in graph.stages}
        self.filters = tuple(stage.name for stage in graph.stages if not stage.writes and stage.name != UPDATE)
        self.reads = {stage.name: self._reads(stage) for stage in graph.stages}
        self.readers: dict[str, list[str]] = {}
        for stage, columns in self.reads.items():
            for column in columns:
                self.readers.setdefault(column, []).append(stage)
        self.writer = {column: stage for stage, columns in self.writes.items() for column in columns}
        self.writer.update({verdict(name): name for name in self.filters})
        self.told = {
            column: (*self.readers.get(column, ()), *([self.writer[column]] if column in self.writer else []))
            for column in self.fields
        }
        self.descendants = {stage: self._descendants(stage) for stage in self.stages}

    def stage(self, name: str) -> Stage:
        """The stage of that name, or GraphError with the nearest match."""
        return self.graph[name]

    def check_field(self, field: Field[Any]) -> None:
        """UnknownField unless the graph declares exactly this column."""
        declared = self.fields.get(field.name)
        if declared == field:
            return
        if declared is not None:
            raise UnknownField(f"column {field!r} is declared as {declared!r}")
        near = difflib.get_close_matches(field.name, self.fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"columns: {', '.join(self.fields)}"
        raise UnknownField(f"no stage of the graph declares the column {field.name!r}", hint)

    def sees_drops_of(self, stage: str | None) -> tuple[str, ...]:
        """Stages that hear of a drop by `stage`: those that wait for it. For others it would be a race. None: all."""
        return tuple(self.stages) if stage is None else (stage, *sorted(self.descendants[stage]))

    def _reads(self, stage: Stage) -> tuple[str, ...]:
        names = [earlier.name for earlier in self.graph.upstream_of(stage.name)]
        verdicts = [verdict(name) for name in self.filters if name in names]
        return tuple(dict.fromkeys([*(field.name for field in stage.reads), *verdicts]))

    def _descendants(self, name: str) -> frozenset[str]:
        found: set[str] = set()
        at = [name]
        while at:
            stage = at.pop()
            below = {
                reader for column in (*self.writes[stage], verdict(stage)) for reader in self.readers.get(column, ())
            }
            at += below - found
            found |= below
        return frozenset(found)


def verdict(stage: str) -> str:
    """Name of the column that stands for a filter's decision to let a row pass."""
    return f"@{stage}"
