"""What the parts of the dock tell each other: ids, names and numbers. No tensor, no object of another part.

Everything here can be sent to another process as it stands; `nbytes` is what it would weigh there.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Home = tuple[int, int, int]
"""Where bytes lie in a warehouse's shared memory: (arena, generation, offset in the arena's file)."""


@dataclass(frozen=True)
class Admission:
    """New rows of one group, to every controller.

    row_ids   int64 [B], by sample index
    group_id  as the prompt source gave it; the group's place in the order of admission is `order`
    place     warehouse that holds the rows
    """

    row_ids: np.ndarray
    group_id: int
    order: int
    place: int

    @property
    def nbytes(self) -> int:
        return self.row_ids.nbytes + 20


@dataclass(frozen=True)
class Notice:
    """Columns have become ready, to one controller whose stage reads them.

    row_ids  int64 [B]
    columns  names, each ready for all of the rows
    lengths  tokens of each row, int64 [B]; 0 before a token column is there
    homes    put after put: how many of the rows, and column -> where their values begin in shared memory, if they do;
             a put's rows lie there one after the other
    """

    stage: str
    row_ids: np.ndarray
    columns: tuple[str, ...]
    lengths: np.ndarray
    homes: tuple[tuple[int, Mapping[str, Home]], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.row_ids.nbytes + self.lengths.nbytes + 2 * len(self.columns)


@dataclass(frozen=True)
class Ended:
    """A reader has put what it made of rows and is through with them, to the controller of its stage.

    row_ids  int64 [B]: all rows of its lease
    read     fetches, and their bytes, that no warehouse has seen
    """

    stage: str
    lease: int
    row_ids: np.ndarray
    read: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Want:
    """What a reader asks a controller for.

    groups      groups at most (exactly, where the composition is fixed)
    max_tokens  hard cap on the tokens of all rows; None: no cap
    exhausted   no further group will be admitted, so what is left is all there is
    rank        which of the `ranks` data-parallel readers asks: what is chosen is divided among them, balanced by
                tokens, and `max_tokens` caps each one's part; ranks 0: the reader takes all
    near        places on the reader's node: groups of theirs come first, within a step's worth of the oldest
    """

    groups: int
    max_tokens: int | None = None
    exhausted: bool = False
    rank: int = 0
    ranks: int = 0
    near: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Census:
    """Rows of one stage by state, and what the free ones lack.

    missing     column -> ids of free rows that lack it
    groups      groups that the stage has still to take; whole: those of them that are ready
    oldest_s    age of the oldest lease in seconds
    """

    ready: int
    leased: int
    done: int
    waiting: int
    groups: int
    whole: int
    oldest_s: float
    missing: dict[str, np.ndarray] = field(default_factory=dict)
