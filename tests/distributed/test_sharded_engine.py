"""The sharded engine's edges: replicas without work, losses that are not finite, bfloat16, frozen weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from docklands.config.schema import TrainSection
from docklands.core.batch import Packed
from docklands.core.fields import TOKEN_IDS
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Learner
from docklands.errors import DataError, LayoutError, NonFinite, TrainError
from docklands.models import ModelConfig, build, hf_io, load
from docklands.models.sharded import build_sharded, load_sharded
from docklands.parallel import Layout, fsdp
from docklands.parallel.mesh import Mesh
from docklands.train import sharded_optim
from docklands.train.sharded import ShardedEngine
from docklands.train.sharded_optim import ShardedOptimizer
from tests.distributed.cases import MODELS, OPTIM, TRAIN, alone, batches, difference, gradients_of
from tests.distributed.pool import Pool
from tests.expert_cases import file_tensors
from tests.parity.test_models_mla import with_mtp
from tests.train_cases import ACTOR, ACTOR_WITH_ENTROPY, policy_loss
from tests.unit.test_models_fp8 import in_fp8


def engine_of(path: Path, layout: Layout, frozen: bool = False, **train: Any) -> ShardedEngine:
    section = TrainSection(**{**TRAIN, **train})
    model = load_sharded(path / "policy", Mesh(layout, timeout_s=60), dtype=getattr(torch, section.dtype))
    return ShardedEngine(model, section, None if frozen else OPTIM, max_tokens=8, total_updates=10)


def unequal(path: Path, layout: Layout, split: list[int]) -> Any:
    """Replica r gets the rows from split[r] to split[r + 1]: some have few micro-batches, one has none."""
    engine = engine_of(path, layout, tokens_per_microbatch=40)
    replica = 0 if engine.mesh.data is None else engine.mesh.data.rank
    rows = np.arange(split[replica], split[replica + 1])
    metrics = engine.forward_backward(batches()[0].select(rows), ACTOR_WITH_ENTROPY)
    gradients = gradients_of(engine)
    return {**metrics, **engine.optim_step()}, gradients if engine.mesh.rank == 0 else None


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3_tied", Layout(fsdp=4)), ("qwen3_moe", Layout(dp=4, ep=4)), ("llama_bias", Layout(fsdp=2, cp=2))],
    ids=str,
)
def test_replicas_without_work_take_part(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    rows = len(batches()[0])
    split = [0, rows - 2, rows - 1, rows, rows] if layout.data == 4 else [0, rows, rows]
    found = pool.run(layout.world_size, unequal, models / name, layout, split)
    expected = alone(models / name, tokens_per_microbatch=40)
    for name, gradient in expected["gradients"].items():
        assert difference(found[0][1][name], gradient) < 1e-5, name
    assert len({repr(sorted(metrics.items())) for metrics, _ in found}) == 1, "every rank reports the same"
    assert found[0][0]["actor/grad_norm"][0] == pytest.approx(expected["metrics"][0]["actor/grad_norm"][0], rel=1e-5)


def poisoned_loss(packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
    """NaN in one micro-batch: the one that holds row 103."""
    result = policy_loss(packed, out, denominators)
    return LossResult(result.loss * (torch.nan if 103 in packed.batch.row_ids else 1.0), result.metrics)


def not_finite(path: Path, layout: Layout) -> list[Any]:
    engine = engine_of(path, layout)
    replica = 0 if engine.mesh.data is None else engine.mesh.data.rank
    batch = batches()[0].select(np.arange(replica, 12, layout.data))
    try:
        engine.forward_backward(batch, Learner("actor", "actor", ACTOR.reads, poisoned_loss))
    except NonFinite as error:
        skipped = engine.optim_step()
        return [str(error), skipped, engine.forward_backward(batch, ACTOR)["actor/loss"]]
    return []


@pytest.mark.parametrize("layout", [Layout(fsdp=2), Layout(pp=2), Layout(tp=2, dp=2)], ids=str)
def test_a_loss_that_is_not_finite_raises_on_every_rank(layout: Layout, models: Path, pool: Pool) -> None:
    found = pool.run(layout.world_size, not_finite, models / "qwen3_tied", layout)
    assert all("the loss of actor is nan at update 1" in each[0] for each in found)
    assert all(each[1] == {"actor/skipped_updates": (1.0, 1.0)} for each in found)
    assert all(np.isfinite(each[2][0]) for each in found), "and the engine can go on"


def bfloat16(path: Path, layout: Layout) -> Any:
    engine = engine_of(path, layout, dtype="bfloat16")
    replica = 0 if engine.mesh.data is None else engine.mesh.data.rank
    losses = []
    for batch in batches():
        metrics = engine.update(batch.select(np.arange(replica, len(batch), layout.data)), ACTOR_WITH_ENTROPY)
        losses.append((metrics["actor/loss"][0], metrics["actor/grad_norm"][0]))
    dtypes = {str(master.dtype) for master in engine.masters().values()}
    local = [p.data for p in engine.sharded.parameters().values() if p.dim() >= 2 and fsdp.window(p.data) is None]
    published = {tensor.dtype for _, tensor in engine.weights() if tensor.dim() >= 2}
    return losses, dtypes, {tensor.dtype for tensor in local}, published


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3_tied", Layout(tp=2, pp=2)), ("qwen3_tied", Layout(fsdp=2)), ("qwen3_moe", Layout(fsdp=2, ep=2))],
    ids=str,
)
def test_bfloat16_with_fp32_masters(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    expected = alone(models / name, dtype="bfloat16")["metrics"]
    sharded = layout.fsdp > 1
    for losses, dtypes, local, published in pool.run(layout.world_size, bfloat16, models / name, layout):
        assert dtypes == {"torch.float32"}
        assert local == (set() if sharded and layout.ep == 1 else {torch.bfloat16})  # FSDP leaves these experts alone
        assert published == {torch.float32 if sharded else torch.bfloat16}
        for (loss, norm), reference in zip(losses, expected):
            assert loss == pytest.approx(reference["actor/loss"][0], abs=0.02)
            assert norm == pytest.approx(reference["actor/grad_norm"][0], rel=0.05)


def summed(path: Path, layout: Layout, most: int) -> Any:
    """Gradients of one micro-batch in bf16 after their sum over the ranks; `most`: ranks between which they are sent as
    they are. -> by name, and how many elements went so."""
    engine = engine_of(path, layout, dtype="bfloat16", tokens_per_microbatch=4096)
    optimizer = engine.optimizer
    assert isinstance(optimizer, ShardedOptimizer) and engine.mesh.data is not None
    sent = 0

    def exchange(names: Any, have: Any, group: Any) -> Any:
        nonlocal sent
        sent += sum(have[name].numel() for name in names)
        return ShardedOptimizer._exchange(names, have, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_optim, "GATHERED", most)
        patch.setattr(optimizer, "_exchange", exchange)
        rows = np.arange(engine.mesh.data.rank, len(batches()[0]), layout.data)
        engine.forward_backward(batches()[0].select(rows), ACTOR)
        optimizer.reduce()
    return {name: gradient.clone() for name, gradient in optimizer.gradients().items()}, sent


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3_tied", Layout(dp=2)), ("qwen3_tied", Layout(dp=3)), ("qwen3_moe", Layout(dp=2, ep=2))],
    ids=str,
)
def test_short_gradients_travel_short_and_are_summed_in_full(
    name: str, layout: Layout, models: Path, pool: Pool
) -> None:
    ranks = layout.world_size
    short, ring = (pool.run(ranks, summed, models / name, layout, most) for most in (ranks, 1))
    for (gradients, sent), (others, none) in zip(short, ring):
        assert none == 0 and sent > 0.9 * sum(g.numel() for n, g in gradients.items() if "experts" not in n)
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        rtol, atol = (0.0, 0.0) if ranks == 2 else (1e-5, 1e-7)  # a ring of three adds in another order
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, others[name], rtol=rtol, atol=atol)


def frozen(path: Path, layout: Layout) -> Any:
    engine = engine_of(path, layout, frozen=True)
    try:
        engine.forward_backward(batches()[0], ACTOR)
    except TrainError as error:
        return engine.logprobs(batches()[0]).values, str(error)


def test_frozen_weights_only_compute(models: Path, pool: Pool) -> None:
    for logprobs, error in pool.run(2, frozen, models / "qwen3_tied", Layout(tp=2)):
        assert difference(logprobs, alone(models / "qwen3_tied")["before"]) < 1e-5
        assert "frozen" in error


def recomputed(path: Path, layout: Layout) -> Any:
    engine = engine_of(path, layout, recompute=True)
    engine.forward_backward(batches()[0], ACTOR_WITH_ENTROPY)
    return gradients_of(engine)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(cp=2, context="ring")], ids=str)
def test_recomputation_changes_nothing(layout: Layout, models: Path, pool: Pool) -> None:
    found = pool.run(2, recomputed, models / "qwen3_tied", layout)[0]
    for name, gradient in alone(models / "qwen3_tied")["gradients"].items():
        assert difference(found[name], gradient) < 1e-5, name


def random_weights(layout: Layout) -> dict[str, torch.Tensor]:
    model = build_sharded(ModelConfig.from_hf(MODELS["qwen3_tied"]), Mesh(layout), seed=4)
    return {
        name: tensor.clone() for name, tensor in model.whole({n: p.detach() for n, p in model.parameters().items()})
    }


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(fsdp=2), Layout(pp=2)], ids=str)
def test_random_weights_do_not_depend_on_the_layout(layout: Layout, pool: Pool) -> None:
    expected = build(ModelConfig.from_hf(MODELS["qwen3_tied"]), seed=4)
    for found in pool.run(2, random_weights, layout):
        assert all(torch.equal(found[name], parameter) for name, parameter in expected.named_parameters())


def exported(path: Path, layout: Layout, out: Path) -> None:
    load_sharded(path / "policy", Mesh(layout)).export(out, path / "policy")


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3_tied", Layout(pp=2, tp=2)), ("deepseek", Layout(fsdp=2, tp=2, ep=2))], ids=str
)
def test_import_and_export_are_bitwise(name: str, layout: Layout, models: Path, pool: Pool, tmp_path: Path) -> None:
    pool.run(layout.world_size, exported, models / name, layout, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (models / name / "policy", tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    configs = [(folder / "config.json").read_text() for folder in (models / name / "policy", tmp_path / "out")]
    assert configs[0] == configs[1]


def test_mtp_layers_pass_through_a_layout_untouched(models: Path, pool: Pool, tmp_path: Path) -> None:
    """Read by no rank, and in the files that a layout writes."""
    shutil.copytree(models / "deepseek" / "policy", tmp_path / "policy")
    extra = with_mtp(tmp_path / "policy", torch.bfloat16)
    pool.run(2, exported, tmp_path, Layout(tp=2), tmp_path / "out")
    before, after = file_tensors(tmp_path / "policy"), file_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and extra.keys() < after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)


def loaded(path: Path, layout: Layout) -> dict[str, torch.Tensor]:
    model = load_sharded(path, Mesh(layout, timeout_s=60))
    named = {name: parameter.detach() for name, parameter in model.parameters().items()}
    return {name: tensor.clone() for name, tensor in model.whole(named)}


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(fsdp=2, ep=2), Layout(pp=2)], ids=str)
def test_an_fp8_checkpoint_is_loaded_as_in_one_process(
    layout: Layout, models: Path, pool: Pool, tmp_path: Path
) -> None:
    in_fp8(models / "deepseek" / "policy", tmp_path / "fp8")
    alone_ = dict(load(tmp_path / "fp8").named_parameters())
    for found in pool.run(2, loaded, tmp_path / "fp8", layout):
        assert found.keys() == alone_.keys()
        assert all(torch.equal(found[name], parameter) for name, parameter in alone_.items())


def dequantised(path: Path, layout: Layout) -> int:
    """How many experts' tensors this rank has dequantised."""
    names: list[str] = []
    plain = hf_io.dequantize
    hf_io.dequantize = lambda weight, scale, block, name="": (names.append(name), plain(weight, scale, block, name))[1]
    try:
        load_sharded(path, Mesh(layout, timeout_s=60))
    finally:
        hf_io.dequantize = plain
    return sum(".experts." in name for name in names)


