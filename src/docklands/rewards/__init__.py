"""Rewards: how samples are scored, in killable processes where a call can hang.

Kept light: sandbox processes import this package, and none of them needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docklands.config.schema import RewardSection
    from docklands.rewards.scorer import Scorer

__all__ = ["build_scorer"]


def build_scorer(section: RewardSection, log: Path | None = None) -> Scorer:
    """The resource of the reward stage; see `docklands.rewards.scorer`."""
    from docklands.rewards.scorer import build_scorer as build

    return build(section, log)
