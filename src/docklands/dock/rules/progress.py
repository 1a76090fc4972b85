"""Where every row stands for one stage: free, leased or done; which of its columns are missing; how long it is.

The half of a controller that hears of rows; controller.py adds the half that hands them out. Rows are named by their
slots in a roster, which the controllers of one process share; every call is a few array operations on its rows.

Row states, per (row, stage):  FREE -> LEASED -> DONE, and back to FREE when the lease's deadline passes.
A *hidden* row has left the flow: it is not handed out any more, and disappears once its lease, if any, has ended.

Legend: B rows, N groups of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from docklands.core.stage import By
from docklands.dock.rules.messages import Census
from docklands.dock.rules.sampler import GroupQueue
from docklands.dock.rules.table import Roster, larger
from docklands.errors import DockError

FREE, LEASED, DONE = 1, 2, 3
STATE, HIDDEN = 3, 4
"""Bits of a row's state byte."""


class Progress:
    """The rows of one stage.

    released  slots that the stage may have let go since the list was last emptied
    """

    def __init__(self, stage: str, columns: tuple[Sequence[str], Sequence[str]], queue: GroupQueue) -> None:
        """`columns`: those that make a row ready, and those that the stage makes."""
        reads, writes = columns
        if len(reads) + len(writes) > 63:
            raise DockError(f"stage {stage!r} has {len(reads) + len(writes)} columns, at most 63 are possible")
        self.stage = stage
        self.by: By = queue.by
        self.released: list[np.ndarray] = []
        self._bits = {name: 1 << i for i, name in enumerate((*reads, *writes))}
        self._need = (1 << len(reads)) - 1
        self._all = (1 << len(reads) + len(writes)) - 1
        self._queue = queue
        self._roster: Roster = queue.roster
        self._state = np.zeros(0, np.uint8)
        self._missing = np.zeros(0, np.min_scalar_type(self._all))
        self._length = np.zeros(0, np.int32)
        self._lease = np.zeros(0, np.int64)
        self._changed = False

    # --- messages ----------------------------------------------------------------------------------------------

    def admit(self, slots: np.ndarray) -> None:
        """Rows of new groups, nothing ready yet."""
        if len(self._state) < len(self._roster.row_id):
            for name in ("_state", "_missing", "_length", "_lease"):
                setattr(self, name, larger(getattr(self, name), len(self._roster.row_id)))
        self._state[slots], self._missing[slots] = FREE, self._all
        self._length[slots] = self._lease[slots] = 0
        blocks = self._roster.blocks_of(slots)
        self._queue.enter(blocks)
        if len(blocks) and self._need:  # every row of a block is new, and nothing is ready
            self._changed = True
            new = np.bincount(np.searchsorted(blocks, slots // self._roster.size), minlength=len(blocks))
            self._queue.update(blocks, new.astype(np.int32), np.zeros(len(blocks), np.int32))
        else:
            self._recount(slots)

    def ready(self, slots: np.ndarray, columns: Sequence[str], lengths: np.ndarray) -> None:
        """Columns are there."""
        bits = sum(self._bits[name] for name in columns)
        self._missing[slots] &= self._all & ~bits
        self._length[slots] = np.maximum(self._length[slots], lengths)
        if bits & self._need and (self._missing[slots] & self._need == 0).any():  # else no row is ready by this
            self._recount(slots)

    def hide(self, slots: np.ndarray) -> None:
        """Rows have left the flow: hand them out no more. Those in a reader's hands stay until it is through."""
        open_ = (self._state[slots] == FREE).any()
        self._state[slots] |= HIDDEN
        self.released.append(slots)
        if open_:  # else nothing was to be handed out of them
            self._recount(slots)

    def forget(self, slots: np.ndarray) -> None:
        """Rows that the stage does not hold any more are freed everywhere."""
        self._state[slots] = 0

    def align(self, slots: np.ndarray, have: Mapping[str, np.ndarray], lengths: np.ndarray, rebuilt: bool) -> None:
        """A warehouse says which columns its rows have; columns that it does not hold (verdicts) stay as they are.

        have     column -> whether each row has it, bool [B]; lengths: tokens of each row, int [B]
        rebuilt  this process has just started: a row is done for a stage that writes iff its columns are there
        """
        missing = self._missing[slots]
        for name, bit in self._bits.items():
            if name in have:
                missing = np.where(have[name], missing & (self._all & ~bit), missing | bit)
        self._missing[slots] = missing
        self._length[slots] = np.maximum(lengths, 0)
        if own := self._all & ~self._need:
            state, lacks = self._state[slots], missing & own != 0
            self._state[slots[lacks & (state == DONE)]] = FREE
            if rebuilt:
                self._state[slots[~lacks & (state == FREE)]] = DONE
        self._recount(slots)

    def heard(self, slots: np.ndarray) -> np.ndarray:
        """Whether a warehouse has told of any column of each row, bool [B]."""
        return self._missing[slots] != self._all

    def wipe(self, slots: np.ndarray) -> None:
        """Rows have lost everything and begin anew; those that have left stay hidden. No lease holds them any more."""
        state = self._state[slots]
        self._state[slots] = np.where(state & HIDDEN != 0, state & ~np.uint8(STATE) | DONE, FREE)
        self._missing[slots], self._length[slots], self._lease[slots] = self._all, 0, 0
        self.released.append(slots)
        self._recount(slots)

    def overtake(self, blocks: np.ndarray) -> None:
        """A take that this process did not see passed over these groups."""
        self._queue.overtake(blocks)

    def holds(self, slots: np.ndarray) -> np.ndarray:
        """Whether the stage has still to do with each row, bool [B]: it is leased, or free and not hidden."""
        state = self._state[slots]
        return (state & STATE == LEASED) | (state == FREE)

    # --- looking in --------------------------------------------------------------------------------------------

    def written(self, slots: np.ndarray) -> np.ndarray:
        """Whether every column that the stage makes is there for each row, bool [B]."""
        return self._missing[slots] & (self._all & ~self._need) == 0

    def lacking(self, slots: np.ndarray) -> str:
        """The first column that the stage has not made for one of the rows."""
        missing = int(np.bitwise_or.reduce(self._missing[slots], initial=0))
        return next((name for name, bit in self._bits.items() if bit > self._need and bit & missing), "")

    def census(self) -> Census:
        """Rows by state, and what is missing. The ages of leases are not known here."""
        slots = self._roster.used
        state, missing = self._state[slots], self._missing[slots] & self._need
        free = state == FREE
        ids = self._roster.row_id[slots]
        lacks = {name: ids[free & (missing & bit != 0)] for name, bit in self._bits.items() if bit <= self._need}
        return Census(
            ready=int((free & (missing == 0)).sum()),
            leased=int((state & STATE == LEASED).sum()),
            done=int((state & STATE == DONE).sum()),
            waiting=int((free & (missing != 0)).sum()),
            groups=self._queue.pending,
            whole=self._queue.whole,
            oldest_s=0.0,
            missing={name: rows for name, rows in lacks.items() if len(rows)},
        )

    def split(self, row_ids: np.ndarray) -> tuple[int, int, int]:
        """How many of these rows are leased, ready and free, and not yet ready."""
        slots = self._roster.present(row_ids)
        state, missing = self._state[slots] & STATE, self._missing[slots] & self._need
        free = state == FREE
        return int((state == LEASED).sum()), int((free & (missing == 0)).sum()), int((free & (missing != 0)).sum())

    @property
    def pending(self) -> int:
        """Groups with a row that the stage has still to take."""
        return self._queue.pending

    def take_changed(self) -> bool:
        """Whether anything has changed since this was last asked: a sleeping reader may be served now."""
        changed, self._changed = self._changed, False
        return changed

    @property
    def may_take(self) -> bool:
        """Whether a reader might be served: cheaper than trying, and never wrongly no."""
        return self._queue.may_choose

    @property
    def nbytes(self) -> int:
        """Bytes of this stage's arrays."""
        return sum(a.nbytes for a in (self._state, self._missing, self._length, self._lease)) + self._queue.nbytes

    # --- snapshot ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Rows with their bits, and how often their groups were overtaken; leases become free."""
        slots = self._roster.used
        state = self._state[slots]
        return {
            "row_ids": torch.from_numpy(self._roster.row_id[slots]),
            "missing": torch.from_numpy(self._missing[slots].astype(np.int64)),
            "length": torch.from_numpy(self._length[slots]),
            "hidden": torch.from_numpy(state & HIDDEN != 0),
            "done": torch.from_numpy(state & STATE == DONE),
            "overtaken": torch.from_numpy(self._queue.overtaken(slots // self._roster.size)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bits of rows that have been admitted before."""
        slots = self._roster.find(state["row_ids"].numpy())
        self._missing[slots] = state["missing"].numpy()
        self._length[slots] = state["length"].numpy()
        self._state[slots] = np.where(state["done"].numpy(), DONE, FREE) | np.where(state["hidden"].numpy(), HIDDEN, 0)
        if "overtaken" in state:  # snapshots of before it was kept lack it
            self._queue.set_overtaken(slots // self._roster.size, state["overtaken"].numpy())
        self._recount(slots)

    # --- inside ------------------------------------------------------------------------------------------------

    def _recount(self, slots: np.ndarray) -> None:
        """Open and ready rows of these rows' groups have changed."""
        self._changed = True
        if not len(slots):
            return
        blocks = self._roster.blocks_of(slots)
        members = self._roster.members(blocks)
        free = self._state[members] == FREE
        ready = free & (self._missing[members] & self._need == 0)
        open_ = np.add.reduce(free, 1, np.int32)  # count_nonzero along an axis takes three times as long
        self._queue.update(blocks, open_, np.add.reduce(ready, 1, np.int32))
