"""Publishing by plan: each process of the world takes its part, and its device goes from training to generation.

Legend: T tokens of the probe.

    publish          probe (trainer) -> hand-over or copy -> the generator holds the buffers -> gate -> its probe
    generated        the last generation of a step has ended: training state begins to come back, where it was swapped
    for_training     before any use of training state: it is here
    for_generation   before any generation: the weights are here (after a swap they are resharded once more if the
                     device trained since the last publish, which happens when a step asks for more samples)

A run in one process has nothing to plan; see sync/in_process.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from docklands.config.layouts import SyncSection
from docklands.errors import ConfigError
from docklands.models.adapters import is_adapter
from docklands.models.config import ModelConfig
from docklands.obs.spans import span
from docklands.parallel.layout import Layout
from docklands.sync.gate import Gate, check_probe, gather
from docklands.sync.handover import Handover
from docklands.sync.memory import Kind, MemoryTiers
from docklands.sync.plan import MIB, Options, Plan, plan_reshard
from docklands.sync.reshard import Counts, Resharder

PROBE = (24, 17)
"""Tokens of the probe's sequences."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.5}
QUANTIZED_TOLERANCE = 2.0
"""After a transfer in fp8: a token goes to another expert here and there, and log-probs of tiny models jump."""
Resident = Mapping[Kind, Mapping[str, Tensor]]
SumCount = dict[str, tuple[float, float]]


