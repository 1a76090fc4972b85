"""Attention in blocks, merged, against one dense softmax over everything; every device's path, forward and backward."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from tests import npu_api
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from docklands.kernels import attention, block_attention, cuda
from docklands.kernels.block_attention import Block, Running, backward_blocks, forward_blocks

T, N, K, H, SCALE = 11, 6, 2, 8, 0.3
CUT = 4
BLOCKS = [Block(CUT, T, 0, CUT), Block(0, CUT, 0, CUT, True), Block(CUT, T, CUT, T, True)]
"""A causal triangle in three blocks."""


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    q, go = (torch.randn(T, N, H, generator=draw).to(dtype) for _ in range(2))
    k, v = (torch.randn(T, K, H, generator=draw).to(dtype) for _ in range(2))
    return q, k, v, go


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of causal attention, in plain torch."""
    k, v = (x.repeat_interleave(N // K, 1) for x in (k, v))
    scores = torch.einsum("tnh,snh->nts", q, k) * SCALE
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return torch.einsum("nts,snh->tnh", scores.softmax(-1), v), torch.logsumexp(scores, -1).t()


def check(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output, log-sum-exp and gradients of the three blocks against the dense form in fp32."""
    q, k, v, go = inputs(dtype)
    running = Running(q)
    forward_blocks(running, (q, k, v), BLOCKS, SCALE, device)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    wanted, lse = dense(*leaves)
    torch.testing.assert_close(running.o_TNH, wanted.detach(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(running.lse_TN, lse.detach(), atol=tolerance, rtol=tolerance)
    wanted.backward(go.float())
    grads = tuple(torch.zeros(x.shape) for x in (q, k, v))
    backward_blocks(grads, (go, q, k, v, running.o_TNH.to(dtype), running.lse_TN), BLOCKS, SCALE, device)  # type: ignore[arg-type]
    for grad, x in zip(grads, leaves):
        torch.testing.assert_close(grad, x.grad, atol=2 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_blocks_give_the_whole(device: str) -> None:
    check(device, torch.float32, 2e-6)  # cuda in fp32: plain torch


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_ascend_calls_its_fused_attention(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", npu_api.module())
    check("npu", dtype, tolerance)
    assert npu_api.calls == ["npu_fusion_attention"] * 3 + ["npu_fusion_attention_grad"] * 3


def test_cuda_calls_torchs_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel needs a GPU: the values come from the CPU's, through torch's real argument names."""
    calls: list[str] = []

    def bound(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append(name)
        schema = getattr(torch.ops.aten, name).default._schema
        names = [inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in schema.arguments]
        return inspect.Signature(names).bind_partial(*args, **kwargs).arguments

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = bound("_scaled_dot_product_flash_attention", *args, **kwargs)
        heads = given["query"], given["key"], given["value"]
        return attention.FLASH(*heads, given["dropout_p"], given["is_causal"], scale=given["scale"])

    def backward(*args: Any, **kwargs: Any) -> Any:
        given = bound("_scaled_dot_product_flash_attention_backward", *args, **kwargs)
        assert (given["max_q"], given["max_k"]) == (given["query"].shape[2], given["key"].shape[2])
        tensors = [given[name].float() for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
        return attention.FLASH_BACKWARD(*tensors, given["dropout_p"], given["is_causal"], scale=given["scale"])

    monkeypatch.setattr(cuda, "_flash", forward)
    monkeypatch.setattr(cuda, "_flash_backward", backward)
    check("cuda", torch.bfloat16, 2e-2)
    assert len(calls) == 6


def test_torch_takes_the_cuda_calls() -> None:
    """Its own shape functions, on tensors without storage."""
    q, k, v = (torch.empty(1, n, 7, 64, dtype=torch.bfloat16, device="meta") for n in (6, 2, 2))
    o, lse = cuda.block_forward(q, k, v, True, SCALE)
    assert o.shape == q.shape and tuple(lse.shape) == (1, 6, 7) and lse.dtype == torch.float32
    assert [x.shape for x in cuda.block_backward((o, q, k, v, o, lse), True, SCALE)] == [q.shape, k.shape, v.shape]


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *made])
        return out


def test_scores_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, go = (torch.randn(1, 2, 64, 8) for _ in range(4))
    o, lse = block_attention.plain_forward(q, k, v, True, SCALE)
    whole = block_attention.plain_backward((go, q, k, v, o, lse), True, SCALE)
    monkeypatch.setattr(block_attention, "SCORES", 512)
    with Largest() as largest:
        found = block_attention.plain_forward(q, k, v, True, SCALE)
        back = block_attention.plain_backward((go, q, k, v, *found), True, SCALE)
    assert largest.numel == q.numel() < 2 * 64 * 64
    for a, b in zip((*found, *back), (o, lse, *whole)):
        torch.testing.assert_close(a, b)


def test_a_block_left_out_is_seen() -> None:
    q, k, v, _ = inputs()
    running = Running(q)
    forward_blocks(running, (q, k, v), BLOCKS[1:], SCALE)
    assert float((running.o_TNH - dense(q, k, v)[0]).abs().max()) > 0.1
