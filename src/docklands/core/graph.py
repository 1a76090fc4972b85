"""The dataflow graph: stages whose every read has exactly one earlier writer."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from docklands.core.fields import ADMITTED, Field
from docklands.core.stage import Learner, Stage
from docklands.errors import GraphError

UPDATE = "update"


@dataclass(frozen=True)
class Graph:
    """Stages in order, ending in the update stage, and the learners that the update trains.

    Checked when made: unique names, one writer per column, every read written earlier, an update at the end.
    """

    stages: tuple[Stage, ...]
    learners: tuple[Learner, ...] = ()
    sources: tuple[Field[Any], ...] = ADMITTED

    def __post_init__(self) -> None:
        check(self)

    def __getitem__(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        near = difflib.get_close_matches(name, names, 1)
        raise GraphError(f"no stage {name!r}", f"did you mean {near[0]!r}?" if near else f"stages: {', '.join(names)}")

    def upstream_of(self, name: str) -> tuple[Stage, ...]:
        """All stages before `name`, in order."""
        return self.stages[: self.stages.index(self[name])]

    def writer_of(self, column: Field[Any]) -> Stage | None:
        """The stage that writes `column`; None for a source."""
        return next((stage for stage in self.stages if column in stage.writes), None)

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role that a stage or a learner needs, in first-use order."""
        return tuple(dict.fromkeys([*(s.role for s in self.stages), *(lrn.role for lrn in self.learners)]))

    @property
    def fields(self) -> tuple[Field[Any], ...]:
        """Every column of the table."""
        return tuple(dict.fromkeys([*self.sources, *(f for s in self.stages for f in s.writes)]))

    def edges(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(writer, reader, column names); the source of prompts is called 'prompts'."""
        found: list[tuple[str, str, tuple[str, ...]]] = []
        for stage in self.stages:
            by_writer: dict[str, list[str]] = {}
            for column in stage.reads:
                writer = self.writer_of(column)
                by_writer.setdefault(writer.name if writer else "prompts", []).append(column.name)
            found += [(writer, stage.name, tuple(columns)) for writer, columns in by_writer.items()]
        return found

    def to_text(self) -> str:
        """A table for the terminal: one line per stage."""
        width = max(len(stage.name) for stage in self.stages)
        lines = [f"{'prompts':<{width}}            -> {', '.join(f.name for f in self.sources)}"]
        for stage in self.stages:
            writes = ", ".join(f.name for f in stage.writes) or "weights of " + ", ".join(x.name for x in self.learners)
            lines.append(f"{stage.name:<{width}} @{stage.role:<9} -> {writes}")
            lines.append(f"{'':<{width}}  by {stage.by:<6} <- {', '.join(f.name for f in stage.reads)}")
        return "\n".join(lines)

    def to_mermaid(self) -> str:
        """A mermaid flowchart."""
        lines = ["flowchart LR", "  prompts([prompts])"]
        lines += [f'  {stage.name}["{stage.name}<br/>@{stage.role}"]' for stage in self.stages]
        lines += [f"  {writer} -->|{'<br/>'.join(columns)}| {reader}" for writer, reader, columns in self.edges()]
        if any(stage.name == "rollout" for stage in self.stages):
            lines.append("  update -.->|weights v+1| rollout")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON for graph.json."""
        stages = [
            {
                "name": s.name,
                "role": s.role,
                "by": s.by,
                "reads": [f.name for f in s.reads],
                "writes": [f.name for f in s.writes],
            }
            for s in self.stages
        ]
        return {"stages": stages, "learners": [x.name for x in self.learners], "edges": [list(e) for e in self.edges()]}


def check(graph: Graph) -> None:
    """Raise GraphError with the stage and the column when the graph does not hold together."""
    names = [stage.name for stage in graph.stages]
    if len(set(names)) != len(names):
        raise GraphError(f"stage names are not unique: {names}")
    if not names or names[-1] != UPDATE:
        raise GraphError("the last stage must be 'update'", f"stages: {', '.join(names) or 'none'}")
    written: dict[Field[Any], str] = dict.fromkeys(graph.sources, "prompts")
    all_writers = {f: s.name for s in graph.stages for f in s.writes}
    for stage in graph.stages:
        for column in stage.reads:
            if column in written:
                continue
            later = all_writers.get(column)
            hint = f"{later!r} writes it, but later" if later else "no stage writes it"
            raise GraphError(f"stage {stage.name!r} reads {column.name!r}, which nothing earlier writes", hint)
        for column in stage.writes:
            if column in written:
                raise GraphError(f"column {column.name!r} is written by both {written[column]!r} and {stage.name!r}")
            written[column] = stage.name
    check_learners(graph, written)


def check_learners(graph: Graph, written: dict[Field[Any], str]) -> None:
    """Learners read what the update stage reads, all of it and no more; every stage's work is read (pitfall 15)."""
    if not graph.learners:
        raise GraphError("the graph has no learner: nothing would be trained")
    update = set(graph[UPDATE].reads)
    for learner in graph.learners:
        for column in learner.reads:
            if column not in update:
                raise GraphError(f"learner {learner.name!r} reads {column.name!r}, which 'update' does not read")
    unused = [f.name for f in graph[UPDATE].reads if all(f not in learner.reads for learner in graph.learners)]
    if unused:
        raise GraphError(f"'update' reads {', '.join(unused)}, which no learner reads", "remove what makes it")
    read = {column for stage in graph.stages for column in stage.reads}
    for stage in graph.stages:
        if stage.writes and not read.intersection(stage.writes):
            raise GraphError(
                f"nothing reads what stage {stage.name!r} writes ({', '.join(f.name for f in stage.writes)})",
                "remove the stage or the config value that asked for it",
            )


def rows_text(ids: Sequence[int], most: int = 8) -> str:
    """Row ids for an error message."""
    shown = ", ".join(str(i) for i in list(ids)[:most])
    return f"{shown}, ... ({len(ids)} in all)" if len(ids) > most else shown
