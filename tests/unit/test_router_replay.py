"""Router choices from generator to trainer: recorded for every token, carried by the flow, replayed (pitfall 21)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import rollout_cases as cases
from tests.routes_cases import (
    CONFIGS,
    DENSE,
    QWEN,
    chosen,
    column_of,
    fed,
    gaps,
    played,
    trainer,
    without_routes,
    worker,
)
from tests.train_cases import ACTOR, gradients_of

from docklands import models
from docklands.algorithms import build_algorithm
from docklands.algorithms.stages import with_routes
from docklands.config.schema import Config, RolloutSection, TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK, TOKEN_IDS, routes_field
from docklands.core.protocols import Sampling
from docklands.errors import ConfigError, TrainError
from docklands.models import CausalLM
from docklands.rollout import NativeEngine
from docklands.run.routes import as_run, check_router, routes_column

MOE = ("qwen3_moe", "deepseek")


@pytest.fixture(scope="module", params=MOE)
def model(request: pytest.FixtureRequest) -> CausalLM:
    return models.build(CONFIGS[request.param], seed=3)


def recorded_as_chosen(model: CausalLM, batch: Batch) -> None:
    """Every recorded choice is the plain forward pass's (fp32, as sets: order is the router's own)."""
    column = column_of(model.config)
    for row in range(len(batch)):
        ids, routes_TLk = fed(batch, column, row)
        assert torch.equal(routes_TLk.sort(-1).values, chosen(model, ids).sort(-1).values)
        assert (batch[column][row][-1] == -1).all()


@pytest.mark.parametrize("engines", [1, 2])
def test_every_token_that_was_fed_has_its_choice(model: CausalLM, engines: int) -> None:
    batch = played(worker(model, engines=engines))
    recorded_as_chosen(model, batch)
    assert batch[column_of(model.config)].values.dtype == torch.int16


def test_choices_survive_preemption_and_shared_prompts(model: CausalLM) -> None:
    made = worker(model, kv_cache_tokens=176, kv_block_tokens=16, max_response_tokens=40)
    rows = cases.admitted([f"{a}+{a * 7}=" for a in range(5)], 4)
    result = made.rollout(rows)
    assert result.batch is not None and result.metrics["rollout/preemptions"][0] > 0
    recorded_as_chosen(model, result.batch)


def test_an_aborted_or_empty_sample_has_an_aligned_column(model: CausalLM) -> None:
    made = worker(model)
    batch = made.rollout(cases.admitted(["1+7="], 2), sampling=Sampling(0)).batch
    assert batch is not None and (batch[column_of(model.config)].values == -1).all()
    engine = NativeEngine(model.config, RolloutSection(record_routes=True))
    engine.load_weights(model.named_parameters(), 0)
    (found,) = engine.generate(cases.groups(1, 1, Sampling(3)))
    assert found.routes is not None and len(found.routes) == 3 + len(found.token_ids)
    plain = NativeEngine(model.config, RolloutSection())
    plain.load_weights(model.named_parameters(), 0)
    (same,) = plain.generate(cases.groups(1, 1, Sampling(3)))
    assert same.routes is None and same.token_ids == found.token_ids and same.logprobs == found.logprobs


class Talks:
    """Answers each of the first two turns with "go"."""

    max_turns = 3

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, row: dict[str, Any]) -> None:
        self.turns = 0

    async def step(self, completion: str, finish: str) -> Any:
        self.turns += 1
        return SimpleNamespace(observation="go", reward=1.0, done=self.turns == 3)


def test_several_turns_fill_each_other_in(model: CausalLM) -> None:
    """A turn's last token and the observation get their choice when the next turn feeds them."""
    made = worker(model, env=Talks, max_response_tokens=60, stop=list("0123456789"))
    batch = made.rollout(cases.admitted(["12+7=", "9-3="], 3)).batch
    assert batch is not None
    turns = [int((mask.int().diff() == 1).sum()) for mask in batch[LOSS_MASK]]
    assert max(turns) == 3
    recorded_as_chosen(model, batch)


# --- replay -----------------------------------------------------------------------------------------------------------


