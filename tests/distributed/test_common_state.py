"""Replicas on one machine that hold trained state once: the same numbers as replicas that each hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from docklands.config.schema import OptimSection, TrainSection
from docklands.errors import NonFinite
from docklands.models.sharded import load_sharded
from docklands.parallel import Layout, common_memory
from docklands.parallel.mesh import Mesh
from docklands.train import common_state
from docklands.train.sharded import ShardedEngine
from tests.distributed.cases import OPTIM, TRAIN, batches
from tests.distributed.pool import Pool
from tests.distributed.test_sharded_checkpoint import load, saving, step
from tests.train_cases import ACTOR


def engine_of(path: Path, layout: Layout, held: bool, optim: OptimSection = OPTIM, **train: Any) -> ShardedEngine:
    section = TrainSection(**{**TRAIN, **train})
    model = load_sharded(path / "policy", Mesh(layout, timeout_s=60), dtype=getattr(torch, section.dtype))
    engine = ShardedEngine(model, section, optim, max_tokens=8, total_updates=10)
    if held:
        engine.optimizer.hold_once()  # type: ignore[union-attr]
    return engine


def state_of(engine: ShardedEngine) -> dict[str, Tensor]:
    """All of one rank's: what it computes with, masters, moments."""
    assert engine.optimizer is not None
    found = {f"weight {name}": p.detach().clone() for name, p in engine.sharded.parameters().items()}
    found |= {f"master {name}": tensor.clone() for name, tensor in engine.masters().items()}
    for name, pair in engine.optimizer.moments.items():
        found |= {f"moment {i} of {name}": tensor.clone() for i, tensor in enumerate(pair)}
    return found


def trained(path: Path, layout: Layout, held: bool, train: dict[str, Any]) -> Any:
    engine = engine_of(path, layout, held, **train)
    metrics = [step(engine, number) for number in range(3)]
    common = engine.optimizer._common  # type: ignore[union-attr]
    return metrics, state_of(engine), len(common)


@pytest.mark.parametrize(
    ("name", "layout", "train"),
    [
        ("qwen3_tied", Layout(dp=2), {"dtype": "bfloat16", "tokens_per_microbatch": 4096}),
        ("qwen3_tied", Layout(dp=2), {"dtype": "bfloat16", "tokens_per_microbatch": 40}),
        ("qwen3_tied", Layout(dp=3), {}),
        ("qwen2_two_kv_heads", Layout(tp=4, dp=2), {}),
        ("qwen3_tied", Layout(pp=2, dp=2), {}),
        ("llama_bias", Layout(cp=2, dp=2), {"dtype": "bfloat16"}),
        ("qwen3_moe", Layout(dp=4, ep=2), {}),
    ],
    ids=str,
)
def test_state_that_is_held_once_is_trained_to_the_same_numbers(
    name: str, layout: Layout, train: dict[str, Any], models: Path, pool: Pool
) -> None:
    """Up to the order in which gradients of more than two ranks, and squares of gradients, are added."""
    held, apart = (pool.run(layout.world_size, trained, models / name, layout, once, train) for once in (True, False))
    for (metrics, state, count), (others, expected, none) in zip(held, apart):
        assert count > 5 and none == 0
        for mine, theirs in zip(metrics, others):
            assert mine.keys() == theirs.keys()
            assert all(mine[key][0] == pytest.approx(theirs[key][0], rel=1e-5, abs=1e-7) for key in mine)
        for what, tensor in expected.items():
            close = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(state[what], tensor, rtol=close, atol=close * float(tensor.abs().max()))


def counted(path: Path, layout: Layout) -> tuple[int, bool]:
    """Elements that this rank updates, and whether it sees what another one writes."""
    engine = engine_of(path, layout, True)
    optimizer = engine.optimizer
    assert optimizer is not None
    shares = [optimizer.share(name) for name in engine.masters()]
    master = engine.masters()["embed.weight"]
    dist.barrier()
    if engine.mesh.rank == 0:
        master[3, 1] = 12345.0
    dist.barrier()
    return sum(share.stop - share.start for share in shares), float(master[3, 1]) == 12345.0


