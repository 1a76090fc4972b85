"""CISPO: clip the importance weight, never the token."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms.base import ALGORITHMS, Own
from docklands.algorithms.functional import TokenLoss, clipped_importance
from docklands.algorithms.policy import GroupAlgorithm, PolicyInputs


@ALGORITHMS.add("cispo")
class CISPO(GroupAlgorithm):
    """Clipped importance-sampling policy optimisation (MiniMax 2025, "MiniMax-M1", arXiv 2506.13585, section 3.1).

    loss       -stop_gradient(clip(ratio, 1 - low, 1 + high)) A log pi, one mean over tokens    (eq. 4, 5)
    advantage  (r - mean) / std over the group

    PPO's clip silences rare tokens ("wait", "however") after their first update; here they keep their gradient. The
    paper sets no lower bound (low = 1) and does not print its upper one; 1 + 4 = 5 is within the range that Khatri et
    al. 2025 ("ScaleRL", arXiv 2510.13786) report as insensitive.
    """

    reads: ClassVar[frozenset[str]] = GroupAlgorithm.reads | {"clip_low", "clip_high"}
    own: ClassVar[Own] = Own(clip_low=1.0, clip_high=4.0, aggregation="token_mean")

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return clipped_importance(x.ratio_T, x.logprobs_T, x.advantage_T, self.clip)
