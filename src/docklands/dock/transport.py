"""The bytes of the dock in one process: its warehouses, and the place where traffic is counted.

In the distributed dock every worker's client goes to the warehouses itself (distributed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.dock.rules.counters import Counters
from docklands.dock.rules.flow import Flow
from docklands.dock.rules.messages import Notice
from docklands.dock.rules.options import DockOptions
from docklands.dock.warehouse.chunks import Warehouse, Write, join

Part = tuple[int, Batch, list[Write]]
"""What a put would write into one warehouse: place, its rows, the writes."""


class LocalStores:
    """All warehouses, in this process."""

    def __init__(self, flow: Flow, options: DockOptions, counters: Counters) -> None:
        self.flow = flow
        fields = tuple(flow.fields.values())
        self.warehouses = [
            Warehouse(place, fields, flow.told, options.capacity_bytes) for place in range(options.warehouses)
        ]
        self.counters = counters

    @property
    def nbytes(self) -> int:
        """Bytes in all warehouses."""
        return sum(warehouse.nbytes for warehouse in self.warehouses)

    def plan(self, batch: Batch, places: np.ndarray) -> list[Part]:
        """What a put would write, per warehouse."""
        parts = []
        for place in np.unique(places).tolist():
            here = np.nonzero(places == place)[0]
            part = batch if len(here) == len(batch) else batch.select(here)
            parts.append((place, part, self.warehouses[place].plan(part)))
        return parts

    def has_room(self, parts: Sequence[Part]) -> bool:
        """All of a put fits. Asked of every warehouse, so that a put is written whole or not at all."""
        room = [self.warehouses[place].has_room(sum(w.nbytes for w in writes)) for place, _, writes in parts]
        return all(room)

    def write(self, parts: Sequence[Part]) -> list[Notice]:
        """Store a planned put and count it for the stages that wrote it; the notices to their controllers."""
        stages: dict[str, int] = {}
        notices: list[Notice] = []
        nbytes = 0
        for place, part, writes in parts:
            before = self.warehouses[place].ignored
            notices += self.warehouses[place].write(part, writes)
            self.counters.ignored_puts += self.warehouses[place].ignored - before
            for write in writes:
                nbytes += write.nbytes
                stage = self.flow.writer.get(write.field.name)
                if stage is not None:
                    stages[stage] = stages.get(stage, 0) + write.nbytes
        self.counters.total.puts += 1
        self.counters.total.bytes_in += nbytes
        self.counters.total.bytes_near += nbytes
        for stage, size in stages.items():
            self.counters.stages[stage].puts += 1
            self.counters.stages[stage].bytes_in += size
            self.counters.stages[stage].bytes_near += size
        return notices

    def absent(self, row_ids: np.ndarray, places: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """column -> rows (which must be here) that lack it."""
        found: dict[str, list[np.ndarray]] = {}
        for place in np.unique(places).tolist():
            for name, rows in self.warehouses[place].absent(row_ids[places == place], names).items():
                found.setdefault(name, []).append(rows)
        return {name: np.concatenate(rows) for name, rows in found.items()}

    def read(self, row_ids: np.ndarray, places: np.ndarray, fields: Sequence[Field[Any]], stage: str) -> Batch:
        """Columns of rows in the given order, counted for the stage that reads them."""
        at = np.unique(places).tolist() or [0]
        parts = [self.warehouses[place].get(row_ids[places == place], fields) for place in at]
        nbytes = sum(size for _, size in parts)
        batch = parts[0][0]
        if len(parts) > 1:
            order = np.concatenate([np.nonzero(places == place)[0] for place in at])
            columns = {field: join([part[field] for part, _ in parts]) for field in fields}
            batch = Batch(row_ids[order], columns).select(np.argsort(order))
        self.counters.read(stage, 1, nbytes)
        return batch
