"""A decode step, products and sampling on CPU through loops compiled by numba, divided over threads.

A step of a small model has some two hundred and fifty operations of a few microseconds; called from Python one by one
they take as long as the arithmetic. Here a step is one call for each thread (compiled_layers.decode). Products read the
weights as they are stored (compiled_tiles), with the same bits for a row in any company and on any number of threads.

Only compiled_*.py files import numba. Where it is missing, or the processor is another, `available()` is false.

Legend: R rows, T tokens, D model, N heads, K kv heads, H head dim, F feed-forward, L layers, Pg pages, S tokens of a
page, V vocabulary, P positions, I inputs, O outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.kernels.compiled_decode import Pages, workers
from docklands.kernels.first_call import alone_at_first
from docklands.kernels.packed_linear import Product

PARALLEL_FROM = 1 << 21
"""Multiplications of a call from which it is worth dividing over threads."""
PAGE_STEP = 4
"""A page's tokens are to be a multiple of these."""
_together = threading.Lock()  # one team at a time: the threads of two would wait for each other's places


@cache
def _loops() -> Any:
    """(layers, draws, tiles), or None without numba."""
    try:
        from docklands.kernels import compiled_draws, compiled_layers, compiled_tiles
    except ImportError:
        return None
    return compiled_layers, compiled_draws, compiled_tiles


def available(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether these functions take tensors of this kind, here."""
    known = dtype in (torch.float32, torch.bfloat16) and torch.device(device).type == "cpu"
    return known and _loops() is not None and _loops()[2].supported(dtype == torch.bfloat16)


def fits(shapes: Sequence[tuple[int, int]], head_dim: int, dtype: torch.dtype) -> bool:
    """Whether weights [O, I] of these shapes and heads of this size can be computed with."""
    half, tiles = dtype == torch.bfloat16, _loops()[2]
    return all(tiles.fits(i, o, half) for o, i in shapes) and tiles.fits(head_dim, tiles.ACROSS, half)


def _together_run(run: Callable[[int, int], None], work: int) -> None:
    """run(part, parts) on every thread of a team; on this one alone where the work is small or a team is busy."""
    threads = torch.get_num_threads()
    if threads == 1 or work < PARALLEL_FROM or not _together.acquire(blocking=False):
        run(0, 1)
        return
    try:
        rest = [workers(threads - 1).submit(run, part, threads) for part in range(1, threads)]
        run(0, threads)
        for future in rest:
            future.result(timeout=600)
    finally:
        _together.release()


def array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory; bf16 as its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class TiledLinear(Product):
    """x [T, I] -> x @ weight.T + bias [T, O]; the weight is read where it is, so later changes in place are seen."""

    __slots__ = ("_bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.shape, self.floor = weight.contiguous(), tuple(weight.shape), 0
        self._bias = np.zeros(0, np.float32) if bias is None else bias.float().numpy().copy()

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI.contiguous()
        out_TO = x_TI.new_empty(len(x_TI), self.shape[0])
        x, out, weight, linear = array(x_TI), array(out_TO), self.weight.data_ptr(), _loops()[0].linear

        def some(part: int, parts: int) -> None:
            linear((part, parts), x, weight, self._bias, out)

        with alone_at_first(("linear", x.dtype)):
            _together_run(some, len(x_TI) * self.weight.numel())
        return out_TO

    def bias(self) -> np.ndarray:
        """fp32 [O], zeros where there is none."""
        return self._bias if len(self._bias) else np.zeros(self.shape[0], np.float32)


@dataclass(frozen=True)
class Layers:
    """A dense decoder's numbers.

    products   for each layer qkv, o, gate_up, down; heads of qkv in (query, kv head) order, then k, then v
    norms      fp32 [L, 2, D] of attention and feed-forward;  final: fp32 [D]
    qk_norm    fp32 [L, N + K, H], or [L, N + K, 0]
    cos, sin   fp32 [P, H / 2], rounded to the activations' dtype
    """

    products: list[tuple[TiledLinear, ...]]
    norms: np.ndarray
    final: np.ndarray
    qk_norm: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    kv_heads: int
    head_dim: int
    eps: float
    scale: float

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Addresses of the weights [L, 4], biases of qkv and o, fp32 [L, O]."""
        addresses = [[p.weight.data_ptr() for p in products] for products in self.products]
        qkv, o = (np.stack([products[i].bias() for products in self.products]) for i in range(2))
        return np.array(addresses, np.int64), qkv, o


def decode(layers: Layers, x_RD: Tensor, pages: Pages, pools: tuple[Tensor, Tensor]) -> Tensor:
    """Tokens through all layers: one of each sequence, or several, as rows of one table. -> final states [R, D]

    x_RD: embeddings, overwritten. pages, pools (k, v) [L, Pg, K, S, H]: a row's new token is the last of its own; its
    keys and values are written there, and every row sees what rows of the same pages have written before its place.
    """
    rows, inner = x_RD.shape
    qkv, o, gate_up, _ = (product.shape for product in layers.products[0])
    heads = layers.kv_heads, o[1] // (layers.kv_heads * layers.head_dim), layers.head_dim
    normed_RD, q_RKMH, o_RD = torch.empty_like(x_RD), x_RD.new_empty(rows, *heads), x_RD.new_empty(rows, o[1])
    act_RF = x_RD.new_empty(rows, gate_up[0] // 2)
    y_RW = np.empty((rows, max(qkv[0], inner)), np.float32)
    eps = np.float32(layers.eps)
    shape = layers.kv_heads, layers.head_dim, eps, np.float32(layers.scale)
    pointers, qkv_bias, o_bias = layers.tables
    model = (
        shape, pointers, (layers.norms, layers.final, o_bias, eps),
        (qkv_bias, layers.qk_norm, layers.cos, layers.sin),
    )  # fmt: skip
    pool = array(pools[0]), array(pools[1])
    buffers = array(x_RD), array(normed_RD), array(q_RKMH), array(o_RD), array(act_RF), y_RW, pool
    tables = pages.prompt, pages.own, pages.prompt_tokens, pages.own_tokens
    state, run = np.zeros(24, np.int64), _loops()[0].decode  # see compiled_team.STATE
    work = rows * len(pointers) * (qkv[0] * inner + o[0] * o[1] + gate_up[0] * inner * 3 // 2)
    with alone_at_first(("decode", pool[0].dtype)):
        _together_run(lambda part, parts: run((part, parts, state), model, buffers, tables), work)
    return normed_RD


def draw(logits_RV: Tensor, temperature_R: np.ndarray, uniform_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Invert the cumulative distribution of softmax(logits / temperature) at `uniform`; temperature 0: the largest.

    -> (tokens int64 [R], log-probs fp32 [R], NaN where logits are not finite)
    """
    rows, logits, loop = len(temperature_R), array(logits_RV.contiguous()), _loops()[1].draw
    out = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    how = np.ascontiguousarray(temperature_R, np.float64), np.ascontiguousarray(uniform_R, np.float64)

    def some(part: int, parts: int) -> None:
        loop(logits, how, out, rows * part // parts, rows * (part + 1) // parts)

    with alone_at_first(("draw", logits.dtype)):
        _together_run(some, 16 * rows * logits.shape[1])
    return out
