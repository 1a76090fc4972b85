"""The engine's promises: one denominator, metrics as (sum, count), masks, empty batches, NaN, state, determinism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.train_cases import (
    ACTOR,
    ACTOR_WITH_ENTROPY,
    CRITIC,
    V,
    batch_of,
    engine,
    gradients_of,
    largest_difference,
    sampled,
    tiny,
)
from torch import Tensor

from docklands.config.schema import OptimSection, TrainSection
from docklands.core.batch import Batch
from docklands.core.fields import ADVANTAGE, GROUP_ID, LOSS_MASK, OLD_LOGPROBS, TOKEN_IDS
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Learner
from docklands.errors import DataError, NonFinite, TrainError
from docklands.obs.metrics import Metrics
from docklands.train import TrainEngine


def learner(loss: Any) -> Learner:
    return Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK), loss)


def with_masked(batch: Batch, field: Any, inside: float, outside: float) -> Batch:
    """A float token column: `inside` under the mask, `outside` elsewhere."""
    rows = [torch.where(mask, inside, outside) for mask in batch[LOSS_MASK]]
    return batch.with_({field: rows})


# --- one denominator ----------------------------------------------------------------------------------------------


def test_pitfall_01_token_mean_is_one_sum_over_one_count() -> None:
    rows = [(0, [1, 2, 3, 4, 5], [False, True, True, True, True]), (1, [6, 7], [False, True])]
    batch = batch_of(rows).with_({ADVANTAGE: torch.tensor([1.0, 4.0])})

    def loss(packed: Any, out: ModelOutput, counts: Denominators) -> LossResult:
        assert out.logprobs_T is not None
        one_T = torch.exp(out.logprobs_T - out.logprobs_T.detach())
        value_T = torch.where(packed.loss_mask_T, packed.per_token(ADVANTAGE) * one_T, 0.0)
        return LossResult(value_T.sum() / counts.tokens)

    for tokens in (4, 5, 100):  # 4: a row each; 100: both together
        metrics = engine(tokens_per_microbatch=tokens).forward_backward(batch, learner(loss))
        assert metrics["actor/loss"] == pytest.approx((1.6, 1.0))
    assert metrics["actor/microbatches"][0] == 1.0


@pytest.mark.parametrize("case", [ACTOR, ACTOR_WITH_ENTROPY, CRITIC], ids=["policy", "entropy", "value"])
def test_pitfall_01_gradients_do_not_depend_on_the_split(case: Learner) -> None:
    batch = sampled(seed=1, groups=4)
    found, passes = [], []
    for tokens in (400, 40, 25, 20):
        trainer = engine(case is CRITIC, tokens_per_microbatch=tokens)
        passes.append(trainer.forward_backward(batch, case)[f"{case.name}/microbatches"][0])
        trainer.optimizer.clear()  # type: ignore[union-attr]
        found.append(gradients_of(trainer, batch, case))
    assert passes == [1.0, 2.0, 3.0, 4.0]
    size = max(float(g.abs().max()) for g in found[0][1].values())
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5, abs=1e-6)
        assert largest_difference(gradients, found[0][1]) < 2e-6 * max(1.0, size)


def test_pitfall_02_metrics_do_not_depend_on_the_number_of_microbatches() -> None:
    batch = sampled(seed=3)
    results = []
    for tokens in (300, 25):
        metrics = Metrics(engine(tokens_per_microbatch=tokens).update(batch, ACTOR)).result()
        results.append({k: v for k, v in metrics.items() if not k.endswith(("microbatches", "packed_tokens"))})
    assert results[0].keys() == results[1].keys() and "actor/pg_loss" in results[0]
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert results[0]["actor/ratio_max"] == 1.0
    assert results[0]["actor/tokens"] == batch.num_trained_tokens


def test_denominators_are_global() -> None:
    batch = sampled()
    seen: list[Denominators] = []

    def loss(packed: Any, out: ModelOutput, counts: Denominators) -> LossResult:
        seen.append(counts)
        return LossResult(out.logprobs_T.sum() / counts.tokens)  # type: ignore[union-attr]

    engine(tokens_per_microbatch=25).forward_backward(batch, learner(loss))
    assert len(seen) > 2 and set(seen) == {Denominators(batch.num_trained_tokens, len(batch), 8)}


# --- masks and empty batches ---------------------------------------------------------------------------------------


def test_pitfall_07_nan_under_the_mask_is_harmless() -> None:
    batch = sampled(seed=5)

    def loss(packed: Any, out: ModelOutput, counts: Denominators) -> LossResult:
        old_T = torch.where(packed.loss_mask_T, packed[OLD_LOGPROBS], 0.0)
        return LossResult(-torch.exp(out.logprobs_T - old_T).where(packed.loss_mask_T, 0.0).sum() / counts.tokens)

    clean = gradients_of(engine(), with_masked(batch, OLD_LOGPROBS, -1.0, 0.0), learner(loss))
    dirty = gradients_of(engine(), with_masked(batch, OLD_LOGPROBS, -1.0, float("nan")), learner(loss))
    assert np.isfinite(clean[0]) and clean[0] == dirty[0]
    assert largest_difference(clean[1], dirty[1]) == 0.0


def test_pitfall_08_masked_values_do_not_move_the_loss() -> None:
    batch = sampled(seed=5)

    def loss(packed: Any, out: ModelOutput, counts: Denominators) -> LossResult:
        return LossResult((out.logprobs_T * packed[OLD_LOGPROBS]).sum() / counts.tokens)

    zero, ten = (with_masked(batch, OLD_LOGPROBS, 1.0, outside) for outside in (0.0, 10.0))
    left, right = gradients_of(engine(), zero, learner(loss)), gradients_of(engine(), ten, learner(loss))
    assert left[0] == right[0] and left[0] != 0.0
    assert largest_difference(left[1], right[1]) == 0.0


def test_pitfall_10_rows_without_response_contribute_nothing() -> None:
    batch = sampled(seed=7)
    idle = batch_of([(0, [1, 2, 3], [False] * 3), (9, [5], [False])])
    both = Batch.concat([batch, idle.with_({f: idle[f] for f in batch.fields})])
    both = Batch(np.arange(len(both)), {f: both[f] for f in both.fields})
    alone, mixed = gradients_of(engine(), batch, ACTOR), gradients_of(engine(), both, ACTOR)
    assert mixed[0] == pytest.approx(alone[0], abs=1e-6)
    assert largest_difference(alone[1], mixed[1]) < 1e-6
    assert [float(row.abs().sum()) for row in engine().logprobs(both)][-2:] == [0.0, 0.0]


def test_pitfall_10_a_batch_of_nothing_else_makes_no_step() -> None:
    batch = batch_of([(0, [1, 2, 3], [False] * 3), (0, [1, 2], [False] * 2)])
    trainer = engine()
    before = {name: w.clone() for name, w in trainer.weights()}
    metrics = trainer.update(batch, ACTOR)
    assert metrics["actor/skipped_updates"] == (1.0, 1.0) and metrics["actor/tokens"][0] == 0.0
    assert "actor/updates" not in metrics and "actor/loss" not in metrics
    assert all(np.isfinite(v) for v in Metrics(metrics).result().values())
    assert largest_difference(before, dict(trainer.weights())) == 0.0
    assert trainer.updates == 0
    assert float(trainer.logprobs(batch).values.abs().sum()) == 0.0


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(TrainError, match="row 101: the first token is under the loss mask"):
        engine().logprobs(batch_of([(0, [1, 2], [False, True]), (0, [3, 4], [True, True])]))


@pytest.mark.parametrize("token", [-1, V])
def test_an_id_that_the_model_has_not_is_refused(token: int) -> None:
    with pytest.raises(DataError, match=f"row 101: token id {token} is not among the model's {V}"):
        engine().logprobs(batch_of([(0, [1, 2], [False, True]), (0, [3, token], [False, True])]))


def test_a_row_over_the_cap_is_refused() -> None:
    with pytest.raises(TrainError, match="row 100 has 9 tokens, a micro-batch holds 8"):
        engine(tokens_per_microbatch=8).logprobs(batch_of([(0, list(range(10)), [False] + [True] * 9)]))


# --- same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [25, 300])
def test_logprobs_before_the_update_equal_those_inside_it(dtype: str, tokens: int) -> None:
    batch = sampled(seed=8)
    trainer = engine(dtype=dtype, tokens_per_microbatch=tokens)
    batch = batch.with_({OLD_LOGPROBS: trainer.logprobs(batch)})
    ratios: list[Tensor] = []

    def loss(packed: Any, out: ModelOutput, counts: Denominators) -> LossResult:
        ratio_T = torch.exp(out.logprobs_T - packed[OLD_LOGPROBS])
        ratios.append(ratio_T.detach())
        return LossResult(ratio_T.where(packed.loss_mask_T, 0.0).sum() / counts.tokens)

    trainer.forward_backward(batch, learner(loss))
    assert torch.equal(torch.cat(ratios), torch.ones(batch.num_tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_engines_make_the_same_bits(dtype: str) -> None:
    batch = sampled(seed=9)
    trainers = [engine(dtype=dtype, tokens_per_microbatch=60) for _ in range(2)]
    metrics = [[trainer.update(batch, ACTOR) for _ in range(3)] for trainer in trainers]
    assert metrics[0] == metrics[1]
    assert largest_difference(dict(trainers[0].weights()), dict(trainers[1].weights())) == 0.0


def test_recomputation_changes_no_bit() -> None:
    batch = sampled(seed=9)
    plain, again = (gradients_of(engine(recompute=flag), batch, ACTOR) for flag in (False, True))
    assert plain[0] == again[0] and largest_difference(plain[1], again[1]) == 0.0


def test_bf16_computes_near_fp32_and_keeps_fp32_masters() -> None:
    batch = sampled(seed=9)
    wide, narrow = engine(), engine(dtype="bfloat16", tokens_per_microbatch=60)
    gap = (wide.logprobs(batch).values - narrow.logprobs(batch).values).abs()
    assert 0 < float(gap.max()) < 0.3
    assert {w.dtype for name, w in narrow.weights() if "norm" not in name} == {torch.bfloat16}
    for _ in range(3):
        narrow.update(batch, ACTOR)
    for name, weight in narrow.weights():
        assert narrow.masters()[name].dtype == torch.float32
        assert torch.equal(weight.float(), narrow.masters()[name].to(weight.dtype).float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pitfall_18_published_weights_are_those_of_the_last_update(dtype: str) -> None:
    batch = sampled(seed=12)
    trainer = engine(dtype=dtype, optim=OptimSection(lr=1.0))
    before = trainer.logprobs(batch).values
    trainer.update(batch, ACTOR)
    receiver = TrainEngine(tiny(), TrainSection.model_validate({"dtype": dtype}), None)
    with torch.no_grad():
        for (name, ours), (same, theirs) in zip(trainer.weights(), receiver.weights()):
            assert name == same and ours.dtype == theirs.dtype
            theirs.copy_(ours)
    after = trainer.logprobs(batch).values
    assert torch.equal(receiver.logprobs(batch).values, after)
    assert float((after - before).abs().max()) > 1.0


def test_pitfall_05_two_losses_give_two_updates() -> None:
    batch = sampled(seed=13)
    left, right = (gradients_of(engine(), batch, case) for case in (ACTOR, ACTOR_WITH_ENTROPY))
    assert abs(left[0] - right[0]) > 1e-3 and largest_difference(left[1], right[1]) > 1e-3


def test_training_raises_the_probability_of_what_is_rewarded() -> None:
    batch = sampled(seed=10)
    batch = batch.with_({ADVANTAGE: torch.ones(len(batch))})
    trainer = engine(optim=OptimSection(lr=3e-3), total=20)
    first = float(trainer.logprobs(batch).values.sum())
    for _ in range(20):
        trainer.update(batch, ACTOR)
    assert float(trainer.logprobs(batch).values.sum()) > first + 0.5 * abs(first)


# --- NaN -----------------------------------------------------------------------------------------------------------


def test_a_nan_loss_is_named_and_leaves_no_gradient() -> None:
    def loss(packed: Any, out: ModelOutput, counts: Denominators) -> LossResult:
        return LossResult(out.logprobs_T.sum() * float("nan"))  # type: ignore[union-attr]

    trainer = engine(tokens_per_microbatch=25)
    with pytest.raises(NonFinite, match="the loss of actor is nan at update 1"):
        trainer.forward_backward(sampled(), learner(loss))
    assert not trainer.optimizer.gradients()  # type: ignore[union-attr]


def test_a_nan_weight_is_found_by_its_log_probs() -> None:
    trainer = engine()
    with torch.no_grad():
        trainer.model.layers[1].o.weight[0, 0] = float("nan")
    with pytest.raises(NonFinite, match=r"actor logprobs of row \d+ is nan at update 1"):
        trainer.update(sampled(), ACTOR)


def test_a_nan_gradient_is_named_and_the_weights_stay() -> None:
    def loss(packed: Any, out: ModelOutput, counts: Denominators) -> LossResult:
        trainer.model.final_norm.weight.register_hook(lambda g: g * float("inf"))
        return LossResult(out.logprobs_T.sum() / counts.tokens)  # type: ignore[union-attr]

    trainer = engine()
    before = {name: w.clone() for name, w in trainer.weights()}
    trainer.forward_backward(sampled(), learner(loss))
    with pytest.raises(NonFinite, match=r"gradient of final_norm.weight: 40 of 40 elements not finite at update 1"):
        trainer.optim_step()
    assert largest_difference(before, dict(trainer.weights())) == 0.0
    assert trainer.updates == 0
    assert "actor/skipped_updates" in trainer.optim_step()


# --- what it is asked for ------------------------------------------------------------------------------------------


def test_frozen_weights_only_read() -> None:
    frozen = TrainEngine(tiny(), TrainSection(tokens_per_microbatch=256), None)
    batch = sampled()
    assert torch.equal(frozen.logprobs(batch).values, engine().logprobs(batch).values)
    for call in (lambda: frozen.forward_backward(batch, ACTOR), frozen.optim_step):
        with pytest.raises(TrainError, match="frozen"):
            call()
    assert not any(p.requires_grad for p in frozen.model.parameters())


def test_the_wrong_verb_is_refused() -> None:
    with pytest.raises(TrainError, match="a CausalLM gives no values"):
        engine().values(sampled())
    with pytest.raises(TrainError, match="a ValueModel gives no logprobs"):
        engine(value=True).logprobs(sampled())


def test_weights_name_every_parameter_once() -> None:
    trainer = engine()
    names = [name for name, _ in trainer.weights()]
    assert len(set(names)) == len(names) == len(list(trainer.model.parameters()))
    assert not any(w.requires_grad for _, w in trainer.weights())


def test_the_engine_metrics_are_declared() -> None:
    metrics = engine().update(sampled(), ACTOR)
    metrics = {**metrics, **engine().update(batch_of([(0, [1, 2], [False, False])]), ACTOR)}
    names = "loss grad_norm lr updates skipped_updates microbatches tokens packed_tokens"
    assert {name.split("/")[1] for name in Metrics(metrics).result()} >= set(names.split())


def test_equal_rows_go_through_once_and_count_twice() -> None:
    row = (0, [1, 2, 3, 4], [False, False, True, True])
    one, two = batch_of([row]), batch_of([row, row])
    one = one.with_({ADVANTAGE: torch.tensor([1.0])})
    two = two.with_({ADVANTAGE: torch.tensor([1.0, 1.0])})
    assert [engine().forward_backward(b, ACTOR)["actor/packed_tokens"][0] for b in (one, two)] == [3.0, 3.0]
    left, right = gradients_of(engine(), one, ACTOR), gradients_of(engine(), two, ACTOR)
    assert left[0] == pytest.approx(right[0]) and largest_difference(left[1], right[1]) < 1e-6
    assert GROUP_ID in two
