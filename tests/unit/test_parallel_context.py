"""The split of a ring, without processes: what all ranks compute together is the causal triangle, once."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.kernels import block_attention
from docklands.parallel.context import Ring
from docklands.train.share import zigzag_index

lengths = st.lists(st.integers(1, 23), min_size=1, max_size=4)


def pairs(seqlens: list[int], ranks: int) -> list[Counter]:
    """For each rank, how often each (query, key) of the pack is computed."""
    held = [zigzag_index(seqlens, ranks, rank).tolist() for rank in range(ranks)]
    found = []
    for rank in range(ranks):
        group = SimpleNamespace(size=ranks, rank=rank)
        ring = Ring(group, seqlens, [0] * ranks, block_attention)  # type: ignore[arg-type]
        seen: Counter = Counter()
        for source, blocks in enumerate(ring.blocks):
            for block in blocks:
                for q in range(block.start, block.stop):
                    last = block.first + q - block.start + 1 if block.causal else block.last
                    seen.update((held[rank][q], held[source][k]) for k in range(block.first, last))
        found.append(seen)
    return found


@settings(max_examples=60)
@given(seqlens=lengths, ranks=st.integers(1, 4))
def test_every_pair_is_computed_once(seqlens: list[int], ranks: int) -> None:
    starts = [0, *accumulate(seqlens)]
    causal = Counter(
        (start + q, start + k) for start, n in zip(starts, seqlens) for q in range(n) for k in range(q + 1)
    )
    assert sum(pairs(seqlens, ranks), Counter()) == causal


@settings(max_examples=60)
@given(seqlens=lengths, ranks=st.integers(1, 4))
def test_every_token_is_held_once(seqlens: list[int], ranks: int) -> None:
    together = torch.cat([zigzag_index(seqlens, ranks, rank) for rank in range(ranks)])
    assert together.sort().values.tolist() == list(range(sum(seqlens)))


def test_ranks_have_equal_shares_of_the_triangle() -> None:
    work = [sum(seen.values()) for seen in pairs([64], 4)]
    assert max(work) == min(work)


def test_padding_sees_itself_only() -> None:
    group = SimpleNamespace(size=2, rank=1)
    ring = Ring(group, [6], [1, 2], block_attention)  # type: ignore[arg-type]
    assert ring.tokens == [4, 5]
    last = ring.blocks[1][-1]
    assert (last.start, last.stop, last.first, last.last, last.causal) == (3, 5, 3, 5, True)
