"""After each sync: do all generators hold the version, the bits and the log-probs that the trainer published?

Legend: T tokens.

A checksum is linear: the sum over 64-bit words (along the last dimension) of word x one odd number per index, modulo
2^64. So shards' checksums add up to the whole tensor's, in any layout and any order. One changed element always changes
it: odd numbers have an inverse. Moved blocks do but for a chance of about 2^-64; two single 16-bit elements that change
places, both the last of their words, but for 2^-14.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from docklands.errors import GateFailed, SyncError, VersionMismatch, reason_of
from docklands.obs.spans import span
from docklands.sync.boxes import Block, Box, blocks_of, stage_ranks
from docklands.sync.plan import Plan
from docklands.sync.script import Script

CHUNK = 1 << 22
"""Elements that are widened to 64 bits at once."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODULUS = 1 << 64
NAMED = 5
"""Tensors that an error names."""


@lru_cache(maxsize=64)
def _factors(dim: int, size: int) -> Tensor:
    """An odd int64 number for each index of a dimension (splitmix64)."""
    with np.errstate(over="ignore"):
        x = (np.arange(size, dtype=np.uint64) + np.uint64((dim + 1) << 40)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64))


@lru_cache(maxsize=64)
def _last_factors(dim: int, size: int, per_word: int) -> Tensor:
    """Of the last dimension: elements j, j + 1, ... of one 64-bit word share its odd number, each shifted to its place
    in the word. Whole words can then be read instead of elements.
    """
    index = torch.arange(size)
    return _factors(dim, -(-size // per_word))[index // per_word] << (index % per_word * (64 // per_word))


def checksum(values: Tensor, box: Box, shape: Sequence[int]) -> int:
    """Of the elements `values`, which are `box` of a parameter of `shape`; 0 to 2^64 - 1. Disjoint boxes add up."""
    last, per_word = len(shape) - 1, 8 // values.element_size()
    low, high = box[last]
    bits, mask = values.detach(), -1
    steps = (bits.storage_offset(), *bits.stride()[:-1], low, high)
    if bits.stride(-1) == 1 and all(step % per_word == 0 for step in steps):
        bits = bits.view(torch.int64)
        inner = _factors(last, -(-shape[last] // per_word))[low // per_word : high // per_word]
    else:
        bits, mask = bits.view(BITS[values.element_size()]), (1 << 64 // per_word) - 1 if per_word > 1 else -1
        inner = _last_factors(last, shape[last], per_word)[low:high]
    factors = [_factors(d, shape[d])[box[d][0] : box[d][1]] for d in range(last)] + [inner]
    factors = [factor.to(values.device) for factor in factors]
    rows = max(1, CHUNK // max(1, bits[:1].numel()))
    total = 0
    for start in range(0, len(bits), rows):
        part = bits[start : start + rows].to(torch.int64) & mask if mask != -1 else bits[start : start + rows]
        for factor in (*reversed(factors[1:]), factors[0][start : start + rows]):
            part = (part * factor).sum(-1)
        total += int(part)
    return total % MODULUS


class Gate:
    """Holds what generators have against what the trainer published. Every rank of the plan calls alike.

    as_held  (stored name, box, the trainer's values of it) -> the same as generators hold them, see Resharder
    """

    def __init__(self, plan: Plan, as_held: Callable[[str, Box, Tensor], Tensor], group: Any = None) -> None:
        self.plan, self._as_held, self._group = plan, as_held, group
        self.script = Script(plan, dist.get_rank(group))
        self._known: dict[tuple[str, int], dict[Box, list[tuple[int, int]]]] = {}

    def publish(self, source: Mapping[str, Tensor]) -> dict[str, int]:
        """Checksums of the whole weights by stored name, out of the trainers' shards (by local name) as generators will
        hold them. Call before resharding, which may let the trainer's tensors go.
        """
        names = [spec.name for spec in self.plan.table.stored()]
        sums = [0] * len(names)
        with span("gate/publish"):
            for index, name in enumerate(names):
                held = self.script.source.get(name)
                for block in held.blocks if held else ():
                    if (name, block.box) in self._spoken_for:
                        values = source[held.name][block.slices(block.box)]  # type: ignore[union-attr]
                        values = self._as_held(name, block.box, values)
                        sums[index] += checksum(values, block.box, self.plan.table.by_name(name).shape)
            mine = np.array([value % MODULUS for value in sums], np.uint64)
            gathered = gather(mine, self._group, "gate: checksums of what trainers send")
            total = np.stack(gathered).sum(0, dtype=np.uint64).tolist()
        return dict(zip(names, total))

    @cached_property
    def _spoken_for(self) -> set[tuple[str, Box]]:
        """Boxes whose checksum is this trainer's to say: each goes to the holder with the fewest elements so far."""
        said: Counter[int] = Counter()
        mine = set()
        for spec in self.plan.table.stored():
            for box, holders in self._holders(spec.name, 0).items():
                device = min((device for device, _ in holders), key=lambda device: said[device])
                said[device] += math.prod(high - low for low, high in box)
                if device == self.script.device:
                    mine.add((spec.name, box))
        return mine

    def _holders(self, name: str, side: int) -> dict[Box, list[tuple[int, int]]]:
        """Box -> (device, which of its blocks), of the trainers (side 0) or the generators (1)."""
        key = self.plan.family_of(name).names[0], side
        if key not in self._known:
            self._known[key] = self._find_holders(*key)
        return self._known[key]

    def _find_holders(self, name: str, side: int) -> dict[Box, list[tuple[int, int]]]:
        layout = (self.plan.source, self.plan.target)[side]
        first = self.plan.first_generator if side else 0
        found: dict[Box, list[tuple[int, int]]] = {}
        for stage in sorted(self.plan.homes[side][name]):
            for rank in stage_ranks(layout, stage):
                blocks, _ = blocks_of(self.plan.table.by_name(name), layout, layout.coords(rank))
                for index, block in enumerate(blocks):
                    found.setdefault(block.box, []).append((first + rank, index))
        return found

    def check(self, version: int, held: int, target: Mapping[str, Tensor], published: Mapping[str, int]) -> None:
        """Raises the same on every rank: VersionMismatch, or GateFailed that names tensors and, where replicas tell,
        devices.

        version, held  what was published, what this device's generator says that it has (any number on a trainer)
        target         this device's generation weights by local name
        published      see `publish`
        """
        with span("gate/check", version=version):
            mine = {name: self._sums(name, part.blocks, target[part.name]) for name, part in self.script.target.items()}
            answers = gather((held, mine), self._group, f"gate: checksums of version {version} as generators hold it")
        first = self.plan.first_generator
        generators = range(first, first + self.plan.target.world_size)
        stale = {device: answers[device][0] for device in generators if answers[device][0] != version}
        if stale:
            said = ", ".join(f"device {device} has {has}" for device, has in stale.items())
            raise VersionMismatch(f"after publishing version {version}: {said}", "did its sync fail?")
        faults = [fault for name, sum_ in published.items() if (fault := self._fault(name, sum_, answers))]
        if faults:
            more = f", and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
            raise GateFailed(
                f"after publishing version {version}, generators differ from the trainer: "
                f"{', '.join(faults[:NAMED])}{more}",
                "the run stops here: its samples would come from another policy",
            )

    def _sums(self, name: str, blocks: Iterable[Block], local: Tensor) -> list[int]:
        shape = self.plan.table.by_name(name).shape
        return [checksum(local[block.slices(block.box)], block.box, shape) for block in blocks]

    def _fault(self, name: str, published: int, answers: Sequence[tuple[int, dict[str, list[int]]]]) -> str:
        """What is wrong with a tensor, "" when nothing is."""
        agreed, disputed = 0, []
        for holders in self._holders(name, 1).values():
            found = {device: answers[device][1][name][index] for device, index in holders}
            if len(set(found.values())) > 1:
                disputed.append(found)
            else:
                agreed += next(iter(found.values()))
        if not disputed:
            return "" if agreed % MODULUS == published else name
        everyone = {device for found in disputed for device in found}
        for wrong in ((), *((device,) for device in sorted(everyone))):  # the most are right, or all but one
            votes = [Counter(v for device, v in found.items() if device not in wrong) for found in disputed]
            right = [count.most_common(1)[0][0] for count in votes]
            if (agreed + sum(right)) % MODULUS == published:
                odd = {device for found, value in zip(disputed, right) for device, v in found.items() if v != value}
                return f"{name} on {_listed(odd)}"
        return f"{name} (on several devices)"


def gather(mine: Any, group: Any, what: str) -> list[Any]:
    """What every rank of the group has, by rank. SyncError when one is lost, or does not take part in time."""
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, mine, group=group)
    except RuntimeError as error:
        raise SyncError(
            f"{what}: a device is lost, or late, as device {dist.get_rank(group)} hears ({reason_of(error)})",
            "are the processes of all devices alive? their logs say",
        ) from error
    return found


def _listed(devices: Iterable[int]) -> str:
    found = sorted(devices)
    return ("device " if len(found) == 1 else "devices ") + ", ".join(map(str, found))


def check_probe(trainer_T: Tensor, generator_T: Tensor, tolerance: float, version: int) -> float:
    """Largest difference of the probe tokens' log-probs; GateFailed above `tolerance` (nats), or for a NaN.

    Checksums do not see what an engine makes of the weights (repacked copies, another rotary base); this does.
    """
    if trainer_T.shape != generator_T.shape:
        raise GateFailed(f"probe: trainer has {len(trainer_T)} log-probs, generator {len(generator_T)}")
    difference_T = (trainer_T.double() - generator_T.double()).abs().nan_to_num(torch.inf)
    worst = int(difference_T.argmax())
    if float(difference_T[worst]) > tolerance:
        raise GateFailed(
            f"after publishing version {version}, log-probs of the probe differ by "
            f"{float(difference_T[worst]):.3g} nats at token {worst} (trainer {float(trainer_T[worst]):.6g}, "
            f"generator {float(generator_T[worst]):.6g}), tolerance {tolerance:g}",
            "checksums agree: look at what the engine derives from its weights",
        )
    return float(difference_T[worst])