class Trainer(Protocol):
    """This process's part of what is trained."""

    def resident(self) -> Resident:
        """Local tensors that wait elsewhere during generation; among "weights" those of the policy by local name."""
        ...

    def published(self, weights: Mapping[str, Tensor], adapters: bool) -> Mapping[str, Tensor]:
        """What generators get, out of those weights: with adapters as they are, or merged. Called on every rank."""
        ...

    def probe(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Log-probs of these sequences, fp32 [T], the same on every rank; each sequence's first is 0."""
        ...


class Generator(Protocol):
    """This process's part of a generator. One that `copies` keeps weights in memory of its own: the buffers may go."""

    @property
    def version(self) -> int: ...

    def hold(self, weights: Mapping[str, Tensor], version: int) -> None: ...

    def sleep(self) -> None: ...

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Tensor | None: ...


@dataclass(frozen=True)
class Route:
    """From where to where.

    apart  generators are on devices of their own, after the trainers'
    dtype  of generation
    temperature  by which the trainer divides its logits
    group  process group whose rank r is device r; None: all processes
    """

    model: ModelConfig
    training: Layout
    generation: Layout
    dtype: torch.dtype
    apart: bool = False
    temperature: float = 1.0
    group: Any = None

    def plan(self, section: SyncSection, adapters: bool = False) -> Plan:
        """Of all weights, or of the adapters alone. LayoutError when the model does not divide."""
        method = section.method
        if method == "auto":
            method = "broadcast" if self.apart else "minimal"
        size = max(1, int(section.bucket_mib * MIB))
        options = Options(method, size, itemsize=self.dtype.itemsize, apart=self.apart, quantize=section.quantized)
        options = replace(options, adapters=adapters, node=section.node_devices)
        return plan_reshard(self.model, self.training, self.generation, options)


def check_sync(section: SyncSection, device: str, apart: bool) -> None:
    """ConfigError for a swap that cannot be, or that has nothing to do."""
    kind, on_cpu = section.swap, torch.device(device).type == "cpu"
    if kind == "none":
        return
    if apart:
        raise ConfigError(
            f"sync.swap is {kind}, but generators have devices of their own", "sync.swap: none; nothing shares a device"
        )
    if kind == "host" and on_cpu:
        raise ConfigError("sync.swap is host, but the device is the host", "sync.swap: disk, or none")
    if kind == "disk" and not on_cpu:
        raise ConfigError("sync.swap is disk, but training state is on an accelerator", "sync.swap: host")


class Publisher:
    """This process's part in publishing. Every process of the world makes one, and calls `publish` alike.

    trainer, generator  None where it does not train, does not generate

    Where the route's model has adapters, generators hold base and adapters: both go there once, then adapters alone.
    The gate compares all of it each time.
    """

    def __init__(
        self,
        route: Route,
        section: SyncSection,
        trainer: Trainer | None,
        generator: Generator | None,
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        check_sync(section, device, route.apart)
        self.section = section
        self.trainer, self.generator = trainer, generator
        self._timeout, self._device = timeout_s, device
        self.tiers = None if section.swap == "none" else MemoryTiers(device, tempfile.gettempdir())
        self.take(route)
        self._moved = Counts()
        self._handover = None
        if self.tiers is not None:
            self._handover = Handover(self.resharder, self.tiers, self.gate, self._given)
        self._weights: dict[str, Tensor] | None = None
        self._generates = self._away = False  # the device is generation's; training state is elsewhere
        self.version = -1

    def take(self, route: Route) -> None:
        """Publish on this route from now on: generators have come or gone. Where nothing is swapped."""
        plan = route.plan(self.section)
        self.route = route
        self.resharder = self._mover(plan)
        self.gate = Gate(plan, self.resharder.as_held, route.group) if self.section.gate else None
        self.adapters: Resharder | None = None  # used from the second publish on this route
        self._based, self._first = False, True

    def forget(self) -> None:
        """Let go of the process group, until `take` brings another; also after one that failed."""
        self.route = replace(self.route, group=None)
        self.__dict__.pop("resharder", None)
        self.gate = self.adapters = None

    # --- the loop's calls -------------------------------------------------------------------------------------

    def publish(self, version: int) -> SumCount:
        """Every generator holds the trainer's weights as `version`; -> metrics of this device.

        Raises SyncError on every rank: MissingWeight, ShapeMismatch, VersionMismatch, GateFailed.
        """
        probed = self._probes(version)
        sequences = probe_sequences(self.route.model.vocab_size) if probed else []
        self.for_training()
        trainer_T = self.trainer.probe(sequences) if probed and self.trainer is not None else None
        self.version = version
        self._to_generation()
        counts = self._moved
        found = {
            "reshard/bytes_received": (float(counts.received + counts.scales), 1.0),
            "reshard/peak_bytes": (float(counts.peak), 1.0),
            "timing_s/reshard/move": (counts.seconds, 1.0),
            "reshard/freed_bytes": (self._freed(), 1.0),
        }
        if probed:
            found["reshard/probe_diff"] = (self._compare(sequences, trainer_T), 1.0)
        return found

    def for_generation(self) -> None:
        """The generator's weights are here. Call on every rank."""
        if self._generates or self.version < 0:
            return
        if self._handover is not None:
            self._to_generation()
        elif self._weights is not None:
            self._adopt(self._weights, self.version)
            self._generates = True

    def generated(self) -> None:
        """Nothing generates any more before the next update: the KV cache goes, training state begins to come back."""
        if self._generates and not self.route.apart:
            self._end_generation()
            if self._handover is not None:
                self._handover.prefetch()

    def for_training(self, update: bool = True) -> None:
        """Training state is here; waits for what is still on its way. update False: weights will do, for log-probs."""
        if self._generates and not self.route.apart:
            self._end_generation()
        if self._handover is not None and self._away:
            self._handover.to_training(self._timeout, update)
            self._away = not update

    def close(self) -> None:
        """Give the lower tier up."""
        if self.tiers is not None:
            self.for_training()
            self.tiers.close()

    # --- parts ------------------------------------------------------------------------------------------------

    def _probes(self, version: int) -> bool:
        """Whether this publish ends with the probe: every rank says the same, whenever it has come. The first on a
        route has generators that are new; without `probe_every` it matters where they keep weights of their own.
        """
        every, first, self._first = self.section.probe_every, self._first, False
        if every or not first:
            return bool(every) and (first or version % every == 0)
        return any(gather(getattr(self.generator, "copies", False), self.route.group, "probe: who keeps copies"))

    def _end_generation(self) -> None:
        self._generates = False
        if self.generator is not None:
            self.generator.sleep()

    def _to_generation(self) -> None:
        resident = self.trainer.resident() if self.trainer is not None else {}
        weights = resident.get("weights", {})
        if self._handover is not None:
            rest = resident.get("gradients", {}), resident.get("optimizer", {})
            self._weights = self._handover.to_generation(self.version, weights, *rest, adopt=self._adopt)
            self._moved = self.resharder.counts
        else:
            with span("publish", version=self.version):
                weights = self._given(weights)
                self.resharder.prepare(weights)
                published = self.gate.publish(weights) if self.gate is not None else {}
                self._weights = self._move(weights)
                held = self._adopt(self._weights, self.version)
                if self.gate is not None:
                    self.gate.check(self.version, held, self._weights, published)
        self._generates, self._away = True, self._handover is not None
        if getattr(self.generator, "copies", False):
            self._empty()

    def _given(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        adapters = self.route.model.lora is not None
        return weights if self.trainer is None else self.trainer.published(weights, adapters)

    def _mover(self, plan: Plan) -> Resharder:
        route, ledger = self.route, None if self.tiers is None else self.tiers.ledger
        return Resharder(
            plan, dtype=route.dtype, device=self._device, timeout_s=self._timeout, group=route.group, ledger=ledger
        )

    def _move(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All of it, or the adapters alone where generators have the base. -> what this device generates with"""
        if self.route.model.lora is None or not self._based or self._weights is None:
            found, self._based = self.resharder.run(weights, self._weights), True
            self._moved = self.resharder.counts
            return found
        if self.adapters is None:
            self.adapters = self._mover(self.route.plan(self.section, adapters=True))
        into = {name: tensor for name, tensor in self._weights.items() if is_adapter(name)}
        found = self.adapters.run(weights, into)
        self._moved = self.adapters.counts
        return {**self._weights, **found}

    def _adopt(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Give the generator its weights; -> the version that it says it has."""
        if self.generator is None:
            return version
        self.generator.hold(weights, version)
        return self.generator.version

    def _empty(self) -> None:
        """The generator has its own copy, and the gate has seen the buffers: they stay, without memory."""
        if self._handover is not None:
            self._handover.drop()
        else:
            for tensor in (self._weights or {}).values():
                tensor.untyped_storage().resize_(0)

    def _freed(self) -> float:
        """Bytes of training state that left the device."""
        kinds: tuple[Kind, ...] = ("weights", "gradients", "optimizer")
        return 0.0 if self.tiers is None else float(self.tiers.bytes(*kinds))

    def _compare(self, sequences: Sequence[Sequence[int]], trainer_T: Tensor | None) -> float:
        """Largest difference of the probe's log-probs over all generators, the same on every rank. GateFailed."""
        generator_T = self.generator.score(sequences, self.route.temperature) if self.generator is not None else None
        found = gather((trainer_T, generator_T), self.route.group, f"probe: log-probs of version {self.version}")
        expected_T = next(trainer for trainer, _ in found if trainer is not None)
        usual = QUANTIZED_TOLERANCE if self.section.quantized else TOLERANCE[self.route.dtype]
        tolerance = self.section.probe_tolerance or usual
        said = [generator for _, generator in found if generator is not None]
        return max(check_probe(expected_T, generator_T, tolerance, self.version) for generator_T in said)


def probe_sequences(vocabulary: int) -> list[list[int]]:
    """The same on every rank and at every publish."""
    draw = np.random.default_rng(17)
    return [draw.integers(0, vocabulary, size).tolist() for size in PROBE]
