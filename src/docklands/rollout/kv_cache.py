"""A paged KV cache: pages, reference counts, and a pool that grows from both ends.

Pages of shared prompts are taken from the top of the pool, pages of single samples from the bottom, so that each kind
is a dense range that attention reads in place (kernels.paged_attention). A sample's own tokens begin on a page of their
own: a shared page is never written after its prefill, and copy-on-write has nothing to copy.

Legend: Pg pages, S tokens of a page, K kv heads, H head dim, L layers, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from docklands.errors import RolloutError
from docklands.kernels.paged_attention import MASKED
from docklands.models import ModelConfig

NULL_PAGE = 0


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros; on CPU pages of memory are committed at first touch only, so capacity costs nothing until it is used."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


class PagedCache:
    """Keys, values and validity of every page, and who holds it.

    pools      keys and values, [L, Pg, K, S, H]; of latent attention one and the same, with K = 1
    k, v       the layers of these, [Pg, K, S, H]
    mask_PgS   fp32: 0 where a token is, MASKED elsewhere; the same for all layers
    refcount   holders of each page; 0: free. Page 0 is never handed out: padding rows write there.
    """

    def __init__(self, config: ModelConfig, pages: int, page_tokens: int, dtype: torch.dtype, device: str) -> None:
        if pages < 2:
            raise RolloutError(f"KV cache of {pages} pages holds nothing", "raise rollout.kv_cache_tokens")
        self.pages, self.page_tokens = pages, page_tokens
        heads, size = config.cache_shape
        self.latent = config.mla is not None
        shape = (config.num_layers, pages, heads, page_tokens, size)
        k = lazy_zeros(shape, dtype, device)
        self.pools = (k, k if self.latent else lazy_zeros(shape, dtype, device))
        self.k = list(k.unbind())
        self.v = self.k if self.latent else list(self.pools[1].unbind())
        self.mask_PgS = torch.full((pages, page_tokens), MASKED, device=device)
        self.refcount = np.zeros(pages, np.int32)
        self.refcount[NULL_PAGE] = 1
        self.high = 1  # one past the last page in use at the bottom
        self.low = pages  # the first page in use at the top
        self.peak = 0
        self._is_top = np.zeros(pages, bool)
        self._head = torch.arange(heads, device=device)[:, None] * page_tokens

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return int(self.pages - np.count_nonzero(self.refcount))

    @property
    def used(self) -> int:
        """Pages somebody holds, the null page left out."""
        return self.pages - self.free - 1

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill."""
        return -(-tokens // self.page_tokens)

    def take(self, count: int, *, top: bool) -> np.ndarray:
        """`count` free pages with one reference each, int64; RolloutError when there are fewer."""
        free = np.flatnonzero(self.refcount == 0)
        if len(free) < count:
            raise RolloutError(f"{count} pages asked of a KV cache with {len(free)} free ones")
        found = free[len(free) - count :] if top else free[:count]
        self.refcount[found] = 1
        self._is_top[found] = top
        self.peak = max(self.peak, self.used)
        self._bounds()
        return found

    def hold(self, pages: np.ndarray) -> None:
        """One more reference on each page."""
        self.refcount[pages] += 1

    @torch.inference_mode()
    def release(self, pages: np.ndarray) -> None:
        """One reference less on each (distinct) page; those without any become free and lose their tokens."""
        self.refcount[pages] -= 1
        if (self.refcount[pages] < 0).any():
            raise RolloutError(f"KV-cache pages {pages[self.refcount[pages] < 0][:8].tolist()} released twice")
        gone = pages[self.refcount[pages] == 0]
        if len(gone):
            self.mask_PgS[torch.from_numpy(gone)] = MASKED
            self._bounds()

    def _bounds(self) -> None:
        bottom = np.flatnonzero((self.refcount > 0) & ~self._is_top)
        top = np.flatnonzero((self.refcount > 0) & self._is_top)
        self.high = int(bottom[-1]) + 1
        self.low = int(top[0]) if len(top) else self.pages

    def compact(self) -> dict[int, int]:
        """Move bottom pages down into holes once fewer than half of the range is in use. -> old page -> new page."""
        bottom = np.flatnonzero((self.refcount > 0) & ~self._is_top)
        if self.high <= 16 or 2 * len(bottom) > self.high:
            return {}
        holes = np.flatnonzero(self.refcount[: len(bottom)] == 0)
        movers = bottom[len(bottom) - len(holes) :]
        source, target = torch.from_numpy(movers), torch.from_numpy(holes)
        for pool in (*self.k, *(() if self.latent else self.v), self.mask_PgS):
            pool[target] = pool[source]
        self.mask_PgS[source] = MASKED
        self.refcount[holes], self.refcount[movers] = self.refcount[movers], 0
        self._is_top[holes] = False
        self._bounds()
        return dict(zip(movers.tolist(), holes.tolist()))

    def slots(self, pages_T: np.ndarray, offsets_T: np.ndarray) -> Tensor:
        """Flat index [T * K] of tokens in a layer's [Pg * K * S] vectors of H numbers."""
        heads, size = self.k[0].shape[1], self.page_tokens
        base_T = torch.from_numpy(pages_T * (heads * size) + offsets_T).to(self._head.device)
        return (base_T[:, None] + self._head[:, 0]).view(-1)

    def write(self, layer: int, slots: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Store keys and values of tokens at `slots`."""
        both = ((self.k[layer], k_TKH), (self.v[layer], v_TKH))
        for pool, new in both[: 1 if self.latent else 2]:
            pool.view(-1, pool.shape[-1]).index_copy_(0, slots, new.reshape(-1, pool.shape[-1]))

    def reveal(self, pages_T: np.ndarray, offsets_T: np.ndarray) -> None:
        """Mark tokens as present."""
        index = torch.from_numpy(pages_T * self.page_tokens + offsets_T).to(self.mask_PgS.device)
        self.mask_PgS.view(-1).index_fill_(0, index, 0.0)
