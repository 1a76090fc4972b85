"""A device between training and generation: bits, the ledger's peak against the plan, what is on it in each phase."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from docklands.config.schema import Config
from docklands.models.sharded import build_sharded
from docklands.obs.spans import SpanRecorder, read_spans, recording, span
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.run.footprint import message_room, streamed
from docklands.sync.gate import Gate
from docklands.sync.handover import Handover
from docklands.sync.memory import FileTier, MemoryTiers, is_resident
from docklands.sync.plan import Options, plan_reshard
from docklands.sync.reshard import Resharder
from docklands.sync.script import ALIGN
from tests.distributed.pool import Pool
from tests.distributed.test_reshard import locals_of
from tests.reshard_cases import MODELS


def cycles(
    name: str, source: Layout, target: Layout, method: str, folder: Path, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """A case: three versions, each published, generated with, and trained on. In bf16 as a run has it: matrices with
    fp32 masters among the optimizer's, and the weights of another role.
    """
    config, rank = MODELS[name], dist.get_rank()
    trained = locals_of(build_sharded(config, Mesh(source, timeout_s=60), seed=3))
    expected = locals_of(build_sharded(config, Mesh(target, timeout_s=60), seed=3))
    moments = {key: torch.rand_like(tensor) for key, tensor in trained.items()}
    gradients = {key: torch.rand_like(tensor) for key, tensor in trained.items()}
    others: dict[str, torch.Tensor] = {}
    if dtype != torch.float32:
        masters = {f"master/{key}": tensor for key, tensor in trained.items() if tensor.dim() >= 2}
        trained = {key: t.to(dtype) if t.dim() >= 2 else t for key, t in trained.items()}
        others = {f"reference/{key}": tensor.clone() for key, tensor in trained.items()}
        moments |= masters
    plan = plan_reshard(config, source, target, Options(method=method, bucket_bytes=3000))  # type: ignore[arg-type]
    tiers = MemoryTiers(folder=folder)
    mover = Resharder(plan, dtype=torch.bfloat16, timeout_s=30, ledger=tiers.ledger)
    handover = Handover(mover, tiers, Gate(plan, mover.as_held))
    state = {"weights": {**trained, **others}, "gradients": gradients, "optimizer": moments}
    size = {kind: sum(t.untyped_storage().nbytes() for t in tensors.values()) for kind, tensors in state.items()}
    own = sum(t.untyped_storage().nbytes() for t in trained.values())
    padding = own - sum(
        t.numel() * dtype.itemsize for t in trained.values()
    )  # FSDP: up to the largest shard's; vectors
    wanted = sum(held.bytes for held in mover.script.target.values())
    first: dict[str, torch.Tensor] = {}
    with recording(SpanRecorder(folder / f"rank{rank}" / "spans.jsonl")):
        for version in range(3):
            kept = {kind: {k: t.clone() for k, t in tensors.items()} for kind, tensors in state.items()}
            found = handover.to_generation(version, state["weights"], gradients, moments)
            first = first or dict(found)
            assert all(found[key] is tensor for key, tensor in first.items())
            for key, tensor in found.items():
                held = expected[key].to(dtype) if tensor.dim() >= 2 else expected[key]
                assert torch.equal(tensor, held.to(tensor.dtype)), key
            assert not any(is_resident(t) for tensors in state.values() for t in tensors.values() if t.numel())
            assert tiers.ledger.of("device") == tiers.ledger.of("device", "generation") == wanted
            assert tiers.ledger.of("disk") == sum(size.values())
            handover.prefetch()
            handover.to_training(timeout_s=30)
            assert tiers.ledger.of("device") == sum(size.values()) and tiers.ledger.of("disk") == 0
            for kind, tensors in state.items():
                assert all(torch.equal(tensor, kept[kind][key]) for key, tensor in tensors.items())
            for tensor in (*trained.values(), *expected.values()):
                tensor.mul_(2.0)  # an update, exact in every dtype
    during = mover.script.peak(master=dtype.itemsize).total + padding
    names = [row["name"] for row in read_spans(folder / f"rank{rank}")]
    tiers.close()
    now, worst = {"weights": 0, "gradients": 0, "optimizer": 0, "messages": 0, "generation": 0}, 0
    for _, tier, kind, bytes_ in tiers.ledger.history:
        if tier == "device":
            now[kind] = bytes_
            if now["gradients"] == now["optimizer"] == 0 and now["generation"]:
                worst = max(worst, sum(now.values()))
    said = Config.model_validate({"train": {"dtype": str(dtype).removeprefix("torch.")}})
    of_run = sum(int(part[rank]) for part in (*streamed(plan, said), message_room(plan)))
    of_run += 2 * 2 * ALIGN * (plan.devices - 1)  # which it leaves out: where messages begin, in both arenas
    fsdp = padding if dtype == torch.float32 else 0
    return {"worst": worst, "planned": during, "run's": of_run + fsdp, "spans": set(names)}


@pytest.mark.parametrize(
    ("name", "source", "target", "method", "dtype"),
    [
        ("mla", Layout(fsdp=2, tp=2, ep=2), Layout(dp=4, ep=4), "minimal", torch.float32),
        ("moe_shared_tied", Layout(pp=2, tp=2), Layout(tp=4, ep=2), "allgather_swap", torch.float32),
        ("bias_tied", Layout(dp=4), Layout(tp=2, dp=2), "broadcast", torch.float32),
        ("dense", Layout(tp=2, dp=2), Layout(dp=4), "minimal", torch.bfloat16),
        ("moe", Layout(pp=2, tp=2), Layout(dp=4, ep=4), "minimal", torch.bfloat16),
    ],
    ids=["minimal", "allgather_swap", "broadcast", "bf16", "bf16-moe"],
)
def test_weights_and_memory_through_three_versions(
    name: str, source: Layout, target: Layout, method: str, dtype: torch.dtype, pool: Pool, tmp_path: Path
) -> None:
    for found in pool.run(4, cycles, name, source, target, method, tmp_path, dtype):
        assert 0.9 * found["planned"] < found["worst"] <= found["planned"]
        assert 0.95 * found["run's"] < found["worst"] <= found["run's"], "what `docklands plan` says"
        assert {"handover/to_generation", "gate/check", f"reshard/{method}", "memory/prefetch"} <= found["spans"]


class Held(FileTier):
    """Reads of more than the weights wait until they are let through: moments are slow to come."""

    def __init__(self, folder: Path, free: int) -> None:
        super().__init__(folder)
        self.free, self.let = free, threading.Event()

    def read(self, key: int, data: torch.Tensor) -> None:
        self.free -= 1
        assert self.free >= 0 or self.let.wait(120)
        super().read(key, data)


def forward_first(folder: Path) -> list[str]:
    """A case: log-probs need the weights alone; moments come back meanwhile, and nothing is lost when they are not
    waited for at all. -> names of this rank's spans, by when they ended
    """
    config, rank = MODELS["moe"], dist.get_rank()
    trained = locals_of(build_sharded(config, Mesh(Layout(tp=2), timeout_s=60), seed=3))
    moments = {key: torch.rand_like(tensor) for key, tensor in trained.items()}
    kept = {key: tensor.clone() for key, tensor in moments.items()}
    lower = Held(folder, len(trained))
    tiers = MemoryTiers(lower=lower)
    plan = plan_reshard(config, Layout(tp=2), Layout(dp=2), Options(bucket_bytes=3000))
    handover = Handover(Resharder(plan, dtype=torch.bfloat16, timeout_s=30, ledger=tiers.ledger), tiers)
    with recording(SpanRecorder(folder / f"rank{rank}" / "spans.jsonl")):
        handover.to_generation(0, trained, {}, moments)
        handover.prefetch()
        handover.to_training(timeout_s=30, update=False)
        with span("stage/ref_logprobs"):
            assert tiers.is_here("weights") and not tiers.is_here("optimizer")
            assert all(is_resident(tensor) for tensor in trained.values())
        lower.let.set()
        handover.to_training(timeout_s=30)
    assert all(torch.equal(tensor, kept[key]) for key, tensor in moments.items())
    handover.to_generation(1, trained, {}, moments)
    handover.to_training(timeout_s=30, update=False)
    handover.to_generation(2, trained, {}, moments)  # a step that asks for more samples before its update
    handover.to_training(timeout_s=30)
    assert all(torch.equal(tensor, kept[key]) for key, tensor in moments.items())
    rows = [
        row for row in read_spans(folder / f"rank{rank}") if row["name"] in ("memory/prefetch", "stage/ref_logprobs")
    ]
    tiers.close()
    ends = sorted(rows, key=lambda row: row["start"] + row["duration"])
    return [row["attributes"].get("kind", row["name"]) for row in ends]


def test_log_probs_run_while_moments_come_back(pool: Pool, tmp_path: Path) -> None:
    """The order in which things end, in the span file: weights, the stage that needs them, moments."""
    for ended in pool.run(2, forward_first, tmp_path):
        assert ended == ["weights", "stage/ref_logprobs", "optimizer"]
