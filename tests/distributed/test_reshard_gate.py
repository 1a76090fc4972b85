"""Faults planted after a real sync: the gate names the tensor, and the device where replicas tell."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from docklands.errors import SyncError
from docklands.models.sharded import build_sharded
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.sync.gate import Gate
from docklands.sync.plan import Options, plan_reshard
from docklands.sync.reshard import Resharder
from tests.distributed.pool import Pool
from tests.distributed.test_reshard import locals_of
from tests.reshard_cases import MODELS


def flip(weights: dict[str, torch.Tensor]) -> None:
    """The lowest bit of one element of one shard."""
    weights["layers.2.mla.q_b.weight"].view(torch.int16)[3, 5] ^= 1


def transpose(weights: dict[str, torch.Tensor]) -> None:
    """One expert's matrix, written by columns."""
    expert = weights["layers.3.moe.experts.down"][1]
    expert.copy_(expert.t().reshape(expert.shape).clone())


def swap_gate_up(weights: dict[str, torch.Tensor]) -> None:
    gate_up = weights["layers.1.moe.shared.gate_up.weight"]
    gate_up.copy_(gate_up.roll(len(gate_up) // 2, 0).clone())


def swap_experts(weights: dict[str, torch.Tensor]) -> None:
    experts = weights["layers.4.moe.experts.gate_up"]
    experts.copy_(experts[[1, 0, *range(2, len(experts))]].clone())


def stale(weights: dict[str, torch.Tensor]) -> None:
    """All weights of the step before, under the new version's number."""
    for tensor in weights.values():
        tensor.sub_(0.25)


FAULTS = {f.__name__: f for f in (flip, transpose, swap_gate_up, swap_experts, stale)}

NAMES = {
    "flip": "layers.2.mla.q_b.weight",
    "transpose": "layers.3.moe.experts.down",
    "swap_gate_up": "layers.1.moe.shared.gate_up.weight",
    "swap_experts": "layers.4.moe.experts.gate_up",
}


def gated(source: Layout, target: Layout, device: int) -> dict[str, str]:
    """A case: one sync, then each fault on one device; what the gate says on this rank."""
    config, rank = MODELS["mla"], dist.get_rank()
    trained = locals_of(build_sharded(config, Mesh(source, timeout_s=60), seed=3))
    plan = plan_reshard(config, source, target, Options(bucket_bytes=5000))
    mover = Resharder(plan, dtype=torch.bfloat16, timeout_s=30)
    gate = Gate(plan, mover.as_held)
    published = gate.publish(trained)
    found = mover.run(trained)
    said = {}
    for name, plant in (("none", None), *FAULTS.items()):
        weights = {key: tensor.clone() for key, tensor in found.items()}
        if plant is not None and rank == device:
            plant(weights)
        try:
            gate.check(7, 7, weights, published)
            said[name] = ""
        except SyncError as error:
            said[name] = error.message
    try:
        gate.check(7, 6 if rank == device else 7, found, published)
    except SyncError as error:
        said["version"] = error.message
    return said


@pytest.mark.parametrize(
    ("source", "target", "device", "where"),
    [
        (Layout(fsdp=2, tp=2, ep=2), Layout(dp=4), 2, " on device 2"),  # four replicas: three outvote one
        (Layout(tp=2, dp=2), Layout(tp=2, dp=2), 1, " on device 1"),  # two replicas: the sum tells which is right
        (Layout(pp=2, tp=2), Layout(tp=4, ep=4), 3, ""),  # no replicas of these
    ],
    ids=["replicas", "pairs", "one copy"],
)
def test_planted_faults_are_named(source: Layout, target: Layout, device: int, where: str, pool: Pool) -> None:
    ranks = pool.run(4, gated, source, target, device)
    assert all(said == ranks[0] for said in ranks)  # all stop, with the same words
    said = ranks[0]
    assert said["none"] == ""
    head = "after publishing version 7, generators differ from the trainer: "
    for fault, name in NAMES.items():
        assert said[fault] == f"{head}{name}{where}"
    assert "embed.weight" in said["stale"] and " more" in said["stale"]
    assert said["version"] == f"after publishing version 7: device {device} has 6"
