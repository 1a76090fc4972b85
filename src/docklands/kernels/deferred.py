"""Weight gradients made later than the rest of a backward pass: what a zero-bubble pipeline fills its gaps with.

Legend: none.

A linear operation's backward needs two products: the gradient of its input, which the operation before waits for, and
that of its weight, which nobody waits for until the update (arXiv 2401.10241, section 2). While a store is active, the
second is put aside. Biases, norms and embeddings are cheap and not put aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_active = threading.local()


class Store:
    """Weight gradients of one micro-batch's backward pass through one stage, not made yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """make() -> what weight.grad grows by."""
        self._waiting.append((weight, make))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Operations whose forward pass runs in here put their weight gradients aside, into this store."""
        before = getattr(_active, "store", None)
        _active.store = self
        try:
            yield
        finally:
            _active.store = before

    @torch.no_grad()
    def run(self) -> None:
        """Make them, in the order that they came."""
        for weight, make in self._waiting:
            gradient = make()
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._waiting.clear()


def store_for(weight: Tensor) -> tuple[Store, Tensor] | None:
    """Where to put this weight's gradient aside, asked in forward. None: make it in backward. (What is not a parameter
    itself, such as a rounded copy, passes its gradient on at once.)
    """
    store: Store | None = getattr(_active, "store", None)
    return (store, weight) if store is not None and weight.is_leaf and weight.requires_grad else None


def gradient(later: tuple[Store, Tensor] | None, make: Callable[[], Tensor]) -> Tensor | None:
    """What backward returns for the weight: its gradient, or None when that was put aside."""
    if later is None:
        return make()
    store, weight = later
    store.add(weight, make)
    return None
