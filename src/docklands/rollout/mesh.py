"""Generation over the ranks of a layout: tensor parallel, expert parallel, data parallel, and their products.

Legend: T packed tokens, D model, V vocabulary.

A *lane* is a tensor group: its ranks run the same scheduler on the same requests, each with its own heads and its part
of the KV cache. The lane's first rank, the leader, is asked for samples, tells the others the requests, and draws the
tokens; nothing but whole numbers and log-probs goes round.

An *instance* is what shares experts: ranks that hold different experts of one model step together. Attention and KV
cache are data parallel there: each lane has its own requests, and only the expert layers' rows travel. Before each step
the ranks tell each other what is due; a lane that has nothing to do passes padding through the layers. Lanes that share
no experts are instances of their own and never wait for each other.

    tp 2 dp 2         instance (0 1) = lane (0 1);           instance (2 3) = lane (2 3)
    ep 4 dp 4         instance (0 1 2 3), lanes (0) (1) (2) (3)
    tp 2 dp 2 ep 4    instance (0 1 2 3), lanes (0 1) (2 3)

A session is one call of `together` on all ranks. Inside, every `generate` of any leader is a round that all lanes of
the instance join, with or without requests, and that ends when all samples of all lanes have ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from docklands.config.layouts import GenerationLayoutSection
from docklands.config.schema import RolloutSection
from docklands.core.protocols import Generation, Request
from docklands.errors import DocklandsError, LayoutError, MissingWeight, RolloutError, ShapeMismatch, reason_of
from docklands.models import CausalLM, ModelConfig
from docklands.models.routing import Routes
from docklands.models.shard import stage_of
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.rollout.decoder import Decoder, decoder_for
from docklands.rollout.mesh_parts import (
    LaneDecoder,
    LaneRoutes,
    LaneSampler,
    Nobody,
    Wish,
    check_alike,
    due_of,
    exchange,
    logprobs_of,
)
from docklands.rollout.native import NativeEngine, end_all, retire
from docklands.rollout.queue import WorkQueue, too_late
from docklands.rollout.running import Prompt
from docklands.rollout.scheduler import Scheduler
from docklands.rollout.visits import MeshVisits

T = TypeVar("T")


def generation_layout(section: GenerationLayoutSection, model: ModelConfig, ranks: int = 0) -> Layout:
    """The layout of generation, on `ranks` ranks where dp is 0. LayoutError when it does not divide.

    Sequence parallel for models with experts: their ranks must send different tokens.
    """
    dp = section.dp or max(ranks, math.lcm(section.tp, section.ep * section.etp)) // section.tp
    layout = Layout(dp=dp, tp=section.tp, ep=section.ep, etp=section.etp, sp=model.moe is not None)
    try:
        layout.check_model(model)
    except LayoutError as error:
        raise LayoutError(f"rollout.{error.message}", error.hint) from None
    return layout


class MeshEngine(MeshVisits, NativeEngine):
    """This rank's part of a generator; see NativeEngine for what a generator promises.

    mesh  of a layout of tp, ep, etp and dp. Every wait for another rank ends at the mesh's deadline.

    The same seeds give the tokens of the engine in one process, up to ties within the rounding of another summation
    order. Weights are the tensors that `hold` was given: a publisher may refill or empty them between sessions.
    """

    def __init__(
        self,
        config: ModelConfig,
        rollout: RolloutSection,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        layout = mesh.layout
        self.mesh, self.lane = mesh, mesh.tp
        self.instance = mesh.block(math.lcm(layout.tp, layout.ep * layout.etp))
        self.pack_step = math.lcm(NativeEngine.pack_step, layout.tp)
        super().__init__(config, rollout, dtype=dtype, device=device)
        kv_heads = max(1, config.num_kv_heads // layout.tp)
        self._shape = replace(config, num_heads=config.num_heads // layout.tp, num_kv_heads=kv_heads)
        self._sampler = LaneSampler(self.lane)
        self._lane_decoder = LaneDecoder(self._model, self.lane, layout.sp)
        self._held: dict[str, Tensor] = {}
        self._deadline = 0.0
        self._left = self._over = self._broken = False
        self._error: DocklandsError | None = None

    def _allocate(self) -> CausalLM:
        """Shapes only: the storage comes with `hold`."""
        model, _ = stage_of(CausalLM, self.config, self.mesh, 0)
        assert isinstance(model, CausalLM)
        return model

    @property
    def is_leader(self) -> bool:
        """Whether samples are asked for here."""
        return self.lane is None or self.lane.rank == 0

    # --- weights ----------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Refused: whole tensors are not what a rank holds."""
        raise RolloutError("a generator over a mesh takes no whole weights", "publish by plan: see `hold`")

    def hold(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Generate with these tensors from now on, without a copy; by name, of this rank's shapes. Between sessions.

        MissingWeight, ShapeMismatch.
        """
        if not self._serving.acquire(blocking=False):
            raise RolloutError("new weights while generating", "publish between two rollouts")
        try:
            self._complete = False
            for name, parameter in list(self._model.named_parameters()):
                if name not in weights:
                    raise MissingWeight(f"weight {name!r} did not come to the generator on rank {self.mesh.rank}")
                tensor = weights[name]
                if tensor.shape != parameter.shape:
                    raise ShapeMismatch(
                        f"weight {name!r} came as {tuple(tensor.shape)}, the generator on rank {self.mesh.rank} holds "
                        f"{tuple(parameter.shape)}"
                    )
                if self._held.get(name) is not tensor:
                    holder, _, leaf = name.rpartition(".")
                    setattr(self._model.get_submodule(holder), leaf, nn.Parameter(tensor, requires_grad=False))
                    self._held[name] = tensor
            self._decoder = None
            self._asleep = False
            if self._scheduler is not None:  # between two visits
                self._scheduler.forget_prompts()
            self.version, self._complete = version, True
        finally:
            self._serving.release()

    def sleep(self) -> None:
        """Free the KV cache; the weights may be emptied. `hold` wakes."""
        super().sleep()
        self._complete = False

    # --- sessions ---------------------------------------------------------------------------------------------

    def together(self, work: Callable[[], T] | None = None) -> T | None:
        """On every rank at once: leaders do `work`, which may call `generate` any number of times, the others help.

        -> what `work` gave, None on the others. An error of `work` is raised when the other lanes have ended too.
        """
        self._over = self._broken = False
        if self.instance is None:
            return work() if work is not None else None
        if not self.is_leader:
            while not self._over:
                self._round([])
            return None
        assert work is not None
        try:
            return work()
        finally:
            while not self._over and not self._broken:  # help the other lanes until none has anything more
                self._round([], left=True)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See NativeEngine. On leaders, inside a session."""
        return self._round(requests).results()

    def _round(self, requests: Sequence[Request], left: bool = False) -> WorkQueue:
        self._left = left
        queue = WorkQueue(self._tell(requests))
        self.serve(queue)
        return queue

    def _tell(self, requests: Sequence[Request]) -> Sequence[Request]:
        """The leader's requests, on every rank of the lane."""
        if self.lane is None:
            return requests
        told: list[Any] = [tuple(requests)]
        try:
            dist.broadcast_object_list(told, self.lane.ranks[0], group=self.lane.pg, device=torch.device("cpu"))
        except RuntimeError as error:
            raise self._lost(error) from error
        return told[0]

    @torch.inference_mode()
    def serve(self, queue: WorkQueue) -> None:
        """One round."""
        if self.instance is None:
            return super().serve(queue)
        if not self._serving.acquire(blocking=False):
            raise RolloutError("generate while generating", "one call at a time: give the engine all requests at once")
        try:
            self._abort.clear()
            self._error = None
            if queue.requests:
                self._try(queue, self._open, queue)
            self._deadline = math.inf
            while self._iterate(queue):
                pass
        except RuntimeError as error:
            raise self._lost(error) from error
        except DocklandsError:  # the ranks disagree; an error of this lane alone does not come here
            self._broken = True
            raise
        finally:
            self._close()
            self._serving.release()
        if self._error is not None and self.is_leader:
            raise self._error

    def _lost(self, error: RuntimeError) -> RolloutError:
        self._broken, instance = True, self.instance or self.lane
        return RolloutError(
            f"generation on rank {self.mesh.rank}, together with processes {list(instance.ranks if instance else ())}, "
            f"failed: {reason_of(error)}",
            "is one of them dead, or stuck elsewhere? its log says",
        )

    def _try(self, queue: WorkQueue, function: Callable[..., Any], *args: Any) -> Any:
        """An error ends this lane's samples; the lane goes on to take part until the other lanes have ended."""
        try:
            return function(*args)
        except DocklandsError as error:
            self._error = error
            queue.close()
            self._close()
            return None

    # --- a step -----------------------------------------------------------------------------------------------

    def _iterate(self, queue: WorkQueue) -> bool:
        if self.instance is None:
            return super()._iterate(queue)
        with self._step_lock:
            self._decoder = self._decoder or self._make_decoder()
            rows, fresh = self._due(queue)
            wishes = exchange(self._wish(queue, fresh), self.instance)
            # counted from when all lanes are here: another's environments may have taken their time
            self._deadline = min(self._deadline, time.monotonic() + self._section.sample_deadline_s)
            ranks = self.mesh.layout.tp
            check_alike(wishes, ranks)
            self._over = all(wish.left for wish in wishes[::ranks])
            first = self.instance.rank // ranks * ranks
            lane = wishes[first : first + ranks]
            if any(wish.abort for wish in lane) and self._scheduler is not None:
                self._counts["aborted"] += end_all(queue, self._scheduler)
                self._close()
            elif lane[0].late:
                self._try(queue, too_late, queue, self._section.sample_deadline_s)
            self._pass(any(wish.prefill for wish in wishes), queue, lambda s: self._start(queue, s, rows, fresh))
            self._pass(any(wish.decode for wish in wishes), queue, lambda s: self._advance(queue, s))
            return any(wish.more for wish in wishes) and not any(wish.pause for wish in wishes)

    def _due(self, queue: WorkQueue) -> tuple[list[int], list[Prompt]]:
        return (self._scheduler and self._try(queue, self._admit, queue, self._scheduler)) or ([], [])

    def _wish(self, queue: WorkQueue, fresh: list[Prompt]) -> Wish:
        late = self.is_leader and bool(queue.requests) and time.monotonic() > self._deadline
        due = due_of(self._scheduler, queue, fresh)
        said = {"left": int(self._left), "abort": int(self._abort.is_set()), "pause": int(queue.due())}
        return replace(due, late=int(late) * due.more, version=self.version, **said)

    def _pass(self, due: bool, queue: WorkQueue, work: Callable[[Scheduler], None]) -> None:
        """This lane's part of a pass that is due in the instance; padding, where the lane has none."""
        before = self._lane_decoder.passes
        if self._scheduler is not None:
            self._try(queue, work, self._scheduler)
        if due and self._lane_decoder.passes == before:
            rows = torch.arange(self._lane_decoder.rows(1), device=self._device)
            self._lane_decoder.hidden(torch.zeros_like(rows), rows, Nobody())

    def _start(self, queue: WorkQueue, scheduler: Scheduler, rows: list[int], fresh: list[Prompt]) -> None:
        """Compute new prompts, draw the first tokens of new rows."""
        self._prefill(fresh)
        if rows:
            retire(queue, scheduler, self._first_tokens(scheduler.running, np.array(rows)))

    def _advance(self, queue: WorkQueue, scheduler: Scheduler) -> None:
        """One token for each running row."""
        if scheduler.running.count:
            scheduler.grow()
            retire(queue, scheduler, self._decode(scheduler))

    def _make_decoder(self) -> Decoder:
        return decoder_for(self._model) if self.instance is None else self._lane_decoder

    def _routes(self) -> Routes | None:
        return LaneRoutes(self.lane) if self._routed and self.lane else super()._routes()

    def _agree(self, pages: int) -> int:
        if self.lane is None:
            return pages
        least = torch.tensor([pages])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.lane.pg)
        return int(least)

    # --- a probe ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Tensor | None:
        """fp32 [T]: log p(token | those before it) of all tokens but each sequence's first, which is 0; end to end.

        On every rank at once, with the same sequences; None where not a leader.
        """
        self._decoder = self._decoder or self._make_decoder()
        found_T = logprobs_of(self._decoder, sequences, temperature, self.pack_step)
        return found_T if self.is_leader else None
