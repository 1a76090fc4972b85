"""The section that says which low-rank adapters are trained, and how generators get them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from docklands.config.section import NonNegative, Section


class LoraSection(Section):
    """Low-rank adapters (LoRA) in place of training all weights. Off unless rank > 0; the base then rests, and is the
    reference policy where one is needed.
    """

    rank: NonNegative = Field(default=0, description="rank of each adapter; 0: all weights are trained")
    alpha: float = Field(default=32.0, gt=0, description="adapters count alpha / rank, or alpha / sqrt(rank)")
    targets: list[str] = Field(
        default_factory=lambda: ["all-linear"],
        description="projections by Hugging Face name (q_proj, o_proj, gate_proj, kv_b_proj, ...), or all-linear",
    )
    experts: bool = Field(default=False, description="routed experts have adapters too, each its own")
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank) (arXiv 2312.03732)")
    dropout: float = Field(
        default=0.0, ge=0, description="only 0: with dropout the trainer's log-probs would not be the generator's"
    )
    publish: Literal["merged", "adapter"] = Field(
        default="merged",
        description="what generators get: W + s B A, or W once and then A and B alone, which they apply themselves",
    )
