"""The model as the generator runs it: the same parameters, fewer operations between them.

`ModelDecoder` calls the modules themselves. `DenseDecoder` is the CPU's path: a decode step of a small model costs as
much in calls as in arithmetic, so the blocks are written out over prepared weights: reordered for oneDNN in bfloat16,
query heads in the order in which the paged cache takes them, q and k rotated together. A test holds the two together.

Legend: T tokens, D model, V vocabulary, N heads, K kv heads, H head dim, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from docklands.kernels import compiled_step
from docklands.kernels.compiled_step import PAGE_STEP, TiledLinear
from docklands.kernels.packed_linear import PackedLinear, Product, bucket, row_floor
from docklands.models import CausalLM
from docklands.models.blocks import Block, Linear, inverse_frequencies, rotary_factor, rotary_tables
from docklands.models.lora import Pair
from docklands.models.mla import Mla, per_head
from docklands.models.moe import Router
from docklands.models.routing import Routes
from docklands.rollout.attention import DecodeAttention, PromptAttention
from docklands.rollout.compiled import CompiledAttention

Context = PromptAttention | DecodeAttention | CompiledAttention


class Decoder(Protocol):
    """Hidden states and logits of the current weights; `rows` says what a batch of rows is padded to.

    routes  keeps the router choices of this pass
    """

    def hidden(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Context, routes: Routes | None = None
    ) -> Tensor: ...

    def logits(self, hidden_TD: Tensor) -> Tensor: ...

    def rows(self, rows: int) -> int: ...

    @property
    def device(self) -> torch.device: ...


class ModelDecoder:
    """The modules as they are: every device, every architecture."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._floor = (0, 0)

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attend: Context, routes: Routes | None = None) -> Tensor:
        return self._model(token_ids_T, positions_T, attend, routes=routes)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self._model.logits(hidden_TD)

    @property
    def device(self) -> torch.device:
        return self._model.head_weight.device

    def rows(self, rows: int) -> int:
        """The next bucket; on CPU at least the one from which on all products give a row the same bits."""
        threads = torch.get_num_threads()
        if self._model.head_weight.device.type == "cpu" and self._floor[0] != threads:
            self._floor = threads, self.find_floor()
        return bucket(max(rows, self._floor[1]))

    def find_floor(self) -> int:
        """The row count from which on all products give a row the same bits."""
        products = {(type(p), p.shape, dtype): p for p, dtype in _products(self._model)}
        return max(row_floor(p, dtype) for (_, _, dtype), p in products.items())


class _Plain(Product):
    """A module's product, as `row_floor` tries it."""

    __slots__ = ("_weight",)

    def __init__(self, weight_OI: Tensor) -> None:
        self.shape, self._weight = tuple(weight_OI.shape), weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self._weight)


class _PerHead(Product):
    """Latent attention's product of every head with its own matrix."""

    __slots__ = ("_weight",)

    def __init__(self, weight_NIO: Tensor) -> None:
        heads, inputs, outputs = weight_NIO.shape
        self.shape, self._weight = (heads * outputs, heads * inputs), weight_NIO

    def __call__(self, x_TI: Tensor) -> Tensor:
        return per_head(x_TI.unflatten(1, (len(self._weight), -1)), self._weight).flatten(1)


def _products(model: CausalLM) -> Iterator[tuple[Product, torch.dtype]]:
    """Every product whose rows are tokens, with the dtype of those; experts pad themselves and are left out."""
    dtype = model.head_weight.dtype
    yield _Plain(model.head_weight.detach()), dtype
    for module in model.modules():
        if isinstance(module, Linear):
            yield _Plain(module.weight.detach()), dtype
        elif isinstance(module, Pair) and module.a.dim() == 2:
            yield _Plain(module.a.detach()), dtype
            yield _Plain(module.b.detach()), dtype
        elif isinstance(module, Router):
            yield _Plain(module.weight.detach().float()), torch.float32
        elif isinstance(module, Mla):
            up_NUR, out_NWR = module.up_projections(dtype)
            yield _PerHead(up_NUR.detach()), dtype
            yield _PerHead(out_NWR.detach().transpose(1, 2)), dtype


@dataclass(frozen=True)
class _Layer:
    attn_norm: Tensor
    qkv: PackedLinear | TiledLinear
    qk_norm: Tensor | None  # [N + K, H]
    o: PackedLinear | TiledLinear
    mlp_norm: Tensor
    gate_up: PackedLinear | TiledLinear
    down: PackedLinear | TiledLinear
    scale: float


