"""Train engines in worker processes that read the dock themselves: the same results, errors that say who and where."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from docklands.config.schema import TrainSection
from docklands.core.batch import Packed
from docklands.core.fields import OLD_LOGPROBS, VALUES
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.dock.warehouse.messages import Stats
from docklands.errors import DataError, NonFinite, WarehouseLost, WorkerLost
from docklands.fleet.engines import RemoteEngine
from docklands.fleet.host import Context, Setup
from docklands.fleet.local_carrier import LocalCarrier
from docklands.fleet.saving import RemoteCheckpoint
from docklands.fleet.workers import Workers
from docklands.models import load
from docklands.parallel import Layout
from docklands.train import TrainEngine, checkpoint, sharded_checkpoint
from docklands.train.share import rows_of_replicas
from tests.distributed.cases import OPTIM, TRAIN, alone, batches, difference
from tests.fleet_cases import ACTOR, STAGES, VALUE, Flow, flow, learner, numbered, spec
from tests.train_cases import ACTOR_WITH_ENTROPY, policy_loss

LAYOUT = Layout(dp=2, tp=2)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers(Setup(LAYOUT, wait_s=60, log=tmp_path_factory.mktemp("log")), LocalCarrier())
    yield made
    made.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Workers]:
    """Workers that a test breaks."""
    made = Workers(Setup(Layout(dp=2), wait_s=30, log=tmp_path / "log"), LocalCarrier())
    yield made
    made.close()


def pids(workers: Workers) -> list[int]:
    return [line.pid for line in workers.lines]  # type: ignore[attr-defined]


async def same_as_alone(flow: Flow, path: Path) -> None:
    """Log-probs, values, three updates of both engines, and the weights: those of one process."""
    policy, critic = alone(path), alone(path, True)
    for step in range(3):
        await flow.admit(step)
        rows, written = await flow.forward()
        if step == 0:
            for column, expected in ((OLD_LOGPROBS, policy), (VALUES, critic)):
                whole = written.by_id(numbered(0).row_ids)[column]
                assert difference(whole.values, expected["before"]) < 1e-5
        for role, update, expected in ((flow.actor, ACTOR, policy), (flow.critic, VALUE, critic)):
            metrics = await role.update(update, rows)
            for name in ("loss", "grad_norm", "tokens"):
                key = f"{update.name}/{name}"
                assert metrics[key][0] == pytest.approx(expected["metrics"][step][key][0], rel=1e-5, abs=1e-7), key
        await flow.dock.retire(rows)
    for role, expected in ((flow.actor, policy), (flow.critic, critic)):
        for name, weight in role.resource.weights():  # type: ignore[attr-defined]
            assert difference(weight, expected["weights"][name]) < 1e-5, name


def test_ranks_that_read_the_dock_train_as_one_process(workers: Workers, models: Path, tmp_path: Path) -> None:
    """A tensor leaves the dock once for each replica, and none passes the driver. Workers read where it lies."""

    async def run() -> None:
        path = models / "qwen3_tied"
        async with flow(workers, path, tmp_path) as made:
            await same_as_alone(made, path)
            stats = await made.dock.stats()
            tokens = sum(batch.num_tokens for batch in batches())
            assert stats["dock/old_logprobs/bytes_out"] == pytest.approx(tokens * 5 + 36 * 8)
            asked = (await made.dock.warehouses.ask(0, Stats())).values.get("gets", 0)
            assert asked == 2  # the first of each leader, before it had mapped the memory, of 24

    asyncio.run(asyncio.wait_for(run(), 240))


def test_the_state_is_that_of_one_process(workers: Workers, models: Path, tmp_path: Path) -> None:
    """Ranks write a checkpoint that one process goes on from, and the other way; the driver handles paths only. What is
    saved is the moment of `hold`, whatever is trained before it is written.
    """
    path, root = models / "llama_bias", tmp_path / "checkpoints"

    async def train(first: int, begin_from: Path | None = None) -> Path:
        async with flow(workers, path, tmp_path / str(first)) as made:
            saver = RemoteCheckpoint(workers)
            if begin_from is not None:
                assert saver.load(begin_from, ["actor"]) == []
            await made.admit(first)
            rows, _ = await made.forward()
            await made.actor.update(ACTOR, rows)
            saver.hold(10 + first, ["actor"])
            await made.actor.update(ACTOR, rows)
            saver.begin(checkpoint.begin(root, 10 + first, {"flow": {}}), ["actor"])
            saver.settle()
            return root / f"step_{10 + first:06d}"

    found = asyncio.run(asyncio.wait_for(train(0), 240))
    local = TrainEngine(load(path / "policy"), TrainSection(**TRAIN), OPTIM, max_tokens=8, total_updates=10)
    sharded_checkpoint.load(found, {"actor": local})
    assert (local.updates, local.notes) == (1, [])
    whole = checkpoint.save(tmp_path / "alone", 1, {"actor": local.state_dict()})
    there = dict(sharded_checkpoint.weights(asyncio.run(asyncio.wait_for(train(1, whole), 240))))
    local.update(batches()[1], ACTOR_WITH_ENTROPY)
    here = local.masters()
    assert there.keys() == here.keys() and all(difference(there[name], here[name]) < 1e-5 for name in here)


def test_weights_that_are_not_finite_are_not_saved(workers: Workers, models: Path, tmp_path: Path) -> None:
    """One element, on one rank: all ranks refuse, no directory is left, and the workers go on."""
    bad = load(models / "qwen3_tied" / "policy")
    with torch.no_grad():
        dict(bad.named_parameters())["layers.2.down.weight"][3, -1] = torch.nan
    engine = TrainEngine(bad, TrainSection(**TRAIN), OPTIM)
    found = checkpoint.save(tmp_path / "bad", 3, {"actor": engine.state_dict()})

    async def run() -> None:
        async with flow(workers, models / "qwen3_tied", tmp_path / "flow"):
            saver = RemoteCheckpoint(workers)
            with pytest.raises(NonFinite, match=r"actor of .*: 1 elements of weight layers.2.down.weight"):
                saver.load(found, ["actor"])
            with pytest.raises(NonFinite, match=r"actor in step_000004: 1 elements of weight layers.2.down.weight"):
                saver.begin(checkpoint.begin(tmp_path / "root", 4, {}), ["actor"])
            assert list((tmp_path / "root").iterdir()) == [] and saver.going is None

    asyncio.run(asyncio.wait_for(run(), 240))


def nan_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    result = policy_loss(packed, out, denominators)
    return LossResult(result.loss * torch.nan, result.metrics)


def test_an_error_of_all_ranks_is_raised_and_the_workers_go_on(workers: Workers, models: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with flow(workers, models / "qwen3_tied", tmp_path) as made:
            await made.admit(0)
            rows, _ = await made.forward()
            with pytest.raises(NonFinite, match="the loss of actor is nan at update 1"):
                await made.actor.update(learner(nan_loss), rows)
            gone = rows.select(np.arange(2))
            gone.row_ids[:1] = 999  # on one replica only, and both must hear of it before they meet
            with pytest.raises(WarehouseLost, match="cannot read its rows"):
                await made.actor.update(ACTOR, gone)
            with pytest.raises(WarehouseLost, match="cannot read its rows"):  # here the other replica does its part
                await made.actor.run(STAGES[0], gone)
            assert np.isfinite((await made.actor.update(ACTOR, rows))["actor/grad_norm"][0])

    asyncio.run(asyncio.wait_for(run(), 240))
    with pytest.raises(DataError, match="does not exist"):
        RemoteEngine(workers, "other", spec(models / "nothing"))


def broken_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    """A fault of the user's on one replica only."""
    if 100 in packed.batch.row_ids:
        raise ZeroDivisionError("a loss that divides by nothing")
    return policy_loss(packed, out, denominators)


