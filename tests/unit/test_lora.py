"""Adapters: what is asked for, what is trained and held, the base as the reference, what generators get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.cases import MODELS
from tests.train_cases import ACTOR, SHAPE, batch_of, sampled

from docklands.config.load import make_config
from docklands.config.lora import LoraSection
from docklands.config.schema import OptimSection, RolloutSection, TrainSection
from docklands.core.protocols import Request, Sampling
from docklands.errors import ConfigError, RolloutError
from docklands.models import ModelConfig, build
from docklands.models.adapters import is_adapter, with_lora
from docklands.models.lora import Adapters, first_values
from docklands.rollout.native import NativeEngine
from docklands.sync.in_process import InProcessSync
from docklands.train import TrainEngine
from docklands.train.lora import BasePolicy
from docklands.train.resident import TrainState

ADAPTED = LoraSection(rank=4, alpha=6.0)


def trainer(name: str = "", dtype: str = "float32", **lora: Any) -> TrainEngine:
    """A train engine with adapters on a tiny model."""
    config = with_lora(ModelConfig.from_hf(MODELS[name] if name else SHAPE), LoraSection(rank=4, alpha=6.0, **lora))
    section = TrainSection(tokens_per_microbatch=256, dtype=dtype)  # type: ignore[arg-type]
    return TrainEngine(build(config, seed=3), section, OptimSection(lr=1e-2), max_tokens=8, total_updates=10)


def base_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters() if not is_adapter(name)}


# --- what is asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "section", "message"),
    [
        ("", {"targets": ["q_porj"]}, "no projection 'q_porj' .hint: did you mean 'q_proj'.*all-linear"),
        ("deepseek", {"targets": ["k_proj"]}, "no projection 'k_proj' .hint: did you mean.*kv_a_proj_with_mqa"),
        ("qwen3_moe", {"targets": ["up_proj"]}, "'up_proj' is in this model's routed experts only .hint: set lora.exp"),
        ("", {"experts": True}, "lora.experts is set, but this model has none"),
        ("qwen3_moe", {"experts": True, "targets": ["q_proj"]}, "lora.targets names none of theirs .hint: add gate"),
    ],
)
def test_targets_that_the_model_does_not_have(model: str, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_lora(ModelConfig.from_hf(MODELS[model] if model else SHAPE), LoraSection(rank=2, **section))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"lora": {"targets": ["q_proj"]}}, "lora.targets: is set, but lora.rank is 0"),
        ({"lora": {"rank": 0, "alpha": 8.0}}, "lora.alpha: is set, but lora.rank is 0"),
        ({"lora": {"rank": -4}}, "lora.rank: got -4"),
        ({"lora": {"rank": 4, "alpha": 0.0}}, "lora.alpha: got 0"),
        ({"lora": {"rank": 4, "dropout": 0.05}}, "lora.dropout: 0.05; only 0"),
        ({"lora": {"rank": 4, "targets": []}}, "lora.targets: is empty"),
        ({"lora": {"rank": 4}, "algorithm": {"name": "ppo"}}, "lora.rank: 4, but algorithm.name: ppo trains a critic"),
        ({"lora": {"rank": 4}, "train": {"router": {"bias_update_rate": 0.001}}}, "but with lora.rank the base rests"),
        ({"lora": {"rank": 4, "publish": "adapter"}, "sync": {"swap": "disk"}}, "empties them after each generation"),
        ({"lora": {"r": 4}}, "unknown key lora.r "),
        ({"lora": {"target_modules": ["q_proj"]}}, "did you mean lora.targets"),
    ],
)
def test_bad_input_is_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_config(data)
    assert "\n" not in caught.value.message


def test_scale_and_first_values() -> None:
    config = with_lora(ModelConfig.from_hf(SHAPE), ADAPTED)
    assert config.lora is not None and config.lora.scale == 1.5
    stable = with_lora(ModelConfig.from_hf(SHAPE), LoraSection(rank=4, alpha=6.0, rslora=True)).lora
    assert stable is not None and stable.scale == 3.0
    model, plain = build(config, seed=3), build(ModelConfig.from_hf(SHAPE), seed=3)
    named = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, named[name]), "the base is drawn as without adapters"
    for spec in model.table:
        if spec.adapts and spec.name.endswith(".a"):
            bound = spec.shape[-1] ** -0.5
            assert float(named[spec.name].detach().abs().max()) <= bound
            assert float(named[spec.name].detach().std()) == pytest.approx(bound / 3**0.5, rel=0.25)
            assert not torch.equal(first_values(spec, 3), first_values(spec, 4))
        elif spec.adapts:
            assert not named[spec.name].any()


# --- what is trained and held -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "experts"), [("", False), ("qwen3_moe", True), ("deepseek", True)])
def test_only_adapters_are_trained_and_step_0_is_the_base(model: str, experts: bool) -> None:
    engine = trainer(model, experts=experts)
    plain = build(ModelConfig.from_hf(MODELS[model] if model else SHAPE), seed=3)
    frozen = TrainEngine(plain, engine.section, None, max_tokens=8)
    batch, before = sampled(), base_of(engine)
    assert torch.equal(engine.logprobs(batch).values, frozen.logprobs(batch).values), "B is zero: not a bit differs"
    engine.forward_backward(batch, ACTOR)
    named = dict(engine.model.named_parameters())
    assert all((p.grad is not None) == is_adapter(name) for name, p in named.items()), "no gradient is made of the base"
    held = TrainState(engine).resident()
    assert held["gradients"] and all(is_adapter(name) for name in held["gradients"])
    assert held["optimizer"] and all(is_adapter(name) for name in held["optimizer"])
    engine.optim_step()
    assert not torch.equal(engine.logprobs(batch).values, frozen.logprobs(batch).values)
    after = base_of(engine)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    policy = BasePolicy(engine)
    assert torch.equal(policy.logprobs(batch).values, frozen.logprobs(batch).values), "the reference: adapters off"
    assert all(module.active for module in engine.model.modules() if isinstance(module, Adapters))


def test_the_ledger_holds_one_base_in_the_compute_dtype() -> None:
    engine = trainer(dtype="bfloat16")
    policy = BasePolicy(engine)
    state = TrainState(engine, {"reference": policy.engine})
    engine.forward_backward(sampled(), ACTOR)
    size = {kind: sum(t.numel() * t.itemsize for t in tensors.values()) for kind, tensors in state.resident().items()}
    named = dict(engine.model.named_parameters())
    base = sum(p.numel() * (2 if p.dim() > 1 else 4) for n, p in named.items() if not is_adapter(n))
    adapters = sum(p.numel() for n, p in named.items() if is_adapter(n))
    assert size["weights"] == base + adapters * 2, "16-bit base once, 16-bit adapters"
    assert size["optimizer"] == adapters * (4 + 8) and size["gradients"] == adapters * 2, "masters and moments"
    assert sum(size.values()) < sum(p.numel() for p in named.values()) * (2 + 4 + 8), "what training all would hold"


def test_state_is_the_adapters_and_resumes_bitwise() -> None:
    one, batches = trainer(), [sampled(seed) for seed in range(4)]
    for batch in batches[:2]:
        one.update(batch, ACTOR)
    state = one.state_dict()
    assert all(is_adapter(name) for name in state["model"])
    saved = {k: {n: t.clone() for n, t in v.items()} if k == "model" else v for k, v in state.items()}
    saved["optimizer"] = {
        k: {n: t.clone() for n, t in v.items()} if isinstance(v, dict) and k.startswith("exp") else v
        for k, v in state["optimizer"].items()
    }
    for batch in batches[2:]:
        one.update(batch, ACTOR)
    two = trainer()
    two.load_state_dict(saved)
    for batch in batches[2:]:
        two.update(batch, ACTOR)
    assert all(torch.equal(tensor, two.masters()[name]) for name, tensor in one.masters().items())


# --- what generators get ----------------------------------------------------------------------------------------


def requests() -> list[Request]:
    prompts = [(5, 6, 7), (5, 6, 7), (9, 1, 2, 3, 4, 8, 11)]
    return [Request(prompt, Sampling(6), seed=i, request_id=i) for i, prompt in enumerate(prompts)]


class Sink:
    """The generator as the sync sees it."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.calls: list[str] = []

    @property
    def version(self) -> int:
        return self.engine.version

    def load_weights(self, weights: Any, version: int) -> None:
        self.calls.append("all")
        self.engine.load_weights(weights, version)

    def load_adapters(self, weights: Any, version: int) -> None:
        self.calls.append("adapters")
        self.engine.load_adapters(weights, version)


