"""The log-probability of sampled tokens when each rank holds some rows of the vocabulary.

Legend: T positions, D model, U this rank's rows of the vocabulary.

Each rank passes over its own rows in chunks, as in logprob.py; then the ranks exchange three numbers a position (logit
of the target, log-sum-exp, entropy). Backward needs no exchange: with the global log-sum-exp each rank's gradients of
its own logits are exact. The gradient of the hidden states is partial, and summed where they were gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.kernels.logprob import HELD, Chunks, Held, How, _SampledLogprob, merge, scan, sizes


@dataclass(frozen=True)
class VocabularyPart:
    """Rows first_row, first_row + 1, ... of the vocabulary are here; the ranks of `pg` hold all of it, in rank order.

    held  as kernels.sampled_logprob has it, for this rank's rows
    """

    pg: dist.ProcessGroup
    first_row: int
    held: Held = HELD


def sampled_logprob_parallel(
    hidden_TD: Tensor,
    weight_UD: Tensor,
    targets_T: Tensor,
    part: VocabularyPart,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor] | Tensor:
    """As kernels.sampled_logprob over the whole vocabulary, the same on every rank. Call it on every rank of the group.

    The gradient that comes in is the same on every rank; that of `hidden_TD` goes out partial, to be summed over them.
    """
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device):
        hidden_TD = hidden_TD.to(torch.get_autocast_dtype(device))
    how = How(temperature, *sizes(hidden_TD, part.held))
    with torch.autocast(device, enabled=False):
        logprobs_T, entropy_T = _ParallelLogprob.apply(  # type: ignore[misc]
            hidden_TD, weight_UD, targets_T - part.first_row, how, entropy, part.pg
        )
    return (logprobs_T, entropy_T) if entropy else logprobs_T


class _ParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_UD: Tensor,
        targets_T: Tensor,
        how: How,
        entropy: bool,
        pg: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor | None]:
        cast_UD = weight_UD.to(hidden_TD.dtype)
        chunks = Chunks(hidden_TD, cast_UD, how)
        target_T, lse_T, entropy_T = scan(chunks, targets_T, entropy)
        own = torch.stack([target_T, lse_T] if entropy_T is None else [target_T, lse_T, entropy_T])
        all_W = own.new_empty((dist.get_world_size(pg), *own.shape))
        dist.all_gather_single(all_W.flatten(0, 1), own, group=pg)
        target_T = all_W[:, 0].sum(0)
        lse_T, entropy_T = merge(all_W[:, 1], all_W[:, 2] if entropy else None)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TD, cast_UD, targets_T, lse_T, entropy_T, chunks.kept)
        ctx.settings = how, weight_UD.dtype
        return target_T - lse_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_SampledLogprob.backward(ctx, *grads), None
