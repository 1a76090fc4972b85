"""What warehouses, their clients and the control plane say to each other: msgpack structs, told apart by a tag.

A message marked *batch* is followed by an index and value frames (wire.py), one marked *rows* by one int64 frame.
Every call is idempotent, so a client that lost its connection may say it again.

Legend: B rows.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from docklands.dock.wire.format import BatchMeta, Codec, ColumnMeta

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that an array of ids holds. Looked at when a message is read, before anything is logged or changed."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
"""Fetches or bytes; sums of them are numbers of msgpack still."""


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all: an array of the tag and the fields."""


# --- calls ---------------------------------------------------------------------------------------------------------


class Hello(Message, tag=1):
    """First on every connection. pid and start (clock ticks after boot) say whether the client is still alive."""

    client: str
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    start: Int64


class Birth(Message, tag=2):
    """Admission of a put's rows.

    order, group_id  of the rows' group; lists: of groups of one size, whose rows follow one another
    samples          index of each row in its group; []: its position
    life             of the rows (lives.py)
    """

    order: Int64 | list[Int64]
    group_id: Int64 | list[Int64]
    place: Int64
    samples: list[Int64] = []
    life: Int64 = 0


class Put(Message, tag=3):
    """*batch*: columns of rows. With `birth` the rows are new; without it rows that are not here are passed over.

    lease  of the stage, which the control process is told has ended with these rows; 0: it is told so by others
    read   fetches under that lease, and their bytes, that no warehouse has seen
    lives  of the rows when they were read (lives.py); []: 0
    room   what the sender would ask for before its next put
    """

    batch: BatchMeta
    birth: Birth | None = None
    stage: str = ""
    lease: Int64 = 0
    read: tuple[Count, Count] = (0, 0)
    lives: list[Int64] = []
    room: Lease | None = None


class Get(Message, tag=4):
    """*rows*: these columns of them. local: the reader has mapped the arenas."""

    columns: list[str]
    local: bool = False
    stage: str = ""


class Free(Message, tag=5):
    """*rows*: they are gone."""


class Inventory(Message, tag=6):
    """What is here; only rows of that place, if it is not negative: a warehouse may serve several."""

    place: Int64 = -1


class Subscribe(Message, tag=7):
    """Push notices to this connection from now on; no stages: of all of them."""

    stages: list[str]


class Lease(Message, tag=8):
    """Room in the arena for a producer's next puts. done: generations that it will not write to any more."""

    nbytes: int
    done: list[Int64] = []


class Snapshot(Message, tag=9):
    """Write what is here (of that place, if it is not negative) to a file in the warehouse's folder, on its node."""

    path: str
    place: Int64 = -1


class Restore(Message, tag=10):
    """Read snapshots, files in the warehouse's folder, into an empty warehouse; their rows are of its place then."""

    paths: list[str]


class Stats(Message, tag=11):
    """Ask for the counters."""


class Allow(Message, tag=12):
    """Let clients with these public keys (Z85) in."""

    keys: list[str]


class Replicate(Message, tag=14):
    """Send everything, and all that comes, to another warehouse. Answered once it has everything: it may serve then."""

    endpoint: str
    public_key: str


class Shutdown(Message, tag=13):
    """End the process."""


# --- replies -------------------------------------------------------------------------------------------------------


class ArenaMeta(Message):
    """A shared file: the client may map it if it finds the nonce in it."""

    path: str
    nonce: bytes


class Welcome(Message, tag=32):
    """Answer to Hello."""

    place: int
    pid: int
    columns: list[ColumnMeta]
    arenas: list[ArenaMeta]
    seq: int


class Stored(Message, tag=33):
    """Answer to Put. seq: of the notice that tells of it; ignored: cells that were there already; *rows*: not here.

    slab  answer to Put.room
    """

    seq: int
    ignored: int
    gone: int
    slab: Slab | None = None


class Full(Message, tag=34):
    """Answer to Put: no room for `nbytes` now; a Room push will come."""

    nbytes: int
    free: int


class Found(Message, tag=35):
    """*batch*: answer to Get."""

    batch: BatchMeta


class Done(Message, tag=36):
    """It is done; rows concerned."""

    rows: int
    seq: int


class Inventoried(Message, tag=37):
    """Answer to Inventory. One int64 frame: row ids [B], order, group_id, place, sample index, length (-1 before there
    is one), life, each [B]; then one uint8 frame per column: whether each row has it [B].

    ended  (stage, lease) of the leases that the last puts have ended (Put.lease)
    """

    rows: int
    columns: list[str]
    seq: int
    ended: list[tuple[str, int]] = []


class Slab(Message, tag=38):
    """Answer to Lease: room of `nbytes` at `offset` of arena 0. nbytes 0: there is none, send the bytes."""

    generation: int
    offset: int
    nbytes: int


class Figures(Message, tag=39):
    """Answer to Stats."""

    values: dict[str, int]


class Failure(Message, tag=40):
    """The call failed: name of the error's class in errors.py, its message and hint."""

    kind: str
    message: str
    hint: str = ""


# --- pushes --------------------------------------------------------------------------------------------------------


class NoticeMeta(Message):
    """Columns that became ready for some rows: the stages that are told, and of which columns each is.

    homes  put after put: how many of the rows, and column -> (arena, generation, offset) where their values begin
    """

    told: list[tuple[str, list[str]]]
    homes: list[tuple[int, dict[str, tuple[int, int, int]]]] = []


class Notices(Message, tag=48):
    """Of the puts first..last. One frame: per notice its row ids and their lengths, per ended lease its rows (ints.py).

    ended  (stage, lease, fetches, bytes) of the leases that ended with those puts
    """

    place: int
    first: int
    last: int
    notices: list[NoticeMeta]
    ended: list[tuple[str, int, int, int]] = []


class Room(Message, tag=49):
    """There is room again."""

    free: int


Calls = (
    Hello | Put | Get | Free | Inventory | Subscribe | Lease | Snapshot | Restore | Stats | Allow | Replicate | Shutdown
)
Replies = Welcome | Stored | Full | Found | Done | Inventoried | Slab | Figures | Failure | Notices | Room
CALLS = Codec(Calls)
"""Headers that a warehouse reads."""
REPLIES = Codec(Replies)
"""Headers that a warehouse's client reads."""
