"""The pool of processes, the groups of a mesh, and every collective with its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from docklands.errors import LayoutError
from docklands.parallel import Layout, collectives
from docklands.parallel.mesh import Mesh
from tests.distributed.pool import CaseFailed, Pool, pid

ROWS = [3, 1]


def rows(rank: int, count: int) -> Tensor:
    return torch.arange(count * 2, dtype=torch.float32).view(count, 2) + 100 * rank


def both_ways(name: str) -> tuple[Tensor, Tensor]:
    """(forward, gradient) of a collective on this rank; the gradient that comes in is 1, 2, ... times rank + 1."""
    group = Mesh(Layout(tp=2)).tp
    assert group is not None
    operation, rank = getattr(collectives, name), group.rank
    more = {"collect": (ROWS,), "all_to_all": ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])}
    count = {"collect": ROWS[rank], "all_to_all": 3}.get(name, 4)
    x = rows(rank, count).requires_grad_()
    out = operation(x, *more[name], group) if name == "all_to_all" else operation(x, group, *more.get(name, ()))
    grad = torch.arange(1, out.numel() + 1, dtype=torch.float32).view_as(out) * (rank + 1)
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad


def ramp(count: int, times: int = 1) -> Tensor:
    return torch.arange(1, count * 2 + 1, dtype=torch.float32).view(count, 2) * times


def test_copy_and_reduce(pool: Pool) -> None:
    for rank, (out, grad) in enumerate(pool.run(2, both_ways, "copy_to")):
        assert torch.equal(out, rows(rank, 4)) and torch.equal(grad, ramp(4, 3))
    for rank, (out, grad) in enumerate(pool.run(2, both_ways, "reduce_from")):
        assert torch.equal(out, rows(0, 4) + rows(1, 4)) and torch.equal(grad, ramp(4, rank + 1))


def test_gather_and_scatter_rows(pool: Pool) -> None:
    for rank, (out, grad) in enumerate(pool.run(2, both_ways, "gather_rows")):
        assert torch.equal(out, torch.cat([rows(0, 4), rows(1, 4)]))
        assert torch.equal(grad, ramp(8, 3)[4 * rank : 4 * rank + 4])
    total = rows(0, 4) + rows(1, 4)
    for rank, (out, grad) in enumerate(pool.run(2, both_ways, "scatter_rows")):
        assert torch.equal(out, total[2 * rank : 2 * rank + 2])
        assert torch.equal(grad, torch.cat([ramp(2), ramp(2, 2)]))


def test_collect_uneven_rows(pool: Pool) -> None:
    for rank, (out, grad) in enumerate(pool.run(2, both_ways, "collect")):
        assert torch.equal(out, torch.cat([rows(0, 3), rows(1, 1)]))
        own = slice(0, 3) if rank == 0 else slice(3, 4)
        assert torch.equal(grad, ramp(4, rank + 1)[own])


def test_all_to_all_uneven_rows(pool: Pool) -> None:
    (first, first_grad), (second, second_grad) = pool.run(2, both_ways, "all_to_all")
    assert torch.equal(first, torch.cat([rows(0, 3)[:1], rows(1, 3)[:2]]))
    assert torch.equal(second, torch.cat([rows(0, 3)[1:], rows(1, 3)[2:]]))
    assert torch.equal(first_grad, torch.cat([ramp(3)[:1], ramp(3, 2)[:2]]))
    assert torch.equal(second_grad, torch.cat([ramp(3)[1:], ramp(3, 2)[2:]]))


def groups_of(layout: Layout) -> dict[str, tuple[int, ...] | None]:
    mesh = Mesh(layout)
    names = ("tp", "cp", "pp", "ep", "data", "shard", "replicate", "expert_shard", "expert_replicate", "ends", "world")
    found = {name: getattr(mesh, name) for name in names}
    for name, group in found.items():
        if group is not None:  # and it works: the sum over the group is the sum over its ranks
            assert collectives.all_reduce(torch.tensor([float(dist.get_rank())]), group).item() == sum(group.ranks), (
                name
            )
    return {name: None if group is None else group.ranks for name, group in found.items()}


def test_mesh_groups(pool: Pool) -> None:
    assert pool.run(4, groups_of, Layout(fsdp=2, tp=2))[3] == {
        "tp": (2, 3),
        "cp": None,
        "pp": None,
        "ep": None,
        "data": (1, 3),
        "shard": (1, 3),
        "replicate": None,
        "expert_shard": (0, 1, 2, 3),
        "expert_replicate": None,
        "ends": None,
        "world": (0, 1, 2, 3),
    }
    found = pool.run(4, groups_of, Layout(pp=2, dp=2, ep=2))[1]
    assert (found["pp"], found["ends"], found["ep"]) == ((1, 3), (1, 3), (0, 1))
    assert (found["replicate"], found["expert_replicate"]) == ((0, 1), None)


def test_a_wrong_number_of_processes_is_refused(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="LayoutError: layout: .* = 4 ranks, 2 processes"):
        pool.run(2, groups_of, Layout(tp=4))
    with pytest.raises(LayoutError, match="no process group"):
        Mesh(Layout(tp=2))


def die() -> None:
    import os

    os._exit(7)


def test_the_pool_names_ranks_that_hang_or_die_and_goes_on(pool: Pool) -> None:
    before = pool.run(2, pid)
    assert pool.run(2, pid) == before and len(set(before)) == 2
    with pytest.raises(CaseFailed, match="rank 1: no answer before the deadline"):
        pool.run(2, pid_of_rank_0, deadline=0.5)
    with pytest.raises(CaseFailed, match="rank 0: the process died"):
        pool.run(2, die)
    assert set(pool.run(2, pid)).isdisjoint(before)


def pid_of_rank_0() -> int:
    return pid(0.0 if dist.get_rank() == 0 else 5.0)
