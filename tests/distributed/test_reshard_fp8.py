"""Transfers in fp8 on real processes: each executor and layout gives the bits of quantising whole tensors once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from docklands.config.load import load_config
from docklands.errors import ConfigError, GateFailed, SyncError
from docklands.models.config import MlaConfig, ModelConfig, MoeConfig
from docklands.models.fp8 import dequantize
from docklands.models.sharded import build_sharded
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.sync.gate import Gate
from docklands.sync.plan import Options, plan_reshard
from docklands.sync.quantize import FP8, Quantizer, check_transfer
from docklands.sync.reshard import Resharder
from docklands.sync.script import Script
from tests.distributed.pool import Pool
from tests.distributed.test_reshard import METHODS, locals_of
from tests.e2e.runs import ROOT, run_here
from tests.reshard_cases import MODELS as NARROW

WIDE = {"hidden_size": 160, "head_dim": 36, "intermediate_size": 168, "num_layers": 2}
MODELS = {
    "dense": replace(NARROW["bias_tied"], **WIDE),
    "moe": replace(
        NARROW["moe"],
        **WIDE,
        tie_embeddings=True,
        moe=MoeConfig(8, 2, 136, shared_size=8, scoring="sigmoid", first_dense=1),
    ),
    "mla": replace(NARROW["mla"], **WIDE | {"head_dim": 48}, mla=MlaConfig(20, 130, 40, 8, 36)),
}
L = Layout
PAIRS: dict[str, list[tuple[Layout, Layout]]] = {
    "dense": [(L(tp=2, pp=2), L(dp=4)), (L(fsdp=4), L(tp=4)), (L(dp=4), L(tp=2, dp=2))],
    "moe": [(L(fsdp=4, ep=2), L(tp=4)), (L(tp=2, dp=2, ep=4, etp=1), L(tp=2, dp=2, ep=2, etp=2))],
    "mla": [(L(pp=2, tp=2), L(tp=4, ep=2)), (L(fsdp=2, tp=2, ep=2), L(dp=4, ep=4))],
}


def once(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantised block by block, and back by the reader of DeepSeek's files."""
    found = torch.empty_like(whole, dtype=dtype)
    for weight, into in zip(whole.reshape(-1, *whole.shape[-2:]), found.view(-1, *whole.shape[-2:])):
        (rows, columns), quantised = weight.shape, torch.empty(weight.shape, dtype=FP8)
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        for x in range(len(scales)):
            for y in range(scales.shape[1]):
                cut = slice(128 * x, 128 * x + 128), slice(128 * y, 128 * y + 128)
                scales[x, y] = weight[cut].abs().max() / 448
                quantised[cut] = (weight[cut] / scales[x, y]).clamp(-448, 448).to(FP8)
        into.copy_(dequantize(quantised, scales, (128, 128)))
    return found


def trained_of(config: ModelConfig, layout: Layout, first: int | None = None) -> dict[str, Tensor]:
    """A trainer's shards: random numbers, so that a shard's own maxima would be other scales than the blocks'."""
    found = locals_of(build_sharded(config, Mesh(layout, timeout_s=60, first=first), seed=3))
    return {name: tensor.clone() for name, tensor in found.items()}


