"""SFT: supervised fine-tuning on demonstrations, the warm start of a policy."""

from __future__ import annotations

from typing import ClassVar

from docklands.algorithms import stages
from docklands.algorithms.base import ALGORITHMS, Algorithm, Own
from docklands.algorithms.functional import aggregate, select, token_pair
from docklands.algorithms.policy import required
from docklands.core.batch import Packed
from docklands.core.graph import Graph
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Learner


@ALGORITHMS.add("sft")
class SFT(Algorithm):
    """Maximum likelihood: -log pi of the demonstrated tokens, one mean over the tokens of the update.

    No rollout, no reward: the flow is prompts -> demonstrate -> update.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"aggregation"})
    own: ClassVar[Own] = Own(aggregation="token_mean")
    learns_from: ClassVar[str] = "demonstrations"

    def graph(self) -> Graph:
        learners = (Learner("actor", "actor", stages.FORWARD, self.loss),)
        return Graph((stages.DEMONSTRATE, stages.update(learners)), learners)

    def loss(self, packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
        logprobs_T = required(out.logprobs_T, "logprobs_T")
        mask_T = packed.loss_mask_T.to(logprobs_T.device)
        surprise_T = select(-logprobs_T, mask_T)
        total = aggregate(surprise_T, packed, mask_T, self.aggregation, denominators)
        return LossResult(total.loss, {"actor/sft_loss": token_pair(surprise_T, mask_T)})