def test_of_an_fp8_checkpoint_a_rank_dequantises_its_own_experts(models: Path, pool: Pool, tmp_path: Path) -> None:
    in_fp8(models / "deepseek" / "policy", tmp_path / "fp8")
    (whole,) = pool.run(1, dequantised, tmp_path / "fp8", Layout())
    assert whole > 0 and pool.run(2, dequantised, tmp_path / "fp8", Layout(dp=2, ep=2)) == [whole // 2] * 2


def unknown_id(path: Path, layout: Layout) -> str:
    engine, batch = engine_of(path, layout), batches()[0]
    ids = [row.clone() for row in batch[TOKEN_IDS]]
    ids[3][-1] = engine.sharded.config.vocab_size
    try:
        engine.logprobs(batch.with_({TOKEN_IDS: ids}))
    except DataError as error:
        return str(error)
    return ""


def test_an_id_of_no_rank_is_refused(models: Path, pool: Pool) -> None:
    """Each rank of a split vocabulary would take it for one of the other's."""
    found = pool.run(2, unknown_id, models / "qwen3_tied", Layout(tp=2))
    row, size = int(batches()[0].row_ids[3]), ModelConfig.from_hf(MODELS["qwen3_tied"]).vocab_size
    assert all(f"row {row}: token id {size} is not among the model's {size}" in said for said in found)


def load_error(path: Path, layout: Layout) -> str:
    try:
        load_sharded(path, Mesh(layout, timeout_s=60))
    except DataError as error:
        return str(error)
    return ""


UP = "model.layers.2.mlp.up_proj.weight"
EXPERT = "model.layers.3.mlp.experts.7.up_proj.weight"
LATENT = "model.layers.3.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("model", "name", "layout"),
    [
        ("qwen3_tied", UP, Layout(tp=2)),
        ("qwen3_tied", UP, Layout(fsdp=2)),
        ("qwen3_tied", UP, Layout(pp=2)),
        ("deepseek", EXPERT, Layout(dp=2, ep=2)),
        ("deepseek", LATENT, Layout(tp=2)),
        ("deepseek", EXPERT, Layout(pp=2, vpp=2)),
    ],
    ids=str,
)
def test_a_number_that_is_not_finite_is_found_by_who_reads_it(
    model: str, name: str, layout: Layout, models: Path, pool: Pool, tmp_path: Path
) -> None:
    source = models / model / "policy"
    tensors = load_file(source / "model.safetensors")
    tensors[name][-1, -1] = torch.nan  # the last rows: one rank's, in each of these layouts
    tmp_path.joinpath("config.json").write_text((source / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    found = pool.run(2, load_error, tmp_path, layout)
    assert found[0] == "" and f"tensor {name} has 1 of" in found[1] and "not finite" in found[1]


def refused(path: Path, layout: Layout) -> str:
    try:
        load_sharded(path / "policy", Mesh(layout))
    except LayoutError as error:
        return str(error)
    return ""


def test_pitfall_32_a_model_that_does_not_divide(models: Path, pool: Pool) -> None:
    found = pool.run(4, refused, models / "qwen3_tied", Layout(pp=4))
    assert all("pp 4 x vpp 1 = 4 chunks for 3 layers" in text for text in found)