def expected_of(script: Script, whole: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What a generator must hold, cut from whole tensors by its blocks, by local name."""
    found = {}
    for name, held in script.target.items():
        spec = script.plan.table.by_name(name)
        kept = torch.float32 if spec.keep_fp32 else dtype
        all_ = once(whole[name], kept) if spec.quantized else whole[name].to(kept)
        found[held.name] = torch.empty(held.shape, dtype=kept)
        for block in held.blocks:
            found[held.name][block.slices(block.box)] = all_[tuple(slice(*edge) for edge in block.box)]
    return found


def bitwise(name: str, dtype: torch.dtype) -> int:
    """A case: each pair by each method."""
    config, checked = MODELS[name], 0
    whole = trained_of(config, Layout(dp=4))
    for source, target in PAIRS[name]:
        trained = trained_of(config, source)
        for method in METHODS:
            options = Options(method, 30000, dtype.itemsize, node=2, quantize=True)  # type: ignore[arg-type]
            plan = plan_reshard(config, source, target, options)
            mover = Resharder(plan, dtype=dtype, timeout_s=30)
            gate = Gate(plan, mover.as_held)
            mover.prepare(trained)
            published = gate.publish(trained)
            found = mover.run(trained)
            gate.check(1, 1, found, published)
            for key, tensor in expected_of(mover.script, whole, dtype).items():
                assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), f"{method}: {key}"
            sent, received = plan.traffic()
            device, counts = mover.script.device, mover.counts
            assert (counts.sent, counts.received) == (sent[device], received[device])
            assert (
                counts.peak == mover.script.peak(master=4, stays=True).total and counts.scales == plan.scale_bytes > 0
            )
            again = mover.run(trained, found)  # without `prepare`
            assert all(torch.equal(again[key], tensor) for key, tensor in found.items())
            checked += 1
    return checked


@pytest.mark.parametrize(("name", "dtype"), [("dense", "bfloat16"), ("moe", "float32"), ("mla", "bfloat16")])
def test_every_method_gives_the_bits_of_quantising_once(name: str, dtype: str, pool: Pool) -> None:
    """In these models every way of cutting cuts blocks. Messages are as large as the plan says."""
    assert pool.run(4, bitwise, name, getattr(torch, dtype)) == [len(PAIRS[name]) * len(METHODS)] * 4


def apart() -> dict[str, Any]:
    """A case: generators on devices of their own, that hand boxes on; then faults."""
    source, target, config = L(tp=2), L(dp=2), MODELS["dense"]
    options = Options("broadcast", 30000, 2, apart=True, quantize=True)
    plan = plan_reshard(config, source, target, options)
    mover = Resharder(plan, dtype=torch.bfloat16, timeout_s=30)
    trains = dist.get_rank() < source.world_size
    trained = trained_of(config, source, first=0) if trains else {}
    gate = Gate(plan, mover.as_held)
    mover.prepare(trained)
    published = gate.publish(trained)
    found = mover.run(trained)
    gate.check(1, 1, found, published)
    said: dict[str, Any] = {}
    if dist.get_rank() == 3:
        found["layers.1.o.weight"].view(torch.int16)[5, 7] ^= 1
    try:
        gate.check(1, 1, found, published)
    except GateFailed as error:
        said["flipped"] = error.message
    if trains and dist.get_rank() == 1:
        trained["layers.0.qkv.weight"][0, 0] = float("nan")
    try:
        mover.run(trained, found)
    except SyncError as error:
        said["nan"] = error.message
    return {**said, "hops": plan.hops, "received": mover.counts.received}


def test_what_is_handed_on_is_quantised_to_the_same_bits_and_faults_are_named(pool: Pool) -> None:
    for one in pool.run(4, apart):
        assert one["hops"] == 2
        assert "generators differ from the trainer: layers.1.o.weight on device 3" in one["flipped"]
        assert one["nan"] == "weight layers.0.qkv.weight is not finite: it cannot be quantised"


def error_of() -> tuple[float, float, bool]:
    """A case: (largest error over its block's maximum, over the element, whether a second time changes nothing)."""
    config = MODELS["dense"]
    plan = plan_reshard(config, L(), L(), Options(itemsize=4, quantize=True))
    script = Script(plan, 0)
    quantizer, trained = Quantizer(plan, script), trained_of(config, L())
    name, box = "layers.0.gate_up.weight", ((0, 336), (0, 160))
    values = torch.randn(336, 160) * torch.logspace(-12, 6, 336)[:, None]  # magnitudes of 18 decades
    values[128:200] = 0
    trained[name] = values
    quantizer.measure(trained)
    held, again = torch.empty_like(values), torch.empty_like(values)
    quantizer.write(name, box, values, held)
    quantizer.write(name, box, held.bfloat16(), again)
    error = (held - values).abs()
    largest = torch.empty_like(values)
    for x in range(0, 336, 128):
        for y in range(0, 160, 128):
            largest[x : x + 128, y : y + 128] = values[x : x + 128, y : y + 128].abs().max()
    normal = values.abs() >= largest / 448 * 2**-6
    of_block = float((error / largest.clamp_min(1e-30)).max())
    of_itself = float((error / values.abs())[normal & (values != 0)].max())
    return of_block, of_itself, torch.equal(again, held) and bool((held[128:200] == 0).all())


def test_the_error_of_an_element_is_bounded_by_its_block(pool: Pool) -> None:
    of_block, of_itself, same = pool.run(1, error_of)[0]
    assert 1 / 40 < of_block <= 1 / 28 * (1 + 1e-5)
    assert 1 / 20 < of_itself <= 1 / 16 * (1 + 1e-5)
    assert same


@pytest.mark.parametrize("name", ["qwen2.5-32b", "deepseek-r1-671b"])
def test_about_half_of_the_bytes_of_bfloat16(name: str) -> None:
    """Of the plan, with the scales; embeddings and head are what does not shrink."""
    from docklands.models.catalog import catalog

    model, pair = catalog.get(name), (L(tp=8, dp=8), L(tp=4, dp=16))
    if model.moe is not None:
        pair = L(tp=4, pp=8, ep=8, dp=8), L(tp=4, ep=64, etp=4, dp=64)
    plain, small = (plan_reshard(model, *pair, Options(quantize=fp8)) for fp8 in (False, True))
    sizes = [int(plan.traffic()[1].sum()) + plan.scale_bytes * plan.devices for plan in (plain, small)]
    assert 1.8 < sizes[0] / sizes[1] <= 2
    for side in ("source", "target"):
        held = [sum(int(counts.sum()) * size for _, size, counts in plan.held(side)) for plan in (plain, small)]  # type: ignore[arg-type]
        assert held[0] == held[1]


TIS = ("algorithm.correction.mode=token_tis", "algorithm.old_logprobs=recompute")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("layout.tp=2",), "the loss takes no notice"),
        (("layout.tp=2", "algorithm.old_logprobs=recompute"), "the loss takes no notice"),
        (TIS, "one process: nothing is sent"),
        (("layout.tp=2", *TIS), ""),
        (("layout.tp=2", "algorithm.old_logprobs=rollout"), ""),
    ],
)
def test_without_a_correction_it_is_refused(more: tuple[str, ...], said: str) -> None:
    config, _ = load_config(ROOT / "configs" / "mix6_grpo.yaml", ["sync.transfer_dtype=fp8", *more])
    if not said:
        check_transfer(config)
        return
    with pytest.raises(ConfigError, match=said) as caught:
        check_transfer(config)
    assert "\n" not in str(caught.value)


def test_a_run_with_a_transfer_in_fp8_learns(tmp_path: Path) -> None:
    """The generators' log-probs are another policy's, all the way; and the reward rises."""
    size = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=8", "layout.tp=2", "sync.probe_every=8")
    run = run_here("mix6_grpo_tis.yaml", tmp_path / "run", "run.steps=16", "sync.transfer_dtype=fp8", *size)
    rows = [metrics for _, metrics in run.read_metrics()]
    rewards = [row["critic/rewards/mean"] for row in rows]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.3
    assert all(1e-3 < row["training/rollout_logprobs_diff_max"] < 3 for row in rows)