def test_a_rank_that_fails_alone_ends_the_group_by_name(
    own: Workers, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docklands.fleet.workers.GRACE_S", 0.5)

    async def run() -> None:
        async with flow(own, models / "qwen3_tied", tmp_path) as made:
            await made.admit(0)
            rows, _ = await made.forward()
            with pytest.raises(WorkerLost, match="failed during actor update.*a loss that divides by nothing"):
                await made.actor.update(learner(broken_loss), rows)
            with pytest.raises(WorkerLost, match="a loss that divides by nothing"):
                await made.actor.update(ACTOR, rows)

    asyncio.run(asyncio.wait_for(run(), 240))


class Sleeper:
    """An object of a role: waits, notes what it is told meanwhile."""

    def __init__(self, context: Context) -> None:
        self.context, self.told = context, threading.Event()

    def wait(self) -> bool:
        """Until somebody tells it to stop."""
        print("waiting", flush=True)
        return self.told.wait(30.0)

    def stop(self) -> None:
        self.told.set()

    def where(self) -> tuple[int, int, int]:
        """(rank, world size, number among all workers)."""
        return self.context.rank, dist.get_world_size(), self.context.setup.first + self.context.rank


def test_pitfall_30_a_killed_rank_is_named_with_its_last_words(own: Workers, tmp_path: Path) -> None:
    own.make("sleeper", Sleeper)
    victim = pids(own)[1]
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    said = rf"worker 1 \(pid {victim}\) died with exit code -9 .* during sleeper wait, \d+ MiB resident before\nwaiting"
    with pytest.raises(WorkerLost, match=said):
        own.call("sleeper", "wait")
    assert until_gone(pids(own))


def until_gone(numbers: list[int]) -> bool:
    end = time.monotonic() + 25
    while time.monotonic() < end and any(alive(number) for number in numbers):
        time.sleep(0.02)
    return not any(alive(number) for number in numbers)


def alive(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


LEFT = """
from pathlib import Path
from docklands.fleet.host import Setup
from docklands.fleet.local_carrier import LocalCarrier
from docklands.fleet.workers import Workers
from docklands.parallel import Layout
from tests.distributed.test_fleet_workers import Sleeper, pids
workers = Workers(Setup(Layout(dp=2), wait_s=30), LocalCarrier())
workers.make("sleeper", Sleeper)
print(*pids(workers))
"""


def test_a_driver_that_ends_without_closing_its_workers_takes_them_along() -> None:
    """As after a second Ctrl-C, which breaks off the closing. Workers ignore the SIGTERM that multiprocessing sends."""
    done = subprocess.run([sys.executable, "-c", LEFT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    left = [int(pid) for pid in done.stdout.split()]
    assert len(left) == 2 and until_gone(left)


def test_worlds_work_and_die_beside_each_other(tmp_path: Path) -> None:
    """Workers 0 and 1 are a world, worker 2 another: its logs and its death are its own. Urgent calls come through."""
    trainers = Workers(Setup(Layout(dp=2), wait_s=30, log=tmp_path), LocalCarrier())
    other = Workers(Setup(Layout(), first=2, wait_s=30, log=tmp_path), LocalCarrier())
    try:
        for made in (trainers, other):
            made.make("sleeper", Sleeper)
        assert other.call("sleeper", "where") == [(0, 1, 2)]
        waits = threading.Thread(target=other.call, args=("sleeper", "wait"))
        waits.start()
        assert trainers.call("sleeper", "where") == [(0, 2, 0), (1, 2, 1)]
        assert waits.is_alive()
        log = tmp_path / "worker.2.log"
        end = time.monotonic() + 25
        while "waiting" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        assert "worker 2: pid" in other.describe()  # as the watchdog does
        while "in wait" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        assert "in wait" in log.read_text(), "the stack of the thread that computes"
        other.urgent("sleeper", "stop")
        waits.join(20)
        assert not waits.is_alive()
        os.kill(pids(other)[0], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="worker 2 .* died"):
            other.call("sleeper", "where")
        assert trainers.lost is None and trainers.call("sleeper", "where", ranks=[1]) == [(1, 2, 1)]
    finally:
        for made in (trainers, other):
            made.close()
    assert until_gone([*pids(trainers), *pids(other)])


def test_a_process_that_is_stopped_is_missed_by_name(tmp_path: Path) -> None:
    """In the middle of a call, and while it has nothing to do: the driver is told then, too."""
    for busy in (True, False):
        told = threading.Event()
        made = Workers(Setup(Layout(), first=7, wait_s=30, log=tmp_path, heartbeat_s=2.0), LocalCarrier(), told.set)
        try:
            made.make("sleeper", Sleeper)
            numbers = pids(made)
            threading.Timer(0.5, os.kill, (numbers[0], signal.SIGSTOP)).start()
            doing = "sleeper wait" if busy else "nothing after make"
            if not busy:
                assert told.wait(120)
            said = rf"worker 7 \(pid {numbers[0]}\) gave no sign of life for 2 s during {doing}"
            with pytest.raises(WorkerLost, match=said):
                made.call("sleeper", "wait")
            assert until_gone(numbers) and told.wait(120)
        finally:
            made.close()


def lengths_of(rows: list[np.ndarray], lengths: np.ndarray) -> list[int]:
    return [int(lengths[replica].sum()) for replica in rows]


def test_pitfall_34_replicas_get_equal_work() -> None:
    """One of 32 samples is 20 times longer; and groups stay whole where that costs nothing."""
    lengths, groups = np.array([200] + [10] * 31), np.arange(32) // 4
    assert max(lengths_of(rows_of_replicas(lengths, groups, 2), lengths)) <= 1.05 * lengths.sum() / 2
    for even in (np.full(32, 10), np.zeros(32, np.int64)):  # lengths are 0 before rollout
        rows = rows_of_replicas(even, groups, 4)
        assert [len(replica) for replica in rows] == [8] * 4
        assert all(len({row // 4 for row in replica.tolist()}) == 2 for replica in rows)
        assert sorted(np.concatenate(rows).tolist()) == list(range(32))
    lengths, groups = np.random.default_rng(0).integers(100, 900, 512 * 8), np.arange(512 * 8) // 8
    rows = rows_of_replicas(lengths, groups, 4)  # so many groups can be cut evenly where they stand
    assert max(lengths_of(rows, lengths)) <= 1.01 * lengths.sum() / 4
    assert np.concatenate(rows).tolist() == list(range(512 * 8)) and all(row[0] % 8 == 0 for row in rows)
    few = rows_of_replicas(lengths[:1], groups[:1], 4)
    assert [len(replica) for replica in few] == [1, 0, 0, 0]
