"""`docklands plan`: what the published clusters need, what fits, and what is refused with the change to make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.reshard_cases import MODELS

from docklands.cli.main import run
from docklands.config.schema import Config
from docklands.errors import ConfigError, LayoutError
from docklands.models.catalog import catalog
from docklands.parallel.layout import Layout
from docklands.run.footprint import activations as activation_bytes
from docklands.run.footprint import gathered, kv_bytes_per_token
from docklands.run.plan import GIB, check_run, generation_layout, parse_layout, parse_transfer, plan_run
from docklands.sync.plan import Options
from docklands.sync.publish import Route
from docklands.sync.script import Script


def config(*overrides: str) -> Config:
    sections: dict[str, dict[str, Any]] = {"train": {"dtype": "bfloat16"}, "rollout": {"max_batch": 64}}
    for key, value in (item.split("=") for item in overrides):
        *path, name = key.split(".")
        section: dict[str, Any] = sections
        for part in path:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    return Config.model_validate(sections)


def layout(**degrees: int) -> list[str]:
    return [f"layout.{name}={value}" for name, value in degrees.items()]


def test_memory_of_32b_is_what_the_paper_states() -> None:
    """TP8 -> TP4 in bf16: 16.4 GB of generation weights a device, and 2 + 4 + 4 + 8 bytes a trained parameter."""
    said = config("sync.swap=host", *layout(tp=8))
    found = plan_run(said, catalog.get("qwen2.5-32b"), Layout(tp=4, dp=2), Options(), 80 * GIB)
    training, resharding, generation = found.phases
    assert generation.parts["generation"] == pytest.approx(16.4e9, rel=0.005)
    local = training.parts["gradients"] / 4
    assert local == pytest.approx(32.764e9 / 8, rel=0.001)
    assert (training.parts["weights"], training.parts["optimizer"]) == (local * 6, local * 8)
    assert found.swapped == local * 14  # gradients are not there between steps
    assert resharding.total <= training.parts["weights"] + generation.parts["generation"] + resharding.parts["messages"]


@pytest.mark.parametrize("name", ["bias_tied", "moe", "mla"])
def test_the_resharding_phase_is_the_executors_peak(name: str) -> None:
    """The same bytes as the script of the fullest device says (weights of the trainer in fp32 here)."""
    said = config("train.dtype=float32", "sync.swap=disk", *layout(tp=2, pp=2))
    found = plan_run(said, MODELS[name], Layout(tp=4), Options(bucket_bytes=2000), GIB)
    peaks = [Script(found.reshard, device).peak() for device in range(4)]
    phase = found.phases[1]
    mine = peaks[phase.device]
    assert (phase.parts["weights"], phase.parts["generation"]) == (mine.source, mine.target)
    assert mine.messages <= phase.parts["messages"] + 2 * 8 * 6  # messages begin at multiples of 8 bytes
    assert phase.parts["weights"] + phase.parts["generation"] == max(p.source + p.target for p in peaks)


def test_kv_cache_per_device() -> None:
    """Heads are split, but not below one; latent attention keeps one vector on every rank."""
    qwen, deepseek = catalog.get("qwen2.5-7b"), catalog.get("deepseek-r1-671b")
    assert kv_bytes_per_token(qwen, Layout()) == qwen.kv_bytes_per_token
    assert kv_bytes_per_token(qwen, Layout(tp=2)) == qwen.kv_bytes_per_token / 2
    assert kv_bytes_per_token(deepseek, Layout(tp=4)) == kv_bytes_per_token(deepseek, Layout()) == 61 * 576


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ((), "training needs .* optimizer .* too many", "raise layout.fsdp"),
        (
            ("train.tokens_per_microbatch=400000", "layout.fsdp=8"),
            "training needs .* activations",
            "tokens_per_microbatch",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_change(change: tuple[str, ...], message: str, hint: str) -> None:
    found = plan_run(config(*change), catalog.get("qwen2.5-7b"), None, Options(), 64 * GIB)
    with pytest.raises(ConfigError, match=message) as error:
        found.check()
    assert hint in error.value.hint


def test_a_small_device_holds_fewer_sequences_or_none() -> None:
    model, said = (
        catalog.get("qwen2.5-7b"),
        config("layout.fsdp=16", "rollout.max_response_tokens=4000", "sync.swap=host"),
    )
    weights = 15.3e9
    enough = plan_run(said, model, None, Options(), 80 * GIB)
    assert (enough.sequences, enough.wanted) == (64, 64)
    each = kv_bytes_per_token(model, Layout()) * 5024 * 2
    few = plan_run(said, model, None, Options(), int(weights + 3.5 * each))
    assert few.sequences == 3 and "3 of 64 sequences" in few.to_text()
    none = plan_run(said, model, None, Options(), int(weights))
    assert none.sequences == 1 and none.phases[2].total > none.capacity
    with pytest.raises(ConfigError, match="needs"):
        none.check()


def test_the_generation_layout_is_that_of_the_config() -> None:
    said = config(*layout(tp=2, dp=2), "rollout.layout.tp=2")
    assert plan_run(said, MODELS["moe"], None, Options(), GIB).reshard.target == Layout(tp=2, dp=2)
    apart = config(*layout(tp=2, dp=2), "rollout.layout.ep=2", "fleet.placement=disaggregated")
    plan = plan_run(apart, MODELS["moe"], None, Options(), GIB).reshard
    assert (plan.target, plan.devices, plan.first_generator) == (Layout(dp=2, ep=2), 6, 4)
    assert plan_run(config(*layout(tp=2)), MODELS["moe"], None, Options(), GIB).reshard.target == Layout(dp=2)


def test_layouts_on_the_command_line() -> None:
    assert parse_layout("tp=4, ep=64,etp=4,dp=64") == Layout(tp=4, ep=64, etp=4, dp=64)
    for wrong in ("tp4", "tp=x", "tp=2,tp=2", "heads=2", "tp=0"):
        with pytest.raises(ConfigError, match="is not NAME=VALUE|layout: tp is"):
            parse_layout(wrong)
    given = parse_transfer("method=broadcast, bucket_mib=3,node=16,apart=1")
    assert given == Options("broadcast", 3 << 20, node=16, apart=True) and parse_transfer("") == Options()
    assert (
        parse_transfer("dtype=fp8") == parse_transfer("", config("sync.transfer_dtype=fp8")) == Options(quantize=True)
    )
    for wrong in ("method=magic", "apart=2", "node=0", "bucket_mib=-1", "speed=3", "dtype=fp4"):
        with pytest.raises(ConfigError, match="transfer"):
            parse_transfer(wrong)
    with pytest.raises(LayoutError, match="has 4 ranks, training one process has 1"):
        plan_run(config(), MODELS["dense"], Layout(tp=4), Options(), GIB)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("train: {dtype: bfloat16, recompute: true}\nlayout: {tp: 4, pp: 8, ep: 8, fsdp: 8}\n")
    large = ["--model", "deepseek-r1-671b", "--generation", "tp=4,ep=64,etp=4,dp=64", "--device-gib", "64"]
    large.append("sync.swap=host")
    assert run(["plan", str(file), *large]) == 0
    said = capsys.readouterr().out
    assert "671.026 B parameters on 256 devices" in said and "KV cache" in said
    assert [line.split()[0] for line in said.splitlines()[5:8]] == ["training", "resharding", "generation"]
    assert run(["plan", str(file), *large, "layout.fsdp=1", "layout.dp=8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: training needs") and "hint: raise layout.fsdp" in error
    assert run(["plan", str(file), "--model", "gpt-9"]) == 2 and "gpt-9" in capsys.readouterr().err
    assert run(["plan", str(file), "--transfer", "method=magic", "--model", "qwen3-8b"]) == 2
    assert run(["plan", str(file)]) == 2 and "model.path" in capsys.readouterr().err
    for size in ("inf", "nan", "1e300", "-5", "1e-12"):
        assert run(["plan", str(file), *large[:4], "--device-gib", size]) == 2
        assert f"--device-gib {size}" in capsys.readouterr().err.replace("e+300", "e300")


def test_a_transfer_in_fp8_is_said_and_counted() -> None:
    plain, fp8 = (
        plan_run(config(*layout(tp=4)), MODELS["dense"], None, Options(quantize=quantize), GIB)
        for quantize in (False, True)
    )
    assert f"(minimal, fp8 and {fp8.reshard.scale_bytes / GIB:.2g} GiB of scales to each device)" in fp8.to_text()
    assert "fp8" not in plain.to_text() and plain.reshard.scale_bytes == 0 < fp8.reshard.scale_bytes
    assert fp8.reshard.links().total < plain.reshard.links().total
    messages = [found.phases[1].parts["messages"] for found in (plain, fp8)]
    assert messages[1] < messages[0] + fp8.reshard.scale_bytes


def test_everything_is_in_every_phase_once() -> None:
    """Columns of the table are bytes that the plan counts: weights by device add up to the model (and its copies)."""
    found = plan_run(config(*layout(fsdp=4)), MODELS["moe"], Layout(tp=4), Options(), GIB)
    elements = np.sum([counts for _, _, counts in found.reshard.held("source")], axis=0)
    assert elements.sum() == MODELS["moe"].num_params


def test_what_waits_on_the_host_is_not_on_the_device() -> None:
    """Qwen2.5-7B, TP 4: moments of three parameters, activations of two layers; everything else as before."""
    model, sizes = catalog.get("qwen2.5-7b"), layout(tp=4)
    plain = plan_run(config(*sizes), model, Layout(tp=4), Options(), 80 * GIB).phases[0].parts
    saved = ("train.optim.offload=true", "train.activation_offload=true")
    spared = plan_run(config(*saved, *sizes), model, Layout(tp=4), Options(), 80 * GIB).phases[0].parts
    assert {name: spared[name] for name in ("weights", "gradients")} == {
        name: plain[name] for name in ("weights", "gradients")
    }
    embedding, layer = 152064 * 3584 // 4, 3 * 18944 * 3584 // 4  # which stand side by side is the table's order
    assert embedding < spared["optimizer"] / 8 < 2 * embedding + layer
    assert plain["optimizer"] > 6 * spared["optimizer"]
    logits = 2 * 4 * 1024 * 152064 // 4
    layers = (plain["activations"] - logits) / (spared["activations"] - logits)
    assert layers == pytest.approx(28 / 2, rel=1e-3)


def test_activations_that_a_pipeline_holds_and_recomputation_spares() -> None:
    """Qwen2.5-7B on two stages: the first holds 2 micro-batches of 14 layers, interleaved 5 passes of 7."""
    model, tokens, size, width = catalog.get("qwen2.5-7b"), 4096, 3584, 18944

    def activations(*more: str) -> int:
        said = config(f"train.tokens_per_microbatch={tokens}", "train.optim.offload=true", *more, *layout(pp=2))
        return activation_bytes(model, said, Layout(**said.layout.model_dump()), 0) // (2 * tokens)  # numbers a token

    attention = (2 * 28 + 2 * 4) * 128
    layer = 4 * size + attention + 3 * width
    assert activations() == 2 * 14 * layer
    assert activations("layout.vpp=2") == 5 * 7 * layer
    assert activations("train.recompute=selective") == 2 * 14 * (layer - 2 * size - width)
    assert activations("train.recompute=full") == 2 * 14 * size + layer  # and the one that is made again
    assert activations("train.activation_offload=true") == 2 * layer
    both = ("train.activation_offload=true", "train.recompute=selective")
    assert activations(*both) == 2 * (layer - 2 * size - width)


def test_without_a_swap_training_state_stays_beside_generation() -> None:
    """Weights and moments while it generates, the generator's weights while it trains; with a swap, one at a time."""
    model, said = catalog.get("qwen2.5-7b"), layout(tp=4)
    plan = [
        plan_run(config(f"sync.swap={s}", *said), model, Layout(tp=4), Options(), 80 * GIB) for s in ("none", "host")
    ]
    (training, resharding, generation), (apart, streamed, alone) = (found.phases for found in plan)
    local = training.parts["gradients"] / 4
    assert training.parts["generation"] == generation.parts["generation"] == alone.parts["generation"] == local * 2
    assert generation.parts["weights"] == local * 6 and generation.parts["optimizer"] == local * 8
    assert (resharding.parts["weights"], resharding.parts["optimizer"]) == (local * 6, local * 8)
    assert {*alone.parts} == {"generation", "KV cache"} and "generation" not in apart.parts
    assert "optimizer" not in streamed.parts and streamed.parts["weights"] <= local * 2 + 5e6  # masters are away, too
    assert [found.swapped for found in plan] == [0, local * 14] and plan[0].stays == local * 14
    assert "nothing is swapped out (sync.swap is none)" in plan[0].to_text()
    offload = ("sync.swap=host", "train.optim.offload=true")
    assert plan_run(config(*offload, *said), model, Layout(tp=4), Options(), GIB).swapped < local * 8
    room = 20 * GIB  # less than the training state
    few, many = (
        plan_run(config(f"sync.swap={s}", *said), model, Layout(tp=4), Options(), room).sequences
        for s in ("none", "host")
    )
    assert few == 1 < many