class DenseDecoder:
    """A dense decoder on CPU. Made from the model's weights; to be made again after they change."""

    product: type[PackedLinear] | type[TiledLinear] = PackedLinear

    def __init__(self, model: CausalLM) -> None:
        self._model, self._config = model, model.config
        self._embed = model.embed.weight.detach()
        self._final_norm = model.final_norm.weight.detach()
        self._layers = [self._prepare(layer) for layer in model.layers if isinstance(layer, Block)]
        self._head = self.product(model.head_weight.detach())
        self._inverse = inverse_frequencies(self._config)
        self._cos, self._sin = self._rotary(256)
        self._threads = 0

    def _prepare(self, block: Block) -> _Layer:
        c = self._config
        order = torch.arange(c.num_heads).view(c.num_kv_heads, -1).t().reshape(-1)  # (query, kv head)
        rows = torch.cat([order, torch.arange(c.num_heads, c.num_heads + 2 * c.num_kv_heads)])
        weight, bias = block.qkv.weight.detach(), block.qkv.bias
        weight = weight.unflatten(0, (-1, c.head_dim))[rows].flatten(0, 1)
        if bias is not None:
            bias = bias.detach().unflatten(0, (-1, c.head_dim))[rows].flatten()
        o = block.o.weight.detach().unflatten(1, (-1, c.head_dim))[:, order].flatten(1)
        qk_norm = None
        if block.q_norm is not None and block.k_norm is not None:
            q, k = block.q_norm.weight.detach(), block.k_norm.weight.detach()
            qk_norm = torch.cat([q.expand(c.num_heads, -1), k.expand(c.num_kv_heads, -1)])
        return _Layer(
            block.attn_norm.weight.detach(),
            self.product(weight, bias),
            qk_norm,
            self.product(o, None if block.o.bias is None else block.o.bias.detach()),
            block.mlp_norm.weight.detach(),
            self.product(block.gate_up.weight.detach()),
            self.product(block.down.weight.detach()),
            block.scale,
        )

    def _rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, H] in the compute dtype, the sine with the sign of its half."""
        cos, sin = rotary_tables(self._inverse, torch.arange(positions), rotary_factor(self._config))
        half = self._config.head_dim // 2
        sin[:, :half].neg_()
        dtype = self._embed.dtype
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def rows(self, rows: int) -> int:
        """The next bucket; a product pads further where a row would have other bits in other company."""
        threads = torch.get_num_threads()
        if self._threads != threads:
            self._threads = threads
            products = [p for layer in self._layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
            for linear in (*products, self._head):
                linear.floor = row_floor(linear, self._embed.dtype)
        return bucket(rows)

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attend: Context, routes: Routes | None = None) -> Tensor:
        """-> hidden_TD after the final norm. No layer has experts: `routes` stays empty."""
        c, size, eps = self._config, self._config.head_dim, self._config.rms_eps
        last = int(positions_T.max())
        if last >= len(self._cos):
            self._cos, self._sin = self._rotary(max(2 * len(self._cos), last + 1))
        cos, sin = self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)
        turned, width = c.num_heads + c.num_kv_heads, (c.hidden_size,)
        x_TD = F.embedding(token_ids_T, self._embed)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(F.rms_norm(x_TD, width, layer.attn_norm, eps)).unflatten(-1, (-1, size))
            qk, v = qkv[:, :turned], qkv[:, turned:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (size,), None, eps) * layer.qk_norm
            swapped = qk.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
            qk = torch.mul(qk, cos).addcmul_(swapped, sin)
            o = attend.grouped(index, qk[:, : c.num_heads], qk[:, c.num_heads :], v, layer.scale)
            x_TD = x_TD + layer.o(o.flatten(1))
            gate, up = layer.gate_up(F.rms_norm(x_TD, width, layer.mlp_norm, eps)).chunk(2, -1)
            x_TD = x_TD + layer.down(F.silu(gate).mul_(up))
        return F.rms_norm(x_TD, width, self._final_norm, eps)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """-> logits_TV in the compute dtype."""
        return self._head(hidden_TD)

    @property
    def device(self) -> torch.device:
        return self._embed.device


class CompiledDecoder(DenseDecoder):
    """A dense decoder whose decode steps are one compiled call, and whose products take any number of rows.

    Weights are read where they are: nothing is packed, and a row is never padded.
    """

    product = TiledLinear

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self._tables: compiled_step.Layers | None = None

    @staticmethod
    def runs(model: CausalLM) -> bool:
        """Whether it can run a dense model here."""
        c, weight = model.config, model.head_weight
        shapes = [(p.shape[0], p.shape[1]) for p in model.parameters() if p.dim() == 2]
        known = compiled_step.available(weight.device, weight.dtype)
        return known and compiled_step.fits(shapes, c.head_dim, weight.dtype)

    def rows(self, rows: int) -> int:
        """As many as there are."""
        return rows

    def _layers_to(self, position: int) -> compiled_step.Layers:
        """The tables, with rotary angles up to a position."""
        if self._tables is None or position >= len(self._tables.cos):
            c, layers = self._config, self._layers
            cos, sin = (x[:, 0].float().numpy() for x in self._rotary(2 * position + 256))
            half, none = c.head_dim // 2, torch.zeros(c.num_heads + c.num_kv_heads, 0)
            self._tables = compiled_step.Layers(
                [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in layers],  # type: ignore[misc]
                np.stack([torch.stack([x.attn_norm, x.mlp_norm]).float().numpy() for x in layers]),
                self._final_norm.float().numpy().copy(),
                np.stack([(none if x.qk_norm is None else x.qk_norm).float().numpy() for x in layers]),
                np.ascontiguousarray(cos[:, :half]),
                np.ascontiguousarray(sin[:, half:]),
                c.num_kv_heads, c.head_dim, c.rms_eps, layers[0].scale,
            )  # fmt: skip
        return self._tables

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attend: Context, routes: Routes | None = None) -> Tensor:
        """See DenseDecoder; real rows only, where the cache is there."""
        if not isinstance(attend, PromptAttention | CompiledAttention) or attend.cache.page_tokens % PAGE_STEP:
            return super().hidden(token_ids_T, positions_T, attend, routes)
        x_RD = F.embedding(token_ids_T[: len(attend.pages.own)], self._embed)
        layers = self._layers_to(int(positions_T.max()))
        return compiled_step.decode(layers, x_RD, attend.pages, attend.cache.pools)


def decoder_for(model: CausalLM) -> Decoder:
    """The fastest decoder that can run this model where it is."""
    dense = model.config.lora is None and all(type(layer) is Block for layer in model.layers)
    if model.embed.weight.device.type != "cpu" or not dense:
        return ModelDecoder(model)
    return CompiledDecoder(model) if CompiledDecoder.runs(model) else DenseDecoder(model)
