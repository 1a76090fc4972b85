"""What all policy-gradient algorithms share: the standard graph, rewards, and the terms around the policy loss.

Legend: B samples, T packed tokens of one micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from docklands.algorithms import stages
from docklands.algorithms.advantage import TOLERANCE, group_advantages, per_sample_sum, terminal_rewards
from docklands.algorithms.base import Algorithm
from docklands.algorithms.check import POLICY
from docklands.algorithms.correction import correction_weights, mismatch_metrics
from docklands.algorithms.functional import (
    ClipRange,
    TokenLoss,
    Total,
    aggregate,
    max_pair,
    overlong_penalty,
    ratio,
    select,
    token_pair,
    tokens_of_rows,
)
from docklands.algorithms.kl import KLController, kl_loss, kl_value
from docklands.config.schema import Config
from docklands.core.batch import Batch, Packed
from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    REWARD,
    ROLLOUT_LOGPROBS,
    SHAPED_REWARD,
    Field,
)
from docklands.core.graph import Graph
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import By, Learner, Result, Stage
from docklands.errors import CheckpointError, TrainError

SumCount = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class PolicyInputs:
    """One micro-batch as a policy loss sees it; every [T] is 0 (weights: 1) off the mask.

    logprobs_T   log pi, with gradient
    old_T        log pi_old
    advantage_T  a sample's advantage on each of its tokens, or one per token
    weight_T     off-policy correction pi_old / mu, truncated or masked; 1 when off
    """

    packed: Packed
    mask_T: Tensor
    logprobs_T: Tensor
    old_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    whole: Denominators
    metrics: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def log_ratio_T(self) -> Tensor:
        """log pi - log pi_old"""
        return self.logprobs_T - self.old_T

    @cached_property
    def ratio_T(self) -> Tensor:
        return ratio(self.log_ratio_T)


class PolicyAlgorithm(Algorithm):
    """A policy gradient on sampled, scored responses. A subclass writes `advantage` and `policy_loss`.

    Its `advantage` writes the column of `advantage_field`, and SHAPED_REWARD: what the sample earned.

    advantage_field  the column that its loss reads: ADVANTAGE per sample, TOKEN_ADVANTAGES per token
    by               how the advantage stage takes rows: whole groups, or whole steps for batch statistics
    """

    reads: ClassVar[frozenset[str]] = POLICY
    advantage_field: ClassVar[Field[Any]] = ADVANTAGE
    by: ClassVar[By] = "group"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kl = self.section.kl
        self.clip = ClipRange(self.pick("clip_low"), self.pick("clip_high"), self.section.dual_clip)
        self.filters: bool = self.pick("filter_groups")
        self.controller = KLController(kl.coef, kl.target, kl.horizon, config.dock.max_staleness + 1)
        self.kl_in_loss = kl.coef > 0 and kl.where == "loss"
        self.kl_in_reward = kl.coef > 0 and kl.where == "reward"
        self.old = self._resolve_old()

    def _resolve_old(self) -> str:
        """Where pi_old comes from. One synchronous update per step starts at pi_old: no extra forward pass."""
        chosen = self.section.old_logprobs
        if chosen != "auto":
            return chosen
        if self.kl_in_reward:  # the advantage stage needs it as a column
            return "recompute"
        first = self.config.updates_per_step == 1 and self.config.dock.max_staleness == 0
        return "current" if first or self.single_update else "recompute"

    # --- the graph -----------------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        """prompts -> rollout -> reward [-> filter] [-> log-probs, values] -> advantage -> update."""
        gate = (stages.KEPT,) if self.filters else ()
        chain: list[Stage] = [stages.ROLLOUT, stages.REWARDS]
        if self.filters:
            chain.append(stages.FILTER)
        if self.old == "recompute":
            chain.append(stages.old_logprobs(gate))
        if self.section.kl.coef > 0:
            chain.append(stages.ref_logprobs(gate))
        if self.has_critic:
            chain.append(stages.values(gate))
        by: By = "step" if self.controller.target else self.by
        chain.append(stages.advantage((*self.advantage_reads(), *gate), self.advantage_writes(), by))
        learners = self.learners()
        return Graph((*chain, stages.update(learners)), learners)

    def advantage_reads(self) -> tuple[Field[Any], ...]:
        """Columns of the advantage stage, without the filter's."""
        reads: tuple[Field[Any], ...] = (GROUP_ID, REWARD)
        if self.section.overlong_buffer_tokens or self.kl_in_reward:
            reads = (*reads, LOSS_MASK)
        return (*reads, self.old_field, REF_LOGPROBS) if self.kl_in_reward else reads

    def advantage_writes(self) -> tuple[Field[Any], ...]:
        return self.advantage_field, SHAPED_REWARD

    def learners(self) -> tuple[Learner, ...]:
        """Who is trained: the actor."""
        reads = [*stages.FORWARD, ROLLOUT_LOGPROBS, self.advantage_field]
        if self.old == "recompute":
            reads.append(OLD_LOGPROBS)
        if self.kl_in_loss:
            reads.append(REF_LOGPROBS)
        return (Learner("actor", "actor", tuple(reads), self.loss, entropy=self.section.entropy_coef != 0),)

    @property
    def old_field(self) -> Field[Any]:
        """The column that holds log pi_old."""
        return ROLLOUT_LOGPROBS if self.old == "rollout" else OLD_LOGPROBS

    # --- dynamic sampling ----------------------------------------------------------------------------------------

    def filter_groups(self, batch: Batch) -> Result:
        """Drop groups whose rewards are all equal: they have no advantage (DAPO, arXiv 2503.14476, section 3.2)."""
        reward_B, group_B = batch[REWARD].double(), batch[GROUP_ID]
        dropped: dict[int, str] = {}
        metrics: SumCount = {}

        def count(name: str) -> None:
            total, _ = metrics.get(f"dynamic_sampling/{name}", (0.0, 0.0))
            metrics[f"dynamic_sampling/{name}"] = (total + 1.0, 1.0)

        for group in torch.unique(group_B).tolist():
            rows = group_B == group
            low, high = float(reward_B[rows].min()), float(reward_B[rows].max())
            count("groups")
            if high - low > TOLERANCE:
                count("kept")
                continue
            reason = "all_0" if abs(low) <= TOLERANCE else "all_1" if abs(low - 1.0) <= TOLERANCE else "equal"
            count(reason)
            dropped.update(dict.fromkeys(batch.row_ids[rows.numpy()].tolist(), reason))
        kept = [row for row in batch.row_ids.tolist() if row not in dropped]
        return Result(Batch(kept, {stages.KEPT: torch.ones(len(kept), dtype=torch.bool)}), dropped, metrics)

    # --- rewards -------------------------------------------------------------------------------------------------

    def shaped_rewards(self, batch: Batch) -> Tensor:
        """Reward with the soft length punishment, float64 [B]."""
        reward_B = batch[REWARD].double()
        buffer = self.section.overlong_buffer_tokens
        if buffer:
            length_B = tokens_of_rows(batch.pack(), batch[LOSS_MASK].values)
            limit = self.config.rollout.max_response_tokens
            reward_B = reward_B + self.section.overlong_penalty * overlong_penalty(length_B, limit, buffer)
        return reward_B

    def kl_penalty(self, batch: Batch) -> tuple[Tensor, SumCount]:
        """Coefficient times KL(pi_old || pi_ref) per token, float64 [T]; moves the coefficient for the next step."""
        mask_T = batch[LOSS_MASK].values
        old_T, ref_T = (select(batch[f].values, mask_T) for f in (self.old_field, REF_LOGPROBS))
        kl_T = kl_value(old_T.double(), ref_T.double(), self.section.kl.estimator)
        total, count = float(kl_T.sum()), float(mask_T.sum())
        coef = self.controller.update(total / count if count else self.controller.target, batch.row_ids.tolist())
        return coef * kl_T, {"actor/kl_reward": (total, count), "actor/kl_coef": (coef, 1.0)}

    def sample_rewards(self, batch: Batch) -> tuple[Tensor, SumCount]:
        """Everything that a response earned, as one number: float64 [B]."""
        reward_B = self.shaped_rewards(batch)
        metrics: SumCount = {}
        if self.kl_in_reward:
            penalty_T, metrics = self.kl_penalty(batch)
            reward_B = reward_B - per_sample_sum(batch.pack(), penalty_T, batch[LOSS_MASK].values)
        return reward_B, metrics

    def token_rewards(self, batch: Batch) -> tuple[Tensor, Tensor, SumCount]:
        """The same token by token, the penalty where it arises, the reward on the last trained token: float64 [T]; and
        per sample: float64 [B].
        """
        mask_T, reward_B = batch[LOSS_MASK].values, self.shaped_rewards(batch)
        reward_T = terminal_rewards(batch.pack(), reward_B, mask_T)
        if not self.kl_in_reward:
            return reward_T, reward_B, {}
        penalty_T, metrics = self.kl_penalty(batch)
        earned_B = reward_B - per_sample_sum(batch.pack(), penalty_T, mask_T)
        return reward_T - penalty_T, earned_B, metrics

    # --- the loss ------------------------------------------------------------------------------------------------

    @abstractmethod
    def policy_loss(self, x: PolicyInputs) -> TokenLoss:
        """The algorithm's own term, per token."""

    def loss(self, packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
        """Policy term, minus the entropy bonus, plus KL to the reference; each aggregated the same way."""
        x = self.inputs(packed, out, denominators)
        token = self.policy_loss(x)
        policy = self.total(token.loss_T * x.weight_T, x)
        loss = policy.loss
        metrics = {
            **x.metrics,
            "actor/pg_loss": policy.pair,
            "actor/ppo_kl": token_pair(-x.log_ratio_T, x.mask_T),
            "actor/ratio_max": max_pair(x.ratio_T, x.mask_T),
            "actor/entropy": token_pair(-x.logprobs_T, x.mask_T),
        }
        if token.clipped_T is not None:
            metrics["actor/pg_clipfrac"] = token_pair(token.clipped_T, x.mask_T)
        if token.lower_T is not None:
            metrics["actor/pg_clipfrac_lower"] = token_pair(token.lower_T, x.mask_T)
        if self.section.entropy_coef:
            entropy_T = select(required(out.entropy_T, "entropy_T"), x.mask_T)
            metrics["actor/entropy"] = token_pair(entropy_T, x.mask_T)
            loss = loss - self.section.entropy_coef * self.total(entropy_T, x).loss
        if self.kl_in_loss:
            ref_T = select(packed[REF_LOGPROBS].to(x.mask_T.device), x.mask_T)
            kl = self.total(kl_loss(x.logprobs_T, ref_T, self.section.kl.estimator), x)
            metrics["actor/kl_loss"] = kl.pair
            loss = loss + self.controller.coef * kl.loss
        return LossResult(loss, metrics)

    def inputs(self, packed: Packed, out: ModelOutput, denominators: Denominators) -> PolicyInputs:
        """Select by the mask, and weigh pi_old against mu."""
        logprobs_T = required(out.logprobs_T, "logprobs_T")
        mask_T = packed.loss_mask_T.to(logprobs_T.device)

        def column(name: Field[Any]) -> Tensor:
            return select(packed.per_token(name).to(logprobs_T.device).float(), mask_T)

        logprobs_T = select(logprobs_T, mask_T)
        old_T = logprobs_T.detach() if self.old == "current" else column(self.old_field)
        mu_T = column(ROLLOUT_LOGPROBS)
        correction = self.section.correction
        bounds = (correction.min_ratio, correction.max_ratio)
        weight_T, metrics = correction_weights(packed, old_T - mu_T, mask_T, correction.mode, bounds)
        if self.old != "rollout":
            metrics.update(mismatch_metrics(old_T, mu_T, mask_T, probabilities=self.old == "current"))
        advantage_T = column(self.advantage_field)
        return PolicyInputs(packed, mask_T, logprobs_T, old_T, advantage_T, weight_T, denominators, metrics)

    def total(self, value_T: Tensor, x: PolicyInputs) -> Total:
        return aggregate(value_T, x.packed, x.mask_T, self.aggregation, x.whole)

    # --- resuming ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A fixed coefficient stays the config's; an adaptive one continues where it stood."""
        if set(state) - {"kl_moves"} != {"kl_coef"}:
            found = ", ".join(sorted(state)) or "none"
            raise CheckpointError(f"algorithm {self.name!r} expects the state kl_coef, the checkpoint has {found}")
        self.controller.load_state_dict(state)


class GroupAlgorithm(PolicyAlgorithm):
    """One advantage per sample, measured against the other samples of its prompt."""

    reads: ClassVar[frozenset[str]] = POLICY | {"normalize_std"}
    needs_group: ClassVar[bool] = True
    leave_one_out: ClassVar[bool] = False

    def advantage(self, batch: Batch) -> Result:
        reward_B, metrics = self.sample_rewards(batch)
        advantage_B = group_advantages(
            reward_B,
            batch[GROUP_ID],
            normalize_std=self.pick("normalize_std"),
            leave_one_out=self.leave_one_out,
        )
        columns = {ADVANTAGE: advantage_B, SHAPED_REWARD: reward_B.float()}
        return Result(Batch(batch.row_ids, columns), metrics=metrics)


def required(value_T: Tensor | None, name: str) -> Tensor:
    """A model output that the loss reads; TrainError when the engine did not compute it."""
    if value_T is None:
        raise TrainError(f"the loss reads {name}, which the engine did not compute")
    return value_T
