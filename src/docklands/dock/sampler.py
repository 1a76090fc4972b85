"""What is handed out next: a pure choice among the groups that a stage has still to take.

`exact` fixes the composition of every take by the order of admission alone: the k-th take of a stage holds the same
rows in every run, however fast its readers and writers are. The eager ones hand out whatever is ready, oldest first.
A stage by "step" is always exact: the update trains the oldest groups, which is what bounds staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from docklands.core.stage import By
from docklands.errors import DockError


@dataclass(slots=True)
class GroupState:
    """A group as one controller sees it.

    order  place in the order of admission
    slots  rows in the controller's table, by sample index, int64 [rows]
    open   rows that the stage has still to take
    ready  those of them whose columns are all there
    """

    order: int
    group_id: int
    slots: np.ndarray
    open: int = 0
    ready: int = 0

    @property
    def whole(self) -> bool:
        """Every row that the stage has still to take is ready."""
        return 0 < self.open == self.ready


Sampler = Callable[[Iterable[GroupState], int, bool], list[GroupState]]
"""(groups still to take, in admission order; how many; whether no further group will come) -> the groups to hand out.

Empty: not yet. The controller leases the rows of the chosen groups that are ready.
"""


def exact(pending: Iterable[GroupState], groups: int, exhausted: bool) -> list[GroupState]:
    """The next `groups` groups in admission order, once all of them are whole; fewer only when there are no more."""
    chosen = list(islice(pending, groups))
    enough = len(chosen) == groups or exhausted
    return chosen if enough and all(group.whole for group in chosen) else []


def eager_by_group(pending: Iterable[GroupState], groups: int, exhausted: bool) -> list[GroupState]:
    """Up to `groups` whole groups, oldest first."""
    return list(islice((group for group in pending if group.whole), groups))


def eager_by_sample(pending: Iterable[GroupState], groups: int, exhausted: bool) -> list[GroupState]:
    """Up to `groups` groups with a ready row, oldest first: their ready rows are handed out."""
    return list(islice((group for group in pending if group.ready), groups))


def choose_sampler(by: By, deterministic: bool) -> Sampler:
    """The sampler of a stage; the update's is exact in either mode."""
    if deterministic or by == "step":
        return exact
    return eager_by_sample if by == "sample" else eager_by_group


def fit(pieces: Sequence[np.ndarray], lengths: Sequence[np.ndarray], max_tokens: int, by: By) -> list[np.ndarray]:
    """The longest prefix of `pieces` (slots of a group each) within a hard cap of tokens; by sample, groups may be cut.

    lengths  tokens of each piece's rows
    Raises DockError when not even the first row (by group: the first group) fits, or for a stage by step.
    """
    if by == "step":
        raise DockError("a stage by step takes whole steps and no token budget", "leave max_tokens out")
    if by == "sample":
        pieces = [np.array([slot]) for piece in pieces for slot in piece]
        lengths = [np.array([n]) for piece in lengths for n in piece]
    total = np.cumsum([int(n.sum()) for n in lengths])
    fitting = int(np.searchsorted(total, max_tokens, side="right"))
    if fitting == 0:
        what = "row" if by == "sample" else f"group of {len(pieces[0])} rows"
        raise DockError(
            f"the next {what} has {int(total[0])} tokens, the budget of a take is {max_tokens}",
            "raise the token budget or lower the length limits",
        )
    return list(pieces[:fitting])
