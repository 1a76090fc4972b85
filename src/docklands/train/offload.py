"""Memory savers of the train engine: what layers keep, and where Adam's moments are between steps.

Legend: none.

The lower tier is pinned host memory, or on a CPU a file (sync/memory.py). Moments come up one parameter at a time, so
that the device never holds more than one parameter's; copies are not overlapped with the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from docklands.config.schema import TrainSection
from docklands.models.model import Trunk
from docklands.models.savers import Saver
from docklands.sync.memory import FileTier, Ledger, Lower, PinnedTier

Pair = tuple[Tensor, Tensor]
MIB = 1 << 20


def lower_tier(device: torch.device) -> Lower:
    """What is below a device."""
    return FileTier() if device.type == "cpu" else PinnedTier(str(device))


def install(models: Iterable[Trunk], section: TrainSection, device: torch.device) -> Saver | None:
    """Let these models save as the section says; one saver for all of them."""
    offload = section.activation_offload
    saver = None
    if offload or section.recompute == "selective":
        saver = Saver(section.recompute == "selective", lower_tier(device) if offload else None)
    for model in models:
        model.recompute, model.saver = section.recompute == "full", saver
    return saver


def saver_metrics(name: str, saver: Saver | None) -> dict[str, tuple[float, float]]:
    """What the saver counted since its reset, as (sum, count)."""
    if saver is None:
        return {}
    found = {}
    if saver.selective:
        found[f"{name}/recompute_saved_mib"] = (saver.discarded / MIB, 1.0)
    if saver.lower is not None:
        found[f"{name}/activations_offloaded_mib"] = (saver.peak / MIB, 1.0)
    return found


def reset(saver: Saver | None) -> None:
    """Count anew: an update begins."""
    if saver is not None:
        saver.reset()


def update_metrics(name: str, norm: float, lr: float, moments: Moments) -> dict[str, tuple[float, float]]:
    """Of one optimizer update, as (sum, count): norm, rate, and what of the optimizer rests elsewhere."""
    found = {f"{name}/grad_norm": (norm, 1.0), f"{name}/lr": (lr, 1.0), f"{name}/updates": (1.0, 1.0)}
    if moments.lower is not None:
        found[f"{name}/optimizer_offloaded_mib"] = (moments.away_bytes / MIB, 1.0)
    return found


class Moments:
    """Two fp32 tensors a parameter, zeros at first, shaped like `masters`.

    lower   where they are between uses; None: always here
    ledger  their bytes, as kind "optimizer"
    """

    def __init__(self, masters: Mapping[str, Tensor], lower: Lower | None = None) -> None:
        self.masters, self.lower, self.ledger = masters, lower, Ledger()
        self._here: dict[str, Pair] = {}
        self._away: set[str] = set()
        self._keys = {name: 2 * i for i, name in enumerate(masters)}
        if lower is None:
            self.all()

    def _up(self, name: str) -> Pair:
        if name not in self._here:
            master = self.masters[name]
            pair = (torch.zeros_like(master), torch.zeros_like(master))
            if name in self._away:
                assert self.lower is not None
                for i, tensor in enumerate(pair):
                    self.lower.read(self._keys[name] + i, flat(tensor))
                self._away.remove(name)
                self.ledger.add(self.lower.name, "optimizer", -size(pair))
            self._here[name] = pair
            self.ledger.add("device", "optimizer", size(pair))
        return self._here[name]

    def _down(self, name: str) -> None:
        if self.lower is None:
            return
        pair = self._here.pop(name)
        for i, tensor in enumerate(pair):
            self.lower.write(self._keys[name] + i, flat(tensor))
        self._away.add(name)
        self.ledger.add("device", "optimizer", -size(pair))
        self.ledger.add(self.lower.name, "optimizer", size(pair))

    @contextmanager
    def of(self, name: str) -> Iterator[Pair]:
        """The moments of one parameter, to be changed in place."""
        yield self._up(name)
        self._down(name)

    def all(self) -> dict[str, Pair]:
        """All of them, here, the live ones; they stay until `rest`."""
        return {name: self._up(name) for name in self.masters}

    def rest(self) -> None:
        """Send down what is still here."""
        for name in list(self._here):
            self._down(name)

    @property
    def away_bytes(self) -> int:
        """In the lower tier now."""
        return 0 if self.lower is None else self.ledger.of(self.lower.name)


def flat(tensor: Tensor) -> Tensor:
    """Its bytes, uint8 [n]."""
    return tensor.view(-1).view(torch.uint8)


def size(pair: Pair) -> int:
    """Bytes of both."""
    return sum(tensor.numel() * tensor.itemsize for tensor in pair)
