"""Context parallelism: the tokens of one pack on several ranks.

Legend: T tokens of the pack (equally many on each of the W ranks), N heads, K kv heads, H head dim, n = N / W.

Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): ranks hold consecutive tokens; for the attention they exchange tokens for
heads, so that each computes n heads over the whole pack, with whatever attention one process would use.

Ring (arXiv 2310.01889, with the balanced split of arXiv 2311.09431): each sequence is cut into 2W chunks, and rank r
holds chunks r and 2W - 1 - r, so that all have equal shares of the causal triangle. Keys and values travel around;
their gradients travel with them in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.parallel.collectives import all_to_all
from docklands.parallel.mesh import Group

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q_TNH, k_TKH, v_TKH, scale) -> o_TNH"""


class Ulysses:
    """An attention context over a split pack. `inner` attends over the whole one, with this rank's heads."""

    def __init__(self, group: Group, inner: Attend) -> None:
        self.group = group
        self.inner = inner

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        ranks, kv_heads = self.group.size, k_TKH.shape[1]
        if kv_heads < ranks:
            k_TKH, v_TKH = (x.repeat_interleave(ranks // kv_heads, 1) for x in (k_TKH, v_TKH))
        q_TnH, k_TkH, v_TkH = (self._to_heads(x) for x in (q_TNH, k_TKH, v_TKH))
        return self._to_tokens(self.inner(layer, q_TnH, k_TkH, v_TkH, scale))

    def _to_heads(self, x_TNH: Tensor) -> Tensor:
        """This rank's tokens, all heads -> all tokens, this rank's heads."""
        tokens, ranks = len(x_TNH), self.group.size
        by_rank = x_TNH.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        return all_to_all(by_rank, [tokens] * ranks, [tokens] * ranks, self.group)

    def _to_tokens(self, x_TnH: Tensor) -> Tensor:
        """The way back."""
        ranks = self.group.size
        tokens = len(x_TnH) // ranks
        by_rank = all_to_all(x_TnH, [tokens] * ranks, [tokens] * ranks, self.group)
        return by_rank.unflatten(0, (ranks, tokens)).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class Chunks:
    """Where a sequence's two chunks lie among a rank's tokens: early..middle and middle..late (start, middle, stop)."""

    start: int
    middle: int
    stop: int


def zigzag(lengths: Sequence[int], ranks: int, rank: int) -> list[list[tuple[int, int]]]:
    """For each sequence, the (start, stop) in it of the two chunks that a rank holds; either may be empty."""
    found = []
    for length in lengths:
        bounds = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
        found.append([(bounds[c], bounds[c + 1]) for c in (rank, 2 * ranks - 1 - rank)])
    return found


def chunks_of(lengths: Sequence[int], ranks: int, rank: int) -> list[Chunks]:
    """Positions among the rank's own tokens, sequence after sequence."""
    sizes = [[stop - start for start, stop in pair] for pair in zigzag(lengths, ranks, rank)]
    starts = [0, *accumulate(sum(pair) for pair in sizes)]
    return [Chunks(at, at + first, at + first + second) for at, (first, second) in zip(starts, sizes)]


class BlockKernel(Protocol):
    """kernels.block_attention, handed in: kernels and parallel are siblings."""

    @staticmethod
    def Block(start: int, stop: int, first: int, last: int, causal: bool = False) -> Any: ...  # noqa: N802
    @staticmethod
    def Running(q_TNH: Tensor) -> Any: ...  # noqa: N802
    @staticmethod
    def forward_blocks(running: Any, qkv: Any, blocks: Any, scale: float) -> None: ...
    @staticmethod
    def backward_blocks(grads: Any, inputs: Any, blocks: Any, scale: float) -> None: ...


class Ring:
    """An attention context over sequences split by `zigzag`; `own` tokens after them attend causally to themselves.

    lengths  of the whole sequences, on every rank the same
    own      padding of each rank: tokens that no other rank sees
    """

    def __init__(self, group: Group, lengths: Sequence[int], own: Sequence[int], kernel: BlockKernel) -> None:
        self.group = group
        self.kernel = kernel
        chunks = [chunks_of(lengths, group.size, rank) for rank in range(group.size)]
        self.tokens = [sum(c.stop - c.start for c in held) + pad for held, pad in zip(chunks, own)]
        self.blocks = [self._blocks(chunks[group.rank], theirs, rank) for rank, theirs in enumerate(chunks)]
        if pad := own[group.rank]:
            end = self.tokens[group.rank]
            self.blocks[group.rank].append(kernel.Block(end - pad, end, end - pad, end, True))

    def _blocks(self, mine: Sequence[Chunks], theirs: Sequence[Chunks], rank: int) -> list[Any]:
        """What my queries see of the keys of `rank`."""
        found = []
        for q, k in zip(mine, theirs):
            if rank == self.group.rank:
                found += [(q.start, q.middle, k.start, k.middle, True), (q.middle, q.stop, k.middle, k.stop, True)]
                found.append((q.middle, q.stop, k.start, k.middle, False))
            elif rank < self.group.rank:  # its early chunk is before both of mine, its late one after both
                found.append((q.start, q.stop, k.start, k.middle, False))
            else:  # both of its chunks lie between mine
                found.append((q.middle, q.stop, k.start, k.stop, False))
        return [self.kernel.Block(*block) for block in found if block[0] < block[1] and block[2] < block[3]]

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        return _Ring.apply(q_TNH, k_TKH, v_TKH, self, scale)  # type: ignore[return-value]

    def source(self, step: int) -> int:
        """Whose keys are here after `step` passes."""
        return (self.group.rank - step) % self.group.size

    def pass_on(self, held: Tensor, step: int) -> tuple[Tensor, list[dist.Work]]:
        """Start to send what is held to the next rank; -> (where the previous one's arrives, what to wait for)."""
        group, rank = self.group, self.group.rank
        arriving = held.new_empty((held.shape[0], self.tokens[self.source(step + 1)], *held.shape[2:]))
        following, previous = group.ranks[(rank + 1) % group.size], group.ranks[(rank - 1) % group.size]
        send = dist.P2POp(dist.isend, held, following, group.pg)
        receive = dist.P2POp(dist.irecv, arriving, previous, group.pg)
        return arriving, dist.batch_isend_irecv([send, receive])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, ring: Ring, scale: float) -> Tensor:
        running = ring.kernel.Running(q_TNH)
        held = torch.stack([k_TKH, v_TKH])
        for step in range(ring.group.size):
            last = step == ring.group.size - 1
            arriving, works = (held, []) if last else ring.pass_on(held, step)
            ring.kernel.forward_blocks(running, (q_TNH, held[0], held[1]), ring.blocks[ring.source(step)], scale)
            for work in works:
                work.wait()
            held = arriving
        o_TNH = running.o_TNH.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, o_TNH, running.lse_TN)
        ctx.ring = ring, scale
        return o_TNH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_TNH, k_TKH, v_TKH, o_TNH, lse_TN = ctx.saved_tensors
        ring, scale = ctx.ring
        dq = torch.zeros_like(q_TNH, dtype=torch.float32)
        held = torch.stack([k_TKH, v_TKH])
        dheld = torch.zeros(held.shape, dtype=torch.float32, device=held.device)
        for step in range(ring.group.size):
            last = step == ring.group.size - 1
            arriving, works = (held, []) if last else ring.pass_on(held, step)
            inputs = (grads[0], q_TNH, held[0], held[1], o_TNH, lse_TN)
            ring.kernel.backward_blocks((dq, dheld[0], dheld[1]), inputs, ring.blocks[ring.source(step)], scale)
            for work in works:
                work.wait()
            held = arriving
            dheld, works = ring.pass_on(dheld, step)  # follows its keys; after the last step it is home
            for work in works:
                work.wait()
        return dq.to(q_TNH.dtype), dheld[0].to(k_TKH.dtype), dheld[1].to(v_TKH.dtype), None, None
