"""Experts kept in use: the balance loss against a loop over rows, the bias step, and what both report."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.routes_cases import CONFIGS, played, trainer, without_routes, worker
from tests.train_cases import ACTOR, CRITIC, engine, gradients_of, policy_loss, sampled

from docklands import models
from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK, RETURNS, TOKEN_IDS
from docklands.core.loss import Denominators, ModelOutput
from docklands.models import CausalLM, PackedCausal
from docklands.models.routing import Routes
from docklands.train import TrainEngine
from docklands.train.microbatch import lay_out

COEF = 0.3


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek"])
def case(request: pytest.FixtureRequest) -> tuple[CausalLM, Batch]:
    model = models.build(CONFIGS[request.param], seed=3)
    return model, played(worker(model), prompts=4, samples=5)


def inputs(batch: Batch, row: int) -> torch.Tensor:
    """What a row feeds: everything before its last trained token."""
    last = int(batch[LOSS_MASK][row].nonzero()[-1])
    return batch[TOKEN_IDS][row][:last].long()


def naive(model: CausalLM, batch: Batch) -> tuple[float, list[Counter[int]], dict[str, torch.Tensor]]:
    """(balance loss, load of each layer, gradients of policy loss + COEF * balance loss), one row after the other.

    E * sum over experts of (choices / tokens) * (mean share of the score), mean over layers.
    """
    model.zero_grad()
    counts = Denominators(batch.num_trained_tokens, len(batch), 24)
    load: list[Counter[int]] = []
    share: list[Any] = []
    tokens, loss = 0, torch.zeros(())
    for row in range(len(batch)):
        ids, routes = inputs(batch, row), Routes()
        hidden_TD = model(ids, torch.arange(len(ids)), PackedCausal([len(ids)]), routes=routes)
        own = batch.select([row])
        whole = batch[TOKEN_IDS][row].long()
        logp_TV = torch.log_softmax(model.logits(hidden_TD), -1)
        picked = logp_TV.gather(1, whole[1 : len(ids) + 1, None]).squeeze(1)
        logprobs_T = torch.zeros(len(whole)).index_put((torch.arange(1, len(ids) + 1),), picked)
        logprobs_T = torch.where(own[LOSS_MASK].values, logprobs_T, 0.0)
        loss = loss + policy_loss(own.pack(), ModelOutput(logprobs_T), counts).loss
        tokens += len(ids)
        for layer, (_, routing) in enumerate(routes.kept()):
            if layer == len(load):
                load.append(Counter())
                share.append(0.0)
            for token in routing.choice_Tk.tolist():
                load[layer].update(token)
            score_TE = routing.score_TE
            share[layer] = share[layer] + sum(score_T / score_T.sum() for score_T in score_TE)
    experts = model.config.moe.experts  # type: ignore[union-attr]
    terms: list[Any] = [
        experts * sum(n[e] / tokens * s[e] / tokens for e in range(experts)) for n, s in zip(load, share, strict=True)
    ]
    aux = torch.stack(terms).mean()
    (loss + COEF * aux).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(aux.detach()), load, found


@pytest.mark.parametrize("replay", [True, False])
def test_the_balance_loss_is_that_of_a_loop_over_rows(case: tuple[CausalLM, Batch], replay: bool) -> None:
    """Whatever is shared, split, replayed, recomputed: the load is the whole update's, known before its first pass."""
    model, batch = case
    aux, load, expected = naive(model, batch)
    given = batch if replay else without_routes(batch)
    splits: tuple[dict[str, Any], ...] = (
        {},
        {"tokens_per_microbatch": 70},
        {"share_prefix": False, "recompute": "full"},
    )
    for more in splits:
        made = trainer(model, router={"aux_loss_coef": COEF}, **more)
        passes = count_passes(made)
        metrics = made.forward_backward(given, ACTOR)
        micros = metrics["actor/microbatches"][0]
        assert len(passes) == (micros if replay else 2 * micros)  # without recorded choices: a pass for the load
        assert metrics["actor/router_aux_loss"][0] == pytest.approx(aux, abs=1e-5)
        assert made.optimizer is not None
        found = made.optimizer.gradients()
        assert max(float((found[n] - g).abs().max()) for n, g in expected.items()) < 1e-5
        rows = [torch.tensor([float(n[e]) for e in range(6)]) for n in load]
        assert metrics["actor/router_load_max"][0] == pytest.approx(
            float(sum(r.max() / r.mean() for r in rows) / len(rows)), abs=1e-6
        )
        assert metrics["actor/router_idle"][0] == pytest.approx(
            float(sum((r == 0).sum() for r in rows) / 6 / len(rows))
        )
    plain = gradients_of(trainer(model), given, ACTOR)[1]
    assert max(float((plain[n] - g).abs().max()) for n, g in expected.items()) > 1e-3


