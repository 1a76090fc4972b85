"""The seam: how the facade reaches warehouses and controllers, and the place where messages and bytes are counted.

Here both live in the facade's own process and a message is a call. Every argument and answer is an id, a name, a
number, an array or a batch, so the same calls can be carried to other processes; nothing but this file and the
construction of the parts would change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.dock.controller import Controller
from docklands.dock.flow import Flow
from docklands.dock.messages import Admission, Notice
from docklands.dock.options import DockOptions
from docklands.dock.sampler import choose_sampler
from docklands.dock.warehouse import Warehouse, Write, join


@dataclass
class Traffic:
    """Messages and bytes since the start, all stages or one."""

    puts: int = 0
    fetches: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class Counters:
    """What the dock has moved and overlooked since the start.

    ignored_puts  cells written again, or written to rows that had left
    late_acks     rows acknowledged under a lease that no longer counted
    """

    total: Traffic = field(default_factory=Traffic)
    stages: dict[str, Traffic] = field(default_factory=dict)
    metadata_bytes: int = 0
    ignored_puts: int = 0
    expired_leases: int = 0
    late_acks: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = Traffic(**state["total"])
        self.stages = {name: Traffic(**traffic) for name, traffic in state["stages"].items()}
        for name in ("metadata_bytes", "ignored_puts", "expired_leases", "late_acks"):
            setattr(self, name, state[name])


class LocalTransport:
    """Warehouses and controllers in this process."""

    def __init__(self, flow: Flow, options: DockOptions) -> None:
        self.flow = flow
        fields = tuple(flow.fields.values())
        self.warehouses = [
            Warehouse(place, fields, flow.readers, options.capacity_bytes) for place in range(options.warehouses)
        ]
        self.controllers = {
            name: Controller(name, stage.by, flow.reads[name], choose_sampler(stage.by, options.deterministic))
            for name, stage in flow.stages.items()
        }
        self.counters = Counters(stages={name: Traffic() for name in flow.stages})

    @property
    def nbytes(self) -> int:
        """Bytes in all warehouses."""
        return sum(warehouse.nbytes for warehouse in self.warehouses)

    # --- metadata: to controllers ------------------------------------------------------------------------------

    def announce(self, new: Admission) -> None:
        """New rows, to the warehouse that will hold them and to every controller."""
        self.warehouses[new.place].add(new.row_ids)
        for controller in self.controllers.values():
            controller.admit(new)
            self.counters.metadata_bytes += new.nbytes

    def notify(self, notices: Iterable[Notice]) -> None:
        """Ready columns, to the controllers whose stages read them."""
        for notice in notices:
            self.controllers[notice.stage].ready(notice)
            self.counters.metadata_bytes += notice.nbytes

    def hide(self, row_ids: np.ndarray, stages: Iterable[str]) -> None:
        """Rows that left, to the controllers of `stages`."""
        for stage in stages:
            self.controllers[stage].hide(row_ids)
            self.counters.metadata_bytes += row_ids.nbytes

    def held(self, row_ids: np.ndarray) -> np.ndarray:
        """Whether some stage has still to do with each row, bool [B]."""
        held = np.zeros(len(row_ids), bool)
        for controller in self.controllers.values():
            held |= controller.holds(row_ids)
        return held

    def free(self, row_ids: np.ndarray, places: np.ndarray) -> None:
        """Rows are gone: bytes and metadata, everywhere."""
        for controller in self.controllers.values():
            controller.forget(row_ids)
            self.counters.metadata_bytes += row_ids.nbytes
        for place in np.unique(places).tolist():
            self.warehouses[place].free(row_ids[places == place])

    # --- bytes: to and from warehouses -------------------------------------------------------------------------

    def plan(self, batch: Batch, places: np.ndarray) -> list[tuple[int, Batch, list[Write]]]:
        """What a put would write, per warehouse."""
        parts = []
        for place in np.unique(places).tolist():
            here = np.nonzero(places == place)[0]
            part = batch if len(here) == len(batch) else batch.select(here)
            parts.append((place, part, self.warehouses[place].plan(part)))
        return parts

    def has_room(self, parts: Sequence[tuple[int, Batch, list[Write]]]) -> bool:
        """All of a put fits. Asked of every warehouse, so that a put is written whole or not at all."""
        room = [self.warehouses[place].has_room(sum(w.nbytes for w in writes)) for place, _, writes in parts]
        return all(room)

    def write(self, parts: Sequence[tuple[int, Batch, list[Write]]]) -> None:
        """Store a planned put, tell the controllers, count it for the stages that wrote it."""
        stages: dict[str, int] = {}
        nbytes = 0
        for place, part, writes in parts:
            before = self.warehouses[place].ignored
            self.notify(self.warehouses[place].write(part, writes))
            self.counters.ignored_puts += self.warehouses[place].ignored - before
            for write in writes:
                nbytes += write.nbytes
                stage = self.flow.writer.get(write.field.name)
                if stage is not None:
                    stages[stage] = stages.get(stage, 0) + write.nbytes
        self.counters.total.puts += 1
        self.counters.total.bytes_in += nbytes
        for stage, size in stages.items():
            self.counters.stages[stage].puts += 1
            self.counters.stages[stage].bytes_in += size

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
        traffic = [self.counters.total, *([self.counters.stages[stage]] if stage in self.counters.stages else [])]
        for count in traffic:
            count.fetches += 1
            count.bytes_out += nbytes
        return batch
