"""A policy with adapters: its base as the reference policy, and what generators get of it.

Legend: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from docklands.core.batch import Batch, Jagged
from docklands.models.adapters import is_adapter
from docklands.models.lora import Merge, adapters_off
from docklands.parallel import fsdp
from docklands.train.engine import TrainEngine
from docklands.train.sharded import ShardedEngine


class BasePolicy:
    """The reference policy of an engine that trains adapters: its weights, without what was trained. Holds nothing."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def logprobs(self, batch: Batch) -> Jagged:
        """See TrainEngine."""
        engine = self.engine
        with adapters_off(engine.sharded.chunks if isinstance(engine, ShardedEngine) else [engine.model]):
            return engine.logprobs(batch)


class Sum:
    """W + s B A of a local tensor, made when it is first read, and gone with this object: a bucket at a time."""

    def __init__(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._make, self._made = make, None

    def __getitem__(self, index: Any) -> Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made[index]


class MergedWeights(Mapping[str, Tensor]):
    """This rank's local weights as generators without adapters hold them; the base is only read. Made on all ranks of
    a layout at once: FSDP gathers the adapters (not the base).

    weights  the local tensors, by name
    """

    @torch.no_grad()
    def __init__(self, engine: ShardedEngine, weights: Mapping[str, Tensor]) -> None:
        model = engine.sharded
        assert model.config.lora is not None
        self._weights, self._parameters = weights, model.parameters()
        self._pairs: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        self._merge: dict[str, Merge] = {}
        whole = {n: fsdp.whole(p.detach()) for n, p in self._parameters.items() if is_adapter(n)}
        for name in whole:
            stem, _, kind = name.rpartition(".")
            base = model.slots[name].spec.adapts
            if kind == "a":
                self._pairs.setdefault(base, {})[stem.rpartition(".")[2]] = whole[name], whole[f"{stem}.b"]
        for base in self._pairs:
            slot = model.slots[base]
            self._merge[base] = Merge(slot.spec, model.config.lora.scale, slot.part_rows(model.mesh.coords))

    def __getitem__(self, name: str) -> Tensor:
        """A new handle at each look-up; see Sum, which is read as a tensor is: by slices."""
        weight = self._weights[name]
        if name not in self._pairs:
            return weight
        window = fsdp.window(self._parameters[name].data)
        return Sum(weight, lambda: self._merge[name](weight, self._pairs[name], window))  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if not is_adapter(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)
