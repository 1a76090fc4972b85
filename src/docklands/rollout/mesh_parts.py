"""What the ranks of a generation mesh do together at each step: choose row counts, sample, agree.

Legend: T tokens, R rows of a step (padded), D model, V vocabulary, N heads, H head dim, L layers with experts,
k experts of a token, W ranks of an instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from docklands.errors import NonFinite, RolloutError
from docklands.models import CausalLM, PackedCausal
from docklands.models.routing import Routes
from docklands.parallel.collectives import all_gather
from docklands.parallel.mesh import Group
from docklands.rollout.attention import regroup, ungroup
from docklands.rollout.decoder import Decoder, ModelDecoder
from docklands.rollout.queue import WorkQueue
from docklands.rollout.running import Prompt
from docklands.rollout.sampling import Choice, Sampler
from docklands.rollout.scheduler import Scheduler


@dataclass(frozen=True)
class Wish:
    """What a rank tells its instance before each step, as whole numbers.

    left     a leader: nothing more will come in this session
    abort    somebody asked this rank to end its samples
    late     a leader: the deadline has passed
    prefill, decode   a pass over prompts, over running rows is due
    more     samples are running or waiting
    version  of the weights
    print    of the scheduler's state, equal on the ranks of a lane
    pause    the visit may end, samples under way (LiveQueue.due)
    """

    left: int = 0
    abort: int = 0
    late: int = 0
    prefill: int = 0
    decode: int = 0
    more: int = 0
    version: int = 0
    print: int = 0
    pause: int = 0


def due_of(scheduler: Scheduler | None, queue: WorkQueue, fresh: Sequence[Prompt]) -> Wish:
    """What a lane has to do; None: nothing. The print is the same in every process: hashes of whole numbers are."""
    if scheduler is None:
        return Wish()
    running, count, waiting = scheduler.running, scheduler.running.count, len(scheduler.waiting)
    state = (count, waiting, len(fresh), *running.made[:count].tolist(), *running.last[:count].tolist())
    more = bool(count or waiting or not queue.empty)
    return Wish(prefill=int(bool(fresh)), decode=int(count > 0), more=int(more), print=hash(state))


def exchange(mine: Wish, instance: Group) -> list[Wish]:
    """Every rank's wish, in rank order."""
    told = torch.tensor([astuple(mine)], dtype=torch.int64)
    return [Wish(*row) for row in all_gather(told, instance).tolist()]


def check_alike(wishes: Sequence[Wish], lane: int) -> None:
    """RolloutError, the same on every rank, when ranks that must do the same are about to do otherwise."""
    versions = sorted({wish.version for wish in wishes})
    if len(versions) > 1:
        raise RolloutError(f"ranks of one generator hold the weight versions {versions}", "did a sync fail half-way?")
    for first in range(0, len(wishes), lane):
        if len({wish.print for wish in wishes[first : first + lane]}) > 1:
            raise RolloutError(
                f"tensor ranks {first} to {first + lane - 1} of one generator schedule different samples",
                "do all nodes run the same version and configuration?",
            )


