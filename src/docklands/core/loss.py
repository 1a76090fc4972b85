"""What a loss sees and gives: the contract between algorithms (which write losses) and train engines (which run them).

Legend: B samples, T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from docklands.core.batch import Packed


@dataclass(frozen=True)
class Denominators:
    """Global counts of one optimizer update, over all of its micro-batches and data-parallel ranks.

    A loss is a sum over its micro-batch divided by one of these, so no split of the update can change the gradient.

    tokens      tokens under the loss mask
    sequences   samples with at least one token under the mask
    max_tokens  the configured response limit (a constant, for Dr. GRPO)
    """

    tokens: int
    sequences: int
    max_tokens: int


@dataclass(frozen=True)
class ModelOutput:
    """What the engine computed for a packed micro-batch, aligned with its tokens.

    logprobs_T  fp32, log p(token_t | token_<t) at the rollout temperature; 0 off the loss mask (policy)
    entropy_T   fp32, entropy of the distribution that token t was drawn from; 0 off the mask (policy, when asked)
    values_T    fp32, value before token t is sampled; 0 off the mask (critic)
    """

    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    values_T: Tensor | None = None


@dataclass(frozen=True)
class LossResult:
    """loss: scalar, already divided by its global denominator. metrics: name -> (sum, count), detached."""

    loss: Tensor
    metrics: Mapping[str, tuple[float | Tensor, float | Tensor]] = field(default_factory=dict)


LossFn = Callable[[Packed, ModelOutput, Denominators], LossResult]
