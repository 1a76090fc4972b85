"""Decode attention through the compiled kernel, and the choice between it and the paged one.

Legend: R rows of a decode step (padded), N heads, K kv heads, H head dim.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from docklands.kernels import compiled_decode
from docklands.rollout.attention import DecodeAttention, RowPages, regroup, ungroup
from docklands.rollout.kv_cache import PagedCache


class CompiledAttention:
    """One new token for each row against all the pages that the row may see; as DecodeAttention, on CPU."""

    def __init__(self, cache: PagedCache, rows: RowPages, slots: Tensor) -> None:
        self.cache, self._slots = cache, slots
        tables = (rows.prompt, rows.prompt_tokens, rows.own, rows.own_tokens)
        self.pages = compiled_decode.Pages(*(np.ascontiguousarray(table, np.int32) for table in tables))

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        kv_heads = k_TKH.shape[1]
        return ungroup(self.grouped(layer, regroup(q_TNH, kv_heads), k_TKH, v_TKH, scale), kv_heads)

    def latent(self, layer: int, kept_T1C: Tensor) -> bool:
        """True: attend to the latent vectors as they are kept."""
        return True

    def grouped(self, layer: int, q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, scale: float) -> Tensor:
        """With heads in (query, kv head) order, in and out."""
        cache = self.cache
        cache.write(layer, self._slots, k_RKH, v_RKH)
        return compiled_decode.decode_attention(q_RNH, cache.k[layer], cache.v[layer], self.pages, scale)


def decode_attention(
    cache: PagedCache, rows: RowPages, padded_rows: int, heads: int, slots: Tensor
) -> DecodeAttention | CompiledAttention:
    """The fastest that runs where the cache is."""
    pool = cache.k[0]
    if compiled_decode.available(pool.device, pool.dtype):
        return CompiledAttention(cache, rows, slots)
    return DecodeAttention(cache, rows, padded_rows, heads, slots)