def count_passes(made: TrainEngine) -> list[int]:
    """Grows with every pass through the model."""
    passes: list[int] = []
    plain = made.model.forward

    def forward(*args: Any, **more: Any) -> Any:
        passes.append(1)
        return plain(*args, **more)

    made.model.forward = forward  # type: ignore[method-assign]
    return passes


def test_the_balance_loss_spreads_the_load() -> None:
    """Some dozens of updates with the balance loss alone: the most used expert comes close to the mean."""
    model = models.build(CONFIGS["qwen3_moe"], seed=3)
    batch = without_routes(played(worker(model), prompts=4, samples=4))
    made = trainer(model, router={"aux_loss_coef": 10.0})
    loads = [made.update(batch, ACTOR)["actor/router_load_max"][0] for _ in range(30)]
    assert loads[0] > 1.5 and min(loads[-3:]) < 1.0 + 0.5 * (loads[0] - 1.0)


def test_an_idle_pass_has_its_choices_recorded(case: tuple[CausalLM, Batch]) -> None:
    """A replica without work must not cost all of them a forward pass."""
    model, batch = case
    made = trainer(model, router={"aux_loss_coef": COEF})
    layout, passes = lay_out(batch, made.section.share_prefix), []
    busy, idle = (layout.rows_S, layout.routes_SLk), (torch.zeros(1, dtype=torch.long), None)
    made.routers.begin([busy], lambda: passes.append(1))
    whole = made.routers._whole
    made.routers.begin([idle, busy], lambda: passes.append(1))
    assert whole is not None and made.routers._whole is not None and not passes
    assert torch.equal(whole[0], made.routers._whole[0]) and whole[1] == made.routers._whole[1]
    made.routers.begin([(layout.rows_S, None)], lambda: passes.append(1))
    assert passes


def test_the_bias_moves_by_the_load_of_all_since_the_last_update() -> None:
    """-rate above the mean, +rate below; the load adds up as gradients do; optimizer and files see the new bias."""
    model = models.build(CONFIGS["deepseek"], seed=3)
    batch = played(worker(model), prompts=4, samples=5)
    made = trainer(model, router={"bias_update_rate": 0.01})
    halves = [batch.select(range(10)), batch.select(range(10, 20))]
    for half in halves:
        made.forward_backward(half, ACTOR)
    _, load, _ = naive(model, batch)
    made.optim_step()
    for layer, count in enumerate(load):
        name = f"layers.{layer + 1}.moe.router.bias"
        bias_E = dict(made.weights())[name]
        load_E = torch.tensor([float(count[e]) for e in range(6)])
        want_E = 0.01 * torch.sign(load_E.mean() - load_E)
        assert torch.allclose(bias_E - dict(model.named_parameters())[name].detach(), want_E)
        assert torch.equal(made.state_dict()["model"][name], bias_E)
    before = {n: w.clone() for n, w in made.weights() if n.endswith("router.bias")}
    made.forward_backward(batch, ACTOR)
    made.load_state_dict(made.state_dict())  # forgets gradients, and the load with them
    assert made.optim_step() == {"actor/skipped_updates": (1.0, 1.0)}
    assert all(torch.equal(before[n], dict(made.weights())[n]) for n in before)


def test_dense_models_and_value_models() -> None:
    dense = engine().forward_backward(sampled(), ACTOR)
    assert not [name for name in dense if "router" in name]
    made = TrainEngine(
        models.build_value(CONFIGS["qwen3_moe"], seed=3),
        trainer(models.build(CONFIGS["qwen3_moe"], seed=3), router={"aux_loss_coef": 0.1}).section,
        engine().optimizer.section,  # type: ignore[union-attr]
    )
    rows = sampled()
    ids = [row % 40 for row in rows[TOKEN_IDS]]
    metrics = made.forward_backward(rows.with_({TOKEN_IDS: ids, RETURNS: rows[RETURNS]}), CRITIC)
    assert metrics["critic/router_aux_loss"][0] >= 1.9 and metrics["critic/router_replayed"] == (0.0, 1.0)
