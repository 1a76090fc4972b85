"""Sizes, bounds and deadlines of a dock, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from docklands.errors import ConfigError


@dataclass(frozen=True)
class DockOptions:
    """How a dock admits, hands out and waits.

    prompts_per_step   groups that one step trains on
    group_size         rows of a group
    max_staleness      steps that a row may lag behind
    overtake           takes of the update in which a group may be overtaken by younger ones that are ready before it
                       (0: first in, first out); (max_staleness - overtake + 1) x prompts_per_step groups are in flight
    warehouses         places for the bytes; a group lies whole in one
    capacity_bytes     bytes that one warehouse holds before its producers wait; 0: unbounded
    spill_bytes        bytes on disk for what does not fit into that capacity, before producers wait; 0: none
    fsync              when logs and journal are brought to disk (warehouse/wal.py)
    lease_s            seconds after which an unacknowledged lease gives its rows back
    wait_s             deadline of every wait, seconds
    groups_per_take    groups handed to a stage at once; 0: prompts_per_step
    deterministic      rows are handed out in admission order and fixed compositions, not as they become ready
    max_dropped_groups_per_step  groups that may be lost whole between two steps; 0: no limit
    total_groups       groups to be trained in all: no more are admitted than that takes; 0: endless
    """

    prompts_per_step: int
    group_size: int
    max_staleness: int = 0
    warehouses: int = 1
    capacity_bytes: int = 0
    lease_s: float = 600.0
    wait_s: float = 1800.0
    groups_per_take: int = 0
    deterministic: bool = True
    max_dropped_groups_per_step: int = 0
    total_groups: int = 0
    overtake: int = 0
    spill_bytes: int = 0
    fsync: Literal["never", "interval", "always"] = "never"

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size", "warehouses", "lease_s", "wait_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"dock: {name} is {getattr(self, name)}", "it must be greater than 0")
        for name in (
            "max_staleness",
            "capacity_bytes",
            "spill_bytes",
            "groups_per_take",
            "max_dropped_groups_per_step",
            "total_groups",
            "overtake",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"dock: {name} is {getattr(self, name)}", "it must be 0 or more")
        if self.spill_bytes and not self.capacity_bytes:
            raise ConfigError("dock: spill_bytes without capacity_bytes", "what is unbounded never spills")
        if self.overtake > self.max_staleness or (self.overtake and self.deterministic):
            raise ConfigError(
                f"dock: overtake is {self.overtake} with max_staleness {self.max_staleness}"
                + (" and deterministic takes" if self.deterministic else ""),
                "it must be at most max_staleness, and 0 in deterministic mode",
            )
        if self.groups_per_take > self.window:
            raise ConfigError(
                f"dock: groups_per_take is {self.groups_per_take}, but only {self.max_staleness - self.overtake + 1} x "
                f"{self.prompts_per_step} = {self.window} groups are ever in flight",
                "lower dock.groups_per_take",
            )

    @property
    def window(self) -> int:
        """Groups in flight at most."""
        return (self.max_staleness - self.overtake + 1) * self.prompts_per_step

    @property
    def take_groups(self) -> int:
        """Groups of a take that does not say."""
        return self.groups_per_take or self.prompts_per_step
