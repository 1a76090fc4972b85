"""Attention contexts of generation: prompts (packed, written to pages) and decode steps (one token a row).

Legend: T packed tokens, R rows of a decode step (padded), N heads, K kv heads, H head dim, Pg pages, W queries of a
shared page computed together, C partial results of a row (padded), Q all partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from docklands import kernels
from docklands.kernels.compiled_decode import Pages
from docklands.kernels.paged_attention import merge_pages, page_attention
from docklands.rollout.kv_cache import NULL_PAGE, PagedCache

WIDTH = 8  # always: products of fewer rows may be summed in another order
PADDING = 16  # see merge_pages


def regroup(q_TNH: Tensor, kv_heads: int) -> Tensor:
    """Heads from (kv head, query of it) order to (query, kv head) order, in which pages take them."""
    return q_TNH.unflatten(1, (kv_heads, -1)).transpose(1, 2).flatten(1, 2)


def ungroup(o_TNH: Tensor, kv_heads: int) -> Tensor:
    """The inverse of `regroup`."""
    return o_TNH.unflatten(1, (-1, kv_heads)).transpose(1, 2).flatten(1, 2)


class PromptAttention:
    """Causal attention inside each prompt of a pack; keys and values go to the cache."""

    def __init__(self, cache: PagedCache, slots: Tensor, seqlens: list[int]) -> None:
        self.cache, self._slots, self._seqlens = cache, slots, seqlens

    @cached_property
    def pages(self) -> Pages:
        """Every token as a sequence that ends there; padding, which has no page, left out."""
        size, heads = self.cache.page_tokens, self.cache.k[0].shape[1]
        page_T = self._slots.view(-1, heads)[:, 0].numpy() // (heads * size)
        real, start = int((page_T != NULL_PAGE).sum()), 0
        own = np.full((real, -(-max(self._seqlens) // size)), -1, np.int32)
        tokens = np.empty(real, np.int32)
        for length in self._seqlens:
            part, start = slice(start, start + length), start + length
            if part.start < real:
                mine = page_T[part][::size]
                own[part, : len(mine)], tokens[part] = mine, np.arange(1, length + 1)
        return Pages(np.full((real, 1), -1, np.int32), np.zeros(real, np.int32), own, tokens)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        if not self.cache.latent:
            self.cache.write(layer, self._slots, k_TKH, v_TKH)
        return kernels.packed_attention(q_TNH, k_TKH, v_TKH, self._seqlens, scale)

    def latent(self, layer: int, kept_T1C: Tensor) -> bool:
        """Keep the latent vectors. False: attend to the keys and values that they expand to."""
        self.cache.write(layer, self._slots, kept_T1C, kept_T1C)
        return False

    def grouped(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        """The same with heads in (query, kv head) order, in and out."""
        kv_heads = k_TKH.shape[1]
        return regroup(self(layer, ungroup(q_TNH, kv_heads), k_TKH, v_TKH, scale), kv_heads)


@dataclass(frozen=True)
class RowPages:
    """Where the rows of a step have their tokens; arrays over the real rows, pages padded with -1.

    own       [rows, n] pages of the sample's own tokens, in order
    prompt    [rows, n] pages of its prompt, in order
    place     [rows] which of its prompt's samples it is
    own_tokens, prompt_tokens   [rows] tokens there, the new one included
    """

    own: np.ndarray
    prompt: np.ndarray
    place: np.ndarray
    own_tokens: np.ndarray
    prompt_tokens: np.ndarray


class DecodeAttention:
    """One new token for each row against all the pages that the row may see."""

    def __init__(self, cache: PagedCache, rows: RowPages, padded_rows: int, heads: int, slots: Tensor) -> None:
        self._cache, self._slots = cache, slots
        device = cache.mask_PgS.device
        chunks, shared = int(rows.place.max(initial=0)) // WIDTH + 1, cache.pages - cache.low
        owners = np.zeros((chunks, shared, WIDTH), np.int64)
        partial = shared_partials(rows, owners, cache.low)
        base = owners.size
        own = np.zeros(cache.high, np.int64)
        real = rows.own >= 0
        own[rows.own[real]] = np.nonzero(real)[0]
        found = np.concatenate([partial, np.where(real, rows.own + base, -1)], 1)
        found = np.take_along_axis(found, np.argsort(found < 0, axis=1, kind="stable"), 1)
        used = found[:, : int((found >= 0).sum(1).max(initial=0))]  # left-aligned: a sum's order is the row's own
        columns = -(-max(used.shape[1], 1) // PADDING) * PADDING
        index_RC = np.full((padded_rows, columns), base + NULL_PAGE, np.int64)
        index_RC[: len(used), : used.shape[1]] = np.where(used >= 0, used, base + NULL_PAGE)
        index_RNC = index_RC[:, None, :] * heads + np.arange(heads)[None, :, None]
        self._owners = [torch.from_numpy(owners[c].reshape(-1)).to(device) for c in range(chunks)]
        self._own = torch.from_numpy(own).to(device)
        self._index = torch.from_numpy(index_RNC).to(device)
        self._offsets = torch.arange(0, index_RNC.size, columns, device=device)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        kv_heads = k_TKH.shape[1]
        return ungroup(self.grouped(layer, regroup(q_TNH, kv_heads), k_TKH, v_TKH, scale), kv_heads)

    def latent(self, layer: int, kept_T1C: Tensor) -> bool:
        """True: attend to the latent vectors as they are kept."""
        return True

    def grouped(self, layer: int, q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, scale: float) -> Tensor:
        """With heads in (query, kv head) order, in and out."""
        cache, (_, heads, size) = self._cache, q_RNH.shape
        cache.write(layer, self._slots, k_RKH, v_RKH)
        k, v, mask, low, high = cache.k[layer], cache.v[layer], cache.mask_PgS, cache.low, cache.high
        kv_heads, flat = k.shape[1], q_RNH.flatten(1)
        outs, lses = [], []
        for owners in self._owners:
            q = flat.index_select(0, owners).view(-1, WIDTH * heads // kv_heads, kv_heads, size)
            o, lse = page_attention(q, k[low:], v[low:], mask[low:], scale)
            outs.append(o.view(-1, size))
            lses.append(lse.view(-1))
        q = flat.index_select(0, self._own).view(-1, heads // kv_heads, kv_heads, size)
        o, lse = page_attention(q, k[:high], v[:high], mask[:high], scale)
        o_QH, lse_Q = torch.cat([*outs, o.view(-1, size)]), torch.cat([*lses, lse.view(-1)])
        return merge_pages(o_QH, lse_Q, self._index, self._offsets)


def shared_partials(rows: RowPages, owners: np.ndarray, low: int) -> np.ndarray:
    """Fill owners [chunks, shared pages, W] with rows; -> partial result of each prompt page [rows, n], -1 none."""
    _, shared, width = owners.shape
    row, column = np.nonzero(rows.prompt >= 0)
    chunk, lane = np.divmod(rows.place[row], width)
    page = rows.prompt[row, column] - low
    owners[chunk, page, lane] = row
    partial = np.full(rows.prompt.shape, -1, np.int64)
    partial[row, column] = (chunk * shared + page) * width + lane
    return partial
