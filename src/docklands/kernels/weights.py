"""Copies of weights in the compute dtype, for training with fp32 masters.

The copies live as long as a block that the engine opens around the micro-batches of one update, so that none can be
stale: a copy made under one weight version and read under the next is a silent error in this kind of system.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_Casts = dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]]
_casts: contextvars.ContextVar[_Casts | None] = contextvars.ContextVar("weight_casts", default=None)


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Inside the block, each weight is cast to the compute dtype once, not once per micro-batch.

    A weight that is changed in place inside the block is cast again (its version counter tells). Changes through
    `.data` are not counted: leave the block first. Blocks nest: the outermost one owns the copies.
    """
    if _casts.get() is not None:
        yield
        return
    token = _casts.set({})
    try:
        yield
    finally:
        _casts.reset(token)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`, without a gradient path; `weight` itself when it has that dtype already."""
    weight = weight.detach()
    if weight.dtype == dtype:
        return weight
    casts = _casts.get()
    if casts is None:
        return weight.to(dtype)
    key = (weight.data_ptr(), dtype)
    kept = casts.get(key)
    if kept is not None and kept[1] == weight._version and kept[0].shape == weight.shape:
        return kept[2]
    copy = weight.to(dtype)
    casts[key] = (weight, weight._version, copy)  # the first keeps the storage alive: its address stays unique
    return copy
