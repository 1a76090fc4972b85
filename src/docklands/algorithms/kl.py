"""KL divergence from the policy to the reference, estimated from sampled tokens: values, gradients, controller.

With d = log pi(x) - log pi_ref(x) for x sampled from pi (Schulman 2020, "Approximating KL Divergence"):

    k1 = d                     unbiased, high variance, may be negative
    k2 = d^2 / 2               biased, low variance
    k3 = exp(-d) - 1 + d       unbiased, low variance, never negative

As a *value* (a penalty in the reward) each is what it says. As a *loss* the gradient is what matters, and the gradient
of an expectation under pi is not the expectation of the gradient:

    grad KL(pi || pi_ref) = E[d grad log pi]
    E[grad k1] = E[grad log pi] = 0                    differentiating k1 regularises nothing
    E[grad k2] = E[d grad log pi]                      right
    E[grad k3] = E[(1 - exp(-d)) grad log pi]          the gradient of KL(pi_ref || pi), another divergence

So the loss shows the chosen estimator's value and takes k2's gradient (straight through) for all three. For k3 that is
also what differentiating ratio x k3 at ratio 1 gives. The GRPO paper (arXiv 2402.03300, eq. 4) differentiates k3
itself; near the reference, where exp(-d) = 1 - d, the two agree to first order.
The term carries neither the ratio pi / pi_old nor a correction's weight: its expectation is under the policy that
sampled, so of several updates per step only the first, at ratio 1, takes exactly this gradient.
As everywhere in this field the sum runs over per-token terms: a token's effect on later tokens' KL is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from docklands.algorithms.functional import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def kl_value(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: Estimator) -> Tensor:
    """Estimate per token, [T]; differentiable as written, so use `kl_loss` where the gradient matters."""
    d_T = (logprobs_T - ref_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d_T
    if estimator == "k2":
        return 0.5 * d_T.square()
    return (-d_T).expm1() + d_T


def kl_loss(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: Estimator) -> Tensor:
    """Per-token term [T] with the value of `estimator` and the gradient d grad log pi of KL(pi || pi_ref)."""
    d_T = (logprobs_T - ref_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    gradient_T = d_T.detach() * logprobs_T
    return kl_value(logprobs_T, ref_logprobs_T, estimator).detach() + (gradient_T - gradient_T.detach())


class KLController:
    """The coefficient: fixed, or steered towards a target KL (Ziegler et al. 2019, arXiv 1909.08593).

    A stage may get rows again: it was interrupted, or a warehouse was lost. So the moves of the newest steps are kept
    with their rows, and a step that is measured again starts from the same coefficient and moves it once.

    target   nats per trained token that the penalty should hold; 0: the coefficient stays as it is
    horizon  samples over which the coefficient may change by its own size
    keep     steps that may be measured again: as many as can be in flight
    """

    def __init__(self, coef: float, target: float = 0.0, horizon: int = 10000, keep: int = 1) -> None:
        self.target = target
        self.horizon = horizon
        self.keep = keep
        self._settled = coef  # before the moves
        self._moves: list[tuple[frozenset[int], float]] = []  # rows of a step -> factor, in order

    @property
    def coef(self) -> float:
        """The coefficient after all moves."""
        coef = self._settled
        for _, factor in self._moves:
            coef *= factor
        return coef

    def update(self, kl: float, row_ids: Sequence[int]) -> float:
        """Of a step's rows: the mean nats per token just measured -> the coefficient of their own penalty.

        It moves for the next step; the proportional error is held within 0.2.
        """
        rows = frozenset(row_ids)
        again = [i for i, (others, _) in enumerate(self._moves) if not rows.isdisjoint(others)]
        place = again[0] if again else len(self._moves)
        later = [move for i, move in enumerate(self._moves) if i > place and i not in again]
        self._moves = self._moves[:place]
        coef = self.coef
        if self.target:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self._moves += [(rows, 1.0 + error * len(rows) / self.horizon), *later]
        while len(self._moves) > self.keep:
            self._settled *= self._moves.pop(0)[1]
        return coef

    def state_dict(self) -> dict[str, Any]:
        """The coefficient before the moves, and the moves."""
        return {"kl_coef": self._settled, "kl_moves": [(sorted(rows), factor) for rows, factor in self._moves]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A fixed coefficient stays as it is; an adaptive one continues where it stood."""
        if self.target:
            self._settled = float(state["kl_coef"])
            self._moves = [(frozenset(rows), float(factor)) for rows, factor in state.get("kl_moves", [])]
