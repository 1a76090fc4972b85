"""What a client and the control process say to each other: msgpack structs, told apart by a tag, in the wire's frames.

A message marked *rows* is followed by one int64 frame of row ids; an acknowledgement without it speaks of all rows of
its lease. One marked *leased* is followed by row ids, group ids, lengths and places, each [B] (ints.py). Every call may
be said again after a lost line: the second time it changes nothing, or (a take) the first one's rows have been given
back.

Legend: B rows.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from docklands.core.graph import Graph
from docklands.core.protocols import Rows
from docklands.core.stage import By, Learner, Stage
from docklands.dock.warehouse.messages import Count, Failure, Int64, Message
from docklands.dock.wire.format import Buffer, Codec, ColumnMeta, column_meta, field_of
from docklands.dock.wire.ints import pack_ints, unpack_ints
from docklands.errors import WireError

# --- calls ---------------------------------------------------------------------------------------------------------


class Join(Message, tag=64):
    """First on every connection: who is there, which groups it can admit again, and which leases it knows of.

    leases  (stage, lease): others that it was given were lost with the line, and are given back
    """

    client: str
    groups: list[Int64] = []
    leases: list[tuple[str, Int64]] = []


class Slot(Message, tag=65):
    """Wait until a group may be admitted."""


class Admit(Message, tag=66):
    """*rows*: enter groups, all or none. The caller then stores their source columns at their places.

    group_ids  their rows follow one another, as many of each
    place      one for all of them, or one for each; -1: in turn
    loss       the source columns of a group are there again, after the loss that Again spoke of
    """

    group_ids: list[Int64]
    place: Int64 | list[Int64] = -1
    loss: Int64 = 0


class Take(Message, tag=67):
    """Lease a stage's next rows; see Dock.take. groups 0: the default; max_tokens 0: no cap; wait_s 0: the options'.

    homes  say also where the rows lie in shared memory
    near   places on the reader's node: groups there come first (Want)
    """

    stage: str
    groups: Int64 = 0
    max_tokens: Int64 = 0
    rank: Int64 = 0
    ranks: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    wait_s: float = 0.0
    homes: bool = False
    near: list[Int64] = []


class Finish(Message, tag=68):
    """*rows*: acknowledge a lease, once the warehouses have told of their columns. dropped: row id -> reason.

    read  here and below: fetches, and their bytes, that no warehouse has seen (warehouse/nearby.py)
    """

    stage: str
    lease: Int64
    dropped: dict[Int64, str] = {}
    read: tuple[Count, Count] = (0, 0)


class Drop(Message, tag=69):
    """*rows*: they leave the flow."""

    stage: str
    lease: Int64
    reason: str
    read: tuple[Count, Count] = (0, 0)


class Retire(Message, tag=70):
    """*rows*: they are trained."""

    stage: str
    lease: Int64
    read: tuple[Count, Count] = (0, 0)


class GiveBack(Message, tag=71):
    """A reader cannot go on: its rows are free again. later: it has begun them (Control.give_back)."""

    stage: str
    lease: Int64
    read: tuple[Count, Count] = (0, 0)
    later: bool = False


class End(Message, tag=72):
    """No further prompt."""


class Close(Message, tag=73):
    """Streams end."""


class Where(Message, tag=74):
    """*rows*: where they lie. Answered by one int64 frame: place, -1 for rows that left late, -2 for unknown ones."""


class Look(Message, tag=75):
    """Statistics and a description."""


class Save(Message, tag=76):
    """The state; nothing is freed until Saved."""


class Saved(Message, tag=77):
    """The warehouses are saved too."""


class Load(Message, tag=78):
    """One frame: a saved state, into a control that has admitted nothing."""


class Move(Message, tag=80):
    """From the launcher: the rows of a place are served elsewhere from now on."""

    place: Int64
    endpoint: str
    public_key: str


class Quit(Message, tag=79):
    """End the process."""


# --- replies and pushes --------------------------------------------------------------------------------------------


class Joined(Message, tag=96):
    """Answer to Join. epoch: how often the control process was started."""

    epoch: int
    pid: int


class Yes(Message, tag=97):
    """Done. False of an acknowledgement: the lease has ended, name its rows."""

    value: bool = True


class Admitted(Message, tag=98):
    """Answer to Admit: order and place of each group.

    gone  groups of this client that have left meanwhile: their prompts need not be kept
    """

    orders: list[int]
    places: list[int]
    gone: list[int]


class Taken(Message, tag=99):
    """*leased*: answer to Take. homes: column -> stretches of the rows in shared memory (rules/addresses.py).

    lives  of the rows (warehouse/lives.py); []: 0
    """

    stage: str
    lease: int
    rows: int
    homes: dict[str, list[int]] = {}
    lives: list[int] = []


class Slots(Message, tag=106):
    """Answer to Slot: how many groups may be admitted; 0: never again."""

    groups: int


class There(Message, tag=100):
    """Answer to Where."""

    rows: int


class View(Message, tag=101):
    """Answer to Look."""

    figures: dict[str, float]
    text: str


class State(Message, tag=102):
    """Answer to Save. One frame: the state.

    lost   groups whose source columns are to come again
    heard  process id of each warehouse that has said what it holds; 0: it has not
    """

    nbytes: int
    lost: int
    heard: list[int]


class Again(Message, tag=103):
    """*rows*, pushed: a warehouse has lost these rows of a group: store their source columns again, then Admit."""

    order: int
    group_id: int
    place: int
    rows: int
    loss: int


class Moved(Message, tag=105):
    """Pushed: where the rows of a place are served."""

    place: int
    endpoint: str
    public_key: str


class Beat(Message, tag=104):
    """Pushed to see whether a client is still there."""


CALLS = Codec(
    Join
    | Slot
    | Admit
    | Take
    | Finish
    | Drop
    | Retire
    | GiveBack
    | End
    | Close
    | Where
    | Look
    | Save
    | Saved
    | Load
    | Move
    | Quit
)
"""Headers that the control process reads."""
REPLIES = Codec(Joined | Yes | Admitted | Taken | Slots | There | View | State | Again | Moved | Beat | Failure)
"""Headers that its clients read."""


def rows_frame(rows: Rows) -> Buffer:
    """Leased rows as one frame."""
    return pack_ints([rows.row_ids, rows.group_ids, rows.lengths, rows.places.astype(np.int64)])


def rows_from(message: Taken, frames: list[Any]) -> Rows:
    """Leased rows of a frame. Raises WireError."""
    table, _ = unpack_ints(frames[0] if frames else b"", 4)
    if len(table[0]) != message.rows:
        raise WireError("malformed message: a take without its rows")
    lives = np.array(message.lives, np.int64) if any(message.lives) else None
    if lives is not None and len(lives) != message.rows:
        raise WireError("malformed message: a take without the lives of its rows")
    return Rows(table[0], table[1], table[2], table[3].astype(np.int32), message.stage, message.lease, lives)


# --- the graph without its functions -------------------------------------------------------------------------------


class StageMeta(msgspec.Struct, frozen=True):
    """A stage's name, role, columns and way of taking."""

    name: str
    role: str
    by: By
    reads: list[str]
    writes: list[str]


class GraphMeta(msgspec.Struct, frozen=True):
    """What the control process has to know of a graph."""

    columns: list[ColumnMeta]
    sources: list[str]
    stages: list[StageMeta]


def graph_meta(graph: Graph) -> GraphMeta:
    """A graph without what its stages do."""
    stages = [
        StageMeta(s.name, s.role, s.by, [f.name for f in s.reads], [f.name for f in s.writes]) for s in graph.stages
    ]
    return GraphMeta([column_meta(f) for f in graph.fields], [f.name for f in graph.sources], stages)


def graph_of(meta: GraphMeta) -> Graph:
    """A graph whose stages do nothing. Raises GraphError when it does not hold together."""
    fields = {column.name: field_of(column) for column in meta.columns}
    stages = tuple(
        Stage(s.name, s.role, tuple(fields[n] for n in s.reads), tuple(fields[n] for n in s.writes), _idle, s.by)
        for s in meta.stages
    )
    learner = Learner("control", "control", stages[-1].reads if stages else (), _idle)  # type: ignore[arg-type]
    return Graph(stages, (learner,), tuple(fields[name] for name in meta.sources))


def _idle(*_: Any) -> None:
    """The control process runs no stage."""
