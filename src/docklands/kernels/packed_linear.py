"""Linear layers of a generator: weights that stay the same for many products, prepared once.

On CPU in bfloat16 the weight is reordered into oneDNN's blocked layout, which saves that reorder in every product.
The operators behind it are private to torch: where they are missing or refuse, the plain product is used.

Legend: T rows (tokens), I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts that products are padded to; above the last, multiples of 128."""


@cache
def _operators() -> tuple[Any, Any] | None:
    """(reorder, product) of torch's oneDNN bridge, or None where this build has none that works."""
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        product = torch.ops.mkldnn._linear_pointwise
        weight = torch.ones(8, 8, dtype=torch.bfloat16)
        with torch.inference_mode():
            out = product(weight, reorder(weight, 8), None, "none", [], "")
        return (reorder, product) if bool((out == 8).all()) else None
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return None


class Product:
    """x [T, I] -> [T, O]: a product with a fixed weight, as `row_floor` tries it."""

    __slots__ = ("floor", "shape")

    floor: int
    shape: tuple[int, ...]

    def __call__(self, x_TI: Tensor) -> Tensor:
        raise NotImplementedError


class PackedLinear(Product):
    """x [T, I] -> x @ weight.T + bias [T, O], with the weight [O, I] prepared at construction.

    The result equals `F.linear` up to the order of summation. `weight` is not referenced afterwards when it was
    reordered; otherwise it is used as it is, so later changes in place are seen: build anew after an update.

    floor  fewer rows than these are padded for this product alone (see `row_floor`)
    """

    __slots__ = ("_bias", "_product", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self._bias = bias
        self.floor = 0
        operators = _operators() if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 else None
        self._product = None if operators is None else operators[1]
        self._weight = weight if operators is None else operators[0](weight.contiguous(), 64)

    def __call__(self, x_TI: Tensor) -> Tensor:
        rows = len(x_TI)
        if rows < self.floor:
            return self._multiply(F.pad(x_TI, (0, 0, 0, self.floor - rows)))[:rows]
        return self._multiply(x_TI)

    def _multiply(self, x_TI: Tensor) -> Tensor:
        if self._product is None:
            return F.linear(x_TI, self._weight, self._bias)
        return self._product(x_TI, self._weight, self._bias, "none", [], "")


def bucket(rows: int) -> int:
    """The row count that `rows` rows are padded to: the next bucket."""
    for size in ROW_BUCKETS:
        if rows <= size:
            return size
    return -(-rows // 128) * 128


_floors: dict[tuple[type, tuple[int, ...], torch.dtype, int], int] = {}


def row_floor(linear: Product, dtype: torch.dtype) -> int:
    """The smallest bucket from which on every bucket gives each row the same bits, by trying them. CPU only.

    Matrix libraries choose a blocking by the number of rows, and with it the order of summation. A generator that pads
    to at least this many rows computes a token's logits independently of what else is in the batch. The answer is kept
    per kind of product, shape, dtype and thread count.
    """
    key = (type(linear), linear.shape, dtype, torch.get_num_threads())
    if key not in _floors:
        generator = torch.Generator().manual_seed(0)
        most = ROW_BUCKETS[-1] if linear.shape[0] < 16384 else 128
        x_TI = torch.randn(most, linear.shape[1], generator=generator).to(dtype)
        linear.floor = 0
        whole_TO = linear(x_TI)
        floor = most
        for size in reversed([size for size in ROW_BUCKETS if size < most]):
            if not torch.equal(linear(x_TI[:size].contiguous()), whole_TO[:size]):
                break
            floor = size
        _floors[key] = floor
    return _floors[key]
