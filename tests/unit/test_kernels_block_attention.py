"""Attention in blocks, merged, against one dense softmax over everything; both paths, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from docklands.kernels.block_attention import Block, Running, backward_blocks, forward_blocks

T, N, K, H, SCALE = 11, 6, 2, 8, 0.3
CUT = 4
BLOCKS = [Block(CUT, T, 0, CUT), Block(0, CUT, 0, CUT, True), Block(CUT, T, CUT, T, True)]
"""A causal triangle in three blocks."""


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    q, go = (torch.randn(T, N, H, generator=draw) for _ in range(2))
    k, v = (torch.randn(T, K, H, generator=draw) for _ in range(2))
    return q, k, v, go


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of causal attention, in plain torch."""
    k, v = (x.repeat_interleave(N // K, 1) for x in (k, v))
    scores = torch.einsum("tnh,snh->nts", q, k) * SCALE
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return torch.einsum("nts,snh->tnh", scores.softmax(-1), v), torch.logsumexp(scores, -1).t()


@pytest.mark.parametrize("portable", [False, True])
def test_blocks_give_the_whole(portable: bool) -> None:
    q, k, v, go = inputs()
    running = Running(q)
    forward_blocks(running, (q, k, v), BLOCKS, SCALE, portable)
    wanted, lse = dense(*(x.requires_grad_() for x in (q, k, v)))
    torch.testing.assert_close(running.o_TNH, wanted.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(running.lse_TN, lse.detach(), atol=1e-6, rtol=1e-5)
    wanted.backward(go)
    with torch.no_grad():
        grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        backward_blocks(grads, (go, q, k, v, running.o_TNH, running.lse_TN), BLOCKS, SCALE, portable)
    for grad, x in zip(grads, (q, k, v)):
        torch.testing.assert_close(grad, x.grad, atol=2e-6, rtol=1e-5)


def test_a_block_left_out_is_seen() -> None:
    q, k, v, _ = inputs()
    running = Running(q)
    forward_blocks(running, (q, k, v), BLOCKS[1:], SCALE)
    assert float((running.o_TNH - dense(q, k, v)[0]).abs().max()) > 0.1
