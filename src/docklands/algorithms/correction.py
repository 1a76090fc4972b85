"""Off-policy correction: the generator's policy mu is not quite the trainer's pi_old, and the loss says so.

Legend: B samples, T packed tokens.

Generation and training run different kernels, or different versions of the weights, so tokens drawn from mu are
trained as if drawn from pi_old. The missing factor is the importance ratio pi_old / mu: truncated from above it is
truncated importance sampling (Ionides 2008; per token for language models: Yao et al. 2025, "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training"); zeroed out of range it is masked importance sampling.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from docklands.algorithms.functional import max_pair, min_pair, ratio, select, spread, token_pair, tokens_of_rows
from docklands.core.batch import Packed

Mode = Literal["off", "token_tis", "sequence_tis", "token_mask", "sequence_mask"]
Pairs = dict[str, tuple[Tensor, Tensor]]


def correction_weights(
    packed: Packed, log_ratio_T: Tensor, mask_T: Tensor, mode: Mode, bounds: tuple[float, float]
) -> tuple[Tensor, Pairs]:
    """Weight of each token's policy loss, detached, [T], and rollout_corr/* metrics.

    log_ratio_T  log pi_old - log mu, 0 off the mask
    bounds       (min_ratio, max_ratio)
    token_*      the ratio of the token;  sequence_*: the product over the sample's trained tokens, on all of them
    *_tis        min(ratio, max_ratio);   *_mask: the ratio inside the bounds, 0 outside
    A masked token still counts in the denominator: it contributes 0, as a token with advantage 0 does.
    """
    log_ratio_T = select(log_ratio_T.detach(), mask_T)
    ones_T = torch.ones_like(log_ratio_T)
    if mode == "off":
        return ones_T, {}
    if mode.startswith("sequence"):
        ratio_T = spread(ratio(packed.sum_rows(log_ratio_T)), packed)
    else:
        ratio_T = ratio(log_ratio_T)
    low, high = bounds
    if mode.endswith("tis"):
        touched_T = ratio_T > high
        weight_T, name = ratio_T.clamp(max=high), "rollout_corr/truncated_fraction"
    else:
        touched_T = (ratio_T < low) | (ratio_T > high)
        weight_T, name = torch.where(touched_T, 0.0, ratio_T), "rollout_corr/masked_fraction"
    over = sample_weights(packed, mask_T) if mode.startswith("sequence") else mask_T.float()
    metrics = {
        name: ((touched_T * over).sum(), over.sum()),
    }
    for what, value_T in (("ratio", ratio_T), ("weight", weight_T)):
        metrics[f"rollout_corr/{what}/mean"] = ((value_T * over).sum(), over.sum())
        metrics[f"rollout_corr/{what}/max"] = max_pair(value_T, mask_T)
        metrics[f"rollout_corr/{what}/min"] = min_pair(value_T, mask_T)
    return torch.where(mask_T, weight_T, ones_T), metrics


def sample_weights(packed: Packed, mask_T: Tensor) -> Tensor:
    """1 / trained tokens of the sample on each of its trained tokens: a sum over tokens then counts samples, [T]."""
    return select(1.0 / spread(tokens_of_rows(packed, mask_T).clamp(min=1.0), packed), mask_T)


def mismatch_metrics(old_T: Tensor, mu_T: Tensor, mask_T: Tensor, *, probabilities: bool) -> Pairs:
    """How far pi_old is from mu on the sampled tokens: KL(mu || pi_old) by k1 and k3, and the largest difference.

    probabilities  also |p_old - p_mu|; left out where pi_old is a column, because the step's description has it then
    """
    old_T = old_T.detach()
    log_ratio_T = old_T - mu_T
    metrics = {
        "rollout_corr/kl": token_pair(-log_ratio_T, mask_T),
        "rollout_corr/k3_kl": token_pair(ratio(log_ratio_T) - 1.0 - log_ratio_T, mask_T),
        "training/rollout_logprobs_diff_max": max_pair(log_ratio_T.abs(), mask_T),
    }
    if probabilities:
        gap_T = (old_T.exp() - mu_T.exp()).abs()
        metrics["training/rollout_probs_diff_mean"] = token_pair(gap_T, mask_T)
        metrics["training/rollout_probs_diff_max"] = max_pair(gap_T, mask_T)
    return metrics
