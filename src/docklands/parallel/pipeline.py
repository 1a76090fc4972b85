"""Pipeline parallelism: the schedule, simulated tick by tick on every rank alike, and the executor that follows it.

Legend: S tokens of a micro-batch, D model.

Stage s of the model is on rank s % pp. The schedule is 1F1B (PipeDream-flush, arXiv 2006.09503), interleaved when ranks
hold several stages (arXiv 2104.04473), or the zero-bubble ZB-H1 (arXiv 2401.10241, section 3.1): a backward pass makes
the input's gradient only, and weight gradients fill the gaps, in the activation memory of 1F1B's first rank. Because
every rank simulates the whole schedule, each knows after every tick which messages cross; they go out in one batch, and
their sizes follow from the micro-batch, so micro-batches may differ in length and their number need not divide by
anything. (torch's own executor fixes one shape.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.parallel.mesh import Group


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch through one stage. `weights`: the weight gradients of a split backward."""

    stage: int
    micro: int
    backward: bool = False
    weights: bool = False


Tick = tuple[Action | None, ...]
"""What each rank does; None: nothing."""


@dataclass
class _Rank:
    """A rank of the simulation: what it still has to do, in order, and how many micro-batches it may hold.

    most  with those whose weight gradients wait; 0: backward is not split
    """

    forwards: list[Action]
    backwards: list[Action]
    limit: int
    most: int = 0
    held: int = 0
    waiting: list[Action] = field(default_factory=list)

    def choose(self, done: set[Action], last: int, training: bool) -> Action | None:
        """The next action whose input is there: forward while there is room, else backward, else weight gradients."""
        full = self.most and self.held + len(self.waiting) >= self.most
        if self.forwards and (not training or (self.held < self.limit and not full)):
            action = self.forwards[0]
            if action.stage == 0 or Action(action.stage - 1, action.micro) in done:
                return action
        if self.backwards:
            action = self.backwards[0]
            own, following = Action(action.stage, action.micro), Action(action.stage + 1, action.micro, True)
            if own in done and (action.stage == last or following in done):
                return action
        return self.waiting[0] if self.waiting else None

    def take(self, action: Action) -> None:
        if action.weights:
            self.waiting.pop(0)
            return
        if action.backward and self.most:
            self.waiting.append(Action(action.stage, action.micro, True, True))
        (self.backwards if action.backward else self.forwards).pop(0)
        self.held += -1 if action.backward else 1


def _order(rank: int, pp: int, vpp: int, micros: int, backward: bool) -> list[Action]:
    """Rounds of pp micro-batches, chunk after chunk (backward: from the last chunk)."""
    found = []
    for first in range(0, micros, pp if vpp > 1 else micros):
        group = range(first, min(micros, first + pp)) if vpp > 1 else range(micros)
        for chunk in reversed(range(vpp)) if backward else range(vpp):
            found += [Action(chunk * pp + rank, micro, backward) for micro in group]
    return found


def most_held(pp: int, vpp: int, rank: int, split: bool = False) -> int:
    """Passes through a chunk that wait for their backward pass on a rank of a pipeline, at most, with enough
    micro-batches: pp - rank, or with chunks 2 (pp - rank - 1) + (vpp - 1) pp + 1. `split`: with those whose weight
    gradients wait, on every rank as many as on the first.
    """
    rank = 0 if split else rank
    return pp - rank if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp + 1


@lru_cache(maxsize=64)
def schedule(pp: int, vpp: int, micros: int, training: bool = True, split: bool = False) -> tuple[Tick, ...]:
    """All ticks. An action's input was made in an earlier tick.

    A rank holds at most as many micro-batches as 1F1B needs to fill the pipeline (`most_held`). Where a ragged last
    round would wait for itself, one more.
    """
    ranks = []
    for rank in range(pp):
        forwards = _order(rank, pp, vpp, micros, False) if micros else []
        backwards = _order(rank, pp, vpp, micros, True) if training and micros else []
        ranks.append(_Rank(forwards, backwards, most_held(pp, vpp, rank), most_held(pp, vpp, 0) if split else 0))
    ticks: list[Tick] = []
    done: set[Action] = set()
    while any(rank.forwards or rank.backwards or rank.waiting for rank in ranks):
        tick = tuple(rank.choose(done, pp * vpp - 1, training) for rank in ranks)
        for rank, action in zip(ranks, tick):
            if action is not None:
                rank.take(action)
                done.add(action)
        if any(tick):
            ticks.append(tick)
        else:
            for rank in ranks:
                rank.limit += 1
                rank.most += bool(rank.most)
    return tuple(ticks)


