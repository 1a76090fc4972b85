"""PPO: a learned critic is the baseline, token by token."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms import stages
from docklands.algorithms.advantage import explained_variance, gae, whiten
from docklands.algorithms.base import ALGORITHMS
from docklands.algorithms.check import CLIP, POLICY
from docklands.algorithms.functional import TokenLoss, aggregate, ppo_clip, select, token_pair, value_clip_loss
from docklands.algorithms.policy import PolicyAlgorithm, PolicyInputs, required
from docklands.core.batch import Batch, Packed
from docklands.core.fields import LOSS_MASK, RETURNS, SHAPED_REWARD, TOKEN_ADVANTAGES, VALUES, Field
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import By, Learner, Result
from docklands.errors import ConfigError


@ALGORITHMS.add("ppo")
class PPO(PolicyAlgorithm):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) on tokens.

    reward     the response's reward on its last token; with `kl.where: reward`, -coef KL on every token
    advantage  GAE(gamma, lambda) over the trained tokens, normalised over the step     (eq. 11, 12)
    actor      -min(ratio A, clip(ratio, 1 - low, 1 + high) A)                          (eq. 7)
    critic     0.5 max of the clipped and the free squared error to A + V
    """

    reads: ClassVar[frozenset[str]] = POLICY | CLIP | {"gamma", "lam", "value_clip", "critic_warmup_steps"}
    has_critic: ClassVar[bool] = True
    advantage_field: ClassVar[Field] = TOKEN_ADVANTAGES
    by: ClassVar[By] = "step"

    def check(self) -> None:
        super().check()
        waits, steps = self.section.critic_warmup_steps, self.config.run.steps
        if waits >= steps:
            raise ConfigError(
                f"algorithm.critic_warmup_steps is {waits} and run.steps is {steps}: the actor would never be trained",
                "lower the one or raise the other",
            )

    def advantage_reads(self) -> tuple[Field, ...]:
        return tuple(dict.fromkeys([*super().advantage_reads(), LOSS_MASK, VALUES]))

    def advantage_writes(self) -> tuple[Field, ...]:
        return *super().advantage_writes(), RETURNS

    def learners(self) -> tuple[Learner, ...]:
        return *super().learners(), Learner("critic", "critic", (*stages.FORWARD, VALUES, RETURNS), self.value_loss)

    def advantage(self, batch: Batch) -> Result:
        packed, mask_T, value_T = batch.pack(), batch[LOSS_MASK].values, batch[VALUES].values
        reward_T, earned_B, metrics = self.token_rewards(batch)
        advantage_T, return_T = gae(packed, reward_T, value_T, mask_T, gamma=self.section.gamma, lam=self.section.lam)
        explained = explained_variance(value_T, return_T, mask_T)
        if explained is not None:
            metrics["critic/vf_explained_var"] = (explained, 1.0)
        columns = {
            TOKEN_ADVANTAGES: packed.unpack(whiten(advantage_T, mask_T)),
            RETURNS: packed.unpack(return_T),
            SHAPED_REWARD: earned_B.float(),
        }
        return Result(Batch(batch.row_ids, columns), metrics=metrics)

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return ppo_clip(x.ratio_T, x.advantage_T, self.clip)

    def value_loss(self, packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
        """The critic's loss: one mean over the tokens of the update."""
        value_T = required(out.values_T, "values_T")
        mask_T = packed.loss_mask_T.to(value_T.device)
        old_T, return_T = (select(packed[f].to(value_T.device), mask_T) for f in (VALUES, RETURNS))
        token = value_clip_loss(select(value_T, mask_T), old_T, return_T, self.section.value_clip)
        total = aggregate(token.loss_T, packed, mask_T, "token_mean", denominators)
        metrics = {"critic/vf_loss": total.pair}
        if token.clipped_T is not None:
            metrics["critic/vf_clipfrac"] = token_pair(token.clipped_T, mask_T)
        return LossResult(total.loss, metrics)
