"""DPO: preferences instead of rewards; the pair is the group.

Legend: B samples (two per pair), T packed tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from docklands.algorithms import stages
from docklands.algorithms.advantage import per_sample_sum
from docklands.algorithms.base import ALGORITHMS, Algorithm
from docklands.algorithms.functional import aggregate, reinforce, select, token_pair
from docklands.algorithms.policy import required
from docklands.core.batch import Batch, Packed
from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    SAMPLE_INDEX,
)
from docklands.core.graph import Graph
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Learner, Result
from docklands.errors import ConfigError


@ALGORITHMS.add("dpo")
class DPO(Algorithm):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    margin     h = beta [(log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)]
    loss       -log sigma(h), a mean over pairs

    Its gradient (section 4 there) is -beta sigma(-h) [grad log pi(chosen) - grad log pi(rejected)]: a policy gradient
    with the advantage +-beta sigma(-h), which the advantage stage writes, so the two samples of a pair may lie in
    different micro-batches or on different ranks. That is exact for the one update per step that is allowed.

    Rows carry `prompt`, `chosen` and `rejected`. No rollout, no reward.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"dpo_beta"})
    learns_from: ClassVar[str] = "preferences"
    single_update: ClassVar[bool] = True
    reads_reference: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        if self.config.dock.max_staleness:
            raise ConfigError(
                f"algorithm dpo weighs pairs by the current policy, and dock.max_staleness is "
                f"{self.config.dock.max_staleness}",
                "set dock.max_staleness to 0",
            )

    def graph(self) -> Graph:
        """prompts -> demonstrate both -> log-probs of policy and reference -> advantage -> update."""
        reads = (GROUP_ID, SAMPLE_INDEX, LOSS_MASK, OLD_LOGPROBS, REF_LOGPROBS)
        learners = (Learner("actor", "actor", (*stages.FORWARD, ADVANTAGE), self.loss),)
        chain = (stages.PREFER, stages.old_logprobs(()), stages.ref_logprobs(()))
        return Graph((*chain, stages.advantage(reads, (ADVANTAGE,), "group"), stages.update(learners)), learners)

    def advantage(self, batch: Batch) -> Result:
        """+beta sigma(-h) for the chosen, -beta sigma(-h) for the rejected sample of each pair."""
        beta, mask_T, packed = self.section.dpo_beta, batch[LOSS_MASK].values, batch.pack()
        gain_T = select(batch[OLD_LOGPROBS].values, mask_T).double() - select(batch[REF_LOGPROBS].values, mask_T)
        reward_B = beta * per_sample_sum(packed, gain_T, mask_T)  # the implicit reward (eq. 5)
        sign_B = torch.where(batch[SAMPLE_INDEX] == 0, 1.0, -1.0).double()
        margin_B = _of_pairs(sign_B * reward_B, batch[GROUP_ID])
        advantage_B = sign_B * beta * torch.sigmoid(-margin_B)
        chosen_B = sign_B > 0
        pairs = float(chosen_B.sum())
        metrics = {
            "dpo/loss": (float(-F.logsigmoid(margin_B[chosen_B]).sum()), pairs),
            "dpo/margin": (float(margin_B[chosen_B].sum()), pairs),
            "dpo/accuracy": (float((margin_B[chosen_B] > 0).sum()), pairs),
            "dpo/chosen_reward": (float(reward_B[chosen_B].sum()), pairs),
            "dpo/rejected_reward": (float(reward_B[~chosen_B].sum()), pairs),
        }
        return Result(Batch(batch.row_ids, {ADVANTAGE: advantage_B.float()}), metrics=metrics)

    def loss(self, packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
        """-A log pi, summed over tokens, a mean over pairs: two samples are one pair."""
        logprobs_T = required(out.logprobs_T, "logprobs_T")
        mask_T = packed.loss_mask_T.to(logprobs_T.device)
        advantage_T = select(packed.per_token(ADVANTAGE).to(logprobs_T.device), mask_T)
        value_T = 2.0 * reinforce(select(logprobs_T, mask_T), advantage_T).loss_T
        total = aggregate(value_T, packed, mask_T, "sequence_sum", denominators)
        return LossResult(total.loss, {"dpo/nll": token_pair(-logprobs_T, mask_T)})


def _of_pairs(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Sum over each group, on each of its samples, float64 [B]."""
    _, pair_B = torch.unique(group_B, return_inverse=True)
    sums = torch.zeros(int(pair_B.max()) + 1 if len(pair_B) else 0, dtype=torch.float64)
    return sums.index_add_(0, pair_B, value_B)[pair_B]
