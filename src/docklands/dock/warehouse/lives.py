"""Lives of rows. A row that its warehouse has lost is made anew under the same id; what a reader still at work on the
lost one makes must not come beside the new one's columns.

The control process numbers losses, and each one is a life of the rows that it took: the admission that follows carries
it (Birth.life), so does every take (Taken.lives), and a put says of which life its rows were read (Put.lives). A first
life is 0 and costs nothing on the wire. Rows of which a later life is here are "gone" for a put of an earlier one.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from docklands.dock.rules.table import RowTable


def outlived(rows: RowTable, slots: np.ndarray, lives: Sequence[int]) -> np.ndarray:
    """Whether each row (slot -1: not here) is of a later life than the put's, bool [B]. lives: [] for all 0."""
    return (slots >= 0) & (rows["life"][slots] > (np.array(lives, np.int64) if lives else 0))


def renew(rows: RowTable, slots: np.ndarray, lives: int | np.ndarray) -> None:
    """Rows are of this life, unless of a later one: the control process may know of a loss before the rows do."""
    rows["life"][slots] = np.maximum(rows["life"][slots], lives)
