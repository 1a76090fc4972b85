"""Notices on the wire: what a warehouse pushes to the control plane after a put."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from docklands.dock.messages import Notice
from docklands.dock.wire import Buffer, int64s
from docklands.dock.wire_messages import NoticeMeta, Notices
from docklands.errors import WireError


def notices_message(place: int, first: int, last: int, notices: Sequence[Notice]) -> tuple[Notices, list[Buffer]]:
    """Notices as one push; those of one stage and the same columns are joined."""
    found: dict[tuple[str, tuple[str, ...]], list[Notice]] = {}
    for notice in notices:
        found.setdefault((notice.stage, notice.columns), []).append(notice)
    metas, arrays = [], []
    for (stage, columns), parts in found.items():
        metas.append(NoticeMeta(stage, list(columns), sum(len(part.row_ids) for part in parts)))
        arrays += [part.row_ids for part in parts] + [part.lengths for part in parts]
    index = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
    return Notices(place, first, last, metas), [index.data]


def notices_from(message: Notices, frames: Sequence[Buffer]) -> list[Notice]:
    """The notices of a push. Raises WireError."""
    if len(frames) != 1 or any(meta.rows < 0 for meta in message.notices):
        raise WireError("malformed message: notices without their rows")
    index = int64s(frames[0], 2 * sum(meta.rows for meta in message.notices))
    found, at = [], 0
    for meta in message.notices:
        row_ids, lengths = index[at : at + meta.rows], index[at + meta.rows : at + 2 * meta.rows]
        found.append(Notice(meta.stage, row_ids, tuple(meta.columns), lengths))
        at += 2 * meta.rows
    return found
