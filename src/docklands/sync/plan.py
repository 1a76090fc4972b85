"""Who sends which elements to whom, so that weights in a training layout become weights in a generation layout.

Legend: M moves of a family, n dimensions of a parameter.

Pure arithmetic (numpy), the same on every rank. Parameters that are split alike and live on the same pipeline stages
are one *family* with one list of moves, so that the 671 B parameters of DeepSeek-R1 on 384 devices are planned in
seconds. (Allgather-swap: arXiv 2507.19017, section 4.)

Three methods, same result:
    minimal           every device receives just the elements that it lacks, each once
    allgather_swap    every device that keeps a slice of a parameter gathers the parameter (of experts: those that it
                      keeps, uncut), and copies its slices out of that temporary
    broadcast         as minimal, but a box that several generators lack is sent once and handed on from one to the
                      next, bucket after bucket: for generators on devices of their own
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from docklands.errors import LayoutError, MissingWeight
from docklands.models.config import ModelConfig
from docklands.models.params import ParamSpec, ParamTable, table_for
from docklands.parallel.layout import Layout
from docklands.sync.boxes import Block, Box, blocks_of, homes_of, stage_ranks, volume
from docklands.sync.buckets import Bucket, fill_buckets

Method = Literal["minimal", "allgather_swap", "broadcast"]
MIB = 1 << 20
BLOCK = 128
"""Rows and columns of a block that has one scale, see sync.quantize."""


@dataclass(frozen=True)
class Options:
    """How to move.

    bucket_bytes  most that one device sends, and most that it receives, at once; a row of a parameter is not cut
    itemsize      bytes of an element in generation (what keeps fp32 counts 4)
    node          devices of a node
    adapters      only what is trained beside a base that rests (see models.adapters): generators have the base
    apart         generators run on devices of their own, numbered after the trainers' (disaggregated)
    quantize      matrices of the layers travel in fp8, one byte an element: see sync.quantize
    """

    method: Method = "minimal"
    bucket_bytes: int = 256 * MIB
    itemsize: int = 2
    node: int = 8
    apart: bool = False
    adapters: bool = False
    quantize: bool = False


@dataclass(frozen=True)
class Family:
    """Parameters that move alike.

    names   stored names
    boxes   int64 [M, n, 2]: elements of a move, first and last + 1 per dimension of the whole parameter
    source, target  device of each move; equal: a copy within a device
    hop     0: from a trainer's tensor; h: handed on by a generator that received it h - 1 hops after the trainer
    phase   int64 [M]: which moves are cut a row earlier or later than others, so that parts of few rows are even
    itemsize, wire  bytes of an element in generation, and in a message
    """

    names: tuple[str, ...]
    itemsize: int
    wire: int
    boxes: np.ndarray
    source: np.ndarray
    target: np.ndarray
    hop: np.ndarray
    phase: np.ndarray

    def part(self, index: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """(move numbers, boxes) of one part of `parts`: the rows of every move are cut into so many."""
        if parts == 1:
            return np.arange(len(self.boxes)), self.boxes
        boxes, low = self.boxes.copy(), self.boxes[:, 0, 0]
        size, phase = self.boxes[:, 0, 1] - low, self.phase % parts
        boxes[:, 0, 0] = low + (size * index + phase) // parts
        boxes[:, 0, 1] = low + (size * (index + 1) + phase) // parts
        kept = np.flatnonzero(boxes[:, 0, 0] < boxes[:, 0, 1])
        return kept, boxes[kept]

    def bytes_of(self, devices: int, index: int = 0, parts: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(sent, received) int64 [devices] between devices, by one of the names."""
        sent, received = self.by_hop(devices, index, parts)
        return sent.sum(0), received.sum(0)

    def by_hop(self, devices: int, index: int, parts: int, hops: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """As `bytes_of`, int64 [hops, devices]; hops: rows in all, of which this family may need fewer."""
        kept, boxes = self.part(index, parts)
        sizes = np.prod(boxes[:, :, 1] - boxes[:, :, 0], axis=1) * self.wire
        source, target, hop = self.source[kept], self.target[kept], self.hop[kept]
        away = source != target
        shape = (hops or 1 + int(hop.max(initial=0)), devices)
        sent, received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        np.add.at(sent, (hop[away], source[away]), sizes[away])
        np.add.at(received, (hop[away], target[away]), sizes[away])
        return sent, received


@dataclass(frozen=True)
class Links:
    """Bytes moved in all: within a device, between devices of a node, between nodes."""

    device: int
    node: int
    between: int

    @property
    def total(self) -> int:
        """Between devices."""
        return self.node + self.between


@dataclass(frozen=True)
class Plan:
    """See the module. `homes`: stored name -> {stage: name there}, of the trainers and of the generators."""

    table: ParamTable
    source: Layout
    target: Layout
    options: Options
    families: tuple[Family, ...]
    buckets: tuple[Bucket, ...]
    homes: tuple[dict[str, dict[int, str]], dict[str, dict[int, str]]]
    _where: dict[str, int] = field(repr=False, default_factory=dict)

    @property
    def first_generator(self) -> int:
        """Device of generation rank 0."""
        return self.source.world_size if self.options.apart else 0

    @property
    def devices(self) -> int:
        """Devices in all; trainers are 0, 1, ..."""
        return max(self.source.world_size, self.first_generator + self.target.world_size)

    @property
    def hops(self) -> int:
        """Times that a box is handed on, at most, plus one."""
        return 1 + max((int(family.hop.max()) for family in self.families if len(family.hop)), default=0)

    @property
    def steps(self) -> int:
        """Exchanges, one after the other: bucket b makes its hop h in step b + h."""
        return len(self.buckets) + self.hops - 1

    def step_bytes(self) -> np.ndarray:
        """Sent and received bytes of each exchange, int64 [steps, devices]: step s makes hop h of bucket s - h."""
        found = np.zeros((self.steps, self.devices), np.int64)
        if self.hops == 1:
            return found + [bucket.sent + bucket.received for bucket in self.buckets]
        known: dict[tuple[int, int, int], np.ndarray] = {}
        for number, bucket in enumerate(self.buckets):
            for item in bucket.items:
                key = (self._where[item.name], item.index, item.parts)
                if key not in known:
                    known[key] = np.add(*self.families[key[0]].by_hop(self.devices, *key[1:], hops=self.hops))
                found[number : number + self.hops] += known[key]
        return found

    @property
    def scale_bytes(self) -> int:
        """Of the scales of all blocks, which every device gets before the messages; 0 without quantisation."""
        if not self.options.quantize:
            return 0
        return sum(4 * math.prod(grid_of(spec)) for spec in self.table.stored() if spec.quantized)

    def family_of(self, name: str) -> Family:
        return self.families[self._where[name]]

    def links(self) -> Links:
        """Bytes by the kind of link that they cross."""
        counts = [0, 0, 0]
        for family in self.families:
            sizes = np.prod(family.boxes[:, :, 1] - family.boxes[:, :, 0], axis=1)
            same = family.source == family.target
            near = family.source // self.options.node == family.target // self.options.node
            for kind, chosen in enumerate((same, near & ~same, ~near)):
                each = family.wire if kind else family.itemsize
                counts[kind] += int(sizes[chosen].sum()) * each * len(family.names)
        return Links(*counts)

    def traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """(sent, received) bytes of each device, int64 [devices]."""
        sent, received = np.zeros(self.devices, np.int64), np.zeros(self.devices, np.int64)
        for family in self.families:
            s, r = family.bytes_of(self.devices)
            sent += s * len(family.names)
            received += r * len(family.names)
        return sent, received

    def held(self, side: Literal["source", "target"]) -> Iterator[tuple[str, int, np.ndarray]]:
        """(stored name, bytes of an element, elements on each device int64 [devices]) of trainers or generators."""
        layout, first = (self.source, 0) if side == "source" else (self.target, self.first_generator)
        homes = self.homes[side == "target"]
        for family in self.families:
            spec = self.table.by_name(family.names[0])
            counts = np.zeros(self.devices, np.int64)
            for rank, blocks in _blocks(spec, layout, tuple(sorted(homes[spec.name]))):
                counts[first + rank] = sum(volume(block.box) for block in blocks)
            for name in family.names:
                yield name, family.itemsize, counts


def grid_of(spec: ParamSpec) -> tuple[int, ...]:
    """Blocks of a quantised parameter: (experts,) along rows, along columns."""
    return (*spec.shape[:-2], *(-(-size // BLOCK) for size in spec.shape[-2:]))


def _blocks(spec: ParamSpec, layout: Layout, stages: Sequence[int]) -> Iterator[tuple[int, tuple[Block, ...]]]:
    """(rank, what it holds of a parameter), stage by stage."""
    known: dict[tuple[int, ...], tuple[Block, ...]] = {}
    axes = ("ep", "etp", "edp") if spec.experts else ("tp", "fsdp", "cp")
    for stage in stages:
        for rank in stage_ranks(layout, stage):
            at = layout.coords(rank)
            key = tuple(at[axis] for axis in axes)
            if key not in known:
                known[key] = blocks_of(spec, layout, at)[0]
            yield rank, known[key]


class _Planner:
    """Makes families; keeps count of what each device sends, so that copies of a box share the work."""

    def __init__(self, source: Layout, target: Layout, options: Options) -> None:
        self.source, self.target, self.options = source, target, options
        self.first = source.world_size if options.apart else 0
        self.load: dict[int, int] = {}

    def family(self, specs: Sequence[ParamSpec], sources: tuple[int, ...], targets: tuple[int, ...]) -> Family:
        spec = specs[0]
        held: dict[Box, list[int]] = {}
        for rank, blocks in _blocks(spec, self.source, sources):
            for block in blocks:
                held.setdefault(block.box, []).append(rank)
        wanted: dict[Box, list[int]] = {}
        for rank, blocks in _blocks(spec, self.target, targets):
            for box in self._wanted(spec, blocks):
                wanted.setdefault(box, []).append(self.first + rank)
        have, want = list(held), list(wanted)
        low, high, i, j = _overlaps(np.array(have, np.int64), np.array(want, np.int64))
        sizes = np.prod(high - low, axis=1)
        _check_cover(specs, have, want, sizes, j)
        wire = 1 if self.options.quantize and spec.quantized else self._itemsize(spec)
        weight = len(specs) * wire
        rows: list[tuple[int, int, int, int]] = []
        for pair, (a, b, size) in enumerate(zip(i.tolist(), j.tolist(), sizes.tolist())):
            holders, receivers = held[have[a]], wanted[want[b]]
            rows += [(pair, *move) for move in self._moves(holders, receivers, size * weight)]
        moves = np.array(rows, np.int64)
        boxes = np.stack([low, high], -1)[moves[:, 0]]
        names = tuple(s.name for s in specs)
        return Family(names, self._itemsize(spec), wire, boxes, moves[:, 1], moves[:, 2], moves[:, 3], moves[:, 0])

    def _itemsize(self, spec: ParamSpec) -> int:
        return 4 if spec.keep_fp32 else self.options.itemsize

    def _wanted(self, spec: ParamSpec, blocks: Sequence[Block]) -> list[Box]:
        if self.options.method != "allgather_swap" or not blocks:
            return [block.box for block in blocks]
        rows = (0, spec.shape[0])
        if spec.experts:
            rows = (min(b.box[0][0] for b in blocks), max(b.box[0][1] for b in blocks))
        return [(rows, *((0, size) for size in spec.shape[1:]))]

    def _moves(self, holders: list[int], receivers: list[int], size: int) -> list[tuple[int, int, int]]:
        """(source, target, hop) of one box, to all that want it."""
        there = set(holders)
        found = [(device, device, 0) for device in receivers if device in there]
        lacking = [device for device in receivers if device not in there]
        before = -1
        for hop, device in enumerate(lacking):
            if self.options.method == "broadcast" and hop:
                found.append((before, device, hop))
                self.load[before] = self.load.get(before, 0) + size
            else:
                sender = self._nearest(holders, device)
                self.load[sender] = self.load.get(sender, 0) + size
                found.append((sender, device, 0))
            before = device
        return found

    def _nearest(self, holders: list[int], device: int) -> int:
        """The holder on the same node, else any; of several the one with the least to send."""
        node = device // self.options.node
        near = [rank for rank in holders if rank // self.options.node == node] or holders
        return min(near, key=lambda rank: (self.load.get(rank, 0), rank))


def _overlaps(have: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(low [p, n], high [p, n], index into have [p], into want [p]) of all pairs of boxes that overlap."""
    fits = np.ones((len(have), len(want)), bool)
    for dim in range(have.shape[1]):
        fits &= have[:, None, dim, 0] < want[None, :, dim, 1]
        fits &= want[None, :, dim, 0] < have[:, None, dim, 1]
    j, i = np.nonzero(fits.T)  # by receiver
    low, high = np.maximum(have[i, :, 0], want[j, :, 0]), np.minimum(have[i, :, 1], want[j, :, 1])
    return low, high, i, j


def _check_cover(
    specs: Sequence[ParamSpec], have: Sequence[Box], want: Sequence[Box], sizes: np.ndarray, j: np.ndarray
) -> None:
    """Every element has one source box, and every wanted one is found once. Cannot fail for a sound layout.

    Boxes that lie inside, apart from each other, and are as many elements as the whole, fill it.
    """
    names = specs[0].name + (f" (and {len(specs) - 1} more)" if len(specs) > 1 else "")
    held, whole = sum(volume(box) for box in have), volume(tuple((0, size) for size in specs[0].shape))
    edges = np.array(have, np.int64)
    inside = bool((edges[:, :, 0] >= 0).all() and (edges[:, :, 1] <= specs[0].shape).all())
    if held != whole or not inside or len(_overlaps(edges, edges)[2]) > len(have):
        raise MissingWeight(f"{names}: trainers hold {held} of {whole} elements", "a layout with a gap or an overlap")
    found = np.zeros(len(want), np.int64)
    np.add.at(found, j, sizes)
    for box, count in zip(want, found.tolist()):
        if count != volume(box):
            raise MissingWeight(f"{names}: {count} of the {volume(box)} elements of {box} have a source")


def plan_reshard(model: ModelConfig, source: Layout, target: Layout, options: Options | None = None) -> Plan:
    """The plan from training layout `source` to generation layout `target`. LayoutError when the model does not divide.

    Trainers are devices 0, 1, ...; generators the same devices, unless `options.apart`. Worlds may differ in size.
    """
    options = options or Options()
    for layout in (source, target):
        layout.check_model(model)
    if options.bucket_bytes < 1 or options.node < 1:
        raise LayoutError(f"resharding: bucket of {options.bucket_bytes} bytes, {options.node} devices a node")
    table = table_for(model)
    if options.adapters:
        table = ParamTable([spec for spec in table if spec.adapts])
    homes = homes_of(table, source, model.num_layers), homes_of(table, target, model.num_layers)
    alike: dict[tuple[object, ...], list[ParamSpec]] = {}
    for spec in table.stored():
        stages = tuple(tuple(sorted(side[spec.name])) for side in homes)
        kind = (spec.shape, spec.split, spec.parts, spec.unit, spec.experts, spec.keep_fp32, spec.quantized)
        alike.setdefault((stages, kind), []).append(spec)
    planner = _Planner(source, target, options)
    families = []
    for (stages, _), specs in alike.items():
        families.append(planner.family(specs, *stages))  # type: ignore[misc]
    where = {name: index for index, family in enumerate(families) for name in family.names}
    devices = max(source.world_size, planner.first + target.world_size)
    buckets = fill_buckets(_queues(table, homes[0]), where, families, devices, options.bucket_bytes)
    return Plan(table, source, target, options, tuple(families), buckets, homes, where)


def _queues(table: ParamTable, homes: dict[str, dict[int, str]]) -> list[list[str]]:
    """Stored names of each pipeline stage."""
    found: dict[int, list[str]] = {}
    for spec in table.stored():
        found.setdefault(min(homes[spec.name]), []).append(spec.name)
    return [found[stage] for stage in sorted(found)]
