"""A stage reads columns and writes columns; a learner reads columns and moves weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from docklands.core.fields import Field

if TYPE_CHECKING:
    from docklands.core.batch import Batch
    from docklands.core.loss import LossFn

By = Literal["sample", "group", "step"]
"""How rows are handed out: any rows, whole groups, or exactly one step's groups."""


@dataclass(frozen=True)
class Result:
    """What a stage function returns.

    batch    the written columns for the rows that go on (None: no column, e.g. a filter or a description)
    dropped  row id -> reason, for rows that leave the flow here; the rest of their group goes on without them
    metrics  metric name -> (sum, count)
    later    rows that the stage has begun and wants to get again, whole groups where it works by group
    """

    batch: Batch | None = None
    dropped: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    later: Sequence[int] = ()


StageFn = Callable[[Any, "Batch"], "Result | Batch | None | Any"]
"""(the role's resource: an engine, a reward, an algorithm; batch with the read columns) -> what it wrote.

A Batch: its columns are written. None: all rows are dropped. A Result: both said explicitly. May be async.
Must be importable by name (a module-level function, or a method of a picklable object): other processes run it.
"""


@dataclass(frozen=True)
class Stage:
    """A named step of the dataflow.

    role      which worker group runs it
    reads     columns it needs; it is ready for a row once all of them are
    writes    columns it makes; no other stage makes them
    by        rows, whole groups, or a whole step at a time
    """

    name: str
    role: str
    reads: tuple[Field[Any], ...]
    writes: tuple[Field[Any], ...]
    run: StageFn = field(compare=False)
    by: By = "group"

    def __repr__(self) -> str:
        return f"Stage({self.name}@{self.role} by {self.by})"


@dataclass(frozen=True)
class Learner:
    """A model that the update stage trains: the actor, and the critic for PPO.

    loss     (packed micro-batch, model outputs, denominators) -> LossResult; see docklands.core.loss
    entropy  whether the loss reads entropy_T (its gradient costs a little more)
    """

    name: str
    role: str
    reads: tuple[Field[Any], ...]
    loss: LossFn = field(compare=False)
    entropy: bool = False
