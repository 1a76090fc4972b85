"""Dr. GRPO: GRPO without the two normalisations that bias it."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms.base import ALGORITHMS, Own
from docklands.algorithms.check import CLIP
from docklands.algorithms.functional import TokenLoss, ppo_clip
from docklands.algorithms.policy import GroupAlgorithm, PolicyInputs


@ALGORITHMS.add("dr_grpo")
class DrGRPO(GroupAlgorithm):
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3).

    Dividing by a response's length favours long wrong answers; dividing by the group's std favours questions that are
    nearly always or nearly never answered. So neither:
    advantage  A_i = r_i - mean(r)
    loss       sum over tokens / (samples x response limit): the length of a response does not move it; samples without
               a trained token are not counted
    """

    reads: ClassVar[frozenset[str]] = GroupAlgorithm.reads | CLIP
    own: ClassVar[Own] = Own(aggregation="constant", normalize_std=False)

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return ppo_clip(x.ratio_T, x.advantage_T, self.clip)
