"""KL estimators: values and gradients against the exact KL by enumeration; the controller; pitfall 14."""

from __future__ import annotations

import pytest
import torch
from tests.algorithm_cases import algorithm, whole
from torch import Tensor

from docklands.algorithms.kl import KLController, kl_loss, kl_value
from docklands.core.batch import Batch
from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
)
from docklands.core.loss import ModelOutput

ESTIMATORS = ("k1", "k2", "k3")


def categorical() -> tuple[Tensor, Tensor]:
    """Logits of the policy (a leaf) and log-probs of the reference, over five tokens, float64."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)


def exact_gradient(logits: Tensor, ref: Tensor, *, backward_kl: bool = False) -> Tensor:
    """Gradient of KL(pi || ref), or of KL(ref || pi)."""
    log_p = logits.log_softmax(0)
    kl = (ref.exp() * (ref - log_p)).sum() if backward_kl else (log_p.exp() * (log_p - ref)).sum()
    return torch.autograd.grad(kl, logits)[0]


def expected_gradient(term: Tensor, logits: Tensor) -> Tensor:
    """E over x ~ pi of the gradient of term(x): the samples' distribution itself is not differentiated."""
    weight = logits.log_softmax(0).exp().detach()
    return torch.autograd.grad((weight * term).sum(), logits)[0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_has_the_exact_gradient_in_expectation(estimator: str) -> None:
    logits, ref = categorical()
    term = kl_loss(logits.log_softmax(0), ref, estimator)  # type: ignore[arg-type]
    torch.testing.assert_close(expected_gradient(term, logits), exact_gradient(logits, ref))
    torch.testing.assert_close(term, kl_value(logits.log_softmax(0), ref, estimator))  # type: ignore[arg-type]


def test_why_the_estimators_are_not_differentiated_as_they_are() -> None:
    """k1 has gradient 0 in expectation, k3 that of KL(ref || pi), k2 the right one."""
    logits, ref = categorical()
    found = {e: expected_gradient(kl_value(logits.log_softmax(0), ref, e), logits) for e in ESTIMATORS}  # type: ignore[arg-type]
    torch.testing.assert_close(found["k1"], torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(found["k2"], exact_gradient(logits, ref))
    torch.testing.assert_close(found["k3"], exact_gradient(logits, ref, backward_kl=True))
    assert float((found["k3"] - exact_gradient(logits, ref)).norm()) > 0.05


def test_values_in_expectation() -> None:
    """k1 and k3 are unbiased, k3 is never negative; k2 is only close near the reference."""
    logits, ref = categorical()
    log_p = logits.detach().log_softmax(0)
    exact = float((log_p.exp() * (log_p - ref)).sum())
    for estimator in ("k1", "k3"):
        assert float((log_p.exp() * kl_value(log_p, ref, estimator)).sum()) == pytest.approx(exact)  # type: ignore[arg-type]
    assert (kl_value(log_p, ref, "k3") >= 0).all()
    assert (kl_value(log_p, ref, "k1") < 0).any()
    near = (logits.detach() * 0.05 + ref).log_softmax(0)
    exact_near = float((near.exp() * (near - ref)).sum())
    assert float((near.exp() * kl_value(near, ref, "k2")).sum()) == pytest.approx(exact_near, rel=0.1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_pitfall_14_the_kl_term_has_a_gradient_and_kl_falls(estimator: str) -> None:
    """A = 0, kl_coef > 0, policy != reference -> gradient norm > 0, and KL falls when it is followed."""
    made = algorithm("grpo", {"kl": {"coef": 0.5, "estimator": estimator}})
    logits, ref = categorical()
    generator = torch.Generator().manual_seed(0)

    def kl() -> float:
        log_p = logits.detach().log_softmax(0)
        return float((log_p.exp() * (log_p - ref)).sum())

    before = kl()
    for step in range(40):
        log_p = logits.log_softmax(0)
        token_T = torch.multinomial(log_p.detach().exp(), 512, replacement=True, generator=generator)
        chosen_T = log_p[token_T].float()
        columns = {
            GROUP_ID: [0],
            TOKEN_IDS: [token_T],
            LOSS_MASK: [[True] * 512],
            ADVANTAGE: [0.0],
            OLD_LOGPROBS: [chosen_T.detach()],
            ROLLOUT_LOGPROBS: [chosen_T.detach()],
            REF_LOGPROBS: [ref[token_T].float()],
        }
        batch = Batch([0], columns)
        result = made.loss(batch.pack(), ModelOutput(chosen_T), whole(batch))
        gradient = torch.autograd.grad(result.loss, logits)[0]
        assert step or float(gradient.norm()) > 1e-2
        with torch.no_grad():
            logits -= 1.0 * gradient
    assert kl() < 0.1 * before


def test_the_value_is_finite_for_a_token_that_the_policy_lost() -> None:
    for estimator in ESTIMATORS:
        term = kl_loss(torch.tensor([-300.0, 0.0]), torch.tensor([0.0, -300.0]), estimator)  # type: ignore[arg-type]
        assert term.isfinite().all()


def test_controller_moves_towards_its_target() -> None:
    """Twice the target: error held at 0.2, over 100 of 1000 samples -> x 1.02; at the target it stays."""
    controller = KLController(0.1, target=0.5, horizon=1000)
    assert controller.update(1.0, range(100)) == 0.1
    assert controller.coef == pytest.approx(0.102)
    assert controller.update(0.5, range(100, 200)) == pytest.approx(0.102)
    assert controller.coef == pytest.approx(0.102)
    controller.update(0.0, range(200, 300))
    assert controller.coef == pytest.approx(0.102 * 0.98)
    fixed = KLController(0.1)
    assert fixed.update(9.0, range(100)) == fixed.coef == 0.1


def test_rows_that_are_measured_again_move_the_coefficient_once() -> None:
    """Interrupted, or lost: a step starts from the coefficient that it had, also behind a later one."""

    def controller(*steps: tuple[float, range]) -> KLController:
        made = KLController(0.1, target=0.5, horizon=1000, keep=2)
        for kl, rows in steps:
            made.update(kl, rows)
        return made

    first, second, third = range(100), range(100, 200), range(200, 300)
    again = controller((1.0, first))
    assert again.update(1.0, first) == 0.1 and again.coef == controller((1.0, first)).coef == 0.1 * 1.02
    again.update(0.0, second)
    once = controller((1.0, first), (0.0, second))
    assert again.coef == once.coef
    assert again.update(0.55, range(50)) == 0.1  # a part of the first step, made anew, after the second was measured
    assert again.coef == controller((0.55, range(50)), (0.0, second)).coef != once.coef
    assert again.update(0.5, third) == again.coef
    resumed = controller()
    resumed.load_state_dict(again.state_dict())
    assert resumed.coef == again.coef
    for one in (again, resumed):
        before = one.update(1.0, third)
        assert before == controller((0.55, range(50)), (0.0, second)).coef
        assert one.coef == pytest.approx(before * 1.02)


def test_the_controller_keeps_no_more_than_may_come_again() -> None:
    controller = KLController(0.1, target=0.5, keep=2)
    for step in range(50):
        controller.update(1.0, range(10 * step, 10 * step + 10))
    assert len(controller.state_dict()["kl_moves"]) == 2
