"""Advantages and returns: group baselines, GAE over token sequences with observations in between, whitening.

Legend: B samples, T packed tokens, N most trained tokens in a sample.

All statistics take two passes in float64: E[x^2] - E[x]^2 in float32 turns rewards [0, .95 x 7] into an advantage of
-2075. A standard deviation below the tolerance counts as zero, and what would be divided by it is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from docklands.core.batch import Packed

TOLERANCE = 1e-6


def group_advantages(
    reward_B: Tensor, group_B: Tensor, *, normalize_std: bool = True, leave_one_out: bool = False
) -> Tensor:
    """Reward minus the group's mean, optionally over the group's standard deviation (n - 1), float32 [B].

    group_B        explicit group ids in any order; equal ids form a group
    leave_one_out  the baseline of a sample is the mean of the *others* (RLOO); the standard deviation stays the group's
    A group of one, or one whose rewards are all equal, has advantage 0.
    """
    reward_B = reward_B.double()
    _, group_of_B = torch.unique(group_B, return_inverse=True)
    groups = int(group_of_B.max()) + 1 if len(group_B) else 0

    def sums(value_B: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=torch.float64).index_add_(0, group_of_B, value_B)

    n_G = sums(torch.ones_like(reward_B))
    centred_B = reward_B - (sums(reward_B) / n_G)[group_of_B]
    std_G = (sums(centred_B.square()) / (n_G - 1).clamp(min=1)).sqrt()
    n_B, std_B = n_G[group_of_B], std_G[group_of_B]
    if leave_one_out:  # r - (S - r) / (n - 1) = (r - S / n) n / (n - 1)
        centred_B = centred_B * n_B / (n_B - 1).clamp(min=1)
    advantage_B = centred_B / std_B.clamp(min=TOLERANCE) if normalize_std else centred_B
    return torch.where(std_B > TOLERANCE, advantage_B, torch.zeros_like(advantage_B)).float()


def terminal_rewards(packed: Packed, reward_B: Tensor, mask_T: Tensor) -> Tensor:
    """Each sample's reward on its last trained token, 0 elsewhere, float64 [T]. A sample without one has none.

    A trajectory that ends in an observation therefore keeps its reward.
    """
    last_B = _last_trained(packed, mask_T)
    there_B = last_B >= 0
    reward_T = torch.zeros(packed.num_tokens, dtype=torch.float64)
    reward_T[last_B[there_B]] = reward_B.double()[there_B]
    return reward_T


def credit_observations(packed: Packed, reward_T: Tensor, mask_T: Tensor) -> Tensor:
    """Move rewards that stand off the mask to the last trained token before them (else the sample's first), [T]."""
    reward_T = reward_T.double()
    index_T = torch.arange(packed.num_tokens)
    latest_T = torch.cummax(torch.where(mask_T, index_T, -1), 0).values if packed.num_tokens else index_T
    start_T = torch.from_numpy(packed.cu_seqlens[:-1])[packed.row_T]
    first_T = _first_trained(packed, mask_T)[packed.row_T]
    target_T = torch.where(latest_T >= start_T, latest_T, first_T)
    owed_T = ~mask_T & (target_T >= 0)
    moved_T = torch.where(mask_T, reward_T, torch.zeros_like(reward_T))
    return moved_T.index_add_(0, target_T[owed_T], reward_T[owed_T])


def gae(
    packed: Packed, reward_T: Tensor, value_T: Tensor, mask_T: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation -> (advantage_T, return_T), float32, 0 off the mask.

    Schulman et al. 2016 (arXiv 1506.02438, eq. 16). The sequence is that of the *trained* tokens: observation tokens
    are skipped, so neither discount nor value of theirs enters, and rewards that stand on them are credited to the
    token before. After the last token the value is 0, also for a truncated response.
    """
    reward_T = credit_observations(packed, reward_T, mask_T)
    reward_BN, there_BN = _grid(packed, reward_T, mask_T)
    value_BN, _ = _grid(packed, value_T, mask_T)
    advantage_BN = torch.zeros_like(reward_BN)
    running_B = torch.zeros(len(packed), dtype=torch.float64)
    next_value_B = torch.zeros(len(packed), dtype=torch.float64)
    for n in range(reward_BN.shape[1] - 1, -1, -1):
        delta_B = reward_BN[:, n] + gamma * next_value_B - value_BN[:, n]
        running_B = delta_B + gamma * lam * running_B  # stays 0 behind a row's end: reward and value are 0 there
        next_value_B = value_BN[:, n]
        advantage_BN[:, n] = running_B
    advantage_T = torch.zeros(packed.num_tokens, dtype=torch.float64)
    advantage_T[mask_T] = advantage_BN[there_BN]
    return_T = torch.where(mask_T, advantage_T + torch.where(mask_T, value_T.double(), 0.0), 0.0)
    return advantage_T.float(), return_T.float()


def discounted_returns(packed: Packed, reward_T: Tensor, mask_T: Tensor, gamma: float = 1.0) -> Tensor:
    """Sum of discounted rewards from each trained token on, float32 [T]: GAE without values and with lambda 1."""
    return gae(packed, reward_T, torch.zeros(packed.num_tokens), mask_T, gamma=gamma, lam=1.0)[0]


def whiten(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """(value - mean) / std (n - 1) over the trained tokens, two passes, float32 [T]; 0 off the mask.

    All values equal: zeros.
    """
    chosen = value_T[mask_T].double()
    white_T = torch.zeros(value_T.shape, dtype=torch.float64)
    if len(chosen) > 1:
        centred = chosen - chosen.mean()
        std = (centred.square().sum() / (len(chosen) - 1)).sqrt()
        if std > TOLERANCE:
            white_T[mask_T] = centred / std
    return white_T.float()


def explained_variance(value_T: Tensor, return_T: Tensor, mask_T: Tensor) -> float | None:
    """1 - var(R - V) / var(R) over the trained tokens, two passes; None where the returns do not vary."""
    value, returns = value_T[mask_T].double(), return_T[mask_T].double()
    if len(returns) < 2 or float(returns.std()) <= TOLERANCE:
        return None
    return float(1.0 - (returns - value).var() / returns.var())


def _grid(packed: Packed, value_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Trained tokens of each sample, left-aligned, float64 [B, N], and where there is one, bool [B, N]."""
    row = packed.row_T[mask_T]
    n_B = torch.zeros(len(packed), dtype=torch.int64).index_add_(0, row, torch.ones_like(row))
    column = torch.arange(len(row)) - (n_B.cumsum(0) - n_B)[row]
    width = int(n_B.max()) if len(n_B) else 0
    value_BN = torch.zeros(len(packed), width, dtype=torch.float64)
    value_BN[row, column] = value_T[mask_T].double()
    return value_BN, torch.arange(width) < n_B[:, None]


def _last_trained(packed: Packed, mask_T: Tensor) -> Tensor:
    """Index in [T] of each sample's last trained token, -1 without one, int64 [B]."""
    row, index = packed.row_T[mask_T], torch.arange(packed.num_tokens)[mask_T]
    return torch.full((len(packed),), -1).scatter_reduce_(0, row, index, "amax")


def _first_trained(packed: Packed, mask_T: Tensor) -> Tensor:
    """Index in [T] of each sample's first trained token, -1 without one, int64 [B]."""
    row, index = packed.row_T[mask_T], torch.arange(packed.num_tokens)[mask_T]
    far = torch.full((len(packed),), packed.num_tokens).scatter_reduce_(0, row, index, "amin")
    return torch.where(far < packed.num_tokens, far, -1)


def per_sample_sum(packed: Packed, value_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum over each sample's trained tokens, float64 [B]."""
    return packed.sum_rows(torch.where(mask_T, value_T.double(), 0.0))
