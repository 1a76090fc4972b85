"""A generator that joins late: the version of the moment comes to it alone, then it publishes with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from docklands.fleet.host import Context, Setup
from docklands.fleet.publishing import Party, join_group
from docklands.models.sharded import build_sharded
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.sync.gate import Gate
from docklands.sync.plan import Options, plan_reshard
from docklands.sync.reshard import Resharder
from tests.distributed.pool import Pool
from tests.distributed.test_reshard import locals_of
from tests.reshard_cases import MODELS

TRAINING, REPLICA = Layout(tp=2), Layout(ep=2, dp=2)


def home() -> Any:
    """A store that process 0 keeps; (it, its port)."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    told = [store.port if store is not None else 0]
    dist.broadcast_object_list(told, 0)
    return store, told[0]


def joins_late(method: str) -> list[tuple[int, int]]:
    """A case: processes 0, 1 train; 2, 3 generate from the start; 4, 5 come after version 1. Each publish is checked
    to the bit and by the gate. -> (bytes sent, received) of this process, by publish
    """
    rank, config = dist.get_rank(), MODELS["moe"]
    store, port = home()
    trained: dict[str, torch.Tensor] = {}
    context = Context(Setup(Layout(), wait_s=30.0), rank, "cpu")
    if rank < 2:
        trained = locals_of(build_sharded(config, Mesh(TRAINING, timeout_s=30, first=0), seed=3))
    elif rank < 4:
        whole = locals_of(build_sharded(config, Mesh(REPLICA, timeout_s=30, first=2), seed=3))
    else:
        whole = locals_of(build_sharded(config, Mesh(REPLICA, timeout_s=30, first=4), seed=3))
    held: dict[str, torch.Tensor] | None = None
    counts = []
    # (version, who meets): the second publish of version 1 is for the newcomers alone
    for number, (version, members) in enumerate(
        [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3)), (1, (0, 1, 4, 5)), (2, (0, 1, 2, 3, 4, 5))]
    ):
        if rank in members:
            party = Party(number, "localhost", port, len(members), len(members) // 2 - 1)
            group = join_group(context, party, members.index(rank))
            generation = Layout(ep=2, dp=2 * party.replicas)
            options = Options(method=method, bucket_bytes=3000, apart=True)  # type: ignore[arg-type]
            plan = plan_reshard(config, TRAINING, generation, options)
            mover = Resharder(plan, dtype=torch.bfloat16, timeout_s=20, group=group)
            gate = Gate(plan, mover.as_held, group)
            now = {name: tensor + version for name, tensor in trained.items()}
            published = gate.publish(now)
            found = mover.run(now, held)
            gate.check(version, version, found, published)
            if rank >= 2:
                held = found
                assert all(torch.equal(t, (whole[name] + version).to(t.dtype)) for name, t in found.items())
            counts.append((mover.counts.sent, mover.counts.received))
            dist.destroy_process_group(group)
        dist.barrier()
    del store
    return counts


@pytest.mark.parametrize("method", ["broadcast", "minimal"])
def test_a_late_generator_catches_up(method: str, pool: Pool) -> None:
    said = pool.run(6, joins_late, method)
    assert [len(counts) for counts in said] == [4, 4, 3, 3, 2, 2]
    plan = plan_reshard(MODELS["moe"], TRAINING, Layout(ep=2, dp=4), Options(method=method, apart=True))  # type: ignore[arg-type]
    sent, received = plan.traffic()
    assert [counts[-1] for counts in said] == list(zip(sent.tolist(), received.tolist()))  # all six, in one publish
    assert said[4][0][1] == said[2][0][1] > 0  # catching up costs the newcomer what a publish costs
    if method == "broadcast":  # two replicas cost the trainers what one does
        assert sum(counts[-1][0] for counts in said[:2]) == sum(counts[0][0] for counts in said[:2])
