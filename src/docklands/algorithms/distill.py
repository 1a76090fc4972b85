"""On-policy distillation: the student samples, the teacher says what each token was worth."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms import stages
from docklands.algorithms.base import ALGORITHMS
from docklands.algorithms.check import CLIP
from docklands.algorithms.functional import TokenLoss, ppo_clip, select
from docklands.algorithms.policy import PolicyAlgorithm, PolicyInputs
from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK, REF_LOGPROBS, REWARD, SHAPED_REWARD, TOKEN_ADVANTAGES, Field
from docklands.core.graph import Graph
from docklands.core.stage import Result
from docklands.errors import ConfigError


@ALGORITHMS.add("distill")
class Distill(PolicyAlgorithm):
    """Reverse KL to a teacher on the student's own samples (Agarwal et al. 2024, "On-policy distillation of language
    models", arXiv 2306.13649; as a policy gradient: Gu et al. 2024, "MiniLLM", arXiv 2306.08543).

    teacher    the frozen model of `reference.path`, with the student's tokenizer
    advantage  log pi_teacher - log pi_old of each sampled token: minus the one-sample estimate of the reverse KL
    loss       PPO's clipped objective

    Every token is paid for itself alone (no future credit), so the signal is dense. Rewards, when the config has
    some, are measured and not trained on; yet a sample whose reward fails is dropped and not trained on either.
    """

    reads: ClassVar[frozenset[str]] = CLIP | {"old_logprobs", "aggregation", "entropy_coef", "correction"}
    advantage_field: ClassVar[Field] = TOKEN_ADVANTAGES
    reads_reference: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        config = self.config
        if not config.reference.path:
            raise ConfigError(
                "algorithm distill has no teacher: reference.path is empty, so the student would be its own",
                "set reference.path to the teacher's directory",
            )
        if config.eval.prompts and not config.reward.functions:
            raise ConfigError(
                "eval.prompts is set, but there is no reward to score them with",
                "set reward.functions (distill does not train on them), or eval.prompts to 0",
            )

    def _resolve_old(self) -> str:
        if self.section.old_logprobs == "current":
            raise ConfigError(
                "algorithm.old_logprobs: 'current' gives no log-probs to the advantage stage, which distill needs",
                "use 'recompute' (or 'auto'), or 'rollout'",
            )
        return "recompute" if self.section.old_logprobs == "auto" else self.section.old_logprobs

    def graph(self) -> Graph:
        """prompts -> rollout [-> reward] -> log-probs of student and teacher -> advantage -> update."""
        chain = [stages.ROLLOUT, *([stages.REWARDS] if self.config.reward.functions else [])]
        chain += [stages.old_logprobs(())] if self.old == "recompute" else []
        chain.append(stages.ref_logprobs(()))
        scored = bool(self.config.reward.functions)
        reads = (LOSS_MASK, self.old_field, REF_LOGPROBS, *([REWARD] if scored else []))
        writes = (TOKEN_ADVANTAGES, *([SHAPED_REWARD] if scored else []))
        chain.append(stages.advantage(reads, writes, "group"))
        learners = self.learners()
        return Graph((*chain, stages.update(learners)), learners)

    def advantage(self, batch: Batch) -> Result:
        mask_T = batch[LOSS_MASK].values
        gap_T = select(batch[REF_LOGPROBS].values, mask_T) - select(batch[self.old_field].values, mask_T)
        metrics = {"distill/reverse_kl": (float(-gap_T.double().sum()), float(mask_T.sum()))}
        columns = {TOKEN_ADVANTAGES: batch.pack().unpack(gap_T)}
        if REWARD in batch:
            columns[SHAPED_REWARD] = batch[REWARD]
        return Result(Batch(batch.row_ids, columns), metrics=metrics)

    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        return ppo_clip(x.ratio_T, x.advantage_T, self.clip)
