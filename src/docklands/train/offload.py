"""Memory savers of the train engine: what layers keep, and where Adam's moments are between steps.

Legend: none.

The lower tier is pinned host memory, or on a CPU a file (sync/memory.py). Moments come up one parameter at a time.
While one is updated, those of the next are on their way up and those of the one before on their way down, so that the
device never holds more than three parameters'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from docklands.config.schema import TrainSection
from docklands.models.copies import Copies, Copy
from docklands.models.model import Trunk
from docklands.models.savers import Saver
from docklands.sync.memory import FileTier, Ledger, Lower, PinnedTier

Pair = tuple[Tensor, Tensor]
MIB = 1 << 20
MOMENTS_AT_ONCE = 3
"""Parameters whose moments are on the device during a step with optim.offload."""
LAYERS_AT_ONCE = 2
"""Layers whose tensors are on the device with train.activation_offload, forward and backward."""


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


def most_at_once(sizes: Sequence[int], count: int) -> int:
    """The largest sum of `count` neighbours: for plans. Moments that the device holds under optim.offload: `sizes` are
    bytes of each trained parameter's, in order, `count` MOMENTS_AT_ONCE. Activations under train.activation_offload:
    what each layer keeps of a micro-batch, LAYERS_AT_ONCE; all layers', of all micro-batches under way, are below.
    """
    return max((sum(sizes[i : i + count]) for i in range(len(sizes))), default=0)


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
        self.copies = Copies("moments")
        self._here: dict[str, Pair] = {}
        self._up: dict[str, list[Copy]] = {}
        self._down: dict[str, list[Copy]] = {}
        self._away: set[str] = set()
        self._keys = {name: 2 * i for i, name in enumerate(masters)}
        if lower is None:
            self.all()

    def each(self, names: Iterable[str]) -> Iterator[tuple[str, Pair]]:
        """The moments of these parameters, one after the other, to be changed in place until the next is asked for."""
        names = list(names)
        for name, following in zip(names, [*names[1:], None]):
            self._call_up(name)
            if following is not None and self.lower is not None:
                self._call_up(following)
            yield name, self._arrived(name)
            self._send_down(name)

    def all(self) -> dict[str, Pair]:
        """All of them, here, the live ones; they stay until `rest`."""
        for name in self.masters:
            self._call_up(name)
        return {name: self._arrived(name) for name in self.masters}

    def take(self, name: str, pair: Pair) -> None:
        """Hold a parameter's in these tensors from now on. For moments that are always here."""
        assert self.lower is None, "moments that rest elsewhere are this process's own"
        self._here[name] = pair

    def rest(self) -> None:
        """Send down what is still here, and wait until all is down."""
        for name in list(self._here):
            self._send_down(name)
        for name in list(self._down):
            self._landed(name)

    def _call_up(self, name: str) -> None:
        """Begin to bring a parameter's up; zeros the first time."""
        if name in self._here:
            return
        master = self.masters[name]
        make = torch.zeros_like if name not in self._away else torch.empty_like
        pair = self._here[name] = (make(master), make(master))
        self.ledger.add("device", "optimizer", size(pair))
        if name in self._away:
            assert self.lower is not None
            self._up[name] = [
                self.copies.read(self.lower.read, self._keys[name] + i, tensor) for i, tensor in enumerate(pair)
            ]

    def _arrived(self, name: str) -> Pair:
        for copy in self._up.pop(name, ()):
            self.copies.wait(copy)
        if name in self._away:
            assert self.lower is not None
            self._away.remove(name)
            self.ledger.add(self.lower.name, "optimizer", -size(self._here[name]))
        return self._here[name]

    def _send_down(self, name: str) -> None:
        """Begin to send a parameter's down; when that of the one before is complete."""
        if self.lower is None:
            return
        for before in list(self._down):
            self._landed(before)
        pair = self._arrived(name)
        del self._here[name]
        self._down[name] = [
            self.copies.write(self.lower.write, self._keys[name] + i, tensor) for i, tensor in enumerate(pair)
        ]
        self._away.add(name)
        self.ledger.add(self.lower.name, "optimizer", size(pair))

    def _landed(self, name: str) -> None:
        for copy in self._down.pop(name):
            self.copies.wait(copy)
        self.ledger.add("device", "optimizer", -2 * 4 * self.masters[name].numel())

    @property
    def away_bytes(self) -> int:
        """In the lower tier now."""
        return 0 if self.lower is None else self.ledger.of(self.lower.name)


def size(pair: Pair) -> int:
    """Bytes of both."""
    return sum(tensor.numel() * tensor.itemsize for tensor in pair)
