"""Buckets: what moves at once, so that temporaries stay small.

Legend: none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from docklands.sync.plan import Family


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter in a bucket, or part `index` of `parts` of it (Family.part)."""

    name: str
    index: int = 0
    parts: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.parts - 1


@dataclass(frozen=True, eq=False)
class Bucket:
    """Items in order, and the bytes that each device sends and receives, int64 [devices]."""

    items: tuple[Item, ...]
    sent: np.ndarray
    received: np.ndarray

    @property
    def largest(self) -> int:
        """Bytes of the device with the most to send and hold at once."""
        return int((self.sent + self.received).max())


Cost = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


def _parts(family: Family, cost: Cost, limit: int) -> int:
    """Parts in which a parameter is moved, so that each fits into a bucket, or is one row of each move."""
    rows = int((family.boxes[:, 0, 1] - family.boxes[:, 0, 0]).max())
    parts = 1
    while parts < rows:
        largest = max(int(column.max()) for index in range(parts) for column in cost(index, parts))
        if largest <= limit:
            break
        parts = min(rows, max(parts + 1, parts * largest // limit))
    return parts


def fill_buckets(
    queues: Sequence[Sequence[str]], where: Mapping[str, int], families: Sequence[Family], devices: int, limit: int
) -> tuple[Bucket, ...]:
    """Buckets of the parameters in these queues, one queue for each pipeline stage that sends: all advance together,
    so that a bucket is sent by all stages at once. No device sends or receives more than `limit` bytes in one, unless
    single rows are larger.
    """
    known: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def cost(family: int, index: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        key = (family, index, parts)
        if key not in known:
            known[key] = families[family].bytes_of(devices, index, parts)
        return known[key]

    due: list[tuple[float, int, int, Item]] = []
    for number, queue in enumerate(queues):
        items, sizes = [], []
        for name in queue:
            family = where[name]
            share = max(1, limit // len(queues))
            parts = _parts(families[family], lambda index, parts, family=family: cost(family, index, parts), share)
            items += [Item(name, index, parts) for index in range(parts)]
            sizes += [float(cost(family, index, parts)[0].sum()) for index in range(parts)]
        done = np.cumsum(sizes) / max(1.0, sum(sizes))
        due += [(share, number, index, item) for index, (share, item) in enumerate(zip(done.tolist(), items))]
    buckets: list[Bucket] = []
    held: list[Item] = []
    sent, received = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    for _, _, _, item in sorted(due, key=lambda entry: entry[:3]):
        more = cost(where[item.name], item.index, item.parts)
        if held and max((sent + more[0]).max(), (received + more[1]).max()) > limit:
            buckets.append(Bucket(tuple(held), sent, received))
            held, sent, received = [], np.zeros(devices, np.int64), np.zeros(devices, np.int64)
        held.append(item)
        sent, received = sent + more[0], received + more[1]
    if held:
        buckets.append(Bucket(tuple(held), sent, received))
    return tuple(buckets)
