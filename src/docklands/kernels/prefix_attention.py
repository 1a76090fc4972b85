"""Attention over sequences that share prefixes, packed as [prefix][suffix 1][suffix 2]...: a prefix is computed once.

Legend: T packed tokens, N heads, K kv heads, H head dim; a tile has R rows of L queries, each against S = C + L keys.

A prefix token attends causally to its prefix; a suffix token to the whole prefix and causally to its own suffix. Every
sequence is cut into *rows*: at most CHUNK queries, a context that all of them see, then their own tokens causally. Rows
of like size form a tile, and a tile is one dense attention call with a mask. So keys that no query of a row may see are
not computed (beyond the padding inside a tile), short groups take a few calls in all, and long sequences stay flash.

On the CPU one autograd function keeps q, k, v, o and the log-sum-exp, and its backward runs in fp32: the bf16 backward
of the CPU flash kernel takes 4 to 5 times as long. On other devices, in half precision, the whole pack is one call of
the device's variable-length attention: a suffix is a sequence whose keys are its prefix and itself, gathered. In fp32
the tiles go through scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from docklands import kernels
from docklands.errors import TrainError

Group = tuple[int, Sequence[int]]
"""(prefix length, suffix lengths) in packed order. A sequence that shares nothing is a suffix after a prefix of 0."""

CHUNK = 256
TILE_SCORES = 4_194_304  # R * L * S of a tile
TILE_KEYS = 65_536  # R * S of a tile

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Row:
    """`length` queries from `start`; they see the `context` segments (start, length) whole, and themselves causally."""

    start: int
    length: int
    context: tuple[tuple[int, int], ...]

    @property
    def context_length(self) -> int:
        return sum(length for _, length in self.context)


class Tile:
    """Rows of like size, padded to one: indices into the pack, and who sees whom."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        queries, context = max(r.length for r in rows), max(r.context_length for r in rows)
        query_RL = np.empty((len(rows), queries), np.int64)
        key_RS = np.empty((len(rows), context + queries), np.int64)
        real_RL, real_RS = np.zeros(query_RL.shape, bool), np.zeros(key_RS.shape, bool)
        for i, row in enumerate(rows):
            query_RL[i], key_RS[i] = row.start, row.start  # padding points at a token of the row's own
            query_RL[i, : row.length] = key_RS[i, context : context + row.length] = row.start + np.arange(row.length)
            real_RL[i, : row.length] = real_RS[i, context : context + row.length] = True
            at = 0
            for start, length in row.context:
                key_RS[i, at : at + length] = start + np.arange(length)
                at += length
            real_RS[i, :at] = True
        self.shape = (len(rows), queries, context + queries)
        self.query_M = torch.from_numpy(query_RL.ravel()).to(device)
        self.key_M = torch.from_numpy(key_RS.ravel()).to(device)
        self.padded = not real_RL.all()
        self.real_RL = torch.from_numpy(real_RL).to(device)
        self.out_M = torch.from_numpy(np.flatnonzero(real_RL)).to(device)  # real queries among the R * L
        self.token_M = self.query_M[self.out_M]  # and which token of the pack each is
        self.causal = context == 0 and real_RS.shape[1] == queries
        self._seen = self._who_sees(real_RL, real_RS, context)
        self._bias: dict[torch.dtype, Tensor] = {}

    def _who_sees(self, real_RL: np.ndarray, real_RS: np.ndarray, context: int) -> Tensor | None:
        if self.causal:  # padding stands after every real query of its row: the causal mask hides it
            return None
        rows, queries, keys = self.shape
        seen_RLS = np.broadcast_to(real_RS[:, None], (rows, queries, keys)).copy()
        seen_RLS[:, :, context:] &= np.tri(queries, dtype=bool)
        seen_RLS[:, :, context] |= ~real_RL  # a padding query sees one key, so that its softmax is finite
        return torch.from_numpy(seen_RLS[:, None]).to(self.query_M.device)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [R, 1, L, S]: 0 where seen, -inf where not. None: plain causal."""
        if self._seen is None:
            return None
        if dtype not in self._bias:
            zero = torch.zeros(self._seen.shape, dtype=dtype, device=self._seen.device)
            self._bias[dtype] = zero.masked_fill_(~self._seen, -torch.inf)
        return self._bias[dtype]

    def queries(self, x_TNH: Tensor) -> Tensor:
        """-> [R, N, L, H]"""
        rows, queries, _ = self.shape
        return x_TNH[self.query_M].unflatten(0, (rows, queries)).transpose(1, 2)

    def keys(self, x_TKH: Tensor) -> Tensor:
        """-> [R, K, S, H]"""
        rows, _, keys = self.shape
        return x_TKH[self.key_M].unflatten(0, (rows, keys)).transpose(1, 2)


class PrefixAttention:
    """Who attends to whom in one pack, for all layers and both passes: an AttentionContext.

    Built once per micro-batch. Calling it gives o_TNH. `portable`: take the path of other devices on the CPU too.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device | str = "cpu", portable: bool = False) -> None:
        self.groups = groups
        self.device = torch.device(device)
        self.tokens = sum(prefix + sum(suffixes) for prefix, suffixes in groups)
        self.portable = portable or self.device.type != "cpu"

    @cached_property
    def tiles(self) -> list[Tile]:
        """The pack as dense calls."""
        return [Tile(rows, self.device) for rows in tiles_of(rows_of(self.groups))]

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """The pack as sequences: queries and keys of each."""
        pairs = [(n, n + (prefix if i else 0)) for prefix, suffixes in self.groups for i, n in each(prefix, suffixes)]
        return [queries for queries, _ in pairs], [keys for _, keys in pairs]

    @cached_property
    def key_S(self) -> Tensor | None:
        """The token of each of those keys; None: keys are the pack itself."""
        pieces, start = [np.empty(0, np.int64)], 0
        for prefix, suffixes in self.groups:
            first = start
            for i, length in each(prefix, suffixes):
                shared = np.arange(first, first + prefix) if i else np.empty(0, np.int64)
                pieces += [shared, np.arange(start, start + length)]
                start += length
        return None if self.lengths[0] == self.lengths[1] else torch.from_numpy(np.concatenate(pieces)).to(self.device)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        if len(q_TNH) != self.tokens:
            raise TrainError(f"prefix attention: {self.tokens} tokens are laid out, {len(q_TNH)} were given")
        if self.device.type != "cpu" and q_TNH.dtype in (torch.float16, torch.bfloat16):
            return self.varlen(q_TNH, k_TKH, v_TKH, scale)
        if self.portable:
            return self._portable(q_TNH, k_TKH, v_TKH, scale)
        return _CpuTiles.apply(q_TNH, k_TKH, v_TKH, self.tiles, scale)  # type: ignore[return-value]

    def varlen(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        """One call of kernels.varlen_attention."""
        if self.key_S is not None:
            k_TKH, v_TKH = k_TKH[self.key_S], v_TKH[self.key_S]
        return kernels.varlen_attention(q_TNH, k_TKH, v_TKH, self.lengths, scale)

    def _portable(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        outs, tokens = [], []
        grouped = q_TNH.shape[1] != k_TKH.shape[1]
        for tile in self.tiles:
            o_RNLH = F.scaled_dot_product_attention(
                tile.queries(q_TNH),
                tile.keys(k_TKH),
                tile.keys(v_TKH),
                attn_mask=tile.bias(q_TNH.dtype),
                is_causal=tile.causal,
                scale=scale,
                enable_gqa=grouped,
            )
            outs.append(o_RNLH.transpose(1, 2).flatten(0, 1)[tile.out_M])
            tokens.append(tile.token_M)
        if not outs:
            return torch.empty_like(q_TNH)
        return torch.cat(outs)[torch.argsort(torch.cat(tokens))]


def each(prefix: int, suffixes: Sequence[int]) -> Sequence[tuple[int, int]]:
    """(0, length of the prefix), (1, length of the first suffix), ...; without the empty ones."""
    return [(i, length) for i, length in enumerate([prefix, *suffixes]) if length]


def prefix_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, groups: Sequence[Group], scale: float) -> Tensor:
    """One call of `PrefixAttention` over `groups`. -> o_TNH."""
    return PrefixAttention(groups, q_TNH.device)(0, q_TNH, k_TKH, v_TKH, scale)


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """All rows of the pack; long sequences in chunks, each seeing the chunks before it."""
    rows: list[Row] = []
    start = 0

    def cut(first: int, length: int, shared: tuple[tuple[int, int], ...]) -> None:
        for i in range(0, length, CHUNK):
            own = ((first, i),) if i else ()
            rows.append(Row(first + i, min(CHUNK, length - i), shared + own))

    for prefix, suffixes in groups:
        cut(start, prefix, ())
        shared = ((start, prefix),) if prefix else ()
        start += prefix
        for length in suffixes:
            cut(start, length, shared)
            start += length
    return rows


def tiles_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of like size together: lengths of one band, sizes of a tile bounded."""
    tiles: list[list[Row]] = []
    size, queries, keys = (0, 0), 0, 0
    for row in sorted(rows, key=lambda r: (band(r.length, 6, 1.3), band(r.context_length, 16, 1.5), r.length, r.start)):
        row_size = band(row.length, 6, 1.3), band(row.context_length, 16, 1.5)
        if row_size == size and tiles:
            count = len(tiles[-1]) + 1
            wide, deep = max(queries, row.length), max(keys, row.context_length)
            if count * wide * (wide + deep) <= TILE_SCORES and count * (wide + deep) <= TILE_KEYS:
                tiles[-1].append(row)
                queries, keys = wide, deep
                continue
        tiles.append([row])
        size, queries, keys = row_size, row.length, row.context_length
    return tiles


def band(length: int, step: int, ratio: float) -> int:
    """Lengths of one band may be padded to each other: 0, then multiples of `step` up to 3 of them, then by `ratio`."""
    if length <= 3 * step:
        return -(-length // step)
    return 4 + int(np.log(length / (3 * step)) / np.log(ratio))


class _CpuTiles(torch.autograd.Function):
    """Flash attention per tile. Saves per-token tensors only; gathers again in backward."""

    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, tiles: list[Tile], scale: float) -> Tensor:
        o_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        lses = []
        for tile in tiles:
            o_RNLH, lse_RNL = _flash(
                tile.queries(q_TNH),
                tile.keys(k_TKH),
                tile.keys(v_TKH),
                0.0,
                tile.causal,
                attn_mask=tile.bias(q_TNH.dtype),
                scale=scale,
            )
            o_MNH = o_RNLH.transpose(1, 2).flatten(0, 1)
            o_TNH.index_copy_(0, tile.token_M, o_MNH[tile.out_M] if tile.padded else o_MNH)
            lses.append(lse_RNL)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, o_TNH, *lses)
        ctx.plan = tiles, scale
        return o_TNH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_TNH, k_TKH, v_TKH, o_TNH, *lses = ctx.saved_tensors
        tiles, scale = ctx.plan
        grad_TNH = grads[0].float()
        wide = [x.float() for x in (q_TNH, k_TKH, v_TKH, o_TNH)]
        dq_TNH = torch.empty_like(wide[0])
        dk_TKH, dv_TKH = torch.zeros_like(wide[1]), torch.zeros_like(wide[2])
        for tile, lse_RNL in zip(tiles, lses):
            g_RNLH = tile.queries(grad_TNH)
            if tile.padded:  # a padding query repeats a real token: its gradient must not count twice
                g_RNLH = g_RNLH * tile.real_RL[:, None, :, None]
            dq, dk, dv = _flash_backward(
                g_RNLH,
                tile.queries(wide[0]),
                tile.keys(wide[1]),
                tile.keys(wide[2]),
                tile.queries(wide[3]),
                lse_RNL,
                0.0,
                tile.causal,
                attn_mask=tile.bias(torch.float32),
                scale=scale,
            )
            dq_MNH = dq.transpose(1, 2).flatten(0, 1)
            dq_TNH.index_copy_(0, tile.token_M, dq_MNH[tile.out_M] if tile.padded else dq_MNH)
            dk_TKH.index_add_(0, tile.key_M, dk.transpose(1, 2).flatten(0, 1))
            dv_TKH.index_add_(0, tile.key_M, dv.transpose(1, 2).flatten(0, 1))
        return dq_TNH.to(q_TNH.dtype), dk_TKH.to(k_TKH.dtype), dv_TKH.to(v_TKH.dtype), None, None
