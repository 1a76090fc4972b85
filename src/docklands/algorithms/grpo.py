"""GRPO: a prompt's samples are each other's baseline."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms.base import ALGORITHMS, Own
from docklands.algorithms.check import CLIP
from docklands.algorithms.functional import TokenLoss, ppo_clip
from docklands.algorithms.policy import GroupAlgorithm, PolicyInputs


@ALGORITHMS.add("grpo")
class GRPO(GroupAlgorithm):
    """Group relative policy optimisation (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300).

    advantage  A_i = (r_i - mean(r)) / std(r) over the group                              (section 4.1.2)
    loss       -min(ratio A, clip(ratio, 1 - low, 1 + high) A) + coef KL(pi || pi_ref)    (eq. 3)

    The paper averages each response's tokens first, clips at 0.2 on both sides and has a KL term. The defaults here
    are what the field has moved to: one mean over all tokens, a higher upper clip, no KL. The paper's form is
    `aggregation: sequence_mean`, `clip_high: 0.2`, `kl: {coef: 0.04}`, up to the gradient of its KL term: see kl.py.
    """

    reads: ClassVar[frozenset[str]] = GroupAlgorithm.reads | CLIP
    own: ClassVar[Own] = Own(clip_low=0.2, clip_high=0.28, aggregation="token_mean")

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return ppo_clip(x.ratio_T, x.advantage_T, self.clip)
