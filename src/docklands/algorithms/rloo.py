"""RLOO: REINFORCE on whole responses with a leave-one-out baseline."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms.base import ALGORITHMS, Own
from docklands.algorithms.functional import TokenLoss, reinforce
from docklands.algorithms.policy import GroupAlgorithm, PolicyInputs


@ALGORITHMS.add("rloo")
class RLOO(GroupAlgorithm):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740, section 3.2).

    advantage  A_i = r_i - mean of the other samples' rewards: an unbiased baseline
    loss       -A log pi(response): the response is one action, so its tokens' log-probs are summed

    There is no importance ratio, hence nothing to clip and one update per step.
    """

    reads: ClassVar[frozenset[str]] = GroupAlgorithm.reads - {"old_logprobs"}
    own: ClassVar[Own] = Own(aggregation="sequence_sum", normalize_std=False)
    leave_one_out: ClassVar[bool] = True
    single_update: ClassVar[bool] = True

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return reinforce(x.logprobs_T, x.advantage_T)