def test_every_role_with_an_engine_is_counted() -> None:
    """PPO with a KL term: a critic's 18 bytes a parameter, the reference's two; adapters share their base."""
    model, said = MODELS["dense"], ("sync.swap=host", *layout(tp=2))
    ppo, kl = ("algorithm.name=ppo", "rollout.samples_per_prompt=1"), "algorithm.kl.coef=0.01"
    plain, critic, reference = (
        plan_run(config(*more, *said), model, None, Options(), GIB) for more in ((), ppo, (kl,))
    )
    weights, gradients, optimizer = (
        [found.phases[0].parts[name] for found in (plain, critic, reference)]
        for name in ("weights", "gradients", "optimizer")
    )
    head = -(-model.vocab_size // 2) * model.hidden_size
    local = gradients[0] // 4 - head + model.hidden_size + 1  # a value head in place of the vocabulary's, held by both
    assert gradients == [gradients[0], gradients[0] + 4 * local, gradients[0]]
    assert optimizer == [optimizer[0], optimizer[0] + 8 * local, optimizer[0]]
    assert weights == [weights[0], weights[0] + 6 * local, weights[0] + 2 * gradients[0] // 4]
    assert critic.swapped - plain.swapped == 14 * local
    lora = ("lora.rank=2", *said)
    first, second = (plan_run(config(*more, *lora), model, None, Options(), GIB) for more in ((), (kl,)))
    assert first.phases == second.phases


def test_the_plan_is_that_of_the_run() -> None:
    said = config("sync.bucket_mib=0.25", "sync.node_devices=2", *layout(tp=2))
    options = Options(bucket_bytes=1 << 18, node=2)
    assert parse_transfer("", said) == options
    route = Route(MODELS["dense"], Layout(tp=2), Layout(dp=2), torch.bfloat16)
    assert (
        plan_run(said, MODELS["dense"], None, options, GIB).reshard.options == route.plan(said.sync).options == options
    )
    apart = config(*layout(tp=2, dp=2), "fleet.placement=disaggregated")
    assert (
        plan_run(apart, MODELS["dense"], None, Options(), GIB).reshard.target.world_size == 1
    )  # as generation_of says
    for wrong in ("fsdp=4", "pp=4", "tp=2,cp=2"):
        with pytest.raises(ConfigError, match="no engine generates with (fsdp|pp|cp)"):
            generation_layout(wrong)
    alone = plan_run(
        config("algorithm.name=sft", "rollout.samples_per_prompt=1", *layout(tp=2)),
        MODELS["dense"],
        None,
        Options(),
        GIB,
    )
    assert [phase.name for phase in alone.phases] == ["training"] and "generates nothing" in alone.to_text()
    assert generation_layout("") is None and generation_layout("tp=2,dp=2") == Layout(tp=2, dp=2)
    two = layout(tp=2)
    for refused, device, words in (
        (["sync.swap=host"], "cuda", "are one process"),
        (["sync.swap=host", *two], "cpu", "the device is the host"),
        (["sync.swap=disk", *two], "cuda", "on an accelerator"),
        (["sync.swap=host", "fleet.placement=disaggregated", *two], "cuda", "devices of their own"),
        (["fleet.placement=disaggregated"], "cuda", "one process trains"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_run(config(*refused), device)
    check_run(config("fleet.placement=disaggregated"), "cuda", Layout(tp=2))
    with pytest.raises(ValueError, match="zero_bubble keeps the input"):
        config("layout.schedule=zero_bubble", "train.recompute=full", *layout(pp=2))


def test_messages_of_each_exchange_where_they_are_handed_on() -> None:
    """Three generators: a step holds a bucket's first hop, the second of the one before, the third of that before."""
    said = config("train.dtype=float32", "fleet.placement=disaggregated", "rollout.layout.dp=3", *layout(tp=2))
    found = plan_run(said, MODELS["dense"], None, Options("broadcast", 2000), GIB)
    plan = found.reshard
    scripts = [Script(plan, device) for device in range(plan.devices)]
    said_bytes = [[sum(script.message_bytes(step)) for step in script.steps] for script in scripts]
    assert plan.hops == 3 and plan.step_bytes().T.tolist() == said_bytes
    of_a_bucket = np.max([bucket.sent + bucket.received for bucket in plan.buckets], axis=0)
    assert (plan.step_bytes().max(0) != of_a_bucket).any()
    whole = plan_run(said, MODELS["dense"], None, Options("minimal", 2000), GIB).reshard
    assert whole.step_bytes().tolist() == [(bucket.sent + bucket.received).tolist() for bucket in whole.buckets]


def test_what_fsdp_gathers_and_what_tensor_ranks_keep_whole() -> None:
    """FSDP: two layers, and the embedding and the head on their stages. Without sp the states are on every rank."""
    model = catalog.get("qwen2.5-7b")
    ends = model.vocab_size * model.hidden_size
    layer = 3584 * (2 * 28 + 2 * 4) * 128 + 3 * 3584 * 18944
    assert gathered(model, config(), Layout(fsdp=2), 0) == 2 * (2 * layer + 2 * ends)
    assert [gathered(model, config(), Layout(fsdp=2, pp=4), r) for r in (0, 2, 6)] == [
        2 * (2 * layer + end * ends) for end in (1, 0, 1)
    ]
    assert gathered(model, config(), Layout(), 0) == 0
    moe = MODELS["moe"]
    own = moe.moe.experts * 3 * moe.hidden_size * moe.moe.expert_size // 2 if moe.moe else 0
    layers = sum(moe.moe.is_sparse(i) for i in range(moe.num_layers)) if moe.moe else 0
    sharded, apart = (gathered(moe, config(), Layout(fsdp=2, dp=dp, ep=2), 0) for dp in (2, 1))
    assert apart - sharded == 2 * own * (layers - 2)  # not sharded further: a copy in 16 bits of all of them
    said = config("train.tokens_per_microbatch=4096", "train.recompute=full", *layout(tp=2))
    without = [activation_bytes(model, said, Layout(tp=2, sp=sp), 0) for sp in (True, False)]
    states = 28 * 3584 + 4 * 3584
    assert without[1] - without[0] == states * 4096 * 2 // 2