def bubble(ticks: Sequence[Tick]) -> float:
    """Share of rank-ticks with nothing to do, forward, backward and weight gradients counted alike."""
    idle = sum(action is None for tick in ticks for action in tick)
    return idle / max(1, sum(len(tick) for tick in ticks))


class Later(Protocol):
    """Puts the weight gradients of what is computed while `collecting` aside, and makes them in `run`."""

    def collecting(self) -> AbstractContextManager[None]: ...
    def run(self) -> None: ...


@dataclass
class Pipeline:
    """Runs micro-batches through the stages of this rank's pipeline.

    forward  (chunk on this rank, micro-batch, input or None on the first stage) -> what the next stage gets [S, D], or
             on the last stage the scalar to differentiate
    shape    of what crosses between stages, for each micro-batch
    after    called after each backward pass
    later    makes a store of weight gradients: backward passes are split; None: they are whole
    """

    group: Group
    chunks: int
    forward: Callable[[int, int, Tensor | None], Tensor]
    shape: Callable[[int], tuple[int, ...]]
    after: Callable[[], None] = lambda: None
    later: Callable[[], Later] | None = None
    _like: Tensor = field(default_factory=lambda: torch.empty(0))
    _arrived: dict[Action, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)
    _held: dict[Action, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    _stores: dict[Action, Later] = field(default_factory=dict)

    def run(self, micros: int, training: bool, dtype: torch.dtype, device: torch.device) -> None:
        """All micro-batches; backward too with `training`. Ranks of the group call it together.

        dtype, device: of what crosses between stages
        """
        self._like = torch.empty(0, dtype=dtype, device=device)
        sending: list[tuple[Tensor, dist.Work]] = []
        for tick in schedule(self.group.size, self.chunks, micros, training, self.later is not None and training):
            action = tick[self.group.rank]
            out = None if action is None else self._do(action, training)
            sending = [(kept, work) for kept, work in sending if not work.is_completed()]
            sending += self._exchange(tick, out)
        for _, work in sending:
            work.wait()

    @property
    def _last(self) -> int:
        return self.group.size * self.chunks - 1

    def _do(self, action: Action, training: bool) -> Tensor | None:
        """-> what the neighbouring stage needs of it."""
        chunk, own = action.stage // self.group.size, Action(action.stage, action.micro)
        if action.weights:
            self._stores.pop(own).run()
            self.after()
            return None
        if self.later is None or not training:
            return self._pass(action, own, chunk, training)
        if not action.backward:
            self._stores[own] = self.later()
        with self._stores[own].collecting():  # in backward too: recomputed forward passes
            return self._pass(action, own, chunk, training)

    def _pass(self, action: Action, own: Action, chunk: int, training: bool) -> Tensor | None:
        if not action.backward:
            x = self._take(action)
            if x is not None and training:
                x.requires_grad_()
            out = self.forward(chunk, action.micro, x)
            if training:
                self._held[own] = x, out
            return None if action.stage == self._last else out.detach()
        x, out = self._held.pop(own)
        torch.autograd.backward(out, self._take(action))
        self.after()
        return None if x is None else x.grad

    def _take(self, action: Action) -> Tensor | None:
        """The message that an action works on, once it is here; None where none is due."""
        tensor, work = self._arrived.pop(action, (None, None))
        if work is not None:
            work.wait()
        return tensor

    def _exchange(self, tick: Tick, out: Tensor | None) -> list[tuple[Tensor, dist.Work]]:
        """Send what this rank made, receive what the others made for it."""
        operations: list[dist.P2POp] = []
        sent, due = [], []
        for rank, action in enumerate(tick):
            found = None if action is None else self._target(action)
            if found is None:
                continue
            target, wanted = found
            if rank == self.group.rank:
                assert out is not None
                sent.append((out.contiguous(), len(operations)))
                operations.append(dist.P2POp(dist.isend, sent[-1][0], self.group.ranks[target], self.group.pg))
            elif target == self.group.rank:
                buffer = self._like.new_empty(self.shape(wanted.micro))
                due.append((wanted, buffer, len(operations)))
                operations.append(dist.P2POp(dist.irecv, buffer, self.group.ranks[rank], self.group.pg))
        works = dist.batch_isend_irecv(operations) if operations else []
        each = len(works) == len(operations)  # NCCL gives one handle for the batch
        for wanted, buffer, index in due:
            self._arrived[wanted] = buffer, works[index if each else 0]
        return [(tensor, works[index if each else 0]) for tensor, index in sent]

    def _target(self, action: Action) -> tuple[int, Action] | None:
        """(rank, the action that waits for this one's output)."""
        stage = action.stage + (-1 if action.backward else 1)
        if action.weights or not 0 <= stage <= self._last:
            return None
        return stage % self.group.size, Action(stage, action.micro, action.backward)
