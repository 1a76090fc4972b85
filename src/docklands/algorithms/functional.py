"""Policy and value losses on packed tokens, as pure functions: what the papers write, one function each.

Legend: B samples, T packed tokens of one micro-batch.

Two rules hold everywhere. Values are selected by the mask *before* any arithmetic, because NaN x 0 is NaN. A loss is
a sum over the micro-batch divided by a count of the whole update, so no split of the update can change its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from docklands.core.batch import Packed
from docklands.core.loss import Denominators

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8: a ratio beyond it carries no information, and infinity times an advantage of 0 would be NaN."""


def select(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """`value_T` under the mask, 0 elsewhere. Neither a value nor a gradient passes from outside the mask."""
    return torch.where(mask_T, value_T, torch.zeros((), dtype=value_T.dtype, device=value_T.device))


def spread(value_B: Tensor, packed: Packed) -> Tensor:
    """One value per sample -> the same value on each of its tokens, [B] -> [T]."""
    return value_B[packed.row_T.to(value_B.device)]


def tokens_of_rows(packed: Packed, mask_T: Tensor) -> Tensor:
    """Trained tokens of each sample, float32 [B]."""
    return packed.sum_rows(mask_T.float())


def ratio(log_ratio_T: Tensor) -> Tensor:
    """exp of a bounded log-ratio."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# --- policy losses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClipRange:
    """A ratio stays within [1 - low, 1 + high]; `dual` > 1 bounds the loss of negative advantages, 0 is off."""

    low: float
    high: float
    dual: float = 0.0

    def clip(self, ratio_T: Tensor) -> Tensor:
        return ratio_T.clamp(1.0 - self.low, 1.0 + self.high)


@dataclass(frozen=True)
class TokenLoss:
    """loss_T: per-token loss. clipped_T, lower_T: bool, where the (dual) clip decided; None: the loss has none."""

    loss_T: Tensor
    clipped_T: Tensor | None = None
    lower_T: Tensor | None = None


def ppo_clip(ratio_T: Tensor, advantage_T: Tensor, clip: ClipRange) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), per token.

    Schulman et al. 2017 (arXiv 1707.06347, eq. 7); separate bounds: Yu et al. 2025 (DAPO, arXiv 2503.14476, eq. 10).
    Dual clip: for A < 0 the loss is at most -dual A (Ye et al. 2020, arXiv 1912.09729).
    """
    free_T = -advantage_T * ratio_T
    held_T = -advantage_T * clip.clip(ratio_T)
    loss_T = torch.maximum(free_T, held_T)
    clipped_T = held_T > free_T
    if not clip.dual:
        return TokenLoss(loss_T, clipped_T)
    bound_T = -advantage_T * clip.dual
    lower_T = (advantage_T < 0) & (loss_T > bound_T)
    return TokenLoss(torch.where(lower_T, bound_T, loss_T), clipped_T, lower_T)


def sequence_ratio(packed: Packed, log_ratio_T: Tensor, mask_T: Tensor) -> Tensor:
    """GSPO's s_i = exp(mean over the response's tokens of the log-ratio), on every token of the response, [T].

    Zheng et al. 2025 (arXiv 2507.18071, eq. 7). The gradient flows through the mean to all of the sample's tokens.
    """
    mean_B = packed.sum_rows(select(log_ratio_T, mask_T)) / tokens_of_rows(packed, mask_T).clamp(min=1.0)
    return select(ratio(spread(mean_B, packed)), mask_T)


def clipped_importance(ratio_T: Tensor, logprobs_T: Tensor, advantage_T: Tensor, clip: ClipRange) -> TokenLoss:
    """-stop_gradient(clip(r)) A log pi: every token keeps a gradient, only its weight is bounded.

    CISPO, MiniMax 2025 (arXiv 2506.13585, eq. 4 and 5).
    """
    weight_T = clip.clip(ratio_T).detach()
    return TokenLoss(-weight_T * advantage_T * logprobs_T, weight_T != ratio_T.detach())


def reinforce(logprobs_T: Tensor, advantage_T: Tensor) -> TokenLoss:
    """-A log pi (Williams 1992); its gradient is right only for samples of the policy that is being updated."""
    return TokenLoss(-advantage_T * logprobs_T)


def value_clip_loss(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, clip: float) -> TokenLoss:
    """0.5 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2); clip 0 is off. PPO's value term."""
    free_T = (value_T - return_T).square()
    if not clip:
        return TokenLoss(0.5 * free_T)
    held_T = (old_value_T + (value_T - old_value_T).clamp(-clip, clip) - return_T).square()
    return TokenLoss(0.5 * torch.maximum(free_T, held_T), held_T > free_T)


# --- from tokens to one number -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Total:
    """loss: this micro-batch's share of the update's loss. sum / count: its own mean, for metrics (detached)."""

    loss: Tensor
    sum: Tensor
    count: Tensor

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.sum, self.count


def aggregate(value_T: Tensor, packed: Packed, mask_T: Tensor, mode: Aggregation, whole: Denominators) -> Total:
    """Token losses -> one number. Empty samples add 0; an update without a trained token gives 0, never NaN.

    token_mean     sum over tokens / tokens of the update                       (DAPO, eq. 12)
    sequence_mean  sum over samples of their token means / samples              (GRPO, arXiv 2402.03300, eq. 3)
    sequence_sum   sum over tokens / samples                                    (sequence log-likelihood: RLOO)
    constant       sum over tokens / (samples x response limit)                 (Dr. GRPO, arXiv 2503.20783)
    """
    value_T = select(value_T, mask_T)
    n_B = tokens_of_rows(packed, mask_T)
    rows = (n_B > 0).sum()
    if mode == "sequence_mean":
        total = (packed.sum_rows(value_T) / n_B.clamp(min=1.0)).sum()
    else:
        total = value_T.sum()
    if mode == "token_mean":
        count, denominator = mask_T.sum(), whole.tokens
    elif mode == "constant":
        count, denominator = rows * whole.max_tokens, whole.sequences * whole.max_tokens
    else:
        count, denominator = rows, whole.sequences
    return Total(total / max(denominator, 1), total.detach(), count)


def token_pair(value_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over trained tokens, trained tokens): a metric's pair, detached."""
    return select(value_T.detach().float(), mask_T).sum(), mask_T.sum()


def max_pair(value_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """(largest over the trained tokens, trained tokens): the pair of a metric that reduces by max, detached."""
    chosen = value_T.detach()[mask_T]
    return chosen.amax() if len(chosen) else value_T.new_zeros(()), mask_T.sum()


def min_pair(value_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same with the smallest."""
    smallest, count = max_pair(-value_T, mask_T)
    return -smallest, count


# --- shaping -----------------------------------------------------------------------------------------------------


def overlong_penalty(length_B: Tensor, limit: int, buffer: int) -> Tensor:
    """Soft punishment in [-1, 0]: 0 up to `limit - buffer` tokens, then linear to -1 at `limit`, [B].

    Yu et al. 2025 (DAPO, arXiv 2503.14476, eq. 13). `buffer` 0: no punishment.
    """
    if not buffer:
        return torch.zeros_like(length_B, dtype=torch.float64)
    return ((limit - buffer - length_B.double()) / buffer).clamp(-1.0, 0.0)
