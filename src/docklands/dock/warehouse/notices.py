"""Notices on the wire, pushed to the control plane after a put: rows and lengths once for all stages; ended leases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from docklands.dock.rules.messages import Ended, Home, Notice
from docklands.dock.warehouse.messages import NoticeMeta, Notices
from docklands.dock.wire.format import Buffer
from docklands.dock.wire.ints import pack_ints, unpack_ints
from docklands.errors import WireError

Told = tuple[tuple[str, tuple[str, ...]], ...]
"""Stages and the columns that each is told of."""


def notices_message(
    place: int, puts: tuple[int, int], notices: Sequence[Notice], ended: Sequence[Ended] = ()
) -> tuple[Notices, list[Buffer]]:
    """Notices of the puts first..last as one push; what several stages hear of the same rows is said once."""
    one: dict[int, list[Notice]] = {}
    for notice in notices:
        one.setdefault(id(notice.row_ids), []).append(notice)
    found: dict[Told, list[Notice]] = {}
    for heard in one.values():
        found.setdefault(tuple((notice.stage, notice.columns) for notice in heard), []).append(heard[0])
    parts = []
    for same in found.values():
        joined = [same[0].row_ids, same[0].lengths]
        if len(same) > 1:
            joined = [np.concatenate([n.row_ids for n in same]), np.concatenate([n.lengths for n in same])]
        parts.append(pack_ints(joined))
    metas = [
        NoticeMeta([(stage, list(columns)) for stage, columns in told], _homes(same)) for told, same in found.items()
    ]
    parts += [pack_ints([lease.row_ids]) for lease in ended]
    through = [(lease.stage, lease.lease, *lease.read) for lease in ended]
    return Notices(place, *puts, metas, through), [b"".join(parts)]


def notices_from(message: Notices, frames: Sequence[Buffer]) -> tuple[list[Notice], list[Ended]]:
    """The notices of a push, and the leases that ended; the notices of one put share their rows. Raises WireError."""
    if len(frames) != 1:
        raise WireError("malformed message: notices without their rows")
    found, at = [], 0
    for meta in message.notices:
        (row_ids, lengths), at = unpack_ints(frames[0], 2, at)
        homes = tuple(meta.homes)
        if homes and (min(count for count, _ in homes) < 0 or sum(count for count, _ in homes) != len(row_ids)):
            raise WireError("malformed message: homes of other rows than the notice's")
        found += [Notice(stage, row_ids, tuple(columns), lengths, homes) for stage, columns in meta.told]
    ended = []
    for stage, lease, fetches, nbytes in message.ended:
        (row_ids,), at = unpack_ints(frames[0], 1, at)
        ended.append(Ended(stage, lease, row_ids, (fetches, nbytes)))
    return found, ended


def _homes(notices: Sequence[Notice]) -> list[tuple[int, dict[str, Home]]]:
    """Where the values of notices lie whose rows are said together; nothing if that is known of none."""
    if not any(notice.homes for notice in notices):
        return []
    parts = [part for notice in notices for part in notice.homes or ((len(notice.row_ids), {}),)]
    return [(count, dict(homes)) for count, homes in parts]
