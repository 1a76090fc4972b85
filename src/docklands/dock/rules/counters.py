"""What the dock has moved, counted, so that the measured volume can be held against the formula."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Traffic:
    """Messages and bytes since the start, all stages or one. bytes_near: of bytes_in, those put on their own node."""

    puts: int = 0
    fetches: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_near: int = 0


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

    def read(self, stage: str, fetches: int, nbytes: int) -> None:
        """Rows were read for a stage."""
        for count in (self.total, self.stages.get(stage)):
            if count is not None:
                count.fetches += fetches
                count.bytes_out += nbytes

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = Traffic(**state["total"])
        self.stages = {name: Traffic(**traffic) for name, traffic in state["stages"].items()}
        for name in ("metadata_bytes", "ignored_puts", "expired_leases", "late_acks"):
            setattr(self, name, state[name])
