"""The executors on real processes: every method, layouts of all kinds, bitwise; bytes and memory against the plan."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from docklands.errors import SyncError
from docklands.models.shard import place, slot_of
from docklands.models.sharded import ShardedModel, build_sharded
from docklands.parallel import fsdp
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.sync.plan import Options, plan_reshard
from docklands.sync.reshard import Resharder
from tests.distributed.pool import Pool
from tests.forks import CONTEXT
from tests.reshard_cases import MODELS

METHODS = ("minimal", "allgather_swap", "broadcast")
L = Layout
PAIRS: dict[str, list[tuple[Layout, Layout]]] = {
    "bias_tied": [
        (L(tp=2, pp=2), L(dp=4)),
        (L(dp=4), L(tp=2, pp=2)),
        (L(fsdp=4), L(tp=4)),
        (L(tp=4), L(pp=2, vpp=2, dp=2)),
    ],
    "one_kv_head": [(L(tp=4), L(tp=2, dp=2)), (L(fsdp=2, tp=2), L(tp=4))],
    "moe": [
        (L(tp=2, ep=2, dp=2), L(dp=4, ep=4)),
        (L(pp=2, dp=2, ep=2), L(tp=2, dp=2, ep=2, etp=2)),
        (L(fsdp=4, ep=2), L(tp=4)),
    ],
    "mla": [(L(fsdp=2, tp=2, ep=2), L(dp=4, ep=4)), (L(pp=2, tp=2), L(tp=4, ep=2)), (L(dp=4, ep=4), L(fsdp=4))],
}


def locals_of(model: ShardedModel) -> dict[str, torch.Tensor]:
    return {name: fsdp.local(parameter).detach() for name, parameter in model.parameters().items()}


def reshard_all(name: str, pairs: list[tuple[Layout, Layout]], dtype: torch.dtype) -> int:
    """A case: each pair by each method, into new tensors and into given ones."""
    config, checked = MODELS[name], 0
    for source, target in pairs:
        trained = locals_of(build_sharded(config, Mesh(source, timeout_s=60), seed=3))
        expected = locals_of(build_sharded(config, Mesh(target, timeout_s=60), seed=3))
        for method in METHODS:
            options = Options(method=method, bucket_bytes=3000, itemsize=dtype.itemsize, node=2)  # type: ignore[arg-type]
            plan = plan_reshard(config, source, target, options)
            mover = Resharder(plan, dtype=dtype, timeout_s=30)
            gone: list[str] = []
            found = mover.run(trained, released=gone.append)
            assert found.keys() == expected.keys() and sorted(gone) == sorted(trained)
            for key, tensor in found.items():
                kept = torch.float32 if key.endswith("router.bias") else dtype
                assert tensor.dtype == kept and torch.equal(tensor, expected[key].to(kept)), f"{method}: {key}"
            sent, received = plan.traffic()
            device, counts = mover.script.device, mover.counts
            assert (counts.sent, counts.received) == (sent[device], received[device])
            peaks = {stays: mover.script.peak(master=4, stays=stays).total for stays in (False, True)}
            assert counts.peak == peaks[False]
            for tensor in found.values():
                tensor.fill_(float("nan"))
            again = mover.run(trained, found)
            assert all(again[key] is tensor for key, tensor in found.items())
            assert all(torch.equal(again[k], expected[k].to(again[k].dtype)) for k in expected)
            everything = sum(t.nbytes for t in (*trained.values(), *found.values())) + 2 * mover.script.room()
            assert mover.counts.peak == peaks[True] == everything  # nothing was let go
            checked += 1
    dist.barrier()
    return checked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PAIRS)
def test_every_method_gives_the_generators_weights(name: str, dtype: torch.dtype, pool: Pool) -> None:
    assert pool.run(4, reshard_all, name, PAIRS[name], dtype) == [len(PAIRS[name]) * len(METHODS)] * 4


def apart(name: str, source: Layout, target: Layout, method: str) -> tuple[int, int]:
    """A case: the first ranks train, the others generate."""
    config = MODELS[name]
    options = Options(method=method, bucket_bytes=3000, itemsize=4, apart=True)  # type: ignore[arg-type]
    plan = plan_reshard(config, source, target, options)
    mover = Resharder(plan, dtype=torch.float32, timeout_s=30)
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(1)
    whole = {spec.name: torch.randn(spec.shape, generator=draw) for spec in plan.table.stored()}

    def slices(layout: Layout, rank: int, held: Any) -> dict[str, torch.Tensor]:
        at = layout.coords(rank)
        specs = {part.name: plan.table.by_name(stored) for stored, part in held.items()}
        return {local: place(slot_of(local, spec, layout), at, whole[spec.name]) for local, spec in specs.items()}

    trained = slices(source, rank, mover.script.source) if rank < plan.first_generator else {}
    found = mover.run(trained)
    if rank >= plan.first_generator:
        expected = slices(target, rank - plan.first_generator, mover.script.target)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    else:
        assert found == {}
    dist.barrier()
    return mover.counts.sent, mover.counts.received


@pytest.mark.parametrize("method", ["broadcast", "minimal"])
def test_generators_on_devices_of_their_own(method: str, pool: Pool) -> None:
    """Two trainers, two replicas of the generator: by broadcast the trainers send every element once."""
    found = pool.run(4, apart, "bias_tied", Layout(pp=2), Layout(dp=2), method)
    weights = MODELS["bias_tied"].num_params * 4
    copies = 1 if method == "broadcast" else 2
    assert sum(sent for sent, _ in found[:2]) == copies * weights
    assert [received for _, received in found] == [0, 0, weights, weights]


def with_a_dead_peer() -> str:
    """A case: device 1 takes no part."""
    config = MODELS["dense"]
    trained = locals_of(build_sharded(config, Mesh(Layout(tp=2), timeout_s=60), seed=3))
    plan = plan_reshard(config, Layout(tp=2), Layout(dp=2), Options(itemsize=4))
    mover = Resharder(plan, dtype=torch.float32, timeout_s=0.5)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    try:
        mover.run(trained)
    except SyncError as error:
        return str(error)
    return "no error"


def test_pitfall_31_a_dead_receiver_is_named(pool: Pool) -> None:
    message = pool.run(2, with_a_dead_peer)[0]
    assert (
        "from device 1: no answer within 0.5 s, step 1 of" in message and "is the process of device 1 alive?" in message
    )


def with_a_killed_peer(rank: int, folder: Path) -> None:
    """A process of its own: device 1 dies before it takes part; what device 0 says of it is left in a file."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    config = MODELS["dense"]
    trained = locals_of(build_sharded(config, Mesh(Layout(tp=2), timeout_s=60), seed=3))
    mover = Resharder(
        plan_reshard(config, Layout(tp=2), Layout(dp=2), Options(itemsize=4)), dtype=torch.float32, timeout_s=20
    )
    dist.barrier()
    if rank == 1:
        os._exit(9)
    try:
        mover.run(trained)
    except SyncError as error:
        (folder / "said").write_text(f"{error.message}\n{error.hint}")


