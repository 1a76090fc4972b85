"""What a control process does after a loss: its own (journal and inventories) or a warehouse's (inventory).

The journal holds what no warehouse can tell: admissions, verdicts of filters, drops, retirements, the end of prompts. A
record is with the kernel before its call is acknowledged, so a killed process forgets nothing that it has said yes to:
no retired row is trained again. What the journal does not hold follows from the inventories: a row is done for a stage
that writes iff its columns are there. Leases are not kept: their rows are free again. Nor are takes: whom
one has overtaken follows from what it has retired.

Legend: B rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from docklands.core.protocols import Rows
from docklands.dock.rules.control import Control
from docklands.dock.rules.table import NO_ROWS
from docklands.dock.warehouse.wal import Fsync, Log, read
from docklands.errors import CheckpointError

log = logging.getLogger("docklands.dock.rules.control")

COMPACT_BYTES = 16 << 20
"""A journal that has grown by so much is replaced by the state that it leads to."""

STATE = "state"


class Journal:
    """The journal of one control in a file. Raises DockError when it cannot be written.

    epoch  how often this file was opened, from 1: leases of different processes differ
    """

    def __init__(self, path: Path, control: Control, fsync: Fsync = "never") -> None:
        """Replay the file, if there is one, into a control that has admitted nothing, and go on writing it."""
        self._control = control
        self.epoch = 1 + (replay(control, path) if path.exists() else 0)
        self.replayed = self.epoch > 1
        self._log = Log(path, fsync)
        self.compact()
        control.journal = self.record

    def record(self, what: str, facts: dict[str, Any], row_ids: np.ndarray) -> None:
        """Hand one change to the kernel."""
        self._log.append([msgspec.msgpack.encode((what, facts)), np.ascontiguousarray(row_ids, np.int64)])

    @property
    def due_s(self) -> float | None:
        """See Log.due_s."""
        return self._log.due_s

    def turn(self) -> None:
        """Between changes, before anybody hears of them: to disk, as the policy says; and keep the file small."""
        self._log.sync()
        if self._log.nbytes > self._base + COMPACT_BYTES:
            try:
                self.compact()
            except CheckpointError as error:  # its records are there: it can grow on
                log.warning("dock: the journal is not made smaller: %s", error.message)
                self._base = self._log.nbytes

    def close(self) -> None:
        self._log.close()

    def compact(self) -> None:
        """Replace the file by the state that it leads to."""
        self._log.replace(
            [[msgspec.msgpack.encode((STATE, {"epoch": self.epoch})), packed(self._control.state_dict())]]
        )
        self._base = self._log.nbytes


def packed(state: dict[str, Any]) -> bytes:
    """A state dict of plain data and tensors [n] as msgpack."""
    return msgspec.msgpack.encode(state, enc_hook=_extension)


def unpacked(data: Any) -> dict[str, Any]:
    """What `packed` packed. Raises CheckpointError."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_tensor)
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise CheckpointError(f"state of a dock cannot be read: {error}") from None


def load(control: Control, state: Any) -> None:
    """A saved state, whole or not at all. Raises CheckpointError."""
    if len(control.roster) or control.ledger.admitted:
        raise CheckpointError("a dock can be restored only before anything was admitted")
    try:
        Control(control.flow.graph, control.options).load_state_dict(state)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(f"state of a dock is not whole: {error!r}", "use another snapshot") from None
    control.load_state_dict(state)


DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)


def _extension(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, torch.Tensor):
        raise NotImplementedError(f"{type(value).__name__} in the state of a dock")
    return msgspec.msgpack.Ext(DTYPES.index(value.dtype), value.numpy().tobytes())


def _tensor(code: int, data: memoryview) -> torch.Tensor:
    dtype = DTYPES[code]
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def replay(control: Control, path: Path) -> int:
    """Every change of a journal again, with the columns left to the inventories; the epoch that it was of."""
    epoch = 0
    for head, body in read(path, mend=True):
        what, facts = msgspec.msgpack.decode(head)
        if what == STATE:
            epoch = facts["epoch"]
            control.load_state_dict(unpacked(body), same_run=True)
        else:
            apply(control, what, facts, np.frombuffer(body, np.int64).copy())
            control.settle()
    return epoch


def apply(control: Control, what: str, facts: Mapping[str, Any], row_ids: np.ndarray) -> None:
    """One recorded change."""
    slots = control.roster.present(row_ids)
    if what == "admit":
        groups = zip(facts["group_ids"], facts["places"], np.split(row_ids, len(facts["group_ids"])))
        for group_id, place, rows in groups:
            control.admit(rows, group_id, place)
    elif what == "pass":
        control.controller(facts["stage"]).finish(slots, 0)
        control.passed(facts["stage"], slots)
    elif what == "drop":
        if facts["stage"]:
            control.controller(facts["stage"]).finish(slots, 0)
        control.dropped(dict(zip(row_ids.tolist(), facts["reasons"])), facts["stage"])
    elif what == "retire":
        overtake(control, slots)
        control.retire(Rows(row_ids, NO_ROWS, NO_ROWS, NO_ROWS))
    elif what == "end":
        control.end_of_prompts()


def overtake(control: Control, retired: np.ndarray) -> None:
    """The take of these rows passed over every older group that is still here. retired: slots [B]."""
    roster = control.roster
    blocks = np.fromiter(roster.by_group.values(), np.int64, len(roster.by_group))
    taken = roster.blocks_of(retired)
    older = blocks[roster.order[blocks] < roster.order[taken].max(initial=-1)]
    older = older[~np.isin(older, taken)]
    for controller in control.controllers.values():
        controller.overtake(older)


Holdings = tuple[np.ndarray, Mapping[str, np.ndarray], np.ndarray]
"""Row ids [B], per column whether each row has it [B], tokens [B] (-1: none yet)."""


def align(
    control: Control, place: int, holdings: Holdings, rebuilt: bool, same: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """A warehouse says what it holds; `rebuilt`: the first time since this process has started.

    same  it is the process that has told before: rows of which it has told nothing yet are on their way to it. (They
          are announced here first.)
    Returns the slots of rows that have lost everything (their prompts must come again, under the same ids), and the ids
    of rows that it holds in vain: they are to be freed.
    """
    row_ids, have, lengths = holdings
    roster = control.roster
    slots = roster.find(row_ids)
    known = slots >= 0
    known[known] = roster.place[slots[known] // roster.size] == place
    born = np.logical_and.reduce([have[name] for name in control.flow.sources]) & known
    for controller in control.controllers.values():
        controller.align(slots[born], {name: there[born] for name, there in have.items()}, lengths[born], rebuilt)
    mine = roster.used
    mine = mine[roster.place[mine // roster.size] == place]
    control.addresses.forget(mine)
    lost = mine[~np.isin(mine, slots[born])]
    if same:
        lost = lost[np.any([controller.heard(lost) for controller in control.controllers.values()], 0)]
    left = lost[~control.ledger.alive(lost)]
    control.hide(left, control.flow.stages)
    for controller in control.controllers.values():
        controller.wipe(lost)
    return np.sort(lost[control.ledger.alive(lost)]), row_ids[~known]
