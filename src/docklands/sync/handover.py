"""One device between two phases: training state leaves, generation weights come, and back.

Legend: none.

    training    weights, gradients, optimizer state on the device
    -> generation: gradients, optimizer state (masters beside 16-bit weights, too) and other roles' weights go down;
                   the policy's are resharded bucket by bucket, each training tensor going down as soon as it is not
                   read any more; the gate checks what generators hold
    generation  generation weights only: the rest of the device is the KV cache's
    -> training:   generation weights are dropped (their tensors stay, emptied), training state comes back, begun by
                   `prefetch` while other stages still run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from docklands.obs.spans import span
from docklands.sync.gate import Gate
from docklands.sync.memory import Kind, MemoryTiers
from docklands.sync.reshard import Resharder

Weights = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
STATE: tuple[Kind, ...] = ("gradients", "optimizer")


class Handover:
    """This rank's part; all ranks of the plan call alike.

    resharder  made with `tiers.ledger`, so that the ledger knows all bytes of the device
    gate       None: do not check
    published  what is resharded, out of the weights on the device: not them where adapters are merged
    """

    def __init__(
        self, resharder: Resharder, tiers: MemoryTiers, gate: Gate | None = None, published: Weights = lambda w: w
    ) -> None:
        self.resharder, self.tiers, self.gate, self.published = resharder, tiers, gate, published
        self.version = -1
        self._generation: dict[str, Tensor] | None = None

    def to_generation(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        adopt: Callable[[Mapping[str, Tensor], int], int] = lambda _, version: version,
    ) -> dict[str, Tensor]:
        """Publish `version`; returns this device's generation weights by local name, the same tensors each time.

        weights, gradients, optimizer  local tensors that leave the device; weights by local name, those of other
                                       roles than the policy as `role/name`
        adopt  given the weights and the version, makes the generator hold them; -> the version that it says it has
        Raises SyncError, VersionMismatch, GateFailed.
        """
        with span("handover/to_generation", version=version):
            self.tiers.register("gradients", gradients)
            self.tiers.register("optimizer", optimizer)
            self.tiers.register("weights", weights)
            self.tiers.swap_out(*STATE)
            for name in weights:
                if "/" in name:  # of another role: no generator reads it
                    self._let_go(name)
            given = self.published(weights)
            self.resharder.prepare(given)
            published = self.gate.publish(given) if self.gate else {}
            self._generation = self.resharder.run(given, self._generation, self._let_go)
            self.tiers.swap_out("weights")  # what no generator reads, and the allocator's freed blocks
            self.version = adopt(self._generation, version)
            if self.gate is not None:
                self.gate.check(version, self.version, self._generation, published)
        return self._generation

    def _let_go(self, name: str) -> None:
        self.tiers.swap_out_one("weights", name)

    def prefetch(self) -> None:
        """Begin to bring training state back: when the last generation of a step ends, before reward and log-probs.

        Nothing may generate any more; generation weights are dropped first.
        """
        self.drop()
        self.tiers.prefetch("weights", "optimizer", "gradients")

    def to_training(self, timeout_s: float = 600.0, update: bool = True) -> None:
        """Training state is on the device again; waits for a prefetch. SyncError.

        update  False: weights will do, for a forward pass; the rest comes meanwhile
        """
        with span("handover/to_training", version=self.version, update=update):
            self.drop()
            if not update:
                self.tiers.prefetch("weights", "optimizer", "gradients")
            kinds: tuple[Kind, ...] = ("weights", "optimizer", "gradients") if update else ("weights",)
            self.tiers.swap_in(*kinds, timeout_s=timeout_s)

    def drop(self) -> None:
        """The generation weights' memory; the tensors stay."""
        for tensor in (self._generation or {}).values():
            storage = tensor.untyped_storage()
            self.tiers.ledger.add("device", "generation", -storage.nbytes())
            storage.resize_(0)
