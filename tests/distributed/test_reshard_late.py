"""A generator that joins late: the version of the moment comes to it alone, then it publishes with the others.

And one that leaves in the middle of a publish.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from docklands.config.layouts import SyncSection
from docklands.config.schema import RolloutSection, TrainSection
from docklands.errors import GateFailed, SyncError
from docklands.fleet.host import Context, Setup
from docklands.fleet.publishing import Party, join_group
from docklands.models import ModelConfig
from docklands.models.sharded import build_sharded, load_sharded
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.rollout.mesh import MeshEngine
from docklands.sync.gate import Gate
from docklands.sync.plan import Options, plan_reshard
from docklands.sync.publish import Publisher, Route
from docklands.sync.reshard import Resharder
from docklands.train.resident import TrainState
from docklands.train.sharded import ShardedEngine
from tests.distributed import cases
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


class Copying(MeshEngine):
    """Keeps weights of its own, as vLLM does. spoils: its copy is not what it was given."""

    copies, spoils = True, False

    def hold(self, weights: Any, version: int) -> None:
        super().hold({name: tensor * (1.5 if self.spoils else 1.0) for name, tensor in weights.items()}, version)


def probed(path: Path, every: int, engine: type[MeshEngine]) -> list[tuple[int, bool]]:
    """A case: process 0 trains, 1 generates from the start, 2 comes after version 1, and 1 is started again after
    version 4. -> (version, whether it was probed) of this process
    """
    rank, config = dist.get_rank(), ModelConfig.from_hf(cases.MODELS[path.name])
    store, port = home()
    trainer: TrainState | None = None
    generator: MeshEngine | None = None
    if rank == 0:
        model = load_sharded(path / "policy", Mesh(Layout(), timeout_s=30, first=0))
        trainer = TrainState(ShardedEngine(model, TrainSection(), cases.OPTIM, max_tokens=8, total_updates=10))
    else:
        generator = engine(config, RolloutSection(max_batch=4), Mesh(Layout(), timeout_s=30, first=rank))
    context = Context(Setup(Layout(), wait_s=10.0), rank, "cpu")
    publisher, said = None, []
    meetings: list[tuple[tuple[int, ...], list[int]]] = [
        ((0, 1), [0, 1]),
        ((0, 2), [1]),
        ((0, 1, 2), [2, 3, 4]),
        ((0, 1), [4]),
        ((0, 1, 2), [5, 6]),
    ]
    for number, (members, versions) in enumerate(meetings):
        if rank in members:
            party = Party(number, "localhost", port, len(members), len(members) - 1)
            group = join_group(context, party, members.index(rank))
            generation = Layout(dp=party.replicas)
            route = Route(config, Layout(), generation, torch.float32, True, group=group)
            if publisher is None or (rank == 1 and number == 3):
                section = SyncSection(probe_every=every)
                publisher = Publisher(route, section, trainer, generator, timeout_s=10)
            else:
                publisher.take(route)
            said += [(version, "reshard/probe_diff" in publisher.publish(version)) for version in versions]
            publisher.forget()
            with pytest.raises(SyncError, match="the plan has 2 devices, the process group 3 ranks"):
                publisher.take(Route(config, Layout(), Layout(), torch.float32, True))
            publisher.forget()  # what failed to come up can be let go of, too
            dist.destroy_process_group(group)
        dist.barrier()
    del store
    return said


@pytest.mark.parametrize(
    ("every", "engine", "more"),
    [(3, MeshEngine, {3, 6}), (0, Copying, set()), (0, MeshEngine, None)],
    ids=["every third", "copies", "never"],
)
def test_whoever_comes_late_is_probed_with_the_others(
    every: int, engine: type[MeshEngine], more: set[int] | None, models: Path, pool: Pool
) -> None:
    """The first publish of every party, and the versions that are due: the same for a trainer that has seen all and a
    generator that has seen none. Else, they would wait for each other in different places.
    """
    first, due = more is not None, more or set()
    said = pool.run(3, probed, models / "qwen3_tied", every, engine)
    begun = [(0, first), (1, False)]
    again = [(2, first), *((version, version in due) for version in (3, 4))]
    last = [(5, first), (6, 6 in due)]
    assert said[0] == [*begun, (1, first), *again, (4, first), *last]
    assert said[1] == [*begun, *again, (4, first), *last]
    assert said[2] == [(1, first), *again, *last]


def first_of_a_copy(path: Path) -> str:
    """A case: what the gate compares is what was sent, but the engine has made something else of it."""
    config = ModelConfig.from_hf(cases.MODELS[path.name])
    mesh = Mesh(Layout(dp=2), timeout_s=30)
    model = load_sharded(path / "policy", mesh)
    trainer = TrainState(ShardedEngine(model, TrainSection(), cases.OPTIM, max_tokens=8, total_updates=10))
    generator = Copying(config, RolloutSection(max_batch=4), mesh)
    generator.spoils = dist.get_rank() == 1
    route = Route(config, Layout(dp=2), Layout(dp=2), torch.float32)
    try:
        Publisher(route, SyncSection(), trainer, generator, timeout_s=30).publish(0)
    except GateFailed as error:
        return error.message
    return ""


def test_the_first_publish_to_an_engine_with_a_copy_is_probed(models: Path, pool: Pool) -> None:
    for said in pool.run(2, first_of_a_copy, models / "qwen3_tied"):
        assert said.startswith("after publishing version 0, log-probs of the probe differ by ")


def leaves(place: str) -> str:
    """A case: process 1 has gone when the others come to this place. -> what process 0 says"""
    rank, config = dist.get_rank(), MODELS["moe"]
    store, port = home()
    trained = locals_of(build_sharded(config, Mesh(Layout(), timeout_s=30, first=0), seed=3)) if rank == 0 else {}
    party = Party(0, "localhost", port, 2, 1)
    group = join_group(Context(Setup(Layout(), wait_s=10.0), rank, "cpu"), party, rank)
    plan = plan_reshard(config, Layout(), Layout(), Options(apart=True))
    mover = Resharder(plan, dtype=torch.bfloat16, timeout_s=10, group=group)
    gate, message = Gate(plan, mover.as_held, group), ""
    try:
        if rank == 0 or place != "published":
            published = gate.publish(trained)
            found = mover.run(trained)
            if rank == 0:
                gate.check(7, 7, found, published)
    except SyncError as error:
        message = f"{type(error).__name__}: {error.message}"
    dist.destroy_process_group(group)
    del gate, mover, group
    gc.collect()  # the line is open as long as anything knows it
    dist.barrier()
    del store
    return message


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (
            "published",
            "SyncError: gate: checksums of what trainers send: a device is lost, or late, as device 0 hears (",
        ),
        ("checked", "SyncError: gate: checksums of version 7 as generators hold it: a device is lost, or late"),
    ],
)
def test_a_device_that_leaves_in_mid_publish_is_told_in_one_line(place: str, says: str, pool: Pool) -> None:
    said = pool.run(2, leaves, place)
    assert said[0].startswith(says) and "\n" not in said[0] and said[1] == ""
