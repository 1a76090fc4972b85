"""Collectives that autograd goes through. Each is named after what its forward pass does.

Legend: T local rows, W ranks of the group.

A tensor is *replicated* when all ranks of a group hold the same and compute the same from it, *partial* when the ranks'
tensors add up to the real one, *split* when each holds some rows. The gradient of a replicated tensor with replicated
use is replicated; with split or partial use it is partial. (Megatron-LM, arXiv 1909.08053 and 2205.05198.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.parallel.mesh import Group

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, before torch 2.13
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, in place. Without autograd."""
    dist.all_reduce(x, group=group.pg)
    return x


def all_gather(x: Tensor, group: Group, rows: Sequence[int] | None = None) -> Tensor:
    """All ranks' rows end to end; `rows`: how many each has, where they differ. Without autograd."""
    if rows is None or len(set(rows)) == 1:
        out = x.new_empty((len(x) * group.size, *x.shape[1:]))
        _gather(out, x.contiguous(), group=group.pg)
        return out
    most = max(rows)
    padded = x.new_zeros((most, *x.shape[1:]))
    padded[: len(x)] = x
    out = x.new_empty((most * group.size, *x.shape[1:]))
    _gather(out, padded, group=group.pg)
    return torch.cat([out[i * most : i * most + count] for i, count in enumerate(rows)])


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the group; each rank keeps its share of the rows, which divide by the group. Without autograd.

    gloo's own moves as much as an all-reduce does: on the CPU the shares are exchanged and added here (half the time).
    """
    if x.device.type == "cpu":
        arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, x.contiguous(), group=group.pg)
        return arrived.unflatten(0, (group.size, -1)).sum(0)
    out = x.new_empty((len(x) // group.size, *x.shape[1:]))
    _scatter(out, x.contiguous(), group=group.pg)
    return out


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """send[r] rows to each rank r in turn, receive[r] from each. Without autograd."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group.pg)
    return out


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter(grads[0], ctx.group), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather(grads[0], ctx.group), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rows: Sequence[int] | None) -> Tensor:
        start = len(x) * group.rank if rows is None else sum(rows[: group.rank])
        ctx.own = slice(start, start + len(x))
        return all_gather(x, group, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
        ctx.back = receive, send, group
        return exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grads[0], *ctx.back), None, None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Replicated in, replicated out, for split or partial use: nothing forward, sum of gradients backward."""
    return _CopyTo.apply(x, group)  # type: ignore[return-value]


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Partial in, replicated out: sum forward, nothing backward."""
    return _ReduceFrom.apply(x, group)  # type: ignore[return-value]


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """[T] split in, [W*T] out for split or partial use: the gradient is summed and split again."""
    return _GatherRows.apply(x, group)  # type: ignore[return-value]


def scatter_rows(x: Tensor, group: Group) -> Tensor:
    """[W*T] partial in, [T] split out: summed and split; gradients are gathered."""
    return _ScatterRows.apply(x, group)  # type: ignore[return-value]


def collect(x: Tensor, group: Group, rows: Sequence[int] | None = None) -> Tensor:
    """Split in, replicated out with replicated use (every rank computes the same loss): each keeps its own gradient.

    rows  how many each rank has; None: equally many
    """
    return _Collect.apply(x, group, rows)  # type: ignore[return-value]


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Rows change their place: send[r] rows to each rank r, receive[r] from each. Gradients go the way back."""
    return _Exchange.apply(x, send, receive, group)  # type: ignore[return-value]