def test_a_killed_receiver_is_named_at_once(tmp_path: Path) -> None:
    pair = [CONTEXT.Process(target=with_a_killed_peer, args=(rank, tmp_path), daemon=True) for rank in (0, 1)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 9]
    message, hint = (tmp_path / "said").read_text().splitlines()
    assert " device 1: " in message and "step 1 of" in message and hint == "is the process of device 1 alive?"
    assert "no answer within" not in message  # it did not wait to the end


def wrong_tensors() -> list[str]:
    config = MODELS["dense"]
    trained = locals_of(build_sharded(config, Mesh(Layout(tp=2), timeout_s=60), seed=3))
    mover = Resharder(plan_reshard(config, Layout(tp=2), Layout(dp=2)), dtype=torch.bfloat16, timeout_s=5)
    found = []
    lacking = {name: tensor for name, tensor in trained.items() if name != "layers.1.o.weight"}
    for given in (lacking, {**trained, "layers.2.down.weight": torch.zeros(3, 3)}):
        try:
            mover.run(given)
        except SyncError as error:
            found.append(str(error))
    dist.barrier()  # nobody leaves while another still connects
    return found


def test_a_missing_or_misshapen_tensor_is_named(pool: Pool) -> None:
    first, second = pool.run(2, wrong_tensors)[1]
    assert first == "resharding: the trainer on device 1 has no tensor layers.1.o.weight"
    assert "layers.2.down.weight of the trainer on device 1 has shape (3, 3), the plan says (20, 12)" in second