def test_each_rank_updates_its_share_of_one_state(models: Path, pool: Pool) -> None:
    (alone, _), *_ = pool.run(1, counted, models / "qwen3_tied", Layout())
    found = pool.run(3, counted, models / "qwen3_tied", Layout(dp=3))
    assert sum(count for count, _ in found) == alone and all(seen for _, seen in found)
    assert max(count for count, _ in found) < 0.5 * alone


def poisoned(path: Path, layout: Layout) -> Any:
    engine = engine_of(path, layout, True, dtype="bfloat16")
    replica = dist.get_rank()
    batch = batches()[0].select(np.arange(replica, 12, 2))
    before = state_of(engine)
    engine.forward_backward(batch, ACTOR)
    if replica == 1:
        gradients = engine.optimizer.gradients()  # type: ignore[union-attr]
        next(iter(gradients.values())).view(-1)[0] = torch.inf
    try:
        engine.optim_step()
    except NonFinite as error:
        after = state_of(engine)
        same = all(torch.equal(before[what], after[what]) for what in before)
        return str(error), same, step(engine, 1)["actor/grad_norm"][0]


def test_one_rank_with_a_bad_gradient_changes_nothing_anywhere(models: Path, pool: Pool) -> None:
    found = pool.run(2, poisoned, models / "qwen3_tied", Layout(dp=2))
    for said, same, norm in found:
        assert "1 of" in said and "not finite at update 1" in said and same and np.isfinite(norm)


def interrupted(path: Path, layout: Layout, root: Path, held: bool) -> Any:
    """One update, saved; then from the file into new engines, and two more."""
    engine = engine_of(path, layout, held)
    step(engine, 0)
    engine.version = 1
    saving(root, 1, engine, copy=held).write()
    dist.barrier()
    other = engine_of(path, layout, held)
    load(root, other)
    metrics = [step(other, number) for number in (1, 2)]
    return metrics, state_of(other), other.version


def test_it_is_saved_and_loaded_like_any_other(models: Path, pool: Pool, tmp_path: Path) -> None:
    held, apart = (
        pool.run(2, interrupted, models / "qwen3_tied", Layout(dp=2), tmp_path / str(once), once)
        for once in (True, False)
    )
    for (metrics, state, version), (others, expected, _) in zip(held, apart):
        assert version == 1
        for mine, theirs in zip(metrics, others, strict=True):
            assert all(mine[key][0] == pytest.approx(theirs[key][0], rel=1e-6, abs=1e-8) for key in theirs)
        for what, tensor in expected.items():
            torch.testing.assert_close(state[what], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max()))


def not_held(path: Path, layout: Layout, why: str) -> tuple[int, float]:
    with pytest.MonkeyPatch.context() as patch:
        optim = OPTIM
        if why == "another machine":  # whose process numbers are its own
            patch.setattr(common_memory, "_opened", lambda path, size, token: None)
        elif why == "no such call":
            patch.delattr("os.memfd_create", raising=False)
        else:
            optim = OPTIM.model_copy(update={"offload": True})
        engine = engine_of(path, layout, True, optim)
        return len(engine.optimizer._common), step(engine, 0)["actor/grad_norm"][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("why", ["another machine", "no such call", "moments rest elsewhere"])
def test_where_it_cannot_be_each_holds_its_own(why: str, models: Path, pool: Pool) -> None:
    found = pool.run(2, not_held, models / "qwen3_tied", Layout(dp=2), why)
    assert [count for count, _ in found] == [0, 0] and found[0] == found[1] and found[0][1] > 0


def another_file() -> list[bool]:
    """What is opened is compared with what was meant: a process of another machine may have the same number."""
    mesh = Mesh(Layout(dp=2), timeout_s=60)
    assert mesh.replicate is not None
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            opened = common_memory._opened
            patch.setattr(common_memory, "_opened", lambda path, size, _: opened(path, size, bytes(16)))
        wrong = common_state.common_memory(mesh.replicate, 1000)
    right = common_state.common_memory(mesh.replicate, 1000)
    return [wrong is None, right is not None]


def test_a_file_that_is_another_one_is_not_taken(pool: Pool) -> None:
    assert pool.run(2, another_file) == [[True, True]] * 2
