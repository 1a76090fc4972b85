"""Checkpoints that are written in one layout and read in another."""

from __future__ import annotations

import errno
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from docklands.config.schema import TrainSection
from docklands.errors import CheckpointError
from docklands.models import load as load_model
from docklands.models import read_config
from docklands.models.hf_export import export_stream
from docklands.models.sharded import load_sharded
from docklands.obs.spans import SpanRecorder, read_spans, recording, span
from docklands.parallel import Layout
from docklands.parallel.mesh import Mesh
from docklands.train import TrainEngine, checkpoint, sharded_checkpoint
from docklands.train.sharded import ShardedEngine
from docklands.train.sharded_checkpoint import Saving
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


def saving(root: Path, number: int, engine: TrainEngine, copy: bool = False) -> Saving:
    """As the driver and the ranks of a run do it together."""
    mesh = engine.mesh if isinstance(engine, ShardedEngine) else None
    begun = checkpoint.Begun(root / f"step_{number:06d}", 2, {})
    if mesh is None or mesh.rank == 0:
        begun = checkpoint.begin(root, number, {}, keep=2)
    group = mesh and (mesh.background() if copy else mesh.world and mesh.world.pg)
    if group is not None:
        dist.barrier(group)
    return Saving.of(begun, {"actor": engine}, group, copy)


def load(root: Path, engine: TrainEngine) -> None:
    world = engine.mesh.world if isinstance(engine, ShardedEngine) else None
    sharded_checkpoint.load(checkpoint.latest(root) or root, {"actor": engine}, world and world.pg)


def train_and_save(path: Path, layout: Layout, root: Path, updates: int) -> None:
    engine = engine_of(path, layout)
    for number in range(updates):
        step(engine, number)
    engine.version = updates
    saving(root, updates, engine).write()


def load_and_train(path: Path, layout: Layout, root: Path) -> dict[str, Any]:
    engine = engine_of(path, layout)
    with torch.no_grad():
        for parameter in engine.sharded.parameters().values():
            parameter.mul_(0.5)  # what was loaded before does not count
    load(root, engine)
    metrics = [step(engine, number) for number in range(engine.version, 3)]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"version": engine.version, "updates": engine.updates, "metrics": metrics, "weights": weights}


