"""Runs a plan on real tensors over torch.distributed: any method, any backend that sends and receives.

Legend: none.

A step packs what it sends into one message per peer, copies what stays within the device while messages travel, and
unpacks what arrives. The messages of the next step are on their way while those of this one are unpacked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.errors import MissingWeight, ShapeMismatch, SyncError, reason_of
from docklands.obs.spans import span
from docklands.sync.boxes import Box, view, volume
from docklands.sync.memory import Ledger
from docklands.sync.plan import Plan
from docklands.sync.quantize import FP8, Quantizer
from docklands.sync.script import Received, Script, Sent, Step, aligned, by_peer


@dataclass
class Counts:
    """What a run of a plan did on this device: bytes sent, received, copied within; most bytes held at once (the
    trainer's tensors, in their own dtype, for as long as they stay; the generator's; messages). scales: bytes of block
    scales, which come beside what is received.
    """

    sent: int = 0
    received: int = 0
    copied: int = 0
    peak: int = 0
    scales: int = 0
    seconds: float = 0.0


@dataclass
class _Flight:
    """Messages of one step under way."""

    number: int
    works: list[tuple[Any, int, str]] = field(default_factory=list)
    inbox: dict[int, Tensor] = field(default_factory=dict)


class Resharder:
    """Moves weights of this process, one device of the plan. Every rank of the group calls run() alike.

    dtype      of generation weights; its size is the plan's itemsize
    timeout_s  longest wait for any one peer
    ledger     told of the bytes that generation weights and messages take
    group      process group whose rank r is device r of the plan; None: all processes
    """

    def __init__(
        self,
        plan: Plan,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        timeout_s: float = 600.0,
        group: Any = None,
        ledger: Ledger | None = None,
    ) -> None:
        if dtype.itemsize != plan.options.itemsize:
            raise SyncError(f"resharding: the plan counts {plan.options.itemsize} bytes an element, {dtype} has others")
        world = dist.get_world_size(group)
        if world != plan.devices:
            raise SyncError(
                f"resharding: the plan has {plan.devices} devices, the process group {world} ranks",
                "start as many processes as trainers and generators need",
            )
        self.plan, self.dtype, self.device = plan, dtype, device
        self.script = Script(plan, dist.get_rank(group))
        self.counts = Counts()
        self.quantizer = Quantizer(plan, self.script, device, group) if plan.options.quantize else None
        self._group, self._timeout, self._ledger = group, timeout_s, ledger
        self._peers = [dist.get_global_rank(group, r) if group is not None else r for r in range(world)]
        self._arenas: list[Tensor] = []

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a generation tensor, by stored name: what keeps fp32 keeps it."""
        return torch.float32 if self.plan.table.by_name(name).keep_fp32 else self.dtype

    def prepare(self, source: Mapping[str, Tensor]) -> None:
        """Scales of what `run` will send next, where it is quantised: on every rank, before `as_held`. SyncError."""
        if self.quantizer is not None:
            self.quantizer.measure(source)

    @torch.no_grad()
    def as_held(self, name: str, box: Box, values: Tensor) -> Tensor:
        """What generators will hold of these values of the trainer, which are `box` of a stored parameter."""
        if self.quantizer is None or name not in self.quantizer:
            return values.to(self.dtype_of(name))
        found = torch.empty(values.shape, dtype=self.dtype_of(name), device=values.device)
        self.quantizer.write(name, box, values, found)
        return found

    @torch.no_grad()
    def run(
        self,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor] | None = None,
        released: Callable[[str], None] | None = None,
    ) -> dict[str, Tensor]:
        """This device's generation weights by their local name; {} on a device that only trains.

        source    local tensors of the trainer by local name (fp32 masters are cast on the way); {} where none trains
        target    buffers to fill, with storage or emptied (resize_(0)); None: made one by one, as emptied ones are
                  filled again, when their first bucket comes
        released  called with a trainer's local name when its tensor is not read any more: it is swapped out, or deleted
                  from `source`; None: all of them stay, and count to the end
        Raises MissingWeight, ShapeMismatch; SyncError that names the peer which did not answer in time.
        """
        began = time.perf_counter()
        sources = self._checked(source, self.script.source, "the trainer")
        made = None if target is None else self._checked(target, self.script.target, "the generator")
        if self.quantizer is not None and not self.quantizer.scales:
            self.prepare(source)
        self.counts = Counts(scales=self.plan.scale_bytes)
        leaving = {name: math.prod(tensor.shape) * tensor.dtype.itemsize for name, tensor in sources.items()}
        room = self.script.room()
        self._arenas = [torch.empty(room, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._account("messages", 2 * room + self.plan.scale_bytes)
        results: dict[str, Tensor] = {} if made is None else made
        held = self.plan.scale_bytes + sum(leaving.values())
        held += sum(self.script.target[n].bytes for n, t in results.items() if t.untyped_storage().nbytes())
        steps = self.script.steps
        with span("reshard/" + self.plan.options.method, steps=len(steps)) as attributes:
            flight = self._post(0, steps[0], sources, results)
            for number, step in enumerate(steps):
                for name in step.begins:
                    held += self._make(name, results)
                self.counts.peak = max(self.counts.peak, held + 2 * room)
                following = steps[number + 1] if number + 1 < len(steps) else None
                early = following is not None and not any(part.handed_on for part in following.sent)
                ahead = self._post(number + 1, following, sources, results) if early and following else None
                self._copy(step, sources, results)
                self._finish(flight, step, results)
                for name in step.ends:
                    del sources[name]  # the caller may have let go of it
                    if released is not None:
                        held -= leaving[name]
                        released(self.script.source[name].name)
                if following is not None:
                    flight = ahead or self._post(number + 1, following, sources, results)
            self._arenas = []
            self._account("messages", -2 * room - self.plan.scale_bytes)
            if self.quantizer is not None:
                self.quantizer.forget()
            self.counts.seconds = time.perf_counter() - began
            attributes |= vars(self.counts)
        return {self.script.target[name].name: tensor for name, tensor in results.items()}

    def _make(self, name: str, results: dict[str, Tensor]) -> int:
        """The generator's tensor, now that its first bucket comes. -> bytes taken for it, none where it has them"""
        held = self.script.target[name]
        if name not in results:
            results[name] = torch.empty(held.shape, dtype=self.dtype_of(name), device=self.device)
        elif results[name].untyped_storage().nbytes():
            return 0
        else:
            results[name].untyped_storage().resize_(held.bytes)
        self._account("generation", held.bytes)
        return held.bytes

    def _account(self, kind: str, size: int) -> None:
        if self._ledger is not None:
            self._ledger.add("device", kind, size)

    def _checked(self, given: Mapping[str, Tensor], held: Mapping[str, Any], who: str) -> dict[str, Tensor]:
        """Tensors by stored name."""
        found = {}
        for name, part in held.items():
            if part.name not in given:
                raise MissingWeight(f"resharding: {who} on device {self.script.device} has no tensor {part.name}")
            if tuple(given[part.name].shape) != part.shape:
                raise ShapeMismatch(
                    f"resharding: {part.name} of {who} on device {self.script.device} has shape "
                    f"{tuple(given[part.name].shape)}, the plan says {part.shape}"
                )
            found[name] = given[part.name]
        return found

    def _post(self, number: int, step: Step, sources: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> _Flight:
        """Send and ask for the messages of a step."""
        flight, ops, about, at = _Flight(number), [], [], 0
        arena = self._arenas[number % 2]
        for peer, parts in by_peer(step.received).items():
            size = sum(self._size(part) for part in parts)
            flight.inbox[peer] = arena[at : at + size]
            ops.append(dist.P2POp(dist.irecv, flight.inbox[peer], self._peers[peer], self._group))
            about.append((peer, f"{parts[0].name} from"))
            self.counts.received += size
            at = aligned(at + size)
        for peer, sent in by_peer(step.sent).items():
            start = at
            for part in sent:
                tensors, held = (results, self.script.target) if part.handed_on else (sources, self.script.source)
                box = view(tensors[part.name], held[part.name].blocks, part.box)
                size = self._size(part)
                self._pack(part, box, arena[at : at + size])
                at += size
            ops.append(dist.P2POp(dist.isend, arena[start:at], self._peers[peer], self._group))
            about.append((peer, f"{sent[0].name} to"))
            self.counts.sent += at - start
            at = aligned(at)
        works = dist.batch_isend_irecv(ops) if ops else []
        if len(works) != len(about):  # a backend that makes one work of all
            about = [(-1, "a message of")] * len(works)
        flight.works = [(work, peer, text) for work, (peer, text) in zip(works, about)]
        return flight

    def _wire(self, name: str) -> torch.dtype:
        return FP8 if self.quantizer is not None and name in self.quantizer else self.dtype_of(name)

    def _pack(self, part: Sent, box: Tensor, message: Tensor) -> None:
        into = message.view(self._wire(part.name)).view(box.shape)
        if into.dtype == FP8 and self.quantizer is not None:
            self.quantizer.pack(part.name, part.box, box, into)
        else:
            into.copy_(box)

    def _finish(self, flight: _Flight, step: Step, results: Mapping[str, Tensor]) -> None:
        """Wait for a step's messages and unpack them."""
        end = time.monotonic() + self._timeout
        for work, peer, text in flight.works:
            try:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as error:
                who = f"device {peer}" if peer >= 0 else "a peer"
                late = "is lost" if time.monotonic() < end else f"no answer within {self._timeout:g} s"
                raise SyncError(
                    f"resharding: {text} {who}: {late}, step {flight.number + 1} of "
                    f"{self.plan.steps} on device {self.script.device} ({reason_of(error)})",
                    f"is the process of {who} alive?",
                ) from error
        for peer, parts in by_peer(step.received).items():
            message, at = flight.inbox[peer], 0
            for part in parts:
                size = self._size(part)
                shape = [high - low for low, high in part.box]
                self._keep(part, message[at : at + size].view(self._wire(part.name)).view(shape), results)
                at += size

    def _copy(self, step: Step, sources: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
        for part in step.copied:
            self._keep(part, view(sources[part.name], self.script.source[part.name].blocks, part.box), results)
            self.counts.copied += volume(part.box) * self.plan.family_of(part.name).itemsize

    def _keep(self, part: Received, box: Tensor, results: Mapping[str, Tensor]) -> None:
        """Of a box, copy what is this device's own."""
        blocks = self.script.target[part.name].blocks
        for kept in part.kept:
            inner = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(kept, part.box))
            into = view(results[part.name], blocks, kept)
            if self.quantizer is not None and part.name in self.quantizer:
                self.quantizer.write(part.name, kept, box[inner], into)
            else:
                into.copy_(box[inner])

    def _size(self, part: Sent | Received) -> int:
        return volume(part.box) * self.plan.family_of(part.name).wire
