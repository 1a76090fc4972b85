"""GSPO: the importance ratio of a response, not of its tokens."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms.base import ALGORITHMS, Own
from docklands.algorithms.check import CLIP
from docklands.algorithms.functional import TokenLoss, ppo_clip, sequence_ratio
from docklands.algorithms.policy import GroupAlgorithm, PolicyInputs


@ALGORITHMS.add("gspo")
class GSPO(GroupAlgorithm):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071).

    ratio      s_i = (pi(y_i) / pi_old(y_i)) ^ (1 / |y_i|): rewards are given to responses, so ratios are too  (eq. 7)
    loss       -min(s A, clip(s, 1 - low, 1 + high) A), one term per response                                  (eq. 5)
    advantage  (r - mean) / std over the group                                                                 (eq. 6)

    A mean over tokens moves little, hence the narrow range: 3e-4 and 4e-4 (section 5.1).
    """

    reads: ClassVar[frozenset[str]] = GroupAlgorithm.reads | CLIP
    own: ClassVar[Own] = Own(clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean")

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return ppo_clip(sequence_ratio(x.packed, x.log_ratio_T, x.mask_T), x.advantage_T, self.clip)