def test_pitfall_21_in_bf16_replay_leaves_the_noise_of_a_dense_model() -> None:
    """Largest |log-prob difference| of generator and trainer: a changed choice is several times the rounding noise."""
    found = {}
    for name, config in CONFIGS.items():
        model = models.build(config, seed=3)
        batch = played(worker(model, "bfloat16"), prompts=8, samples=8)
        engine = trainer(model, dtype="bfloat16")
        found[name] = float(gaps(engine, batch).max()), float(gaps(engine, without_routes(batch)).max())
    noise = found["dense"][0]
    for name in MOE:
        replayed, free = found[name]
        assert replayed < 2 * noise and free > 3 * noise, (name, found)


def test_pitfall_21_a_perturbed_router_replays_every_choice_and_still_learns(model: CausalLM) -> None:
    """fp32: noise on the trainer's router changes choices; with replay none, and log-probs move by the weights only."""
    batch = played(worker(model))
    column = column_of(model.config)
    engine = trainer(model)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(1)
        for name, weight in engine.model.named_parameters():
            if name.endswith("router.weight"):
                weight.add_(torch.empty_like(weight).normal_(0.0, 0.002, generator=draw))
    assert isinstance(engine.model, CausalLM)
    changed = [(chosen(engine.model, fed(batch, column, r)[0]) != fed(batch, column, r)[1]).sum() for r in range(9)]
    assert sum(changed) > 0
    assert gaps(engine, batch).max() < 0.2 * gaps(engine, without_routes(batch)).max()

    seen: list[Any] = []
    engine.routers.attach = watch(engine.routers.attach, seen)  # type: ignore[method-assign]
    metrics = engine.forward_backward(batch, ACTOR)
    assert metrics["actor/router_replayed"] == (1.0, 1.0) and sum(map(int, seen)) == 0
    assert engine.optimizer is not None
    norms = [g.norm() for n, g in engine.optimizer.gradients().items() if n.endswith("router.weight")]
    assert len(norms) == model.config.routed[0] and min(norms) > 0  # type: ignore[index]
    free = trainer(model).forward_backward(without_routes(batch), ACTOR)
    assert free["actor/router_replayed"] == (0.0, 1.0)


def watch(attach: Any, differing: list[Any]) -> Any:
    """Counts, in every pass, the choices that are not the given ones."""

    def counted(out: Any, routes: Any, *more: Any) -> Any:
        differing.extend((routing.choice_Tk != routes.given(index)).sum() for index, routing in routes.kept())
        return attach(out, routes, *more)

    return counted


def test_pitfall_21_generator_and_trainer_agree_in_fp32(model: CausalLM) -> None:
    batch = played(worker(model))
    engine = trainer(model)
    assert gaps(engine, batch).max() < 1e-5
    off = trainer(model, replay_routes=False)
    assert off.forward_backward(batch, ACTOR)["actor/router_replayed"] == (0.0, 1.0)


@pytest.mark.parametrize(
    "train", [{"share_prefix": False}, {"tokens_per_microbatch": 70}, {"recompute": "full"}], ids=str
)
def test_replay_does_not_depend_on_packing(model: CausalLM, train: dict[str, Any]) -> None:
    batch = played(worker(model))
    column, packed = column_of(model.config), batch.pack()
    first_T = (packed.token_ids_T + packed.positions_T) % 6  # choices that no router would make; a prompt's agree
    routes_TLk = torch.stack([first_T, (first_T + 2) % 6, (first_T + 1) % 6, first_T], 1).view(-1, 2, 2)
    odd = batch.with_({column: packed.unpack(routes_TLk.to(torch.int16))})
    whole, parts = trainer(model), trainer(model, **train)
    assert (whole.logprobs(odd).values - parts.logprobs(odd).values).abs().max() < 1e-5
    assert (whole.logprobs(odd).values - whole.logprobs(batch).values).abs().max() > 0.1
    (loss, grads), (other_loss, other_grads) = (gradients_of(e, odd, ACTOR) for e in (whole, parts))
    assert abs(loss - other_loss) < 1e-5
    assert max(float((grads[n] - other_grads[n]).abs().max()) for n in grads) < 1e-5


