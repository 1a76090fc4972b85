"""Workers that Ray places: one local Ray for this module, the same results as one process, deaths named."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from docklands.errors import ConfigError, WorkerLost
from docklands.fleet.host import Setup
from docklands.fleet.ray_carrier import SESSION, RayCarrier, found, join, taking
from docklands.fleet.workers import Workers
from docklands.parallel import Layout
from tests.distributed.test_fleet_workers import Sleeper, pids, same_as_alone, until_gone
from tests.fleet_cases import flow


def test_worlds_share_this_process_s_part_in_ray(cluster: None, tmp_path: Path) -> None:
    """A world of its own comes and goes, another stays."""
    stays = made(Layout(), tmp_path / "log")
    comes = Workers(Setup(Layout(), first=1, wait_s=60, log=tmp_path / "log"), RayCarrier())
    try:
        for each in (stays, comes):
            each.make("sleeper", Sleeper)
        comes.close()
        assert until_gone(pids(comes)) and stays.call("sleeper", "where") == [(0, 1, 0)]
    finally:
        stays.close()
        comes.close()
    assert ray.is_initialized()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, resources={"NPU": 2})
    yield
    ray.shutdown()


def made(layout: Layout, log: Path, **more: str) -> Workers:
    return Workers(Setup(layout, wait_s=60, log=log), RayCarrier(**more))


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_two_ranks_on_ray_train_as_one_process(cluster: None, models: Path, tmp_path: Path, name: str) -> None:
    layout = Layout(dp=2, ep=2) if name == "qwen3_moe" else Layout(tp=2)
    workers = made(layout, tmp_path / "log", **({"resource": "NPU"} if name == "qwen3_moe" else {}))

    async def run() -> None:
        async with flow(workers, models / name, tmp_path / "dock") as found:
            await same_as_alone(found, models / name)

    try:
        asyncio.run(asyncio.wait_for(run(), 240))
        assert ray.available_resources().get("NPU", 0) == (0 if name == "qwen3_moe" else 2)
    finally:
        workers.close()
    assert until_gone(pids(workers)) and ray.is_initialized()


def test_a_killed_actor_is_named_and_the_next_workers_find_room(cluster: None, tmp_path: Path) -> None:
    for _ in range(2):
        workers = made(Layout(dp=2), tmp_path / "log")
        try:
            workers.make("sleeper", Sleeper)
            threading.Timer(0.5, os.kill, (pids(workers)[1], signal.SIGKILL)).start()
            said = rf"worker 1 \(pid {pids(workers)[1]} on [\d.]+\) died: .* during sleeper wait, \d+ MiB"
            with pytest.raises(WorkerLost, match=said) as caught:
                workers.call("sleeper", "wait")
            assert caught.value.message.splitlines()[-1] == "waiting"
        finally:
            workers.close()


def test_urgent_calls_reach_a_busy_actor(cluster: None, tmp_path: Path) -> None:
    workers = made(Layout(), tmp_path / "log")
    try:
        workers.make("sleeper", Sleeper)
        threading.Timer(0.3, workers.urgent, ("sleeper", "stop")).start()
        assert workers.call("sleeper", "wait") == [True]
    finally:
        workers.close()


def test_a_group_that_went_with_its_ray_is_a_loss(cluster: None) -> None:
    group = placement_group([{"CPU": 1}])
    assert found(group.wait)
    remove_placement_group(group)
    with pytest.raises(WorkerLost, match="Ray was lost while workers started: .* does not exist"):
        found(group.wait)


def test_what_does_not_fit_is_refused(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docklands.fleet.workers.START_S", 1.0)
    with pytest.raises(ConfigError, match=r"no room for 3 workers with one NPU each .*the cluster has 2 NPU"):
        made(Layout(dp=3), tmp_path / "log", resource="NPU").call("", "stacks")
    with pytest.raises(ConfigError, match="no node of this Ray has a resource 'TPU'") as caught:
        made(Layout(), tmp_path / "log", resource="TPU").call("", "stacks")
    assert "it has CPU, NPU" in caught.value.hint
    monkeypatch.setattr(SESSION, "seen", {"TPU"})  # its node is away, and may come back
    with pytest.raises(ConfigError, match="no room for 1 workers with one TPU each"):
        made(Layout(), tmp_path / "log", resource="TPU").call("", "stacks")
    monkeypatch.setattr("docklands.fleet.workers.START_S", 300.0)
    workers = made(Layout(), tmp_path / "log", resource="TPU")
    threading.Timer(0.3, workers.give_up).start()
    with pytest.raises(WorkerLost, match="have been ended"):
        workers.call("", "stacks")
    assert taking("GPU") == {"num_cpus": 0, "num_gpus": 1}
    assert join("", 4) == ("", [])  # this process belongs to a Ray already
