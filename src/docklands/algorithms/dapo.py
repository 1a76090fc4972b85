"""DAPO: GRPO with a higher upper clip, one mean over tokens, dynamic sampling and a soft length punishment."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms.base import ALGORITHMS, Own
from docklands.algorithms.check import CLIP
from docklands.algorithms.functional import TokenLoss, ppo_clip
from docklands.algorithms.policy import GroupAlgorithm, PolicyInputs


@ALGORITHMS.add("dapo")
class DAPO(GroupAlgorithm):
    """Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv 2503.14476).

    clip-higher       clip(ratio, 1 - 0.2, 1 + 0.28): unlikely tokens may gain more         (section 3.1, eq. 10)
    dynamic sampling  groups with equal rewards leave the flow before any log-prob is computed; the dock admits
                      other prompts in their place                                          (section 3.2, eq. 11)
    token loss        one mean over the tokens of the whole update                          (section 3.3, eq. 12)
    overlong shaping  `overlong_buffer_tokens` > 0: a punishment that grows linearly over the last tokens before the
                      limit. The filter looks at the reward before it                       (section 3.4, eq. 13)
    advantage         (r - mean) / std over the group                                       (eq. 9)
    """

    reads: ClassVar[frozenset[str]] = GroupAlgorithm.reads | CLIP
    own: ClassVar[Own] = Own(clip_low=0.2, clip_high=0.28, aggregation="token_mean", filter_groups=True)

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return ppo_clip(x.ratio_T, x.advantage_T, self.clip)
