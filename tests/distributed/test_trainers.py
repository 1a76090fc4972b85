"""Train engines in processes of their own, driven from one: the same results, and errors that say who and where."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from docklands.config.schema import TrainSection
from docklands.core.batch import Packed
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Learner
from docklands.errors import DataError, NonFinite, WorkerLost
from docklands.fleet.trainers import EngineSpec, RemoteEngine, Setup, Trainers
from docklands.models import load
from docklands.parallel import Layout
from docklands.train import TrainEngine
from docklands.train.share import rows_of_replicas
from tests.distributed.cases import OPTIM, TRAIN, alone, batches, difference
from tests.train_cases import ACTOR_WITH_ENTROPY, CRITIC, batch_of, policy_loss

SETTINGS = (("max_tokens", 8), ("total_updates", 10))
LAYOUT = Layout(dp=2, tp=2)


def spec(path: Path, value: bool = False) -> EngineSpec:
    return EngineSpec(path / ("critic" if value else "policy"), TrainSection(**TRAIN), OPTIM, value, None, SETTINGS)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    made = Trainers(Setup(LAYOUT, wait_s=60, log=tmp_path_factory.mktemp("log")))
    yield made
    made.close()


@pytest.fixture
def own() -> Iterator[list[Trainers]]:
    """Trainers that a test breaks."""
    made: list[Trainers] = []
    yield made
    for each in made:
        each.close()


def test_two_engines_share_the_processes(trainers: Trainers, models: Path) -> None:
    path = models / "qwen3_tied"
    actor, critic = trainers.engine("actor", spec(path)), trainers.engine("critic", spec(path, True))
    for engine, learner, value in ((actor, ACTOR_WITH_ENTROPY, False), (critic, CRITIC, True)):
        expected = alone(path, value)
        before = engine.values(batches()[0]) if value else engine.logprobs(batches()[0])
        assert difference(before.values, expected["before"]) < 1e-5
        for batch, reference in zip(batches(), expected["metrics"]):
            metrics = engine.update(batch, learner)
            for name in ("loss", "grad_norm"):
                key = f"{learner.name}/{name}"
                assert metrics[key][0] == pytest.approx(reference[key][0], rel=1e-5, abs=1e-7)
        for name, weight in engine.weights():
            assert difference(weight, expected["weights"][name]) < 1e-5, name


def test_the_state_is_that_of_one_process(trainers: Trainers, models: Path) -> None:
    path = models / "llama_bias"
    remote = trainers.engine("actor", spec(path))
    remote.update(batches()[0], ACTOR_WITH_ENTROPY)
    remote.version = 7
    state = remote.state_dict()
    local = TrainEngine(load(path / "policy"), TrainSection(**TRAIN), OPTIM, max_tokens=8, total_updates=10)
    local.load_state_dict(state)
    assert (local.version, local.updates, local.notes) == (7, 1, [])
    again = trainers.engine("actor", spec(path))
    again.load_state_dict(local.state_dict())
    assert again.version == 7
    for engine in (local, again):
        engine.update(batches()[1], ACTOR_WITH_ENTROPY)
    here, there = dict(local.weights()), dict(again.weights())
    assert all(difference(there[name], here[name]) < 1e-5 for name in here)


def nan_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    result = policy_loss(packed, out, denominators)
    return LossResult(result.loss * torch.nan, result.metrics)


def test_an_error_of_all_ranks_is_raised_and_the_engine_goes_on(trainers: Trainers, models: Path) -> None:
    engine = trainers.engine("actor", spec(models / "qwen3_tied"))
    with pytest.raises(NonFinite, match="the loss of actor is nan at update 1"):
        engine.update(batches()[0], Learner("actor", "actor", ACTOR_WITH_ENTROPY.reads, nan_loss))
    assert np.isfinite(engine.update(batches()[0], ACTOR_WITH_ENTROPY)["actor/grad_norm"][0])
    with pytest.raises(DataError, match="does not exist"):
        trainers.engine("other", spec(models / "nothing"))


def broken_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    """A fault of the user's on one replica only."""
    if 100 in packed.batch.row_ids:
        raise ZeroDivisionError("a loss that divides by nothing")
    return policy_loss(packed, out, denominators)


def started(own: list[Trainers], models: Path, log: Path) -> tuple[RemoteEngine, list[int]]:
    own.append(Trainers(Setup(Layout(dp=2), wait_s=30, log=log)))
    engine = own[-1].engine("actor", spec(models / "qwen3_tied"))
    return engine, own[-1].pids


def test_a_rank_that_fails_alone_ends_the_group_by_name(
    own: list[Trainers], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docklands.fleet.trainers.GRACE_S", 0.5)
    engine, pids = started(own, models, tmp_path)
    with pytest.raises(WorkerLost, match="failed during actor update.*a loss that divides by nothing"):
        engine.update(batches()[0], Learner("actor", "actor", ACTOR_WITH_ENTROPY.reads, broken_loss))
    with pytest.raises(WorkerLost, match="a loss that divides by nothing"):
        engine.logprobs(batches()[0])
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_pitfall_30_a_killed_rank_is_named(own: list[Trainers], models: Path, tmp_path: Path) -> None:
    engine, pids = started(own, models, tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=rf"trainer 1 \(pid {pids[1]}\) died with exit code -9 during actor logprobs"):
        engine.logprobs(batches()[0])


def lengths_of(rows: list[np.ndarray], lengths: list[int]) -> list[int]:
    return [sum(lengths[row] for row in replica) for replica in rows]


def test_pitfall_34_replicas_get_equal_work() -> None:
    """One of 32 samples is 20 times longer; and groups stay whole where that costs nothing."""
    lengths = [200] + [10] * 31
    batch = batch_of([(row // 4, range(length), [False] + [True] * (length - 1)) for row, length in enumerate(lengths)])
    found = lengths_of(rows_of_replicas(batch, 2), lengths)
    assert max(found) <= 1.05 * sum(lengths) / 2
    even = batch_of([(row // 4, range(10), [False] + [True] * 9) for row in range(32)])
    rows = rows_of_replicas(even, 4)
    assert [len(replica) for replica in rows] == [8] * 4
    assert all(len({row // 4 for row in replica.tolist()}) == 2 for replica in rows)
    assert sorted(np.concatenate(rows).tolist()) == list(range(32))
    few = rows_of_replicas(even.select(np.arange(1)), 4)
    assert [len(replica) for replica in few] == [1, 0, 0, 0]
