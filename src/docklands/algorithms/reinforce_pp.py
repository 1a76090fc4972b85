"""REINFORCE++: no critic and no group; the whole step is the baseline."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms.advantage import discounted_returns, whiten
from docklands.algorithms.base import ALGORITHMS
from docklands.algorithms.check import CLIP, POLICY
from docklands.algorithms.functional import TokenLoss, ppo_clip
from docklands.algorithms.policy import PolicyAlgorithm, PolicyInputs
from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK, SHAPED_REWARD, TOKEN_ADVANTAGES, Field
from docklands.core.stage import By, Result


@ALGORITHMS.add("reinforce_pp")
class ReinforcePP(PolicyAlgorithm):
    """REINFORCE++ (Hu 2025, arXiv 2501.03262, section 3).

    reward     the response's reward on its last token; with `kl.where: reward`, -coef KL on every token
    advantage  the return from each token on, normalised over all tokens of the step
    loss       PPO's clipped objective

    It needs no groups: many prompts with one sample each are its usual diet.
    """

    reads: ClassVar[frozenset[str]] = POLICY | CLIP | {"gamma"}
    advantage_field: ClassVar[Field] = TOKEN_ADVANTAGES
    by: ClassVar[By] = "step"

    def advantage_reads(self) -> tuple[Field, ...]:
        return tuple(dict.fromkeys([*super().advantage_reads(), LOSS_MASK]))

    def advantage(self, batch: Batch) -> Result:
        packed, mask_T = batch.pack(), batch[LOSS_MASK].values
        reward_T, earned_B, metrics = self.token_rewards(batch)
        return_T = discounted_returns(packed, reward_T, mask_T, self.section.gamma)
        columns = {TOKEN_ADVANTAGES: packed.unpack(whiten(return_T, mask_T)), SHAPED_REWARD: earned_B.float()}
        return Result(Batch(batch.row_ids, columns), metrics=metrics)

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return ppo_clip(x.ratio_T, x.advantage_T, self.clip)
