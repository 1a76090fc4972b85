"""What a layer keeps for its backward pass: less of it, or elsewhere.

Legend: none.

Autograd asks before it keeps a tensor (saved_tensors_hooks). A `Saver` answers in one of three ways: as it is; not at
all, because a cheap operation on kept tensors makes it again bit for bit (selective recomputation, after arXiv
2205.05198, section 4.1, of norms and activations: their products, which cost most, are never made twice); or in a lower
tier until backward asks.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from docklands.models.copies import Copies, Copy
from docklands.parallel import fsdp

LEAST = 65_536  # bytes: a smaller tensor stays
_active = threading.local()

Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Lower(Protocol):
    """A lower tier: keeps bytes (uint8 [n]) by key; see sync/memory.py."""

    def write(self, key: int, data: Tensor) -> None: ...
    def read(self, key: int, data: Tensor) -> None: ...
    def drop(self, key: int) -> None: ...


def again(operation: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """operation(*inputs), which backward may make again from its inputs instead of keeping it. The operation must give
    the same bits each time, and its inputs must not change until backward.
    """
    out = operation(*inputs)
    saver: Saver | None = getattr(_active, "saver", None)
    if saver is not None and saver.selective and out.requires_grad:
        saver.offer(out, operation, inputs)
    return out


class Saver:
    """Keeps what layers save.

    selective  what `again` made is not kept
    lower      where the rest goes, from `least` bytes on; parameters stay. None: nowhere

    discarded  bytes not kept since `reset`
    away       bytes in the lower tier now (or on their way); peak: at most since `reset`
    ahead      tensors that were on their way up before backward asked for them, since `reset`
    """

    def __init__(self, selective: bool, lower: Lower | None = None, least: int = LEAST) -> None:
        self.selective, self.lower, self.least = selective, lower, least
        self.discarded = self.away = self.peak = self.ahead = 0
        self.copies = Copies("activations")
        self._visits: deque[_Visit] = deque(maxlen=2)
        self._offers: dict[Key, tuple[Tensor, _Again]] = {}
        self._known: weakref.WeakValueDictionary[Key, _Away] = weakref.WeakValueDictionary()
        self._layer: nn.Module | None = None
        self._parameters: set[int] = set()  # addresses
        self._keys = 0

    def reset(self) -> None:
        """Count from here on."""
        self.discarded, self.ahead, self.peak = 0, 0, self.away

    @contextmanager
    def layer(self, layer: nn.Module) -> Iterator[None]:
        """Around the forward pass of one layer."""
        before, self._layer, self._parameters = getattr(_active, "saver", None), layer, set()
        _active.saver = self
        self._visit(layer)
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            _active.saver = before
            self._layer = None
            self._offers.clear()

    def _visit(self, layer: nn.Module) -> None:
        """Begin a layer's pass. It is a link of the chain that backward will go back along, unless it begins one."""
        if self.lower is None:
            return
        if len(self._visits) == 2:
            self._visits[0].settle(self.copies)
        before = self._visits[-1] if self._visits else None
        self._visits.append(_Visit(layer, None if before is None or layer in before.layers else before))

    def offer(self, out: Tensor, operation: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        """`out` can be made again. It is held until the end of the layer, so that no other tensor has its address."""
        self._offers[key_of(out)] = out.detach(), _Again(operation, [self._keep(x.detach()) for x in inputs])

    def _pack(self, tensor: Tensor) -> Any:
        found = self._offers.get(key_of(tensor))
        if found is None:
            return self._keep(tensor)
        self.discarded += found[1].count(tensor)
        return found[1]

    def _keep(self, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.itemsize
        if self.lower is None or size < self.least or not size or self._is_parameter(tensor):
            return tensor
        key = key_of(tensor)
        known = self._known.get(key)
        if known is None or known.source.expired():
            self._keys += 1
            self.away += size
            self.peak = max(self.peak, self.away)
            known = self._known[key] = _Away(self, self.lower, self._keys, tensor, self._visits[-1])
        return known

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Or a view of one. Experts under FSDP are a module of their own, gathered when the layer has saved already: an
        unknown address is looked up anew, or their weights would count as activations and be read after they are freed.
        """
        address = tensor.untyped_storage().data_ptr()
        if address not in self._parameters:
            assert self._layer is not None
            own = (fsdp.local(p.data) for p in self._layer.parameters())
            self._parameters = {p.untyped_storage().data_ptr() for p in own}
        return address in self._parameters


def key_of(tensor: Tensor) -> Key:
    """Equal for tensors that are the same bytes, as long as one of them lives."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _unpack(item: Any) -> Tensor:
    return item if isinstance(item, Tensor) else item.get()


class _Again:
    """A tensor that is made again; once, while anybody uses it."""

    def __init__(self, operation: Callable[..., Tensor], inputs: list[Any]) -> None:
        self.operation, self.inputs = operation, inputs
        self._counted = False
        self._live: Callable[[], Tensor | None] = lambda: None

    def count(self, tensor: Tensor) -> int:
        """Its bytes, at the first call."""
        counted, self._counted = self._counted, True
        return 0 if counted else tensor.numel() * tensor.itemsize

    def get(self) -> Tensor:
        found = self._live()
        if found is None:
            with torch.no_grad():
                found = self.operation(*map(_unpack, self.inputs))
            self._live = weakref.ref(found)
        return found


class _Visit:
    """One layer's forward pass: what it sent down, and the pass before it. `layers`: of the chain that ends here."""

    def __init__(self, layer: nn.Module, before: _Visit | None) -> None:
        self.before = before
        self.layers: set[nn.Module] = {layer} if before is None else before.layers | {layer}
        self.sent: list[weakref.ref[_Away]] = []
        self._called = False

    def settle(self, copies: Copies) -> None:
        """Wait until all of it is down."""
        for away in filter(None, (ref() for ref in self.sent)):
            copies.wait(away.down)

    def call_up(self) -> None:
        """Begin to bring it up, last first; once."""
        if not self._called:
            self._called = True
            for away in filter(None, (ref() for ref in reversed(self.sent))):
                away.call_up()


class _Away:
    """A tensor in the lower tier; its place is free again when the graph lets go of it."""

    def __init__(self, saver: Saver, lower: Lower, key: int, tensor: Tensor, visit: _Visit) -> None:
        self.saver, self.lower, self.key, self.visit = saver, lower, key, visit
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.size = tensor.numel() * tensor.itemsize
        self.source = StorageWeakRef(tensor.untyped_storage())
        self.down = saver.copies.write(lower.write, key, tensor.detach())
        self._up: Copy | None = None
        self._held: Tensor | None = None
        self._live: Callable[[], Tensor | None] = lambda: None
        visit.sent.append(weakref.ref(self))

    def call_up(self) -> None:
        """Begin to bring it up, or hold it if it is not yet down."""
        if self._up is None and self._held is None:
            self._held = self._here()
            if self._held is None:
                self._up = self._read()
            self.saver.ahead += 1

    def _here(self) -> Tensor | None:
        """The tensor, while somebody uses it or it is not yet down."""
        live = self._live()
        return self.down.data if live is None else live

    def _read(self) -> Copy:
        data = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.saver.copies.read(self.lower.read, self.key, data)

    def get(self) -> Tensor:
        if self.visit.before is not None:
            self.visit.before.call_up()
        if self.down.is_done:
            self.down.wait()  # raises where it failed
        found = self._here() if self._held is None else self._held
        if found is None:
            coming = self._read() if self._up is None else self._up
            self.saver.copies.wait(coming)
            found = coming.data
            assert found is not None
            self._live = weakref.ref(found)
        self._held = self._up = None
        return found

    def __del__(self) -> None:
        self.saver.copies.drop(self.lower.drop, self.key)
        self.saver.away -= self.size