class LaneDecoder(ModelDecoder):
    """The modules of a tensor-parallel rank; logits of the whole vocabulary arrive at the lane's first rank.

    sequence  between products ranks hold different tokens, so a product sees rows / ranks of them
    passes    through the layers so far
    """

    def __init__(self, model: CausalLM, lane: Group | None, sequence: bool) -> None:
        super().__init__(model)
        self._lane, self._sequence = lane, sequence
        self.passes = 0

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attend: Any, routes: Routes | None = None) -> Tensor:
        """See Decoder; counted in `passes`."""
        self.passes += 1
        return super().hidden(token_ids_T, positions_T, attend, routes)

    def find_floor(self) -> int:
        """Agreed on: the vocabulary is split unevenly, and products of other shapes have other floors."""
        floor = super().find_floor()
        if self._lane is None:
            return floor
        most = torch.tensor([floor * (self._lane.size if self._sequence else 1)])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._lane.pg)
        return int(most)

    def rows(self, rows: int) -> int:
        """See ModelDecoder; a multiple of the lane's ranks."""
        ranks = 1 if self._lane is None else self._lane.size
        return -(-super().rows(rows) // ranks) * ranks

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """-> logits_TV on the lane's first rank; elsewhere this rank's columns, which nobody reads."""
        own, lane = super().logits(hidden_TD), self._lane
        if lane is None:
            return own
        vocabulary = self._model.config.vocab_size
        edges = [vocabulary * rank // lane.size for rank in range(lane.size + 1)]
        counts = [last - first for first, last in zip(edges, edges[1:])]
        padded = F.pad(own, (0, max(counts) - own.shape[1]))
        parts = [torch.empty_like(padded) for _ in counts] if lane.rank == 0 else None
        dist.gather(padded, parts, lane.ranks[0], group=lane.pg)
        if parts is None:
            return own
        return torch.cat([part[:, :count] for part, count in zip(parts, counts)], 1)


class LaneSampler(Sampler):
    """The lane's first rank draws; the others are told, so that all go on with the same bits."""

    def __init__(self, lane: Group | None) -> None:
        super().__init__()
        self._lane = lane

    def __call__(self, logits_RV: Tensor, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
        """See Sampler. NonFinite on all ranks of the lane."""
        lane = self._lane
        if lane is None:
            return super().__call__(logits_RV, choice)
        drawn, failure = torch.full((2, len(choice.temperature)), torch.nan, dtype=torch.float64), None
        if lane.rank == 0:
            try:
                for row, values in zip(drawn, super().__call__(logits_RV, choice)):
                    row.copy_(torch.from_numpy(values))
            except NonFinite as error:
                failure = error
        dist.broadcast(drawn, lane.ranks[0], group=lane.pg)
        if failure is None and bool(drawn.isnan().any()):
            failure = NonFinite("logits of the first tensor rank hold a NaN or an infinity", "look at the weights")
        if failure is not None:
            raise failure
        return drawn[0].long().numpy(), drawn[1].float().numpy()


class LaneRoutes(Routes):
    """Router choices of all tokens, where each tensor rank routes its own."""

    def __init__(self, lane: Group) -> None:
        super().__init__()
        self._lane = lane

    def choices(self) -> Tensor:
        return all_gather(super().choices().int(), self._lane).to(torch.int16)


class Nobody:
    """Attention of padding: a rank without work passes rows through the layers because the others' experts are here."""

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        return torch.zeros_like(q_TNH)


class Uncached(PackedCausal):
    """Whole sequences, packed, without a cache; for both kinds of decoder."""

    def grouped(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        """With heads in (query, kv head) order, in and out."""
        kv_heads = k_TKH.shape[1]
        return regroup(self(layer, ungroup(q_TNH, kv_heads), k_TKH, v_TKH, scale), kv_heads)


def logprobs_of(decoder: Decoder, sequences: Sequence[Sequence[int]], temperature: float, step: int) -> Tensor:
    """fp32 [T]: log-probs of sequences end to end, each one's first 0. On a rank that has no logits of the whole
    vocabulary, numbers without meaning. step: tokens are padded to a multiple of it.
    """
    lengths = [len(sequence) for sequence in sequences]
    total = sum(lengths)
    padding = -total % step
    ids_T = torch.tensor([*(token for sequence in sequences for token in sequence), *[0] * padding])
    positions_T = torch.cat([torch.arange(n) for n in (*lengths, padding)])
    attend: Any = Uncached([*lengths, padding] if padding else lengths)
    logits_TV = decoder.logits(decoder.hidden(ids_T.to(decoder.device), positions_T.to(decoder.device), attend))
    table_TV = torch.log_softmax(logits_TV[: total - 1].float() / temperature, -1)
    next_T = ids_T[1:total].clamp(max=logits_TV.shape[1] - 1).to(table_TV.device)
    found_T = torch.cat([torch.zeros(1), table_TV.gather(1, next_T[:, None]).squeeze(1).cpu()])
    found_T[np.cumsum([0, *lengths[:-1]])] = 0.0
    return found_T