def goes_on(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Resumed after one update: the losses and the weights of a run that was never cut."""
    assert (found["version"], found["updates"]) == (1, 3)
    for mine, reference in zip(found["metrics"], expected["metrics"][1:], strict=True):
        for key in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert mine[key][0] == pytest.approx(reference[key][0], rel=1e-5, abs=1e-7)
    for key, weight in expected["weights"].items():
        assert difference(found["weights"][key], weight) < 1e-5, key


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
    goes_on(found, alone(models / name))


def alone_of(path: Path) -> TrainEngine:
    return TrainEngine(load_model(path / "policy"), TrainSection(**TRAIN), OPTIM, max_tokens=8, total_updates=10)


def test_what_one_process_wrote_is_read_by_ranks_and_the_other_way(models: Path, pool: Pool, tmp_path: Path) -> None:
    """Also as one whole file, the format of a run in one process."""
    path = models / "qwen3_moe"
    layout = Layout(pp=2, dp=2, ep=2)
    engine = alone_of(path)
    engine.update(batches()[0], ACTOR_WITH_ENTROPY)
    engine.version = 1
    checkpoint.save(tmp_path / "file", 1, {"actor": engine.state_dict()})
    goes_on(pool.run(4, load_and_train, path, layout, tmp_path / "file")[0], alone(path))
    pool.run(4, train_and_save, path, layout, tmp_path / "ranks", 1)
    back = alone_of(path)
    load(tmp_path / "ranks", back)
    assert (back.version, back.updates, back.notes) == (1, 1, [])
    for (name, ours), theirs in zip(back.masters().items(), engine.masters().values(), strict=True):
        assert difference(ours, theirs) < 1e-5, name
    metrics = [back.update(batch, ACTOR_WITH_ENTROPY) for batch in batches()[1:]]
    for mine, reference in zip(metrics, alone(path)["metrics"][1:], strict=True):
        assert mine["actor/loss"][0] == pytest.approx(reference["actor/loss"][0], rel=1e-5, abs=1e-7)


def save_while_training(path: Path, layout: Layout, root: Path) -> list[str]:
    """What is saved is the moment of the call, whatever follows it; the last file waits for two steps of training."""
    trained, marker = threading.Event(), checkpoint.write_marker
    engine = engine_of(path, layout)
    step(engine, 0)
    engine.version = 1
    with ThreadPoolExecutor(1) as thread, recording(SpanRecorder(root / "spans.jsonl", "worker", engine.mesh.rank)):
        checkpoint.write_marker = lambda *args: (trained.wait(120), marker(*args))[1]  # type: ignore[assignment]
        try:
            done = thread.submit(saving(root, 1, engine, copy=True).write)
            for number in (1, 2):
                with span("update"):
                    step(engine, number)
            unfinished = not done.done() and not checkpoint.complete(root)
            dist.barrier()
            trained.set()
            first = done.result(timeout=120)
        finally:
            checkpoint.write_marker = marker

        def full(*_: Any) -> None:  # and a save that cannot be made says so
            raise OSError(errno.ENOSPC, "No space left on device")

        checkpoint.write_marker = full
        try:
            refused = thread.submit(saving(root, 2, engine, copy=True).write).exception(timeout=120)
        finally:
            checkpoint.write_marker = marker
    return [first.name, str(unfinished), type(refused).__name__, getattr(refused, "message", "")]


def test_saving_beside_the_training(models: Path, pool: Pool, tmp_path: Path) -> None:
    """Shown by the spans: the write begins before the updates and ends after them, on every rank."""
    layout = Layout(tp=2, pp=2)
    found = pool.run(4, save_while_training, models / "qwen3_tied", layout, tmp_path)
    why = f"checkpoint of step 2 was not written to {tmp_path}: No space left on device"
    assert found == [["step_000001", "True", "CheckpointError", why]] * 4
    assert checkpoint.complete(tmp_path) == [tmp_path / "step_000001"]
    assert not list(tmp_path.glob(".writing-*"))
    goes_on(
        pool.run(2, load_and_train, models / "qwen3_tied", Layout(fsdp=2), tmp_path)[0], alone(models / "qwen3_tied")
    )
    spans = read_spans(tmp_path)
    for rank in range(4):
        mine = [row for row in spans if row["rank"] == rank]
        write = next(row for row in mine if row["name"] == "checkpoint/write" and row["step"] == 1)
        updates = [row for row in mine if row["name"] == "update"]
        assert len(updates) == 2 and write["start"] + write["duration"] > max(
            r["start"] + r["duration"] for r in updates
        )
        assert write["start"] < updates[-1]["start"]


def save_without_room(path: Path, layout: Layout, root: Path) -> str:
    """Files of rank 1 may not grow beyond some bytes: what the system says of a disk that fills up in mid-tensor."""
    engine = engine_of(path, layout)
    saving(root, 1, engine).write()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        saving(root, 2, engine).write()
    except CheckpointError as error:
        return error.message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


def test_a_disk_that_fills_up_on_one_rank_is_told_on_all(models: Path, pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, save_without_room, models / "qwen3_moe", Layout(fsdp=2), tmp_path)
    why = "cannot be written: rank 1: OSError [Errno 27] File too large"
    assert found == [f"{tmp_path / 'step_000002'} {why}"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def die_while_saving(path: Path, layout: Layout, root: Path, marker: Path) -> None:
    """Killed after the tensors, before the marker."""
    import os

    engine = engine_of(path, layout)
    saving(root, 1, engine).write()
    checkpoint.write_marker = lambda *_: os._exit(9)  # type: ignore[assignment]
    saving(root, 2, engine).write()


def test_pitfall_25_a_kill_during_the_save_leaves_the_last_one(models: Path, pool: Pool, tmp_path: Path) -> None:
    from tests.distributed.pool import CaseFailed

    with pytest.raises(CaseFailed, match="rank 0: the process died"):
        pool.run(2, die_while_saving, models / "qwen3_tied", Layout(tp=2), tmp_path, tmp_path)
    assert (tmp_path / ".writing-step_000002" / "engines" / ".metadata").is_file()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000001"
    found = pool.run(2, load_and_train, models / "qwen3_tied", Layout(pp=2), tmp_path)[0]
    assert found["updates"] == 3


def load_error(path: Path, layout: Layout, root: Path) -> str:
    try:
        load(root, engine_of(path, layout))
    except CheckpointError as error:
        return str(error)
    return ""


def test_pitfall_26_another_model_is_refused(models: Path, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, train_and_save, models / "qwen3_tied", Layout(tp=2), tmp_path, 0)
    found = pool.run(2, load_error, models / "llama_bias", Layout(tp=2), tmp_path / "step_000000")
    assert len(set(found)) == 1 and "lacks actor/weights/layers.0.qkv.bias" in found[0]
    part = tmp_path / "step_000000" / "engines" / "__1_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:])  # pitfall 25: its size is right
    found = pool.run(2, load_error, models / "qwen3_tied", Layout(tp=2), tmp_path / "step_000000")
    assert len(set(found)) == 1 and "__1_0.distcp is damaged" in found[0]
    part.unlink()
    found = pool.run(2, load_error, models / "qwen3_tied", Layout(tp=2), tmp_path / "step_000000")
    assert "is not complete" in found[0]


def test_of_two_roles_one_that_does_not_fit_leaves_both(models: Path, tmp_path: Path) -> None:
    actor, other = alone_of(models / "qwen3_tied"), alone_of(models / "llama_bias")
    begun = checkpoint.begin(tmp_path, 1, {}, keep=2)
    Saving.of(begun, {"actor": actor, "critic": actor}, None).write()
    for master in actor.masters().values():
        master.mul_(0.5)
    before = {name: master.clone() for name, master in actor.masters().items()}
    with pytest.raises(CheckpointError, match="lacks critic/weights/layers.0.qkv.bias"):
        sharded_checkpoint.load(begun.path, {"actor": actor, "critic": other})
    assert all(torch.equal(before[name], master) for name, master in actor.masters().items())


class Held(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def see(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        del storage
        self._seen = {key: (ref, size) for key, (ref, size) in self._seen.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return found


def test_an_export_holds_one_parameter_and_one_bucket(
    models: Path, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of all tensors that exist at once, the files' included; the model is several times as large."""
    source, root = models / "qwen3_moe" / "policy", tmp_path / "checkpoints"
    pool.run(4, train_and_save, models / "qwen3_moe", Layout(pp=2, dp=2, ep=2), root, 1)
    path = checkpoint.latest(root)
    assert path is not None
    sizes = [weight.nbytes for _, weight in sharded_checkpoint.weights(path)]
    bucket, plain = 3 * max(sizes) // 2, torch.load
    assert sum(sizes) > 3 * (max(sizes) + bucket)
    held = Held()
    monkeypatch.setattr(torch, "load", lambda *args, **more: held.see(plain(*args, **more)))
    with held:
        weights = sharded_checkpoint.weights(path)
        export_stream(read_config(source), weights, tmp_path / "out", source, bucket)
    assert max(sizes) <= held.peak <= max(sizes) + bucket
    monkeypatch.undo()
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    expected = dict(sharded_checkpoint.weights(path))
    exported = load_model(tmp_path / "out")
    assert all(torch.equal(weight, expected[name]) for name, weight in exported.named_parameters())
    config = read_config(source)
    with pytest.raises(CheckpointError, match=r"1 weights are missing \(first: final_norm.weight\)"):
        rest = ((name, weight) for name, weight in expected.items() if name != "final_norm.weight")
        export_stream(config, rest, tmp_path / "less", source)
    assert not list(tmp_path.glob("*less*"))
