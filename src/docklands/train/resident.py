"""What an engine keeps on its device: what may wait elsewhere while the device generates, and what is published of it.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK, TOKEN_IDS
from docklands.parallel import fsdp
from docklands.sync.memory import Kind
from docklands.train.engine import TrainEngine
from docklands.train.lora import MergedWeights
from docklands.train.sharded import ShardedEngine

Resident = dict[Kind, dict[str, Tensor]]


class TrainState:
    """The training state of this process.

    policy  whose weights are published
    others  by role: what else is on the device (a frozen reference, a critic); their tensors are `role/name`
    """

    def __init__(self, policy: TrainEngine, others: Mapping[str, TrainEngine] | None = None) -> None:
        self.policy = policy
        self.others = {role: engine for role, engine in (others or {}).items() if engine is not policy}  # its base

    def resident(self) -> Resident:
        """Local tensors; those of the policy by their own names. Moments that rest in a lower tier are not here."""
        found = resident(self.policy)
        for role, engine in self.others.items():
            for kind, tensors in resident(engine).items():
                found[kind] |= {f"{role}/{name}": tensor for name, tensor in tensors.items()}
        return found

    def published(self, weights: Mapping[str, Tensor], adapters: bool) -> Mapping[str, Tensor]:
        """Of the resident weights, what generators get, by local name: those without adapters get them merged. Call on
        every rank.
        """
        policy = self.policy
        if adapters or not isinstance(policy, ShardedEngine) or policy.sharded.config.lora is None:
            return weights
        return MergedWeights(policy, weights)

    def probe(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The policy's log-probs of these sequences, fp32 [T], each sequence's first 0. Call on every rank."""
        masks = [torch.arange(len(sequence)) > 0 for sequence in sequences]
        columns = {TOKEN_IDS: [torch.tensor(s, dtype=torch.int32) for s in sequences], LOSS_MASK: masks}
        return self.policy.logprobs(Batch(list(range(len(sequences))), columns)).values


def resident(engine: TrainEngine) -> Resident:
    """Of one engine, by kind and name. Masters beside 16-bit weights are the optimizer's: only an update reads them."""
    sharded = isinstance(engine, ShardedEngine)
    named = engine.sharded.parameters() if sharded else dict(engine.model.named_parameters())
    found: Resident = {
        "weights": {n: fsdp.local(p).detach() for n, p in named.items()},
        "gradients": {},
        "optimizer": {},
    }
    optimizer = engine.optimizer
    if optimizer is not None:
        weights, masters = found["weights"], optimizer.masters.items()
        found["optimizer"] = {f"master/{n}": m.detach() for n, m in masters if m.dtype != weights[n].dtype}
        found["gradients"] = {name: fsdp.local(grad) for name, grad in optimizer.gradients().items()}
        if optimizer.resting.lower is None:
            pairs = optimizer.resting.all().items()
            found["optimizer"] |= {f"{name}/{i}": moment for name, pair in pairs for i, moment in enumerate(pair)}
    return found
