"""What one device does in a plan, step by step: the plan's moves written out for its own tensors.

Legend: none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from docklands.sync.boxes import Block, Box, blocks_of, overlap
from docklands.sync.buckets import Bucket
from docklands.sync.plan import Plan

ALIGN = 8
"""Bytes; no element is wider."""


def aligned(size: int) -> int:
    """Bytes up to where the next message begins."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Held:
    """A parameter in a rank's memory. name: there; blocks: which elements; shape: of the local tensor."""

    name: str
    blocks: tuple[Block, ...]
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Sent:
    """A box of stored parameter `name` that goes to `peer`; handed_on: out of the generator's tensor."""

    peer: int
    name: str
    box: Box
    handed_on: bool


@dataclass(frozen=True)
class Received:
    """A box of stored parameter `name` that comes from `peer`; of it, `kept` are this device's own."""

    peer: int
    name: str
    box: Box
    kept: tuple[Box, ...]


@dataclass
class Step:
    """One exchange: sent, received (for each peer in the order in which it lies in the message) and copied here.

    begins  stored names of which the generator's tensor is needed from here on
    ends    stored names of which the trainer's tensor is not read any more
    """

    sent: list[Sent] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    copied: list[Received] = field(default_factory=list)
    begins: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Peak:
    """Bytes of a device at its worst step: the trainer's weights that are still here, the generator's that are here
    already, and room for messages (as large as those of the largest step, times the steps under way; with scales).
    """

    step: int
    source: int
    target: int
    messages: int

    @property
    def total(self) -> int:
        return self.source + self.target + self.messages


def by_peer(parts: Sequence[Any]) -> dict[int, list[Any]]:
    """What goes to (or comes from) each peer, in the order of its message."""
    found: dict[int, list[Any]] = {}
    for part in parts:
        found.setdefault(part.peer, []).append(part)
    return found


class Script:
    """A device's part in a plan."""

    def __init__(self, plan: Plan, device: int) -> None:
        self.plan, self.device = plan, device

    @cached_property
    def source(self) -> dict[str, Held]:
        """What it trains, by stored name; empty on a device that only generates."""
        return self._held(self.plan.source, self.device, 0)

    @cached_property
    def target(self) -> dict[str, Held]:
        """What it generates with, by stored name."""
        return self._held(self.plan.target, self.device - self.plan.first_generator, 1)

    def _held(self, layout: object, rank: int, side: int) -> dict[str, Held]:
        layout = (self.plan.source, self.plan.target)[side]
        if not 0 <= rank < layout.world_size:
            return {}
        at, found = layout.coords(rank), {}
        for name, homes in self.plan.homes[side].items():
            if at["pp"] in homes:
                spec = self.plan.table.by_name(name)
                itemsize = self.plan.family_of(name).itemsize
                found[name] = Held(homes[at["pp"]], *blocks_of(spec, layout, at), itemsize)
        return found

    def _moves(self, bucket: Bucket) -> Iterator[tuple[str, Box, int, int, int]]:
        """(name, box, source, target, hop) of the bucket's moves that this device takes part in."""
        for item in bucket.items:
            family = self.plan.family_of(item.name)
            mine = (family.source == self.device) | (family.target == self.device)
            kept, boxes = family.part(item.index, item.parts)
            for move in np.flatnonzero(mine[kept]).tolist():
                at = kept[move]
                box = tuple((low, high) for low, high in boxes[move].tolist())
                yield item.name, box, int(family.source[at]), int(family.target[at]), int(family.hop[at])

    @cached_property
    def steps(self) -> list[Step]:
        """All exchanges of the plan, those that this device has no part in empty."""
        steps = [Step() for _ in range(self.plan.steps)]
        for number, bucket in enumerate(self.plan.buckets):
            for name, box, source, target, hop in self._moves(bucket):
                step = steps[number + hop]
                if target == self.device:
                    kept = [overlap(box, block.box) for block in self.target[name].blocks]
                    into = step.copied if source == target else step.received
                    into.append(Received(source, name, box, tuple(part for part in kept if part)))
                else:
                    step.sent.append(Sent(target, name, box, hop > 0))
            for item in bucket.items:
                if item.is_first and item.name in self.target:
                    steps[number].begins.append(item.name)
                if item.is_last and item.name in self.source:
                    steps[number].ends.append(item.name)
        for step in steps:  # wide elements first: then every part of a message is aligned
            for parts in (step.sent, step.received):
                parts.sort(key=lambda part: -self.plan.family_of(part.name).wire)  # type: ignore[union-attr]
        return steps

    def message_bytes(self, step: Step) -> tuple[int, int]:
        """(sent, received) bytes of a step."""
        return self._bytes(step.sent), self._bytes(step.received)

    def _bytes(self, parts: list[Sent] | list[Received]) -> int:
        wire = {part.name: self.plan.family_of(part.name).wire for part in parts}
        return sum(math.prod(high - low for low, high in part.box) * wire[part.name] for part in parts)

    def room(self) -> int:
        """Bytes of the messages, sent and received, of the largest step; each begins at a multiple of ALIGN."""
        return max((self._room(step) for step in self.steps), default=0)

    def _room(self, step: Step) -> int:
        messages = (part for parts in (step.received, step.sent) for part in by_peer(parts).values())
        return sum(aligned(self._bytes(parts)) for parts in messages)

    def peak(self, ahead: int = 1, master: int = 0, stays: bool = False) -> Peak:
        """When a trainer's tensor leaves after its last use, and a generator's is made at its first.

        ahead   steps whose messages are under way beside those of the one that is unpacked
        master  bytes of an element in training, where it is not that of generation
        stays   the trainer's tensors do not leave: nothing is swapped
        """
        trained = {n: h.bytes // h.itemsize * (master or h.itemsize) for n, h in self.source.items()}
        messages = (1 + ahead) * self.room() + self.plan.scale_bytes
        source = sum(trained.values())
        target, worst = 0, Peak(0, 0, 0, 0)
        for number, step in enumerate(self.steps):
            target += sum(self.target[name].bytes for name in step.begins)
            now = Peak(number, source, target, messages)
            worst = max(worst, now, key=lambda peak: peak.total)
            source -= 0 if stays else sum(trained[name] for name in step.ends)
        return worst
