"""Checkpoints that are written in one layout and read in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from docklands.config.schema import TrainSection
from docklands.errors import CheckpointError
from docklands.models.sharded import load_sharded
from docklands.parallel import Layout
from docklands.parallel.mesh import Mesh
from docklands.train import checkpoint, sharded_checkpoint
from docklands.train.sharded import ShardedEngine
from tests.distributed.cases import OPTIM, TRAIN, alone, batches, difference
from tests.distributed.pool import Pool
from tests.train_cases import ACTOR_WITH_ENTROPY


def engine_of(path: Path, layout: Layout) -> ShardedEngine:
    model = load_sharded(path / "policy", Mesh(layout, timeout_s=60))
    return ShardedEngine(model, TrainSection(**TRAIN), OPTIM, max_tokens=8, total_updates=10)


def step(engine: ShardedEngine, number: int) -> dict[str, tuple[float, float]]:
    replica = 0 if engine.mesh.data is None else engine.mesh.data.rank
    batch = batches()[number]
    rows = np.arange(replica, len(batch), engine.mesh.layout.data)
    return {**engine.forward_backward(batch.select(rows), ACTOR_WITH_ENTROPY), **engine.optim_step()}


def train_and_save(path: Path, layout: Layout, root: Path, updates: int) -> None:
    engine = engine_of(path, layout)
    for number in range(updates):
        step(engine, number)
    engine.version = updates
    sharded_checkpoint.save(root, updates, engine)


def load_and_train(path: Path, layout: Layout, root: Path) -> dict[str, Any]:
    engine = engine_of(path, layout)
    with torch.no_grad():
        for parameter in engine.sharded.parameters().values():
            parameter.mul_(0.5)  # what was loaded before does not count
    sharded_checkpoint.load(checkpoint.latest(root) or root, engine)
    metrics = [step(engine, number) for number in range(engine.version, 3)]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"version": engine.version, "updates": engine.updates, "metrics": metrics, "weights": weights}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("qwen3_tied", Layout(tp=2, pp=2), Layout(fsdp=4)),
        ("qwen2_two_kv_heads", Layout(tp=4), Layout(pp=2)),
        ("deepseek", Layout(fsdp=2, tp=2, ep=2), Layout(pp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_saved_in_one_layout_and_loaded_in_another(
    name: str, before: Layout, after: Layout, models: Path, pool: Pool, tmp_path: Path
) -> None:
    pool.run(before.world_size, train_and_save, models / name, before, tmp_path, 1)
    found = pool.run(after.world_size, load_and_train, models / name, after, tmp_path)[0]
    expected = alone(models / name)
    assert (found["version"], found["updates"]) == (1, 3)
    for mine, reference in zip(found["metrics"], expected["metrics"][1:]):
        for key in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert mine[key][0] == pytest.approx(reference[key][0], rel=1e-5, abs=1e-7)
    for key, weight in expected["weights"].items():
        assert difference(found["weights"][key], weight) < 1e-5, key


def save_while_training(path: Path, layout: Layout, root: Path) -> list[str]:
    """What is saved is the moment of the call, whatever follows it."""
    engine = engine_of(path, layout)
    step(engine, 0)
    engine.version = 1
    done = sharded_checkpoint.save_async(root, 1, engine)
    for number in (1, 2):
        step(engine, number)
    first = done.result(timeout=30)
    (root / "file").touch()  # and a save that cannot be made says so
    refused = sharded_checkpoint.save_async(root / "file", 2, engine).exception(timeout=30)
    return [str(first), type(refused).__name__]


def test_saving_beside_the_training(models: Path, pool: Pool, tmp_path: Path) -> None:
    layout = Layout(tp=2, pp=2)
    found = pool.run(4, save_while_training, models / "qwen3_tied", layout, tmp_path)
    assert found == [[str(tmp_path / "step_000001"), "CheckpointError"]] * 4
    resumed = pool.run(2, load_and_train, models / "qwen3_tied", Layout(fsdp=2), tmp_path)[0]
    expected = alone(models / "qwen3_tied")
    assert (resumed["version"], resumed["updates"]) == (1, 3)
    for key, weight in expected["weights"].items():
        assert difference(resumed["weights"][key], weight) < 1e-5, key


def save_with_a_fault(path: Path, layout: Layout, root: Path) -> str:
    """The second checkpoint cannot be finished: its directory is taken away under it on the way."""
    engine = engine_of(path, layout)
    sharded_checkpoint.save(root, 1, engine)
    original = checkpoint.put_in_place

    def fail(writing: Path, target: Path) -> None:
        raise OSError("no space left on device")

    checkpoint.put_in_place = fail
    try:
        sharded_checkpoint.save(root, 2, engine)
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoint.put_in_place = original
    return "no error"


def test_a_save_that_fails_leaves_the_last_one_and_says_so_on_every_rank(
    models: Path, pool: Pool, tmp_path: Path
) -> None:
    found = pool.run(2, save_with_a_fault, models / "qwen3_tied", Layout(tp=2), tmp_path)
    assert all("no space left on device" in text for text in found)
    assert checkpoint.complete(tmp_path) == [tmp_path / "step_000001"]


def die_while_saving(path: Path, layout: Layout, root: Path, marker: Path) -> None:
    """Killed after the tensors, before the marker."""
    import os

    engine = engine_of(path, layout)
    sharded_checkpoint.save(root, 1, engine)
    checkpoint.write_marker = lambda *_: os._exit(9)  # type: ignore[assignment]
    sharded_checkpoint.save(root, 2, engine)


def test_pitfall_25_a_kill_during_the_save_leaves_the_last_one(models: Path, pool: Pool, tmp_path: Path) -> None:
    from tests.distributed.pool import CaseFailed

    with pytest.raises(CaseFailed, match="rank 0: the process died"):
        pool.run(2, die_while_saving, models / "qwen3_tied", Layout(tp=2), tmp_path, tmp_path)
    assert (tmp_path / ".writing-step_000002" / "actor" / ".metadata").is_file()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000001"
    found = pool.run(2, load_and_train, models / "qwen3_tied", Layout(pp=2), tmp_path)[0]
    assert found["updates"] == 3


def load_error(path: Path, layout: Layout, root: Path) -> str:
    try:
        sharded_checkpoint.load(root, engine_of(path, layout))
    except CheckpointError as error:
        return str(error)
    return ""


def test_pitfall_26_another_model_is_refused(models: Path, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, train_and_save, models / "qwen3_tied", Layout(tp=2), tmp_path, 0)
    found = pool.run(2, load_error, models / "llama_bias", Layout(tp=2), tmp_path / "step_000000")
    assert len(set(found)) == 1 and "lacks weights/layers.0.qkv.bias" in found[0]
    part = tmp_path / "step_000000" / "actor" / "__1_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:])  # pitfall 25: its size is right
    found = pool.run(2, load_error, models / "qwen3_tied", Layout(tp=2), tmp_path / "step_000000")
    assert len(set(found)) == 1 and "__1_0.distcp is damaged" in found[0]
    part.unlink()
    found = pool.run(2, load_error, models / "qwen3_tied", Layout(tp=2), tmp_path / "step_000000")
    assert "is not complete" in found[0]