@pytest.mark.parametrize(("model", "experts"), [("", False), ("qwen3_moe", True), ("deepseek", False)])
def test_generators_agree_with_the_trainer_merged_or_adapted(model: str, experts: bool) -> None:
    engine = trainer(model, experts=experts)
    before, raw = base_of(engine), ModelConfig.from_hf(MODELS[model] if model else SHAPE)
    told: dict[bool, list[float]] = {False: [], True: []}
    sinks = {a: Sink(NativeEngine(engine.model.config if a else raw, RolloutSection(max_batch=4))) for a in told}

    async def call(name: str, function: Any, *args: Any) -> Any:
        return function(*args)

    syncs = {
        a: InProcessSync(engine, [sink], call, a, lambda found, a=a: told[a].append(found["reshard/bytes_received"][0]))
        for a, sink in sinks.items()
    }
    for version in range(3):
        tokens = []
        for adapters, sync in syncs.items():
            run_now(sync.publish(version))
            found = sinks[adapters].engine.generate(requests())
            tokens.append([list(one.token_ids) for one in found])
            rows = [(i, [*r.prompt, *g.token_ids], [False] * len(r.prompt) + [True] * len(g.token_ids)) for i, (r, g) in
                    enumerate(zip(requests(), found))]  # fmt: skip
            batch = batch_of(rows)
            theirs = engine.logprobs(batch).values[torch.cat([torch.tensor(mask) for _, _, mask in rows])]
            mine = torch.cat([torch.tensor(one.logprobs) for one in found])
            assert float((theirs - mine).abs().max()) < 1e-5
        assert tokens[0] == tokens[1]
        engine.update(sampled(version), ACTOR)
    assert sinks[True].calls == ["all", "adapters", "adapters"] and sinks[False].calls == ["all"] * 3
    assert told[True][0] > told[False][0] == told[False][2] > 2 * told[True][1], "adapters alone are fewer bytes"
    after = base_of(engine)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "publishing only reads the base"


@pytest.mark.parametrize(("model", "experts"), [("", False), ("qwen3_moe", True)])
def test_a_sample_does_not_depend_on_its_company(model: str, experts: bool) -> None:
    """To the bit, where the engine applies the adapters itself."""
    trained = trainer(model, experts=experts)
    trained.update(sampled(), ACTOR)
    engine = NativeEngine(trained.model.config, RolloutSection(max_batch=4))
    engine.load_weights(trained.parts(), 0)
    together = engine.generate(requests())
    for request, found in zip(requests(), together):
        (alone,) = engine.generate([request])
        assert list(alone.token_ids) == list(found.token_ids) and list(alone.logprobs) == list(found.logprobs)


def test_adapters_need_their_base() -> None:
    engine = trainer()
    generator = NativeEngine(engine.model.config, RolloutSection(max_batch=4))
    with pytest.raises(RolloutError, match="adapters without a complete set of weights"):
        generator.load_adapters(engine.adapters(), 0)


def run_now(awaitable: Any) -> None:
    """A coroutine that never waits."""
    with pytest.raises(StopIteration):
        awaitable.send(None)