def test_rows_share_what_agrees_in_tokens_and_choices(model: CausalLM) -> None:
    """All samples of a prompt were prefilled once, so recording costs no sharing; a row that disagrees stands alone."""
    batch = played(worker(model))
    engine = trainer(model)
    packed = [engine.forward_backward(b, ACTOR)["actor/packed_tokens"][0] for b in (batch, without_routes(batch))]
    assert packed[0] == packed[1] < batch.num_tokens - len(batch)
    column = column_of(model.config)
    routes_TLk = batch[column].values.clone()
    start = int(batch[column].offsets[2])
    routes_TLk[start] = routes_TLk[start].flip(0) if column.inner_shape[0] > 1 else routes_TLk[start].flip(1)
    apart = engine.forward_backward(batch.with_({column: batch.pack().unpack(routes_TLk)}), ACTOR)
    assert apart["actor/packed_tokens"][0] > packed[0]


def test_choices_of_another_model_are_refused(model: CausalLM) -> None:
    batch = played(worker(model))
    wrong = routes_field(5, 2)
    batch = without_routes(batch).with_({wrong: [np.zeros((n, 5, 2), np.int16) for n in batch.lengths]})
    with pytest.raises(TrainError, match=r"router choices \[tokens, 5, 2\] do not fit this model: 2 layers"):
        trainer(model).logprobs(batch)


# --- the flow ---------------------------------------------------------------------------------------------------------


def flow(name: str, **more: Any) -> Any:
    size = 1 if name == "sft" else 4
    config = Config.model_validate({"algorithm": {"name": name, **more}, "rollout": {"samples_per_prompt": size}})
    return build_algorithm(config).graph()


def test_the_actor_reads_what_rollout_writes() -> None:
    column = routes_field(2, 2)
    graph = with_routes(flow("ppo", kl={"coef": 0.1}, old_logprobs="recompute"), column)
    assert graph.writer_of(column) == graph["rollout"]
    readers = {stage.name for stage in graph.stages if column in stage.reads}
    assert readers == {"old_logprobs", "update"}
    assert [column in learner.reads for learner in graph.learners] == [True, False]  # the critic has its own routers
    kept = with_routes(flow("grpo"), column, replay=False)
    assert column in kept["rollout"].writes and column not in kept["update"].reads
    assert with_routes(flow("sft"), column) == flow("sft")


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def test_recording_follows_model_and_replay() -> None:
    assert routes_column(config(), QWEN) == routes_field(2, 2)
    assert routes_column(config(), DENSE) is None
    assert routes_column(config(train={"replay_routes": False}), QWEN) is None
    kept = config(train={"replay_routes": False}, rollout={"record_routes": True})
    assert routes_column(kept, QWEN) == routes_field(2, 2)


def test_the_printed_graph_is_that_of_the_run(tmp_path: Path) -> None:
    models.export(models.build(QWEN), tmp_path / "moe")
    models.export(models.build(DENSE), tmp_path / "dense")
    plain = flow("grpo")
    shown = as_run(config(model={"path": str(tmp_path / "moe")}), plain)
    assert shown == with_routes(plain, routes_field(2, 2)) and "routes" in shown.to_text()
    for path in ("dense", "not here"):
        assert as_run(config(model={"path": str(tmp_path / path)}), plain) == plain


@pytest.mark.parametrize(
    ("sections", "shape", "said"),
    [
        ({"rollout": {"record_routes": True}}, DENSE, "rollout.record_routes is true"),
        ({"rollout": {"record_routes": False}}, QWEN, "nothing to replay"),
        ({"train": {"router": {"aux_loss_coef": 0.1}}}, DENSE, "aux_loss_coef is set, but the model has no layer"),
        (
            {"train": {"router": {"bias_update_rate": 0.1}}},
            DENSE,
            "bias_update_rate is set, but the model has no layer",
        ),
        ({"train": {"router": {"bias_update_rate": 0.1}}}, QWEN, "have no bias"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], shape: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_router(config(**sections), shape)
        routes_column(config(**sections), shape)


def test_the_column_is_declared_with_the_models_shape() -> None:
    assert repr(routes_field(24, 8)) == "routes:int16[T,24,8]"
    assert TrainSection().replay_routes and TOKEN_IDS.is_token and routes_field(1, 1).is_token
