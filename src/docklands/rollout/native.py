"""The native generation engine: continuous batching over a paged KV cache, on the trainer's own modules.

Legend: R rows of a step (padded), P prompts, T packed tokens, D model, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from docklands.config.schema import RolloutSection
from docklands.core.fields import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from docklands.core.protocols import Generation, Request
from docklands.errors import MissingWeight, RolloutError, ShapeMismatch
from docklands.models import CausalLM, ModelConfig
from docklands.models.build import allocate
from docklands.models.lora import adapters_of
from docklands.models.routing import Routes
from docklands.rollout.attention import PromptAttention
from docklands.rollout.capacity import cache_pages, check_requests
from docklands.rollout.compiled import decode_attention
from docklands.rollout.decoder import Decoder, decoder_for
from docklands.rollout.kv_cache import NULL_PAGE, PagedCache
from docklands.rollout.queue import WorkQueue, too_late
from docklands.rollout.running import Prompt, RunningBatch
from docklands.rollout.sampling import Choice, Sampler, uniforms
from docklands.rollout.scheduler import Scheduler
from docklands.rollout.visits import Visits

log = logging.getLogger("docklands.rollout")
PREFILL_TOKENS = 4096


class NativeEngine(Visits):
    """Generates with one set of weights at a time; see core.protocols.RolloutEngine.

    `load_weights` before the first `generate`. One `generate` at a time; `abort` and `load_weights` may come from other
    threads meanwhile: new weights take effect at the next token, for running sequences too, and every token says
    which version made it.

    A sample's tokens and log-probabilities depend on its prompt, sampling, seed and the weights alone: not on what else
    is in the batch, on the order, or on preemptions.
    """

    pack_step = 64
    """Tokens that packed prompts are padded to a multiple of."""

    def __init__(
        self, config: ModelConfig, rollout: RolloutSection, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self.config, self.version = config, -1
        self._section, self._dtype, self._device = rollout, dtype, device
        self._shape = config
        self._model = self._allocate()
        self._decoder: Decoder | None = None
        self._cache: PagedCache | None = None
        self._sampler = Sampler()
        self._scheduler: Scheduler | None = None
        self._routed = config.routed if rollout.record_routes else None
        self._asleep = False
        self._complete = False
        self._abort = threading.Event()
        self._step_lock = threading.RLock()
        self._serving = threading.Lock()
        self._counts: Counter[str] = Counter()

    def _allocate(self) -> CausalLM:
        return allocate(CausalLM, self.config, self._dtype, self._device)

    # --- weights and memory ------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy our named parameters in place and start `version`; prompts in the cache are forgotten.

        MissingWeight names a parameter that did not come, or that the model does not have; ShapeMismatch both shapes.
        After such an error the engine refuses to generate until a complete set has come.
        """
        self._load(weights, version, dict(self._model.named_parameters()))

    def load_adapters(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As `load_weights`, of the adapters alone: the base stays. RolloutError before a base has come."""
        if not self._complete:
            raise RolloutError("adapters without a complete set of weights", "call load_weights first")
        self._load(weights, version, dict(adapters_of(self._model.named_parameters())))

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int, wanted: dict[str, Tensor]) -> None:
        with self._step_lock:
            self._complete = False
            tied = {spec.name for spec in self._model.table if spec.tied_to is not None}
            for name, tensor in weights:
                if name in tied:
                    continue
                target = wanted.pop(name, None)
                if target is None:
                    raise MissingWeight(f"weight {name!r} came twice, or the generator does not have it")
                if target.shape != tensor.shape:
                    raise ShapeMismatch(
                        f"weight {name!r} came as {tuple(tensor.shape)}, the generator holds {tuple(target.shape)}"
                    )
                target.copy_(tensor)
            if wanted:
                raise MissingWeight(f"{len(wanted)} weights did not come, first {next(iter(wanted))!r}")
            self._decoder = None  # prepared weights are copies: made again at the next use
            if self._scheduler is not None:
                self._scheduler.forget_prompts()
            self.version, self._complete = version, True

    def sleep(self) -> None:
        """Free the KV cache and the prepared weights. RolloutError while generating."""
        if not self._serving.acquire(blocking=False):
            raise RolloutError("sleep while generating", "abort first, or wait for generate to return")
        with self._step_lock:
            self._decoder = self._cache = None
            self._asleep = True
        self._serving.release()

    def wake(self) -> None:
        """Ready to generate again; memory is taken at the next use."""
        self._asleep = False

    def abort(self) -> None:
        """End a running `generate` soon, from any thread: every sample returns FINISH_ABORT with what it has."""
        if self._serving.locked():
            self._abort.set()

    # --- generation --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """All samples, in request order. RolloutError: an impossible request, or the deadline (names the pending)."""
        queue = WorkQueue(requests)
        self.serve(queue)
        return queue.results()

    @torch.inference_mode()
    def serve(self, queue: WorkQueue) -> None:
        """Generate what the queue hands out until it is empty; several engines may share one."""
        if not self._serving.acquire(blocking=False):
            raise RolloutError("generate while generating", "one call at a time: give the engine all requests at once")
        try:
            self._abort.clear()
            self._open(queue)
            deadline = time.monotonic() + self._section.sample_deadline_s
            while self._iterate(queue):
                if time.monotonic() > deadline:
                    too_late(queue, self._section.sample_deadline_s)
        finally:
            self._close()
            self._serving.release()

    def _open(self, queue: WorkQueue) -> None:
        with self._step_lock:
            if self._asleep:
                raise RolloutError("generate while asleep", "call wake first")
            if not self._complete:
                raise RolloutError("generate without a complete set of weights", "call load_weights first")
            section = self._section
            check_requests(queue.sizing, self.config)
            pages = cache_pages(queue.sizing, section, self._shape, self._dtype, self._agree, self._device)
            if self._cache is None or self._cache.pages < pages:
                self._cache = None  # free the old one first
                self._cache = PagedCache(self._shape, pages, section.kv_block_tokens, self._dtype, self._device)
            self._cache.peak = 0
            rows = section.max_batch
            self._scheduler = Scheduler(self._cache, queue.requests, rows, self._routed, queue.sizing)

    def _agree(self, pages: int) -> int:
        """Pages of the KV cache, of those that there is room for here."""
        return pages

    def _close(self) -> None:
        with self._step_lock:
            if self._scheduler is not None:
                self._scheduler.clear()
                self._tally(self._scheduler)
            self._scheduler = None

    def _iterate(self, queue: WorkQueue) -> bool:
        """Admit, compute new prompts, one decode step. -> whether there is more to do."""
        with self._step_lock:
            scheduler = self._scheduler
            assert scheduler is not None
            if self._abort.is_set():
                self._counts["aborted"] += end_all(queue, scheduler)
                return False
            rows, fresh = self._admit(queue, scheduler)
            if self._decoder is None:
                self._decoder = decoder_for(self._model)
            if rows:
                self._prefill(fresh)
                retire(queue, scheduler, self._first_tokens(scheduler.running, np.array(rows)))
            if scheduler.running.count:
                scheduler.grow()
                retire(queue, scheduler, self._decode(scheduler))
            return bool(scheduler.running.count or scheduler.waiting or not queue.empty)

    def _admit(self, queue: WorkQueue, scheduler: Scheduler) -> tuple[list[int], list[Prompt]]:
        """Fill the running batch. -> (new rows, prompts to be computed first)"""
        room = scheduler.running.room - len(scheduler.waiting)
        if room > 0:
            scheduler.enqueue(without_empty(queue, queue.pull(room)))
        return scheduler.admit(PREFILL_TOKENS) if scheduler.waiting and scheduler.running.room else ([], [])

    def _prefill(self, prompts: list[Prompt]) -> None:
        """Compute the prompts, packed; keys and values into their pages, last hidden states kept."""
        if not prompts:
            return
        assert self._cache is not None and self._decoder is not None
        lengths = [len(prompt.tokens) for prompt in prompts]
        total = sum(lengths)
        padding = -(-self._decoder.rows(total) // self.pack_step) * self.pack_step - total
        offsets = np.concatenate([np.arange(n) for n in (*lengths, padding)])
        size = self._cache.page_tokens
        pages = np.full(total + padding, NULL_PAGE, np.int64)
        pages[:total] = np.concatenate([p.pages[np.arange(n) // size] for p, n in zip(prompts, lengths)])
        tokens = np.zeros(total + padding, np.int64)
        tokens[:total] = np.concatenate([p.tokens for p in prompts])
        attend = PromptAttention(self._cache, self._cache.slots(pages, offsets % size), [*lengths, padding])
        routes = self._routes()
        hidden_TD = self._decoder.hidden(self._tensor(tokens), self._tensor(offsets), attend, routes)
        self._cache.reveal(pages[:total], offsets[:total] % size)
        chosen = None if routes is None else routes.choices().cpu().numpy()
        for prompt, end in zip(prompts, np.cumsum(lengths)):
            prompt.hidden = hidden_TD[end - 1].clone()
            if chosen is not None:
                prompt.routes = chosen[end - len(prompt.tokens) : end].copy()
        self._counts["prefill_tokens"] += total

    def _first_tokens(self, running: RunningBatch, rows: np.ndarray) -> np.ndarray:
        """Draw the first token of new rows from their prompts' last hidden states. -> finished rows."""
        assert self._decoder is not None
        prompts = list({id(running.prompts[row]): running.prompts[row] for row in rows}.values())
        hidden_PD = torch.stack([prompt.hidden for prompt in prompts])  # type: ignore[misc]
        padded = self._decoder.rows(len(prompts)) - len(prompts)
        logits_PV = self._decoder.logits(torch.cat([hidden_PD, hidden_PD.new_zeros(padded, hidden_PD.shape[1])]))
        where = {id(prompt): i for i, prompt in enumerate(prompts)}
        index = self._tensor(np.array([where[id(running.prompts[row])] for row in rows]))
        return self._draw(running, rows, logits_PV.index_select(0, index))

    def _decode(self, scheduler: Scheduler) -> np.ndarray:
        """Feed every row's last token, draw its next. -> finished rows."""
        assert self._cache is not None and self._decoder is not None
        running, cache = scheduler.running, self._cache
        scheduler.compact()
        rows = np.arange(running.count)
        padded = self._decoder.rows(len(rows))
        stored = running.made[rows] - 1
        tokens, positions = np.zeros((2, padded), np.int64)
        tokens[rows], positions[rows] = running.last[rows], running.prompt_length[rows] + stored
        pages, offsets = np.full(padded, NULL_PAGE, np.int64), np.arange(padded) % cache.page_tokens
        column, offset = np.divmod(stored, cache.page_tokens)
        pages[rows], offsets[rows] = running.own[rows, column], offset
        cache.reveal(pages[rows], offsets[rows])
        slots = cache.slots(pages, offsets)
        attend = decode_attention(cache, running.row_pages(), padded, self._shape.num_heads, slots)
        routes = self._routes()
        hidden_RD = self._decoder.hidden(self._tensor(tokens), self._tensor(positions), attend, routes)
        if routes is not None:
            running.fed(rows, routes.choices()[: len(rows)].cpu().numpy())
        self._counts["decode_steps"] += 1
        self._counts["rows"] += len(rows)
        return self._draw(running, rows, self._decoder.logits(hidden_RD))

    def _routes(self) -> Routes | None:
        """Keeps the router choices of one pass, when those are recorded."""
        return None if self._routed is None else Routes()

    def _draw(self, running: RunningBatch, rows: np.ndarray, logits_RV: Tensor) -> np.ndarray:
        """Sample one token for each of `rows` from the first rows of the logits. -> finished rows."""
        choice = Choice(
            running.temperature[rows],
            running.top_k[rows],
            running.top_p[rows],
            uniforms(running.seed[rows], running.drawn[rows] + running.made[rows]),
            running.banned(rows),
        )
        tokens, logprobs = self._sampler(logits_RV, choice)
        done = running.append(rows, tokens, logprobs, self.version)
        self._counts["decode_tokens"] += len(rows)
        return rows[done]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def hand_back(queue: WorkQueue, running: RunningBatch, row: int, finish: int) -> None:
    """Give a row's sample to whoever waits for it."""
    index = int(running.index[row])
    queue.finish(index, running.generation(row, finish, queue.requests[index].request_id))


def retire(queue: WorkQueue, scheduler: Scheduler, rows: np.ndarray) -> None:
    """Hand finished rows back."""
    for row in rows.tolist():
        finish = FINISH_STOP if scheduler.running.stopped(row) else FINISH_LENGTH
        hand_back(queue, scheduler.running, row, finish)
    if len(rows):
        scheduler.release(rows)


def end_all(queue: WorkQueue, scheduler: Scheduler) -> int:
    """Abort: running samples keep what they have, the others have nothing. -> how many"""
    for row in range(scheduler.running.count):
        hand_back(queue, scheduler.running, row, FINISH_ABORT)
    rest = list(scheduler.waiting)
    while found := queue.pull(1 << 30):
        rest += found
    for index in rest:
        queue.finish(index, Generation([], [], [], FINISH_ABORT, queue.requests[index].request_id))
    return scheduler.running.count + len(rest)


def without_empty(queue: WorkQueue, indices: list[int]) -> list[int]:
    """Samples of which no token is wanted are finished at once."""
    for index in indices:
        if queue.requests[index].sampling.max_tokens == 0:
            queue.finish(index, Generation([], [], [], FINISH_LENGTH, queue.requests[index].request_id))
    return [index for index in indices if queue.requests[index].sampling.max_tokens > 0]
