"""vLLM as the generation engine, in this process: the contract of rollout.native on vLLM's scheduler and kernels.

Engine and model are driven step by step on the caller's thread, so that new weights
may come between two steps and every token says which version made it.

Legend: none.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from docklands.config.schema import RolloutSection
from docklands.core.fields import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from docklands.core.protocols import Generation, Request
from docklands.errors import NonFinite, RolloutError, VersionMismatch
from docklands.models import ModelConfig
from docklands.models.params import table_for
from docklands.rollout.capacity import check_requests
from docklands.rollout.native import too_late, without_empty
from docklands.rollout.queue import WorkQueue
from docklands.rollout.sampling import sample_seed
from docklands.rollout.vllm_lora import VllmAdapter
from docklands.rollout.vllm_start import DELTA, ON_CPU, PARAMS, SLEEPS, Start, use_trainers_sampler
from docklands.rollout.vllm_weights import InPlace

log = logging.getLogger("docklands.rollout")
GO_ON, ABORT, LATE = 0, 1, 2
"""What happens before a step: it is made, or generation ends with what there is, or as too late."""
COUNTED = ("prefill_tokens", "decode_tokens", "decode_steps", "aborted")


@dataclass
class _Sample:
    """What a running sample has."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def generation(self, finish: int, request_id: int) -> Generation:
        return Generation(self.token_ids, self.logprobs, self.versions, finish, request_id)


class VllmEngine:
    """Generates with one set of weights at a time; see core.protocols.RolloutEngine and rollout.native.

    longest       tokens of the longest prompt with its response; 0: the model's positions
    tensor_ranks  processes that hold a shard each, see rollout.vllm_replica

    `load_weights` before the first `generate`. One `generate` at a time; `abort` and `load_weights` may come from other
    threads meanwhile. New weights take effect at the next token, and vLLM computes the keys and values of running
    sequences again with them (the native engine keeps those).

    A sample's tokens depend on its seed; vLLM does not promise the same bits in another batch.
    """

    def __init__(
        self,
        config: ModelConfig,
        rollout: RolloutSection,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        longest: int = 0,
        tensor_ranks: int = 1,
    ) -> None:
        self.config, self.version = config, -1
        self._section = rollout
        self._longest = min(longest or config.max_positions, config.max_positions)
        self._asleep = self._complete = self._warned = False
        self._abort = threading.Event()
        self._step_lock = threading.RLock()
        self._serving = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._running: dict[int, _Sample] = {}
        self._engine = Start(config, rollout, self._longest, dtype, tensor_ranks).engine()
        self._sampler = self._engine.collective_rpc(use_trainers_sampler)[0]
        self._adapter = None if config.lora is None else VllmAdapter(self._engine, config)
        table, shapes = table_for(replace(config, lora=None)), self._shapes()
        self._weights = self._engine.apply_model(lambda model: InPlace(model, table, shapes, ON_CPU))[0]

    @property
    def _asked(self) -> Any:
        """The adapter that samples are made with; None: without."""
        return None if self._adapter is None else self._adapter.request

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of our parameters as they come here, by name."""
        return {spec.name: spec.shape for spec in table_for(replace(self.config, lora=None)).stored()}

    # --- weights and memory ------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy our named parameters in place and start `version`; everything in the KV cache is forgotten.

        MissingWeight names a parameter that did not come, or that the model does not have; ShapeMismatch both shapes.
        After such an error the engine refuses to generate until a complete set has come. VersionMismatch when vLLM does
        not say the new version afterwards.
        """
        with self._step_lock:
            self._complete = False
            self._weights.load(weights if self._adapter is None else self._adapter.aside(weights))
            if self._adapter is not None:
                self._adapter.take()
            self._begin(version)

    def load_adapters(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As `load_weights`, of the adapters alone: the base stays. RolloutError before a base has come."""
        if self._adapter is None or not self._complete:
            raise RolloutError("adapters without a complete set of weights", "call load_weights first")
        with self._step_lock:
            self._complete = False
            self._adapter.take(weights)
            self._begin(version)

    def _begin(self, version: int) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(str(version))
        if (told := self._engine.get_weight_version()) != str(version):
            raise VersionMismatch(f"after an update to version {version}, vLLM says that it holds {told}")
        self.version, self._complete = version, True

    def sleep(self) -> None:
        """Weights to host memory and the KV cache freed, where vLLM can. RolloutError while generating."""
        if not self._serving.acquire(blocking=False):
            raise RolloutError("sleep while generating", "abort first, or wait for generate to return")
        try:
            if SLEEPS and not self._asleep:
                self._engine.sleep(level=1)
            elif not self._asleep and not self._warned:
                log.warning("vLLM has no sleep on this platform: its weights and KV cache stay in memory")
                self._warned = True
            self._asleep = True
        finally:
            self._serving.release()

    def wake(self) -> None:
        """Ready to generate again."""
        if SLEEPS and self._asleep:
            self._engine.wake_up()
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

    def serve(self, queue: WorkQueue) -> None:
        """Generate what the queue hands out until it is empty; several engines may share one."""
        if not self._serving.acquire(blocking=False):
            raise RolloutError("generate while generating", "one call at a time: give the engine all requests at once")
        try:
            settle_threads()
            self._abort.clear()
            self._check(queue)
            deadline = time.monotonic() + self._section.sample_deadline_s
            while (said := self._signal(deadline)) == GO_ON and self._iterate(queue):
                pass
            if said == ABORT:
                with self._step_lock:
                    self._end_all(queue)
            elif said == LATE:
                too_late(queue, self._section.sample_deadline_s)
        finally:
            with self._step_lock:
                self._forget()
            self._serving.release()

    def _signal(self, deadline: float) -> int:
        """Before each step: whether it is made."""
        return ABORT if self._abort.is_set() else LATE if time.monotonic() > deadline else GO_ON

    def prompt_logprobs(self, ids: Sequence[int], temperature: float) -> list[float]:
        """Of each token, at the temperature, given those before it; of the first 0. Nothing may generate meanwhile."""
        params = PARAMS(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompt: Any = {"type": "token", "prompt_token_ids": list(ids)}
        with self._step_lock:
            self._sampler.of_prompts = temperature
            settle_threads()
            try:
                self._engine.add_request("probe", prompt, params, lora_request=self._asked)
                found: list[Any] = []
                while self._engine.has_unfinished_requests():
                    found += self._engine.step()
            finally:
                self._sampler.of_prompts = 0.0
        return [0.0, *(at[token].logprob for at, token in zip(found[-1].prompt_logprobs[1:], ids[1:], strict=True))]

    def take_metrics(self) -> dict[str, tuple[float, float]]:
        """(sum, count) of what was done since the last call, under the names of obs/names.py."""
        counts, self._counts = self._counts, Counter()
        found = {f"rollout/{name}": (float(counts[name]), 1.0) for name in COUNTED}
        return {**found, "rollout/batch_size": (float(counts["rows"]), float(max(1, counts["decode_steps"])))}

    def _check(self, queue: WorkQueue) -> None:
        if self._asleep:
            raise RolloutError("generate while asleep", "call wake first")
        if not self._complete:
            raise RolloutError("generate without a complete set of weights", "call load_weights first")
        check_requests(queue.requests, self.config)
        for request in queue.requests:
            asked = len(request.prompt) + request.sampling.max_tokens
            if asked > self._longest:
                raise RolloutError(
                    f"request {request.request_id}: {asked} tokens, vLLM was started for {self._longest}",
                    "raise data.max_prompt_tokens or rollout.max_response_tokens",
                )

    def _iterate(self, queue: WorkQueue) -> bool:
        """Hand requests to vLLM, one step of it. -> whether there is more to do."""
        with self._step_lock:
            if not self._complete:
                raise RolloutError("an update of the weights failed while generating", "see its own error")
            room = self._section.max_batch - len(self._running)
            for index in without_empty(queue, queue.pull(room)) if room > 0 else ():
                self._add(index, queue.requests[index])
            if self._running:
                self._step(queue)
            return bool(self._running or not queue.empty)

    def _add(self, index: int, request: Request) -> None:
        s = request.sampling
        params = PARAMS(
            max_tokens=s.max_tokens,
            min_tokens=min(s.min_tokens, s.max_tokens),
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            seed=seed_of(request),
            stop_token_ids=list(s.stop_ids),
            ignore_eos=True,  # what ends a sample is said by stop_ids
            detokenize=False,
            logprobs=0,
            output_kind=DELTA,
        )
        self._running[index] = _Sample()
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt)}
        self._engine.add_request(str(index), prompt, params, lora_request=self._asked)

    def _step(self, queue: WorkQueue) -> None:
        outputs: list[Any] = self._engine.step()
        made = 0
        for output in outputs:
            index, new = int(output.request_id), output.outputs[0]
            sample, request = self._running[index], queue.requests[index]
            ids = list(new.token_ids)
            if not sample.token_ids and ids:
                self._counts["prefill_tokens"] += len(request.prompt) - (output.num_cached_tokens or 0)
            sample.token_ids += ids
            sample.logprobs += [at[token].logprob for at, token in zip(new.logprobs or (), ids, strict=True)]
            sample.versions += [self.version] * len(ids)
            made += len(ids)
            if not all(map(math.isfinite, sample.logprobs[-len(ids) :])):
                raise NonFinite(f"request {request.request_id}: a log-probability is not finite", "look at the weights")
            if output.finished:
                stopped = bool(sample.token_ids) and sample.token_ids[-1] in request.sampling.stop_ids
                finish = FINISH_STOP if stopped else FINISH_LENGTH
                queue.finish(index, self._running.pop(index).generation(finish, request.request_id))
        self._counts["decode_tokens"] += made
        self._counts["rows"] += made
        self._counts["decode_steps"] += 1

    def _end_all(self, queue: WorkQueue) -> None:
        """Abort: running samples keep what they have, the others have nothing."""
        samples = dict(self._running)
        self._forget()
        while found := queue.pull(1 << 30):
            samples |= {index: _Sample() for index in found}
        for index, sample in samples.items():
            queue.finish(index, sample.generation(FINISH_ABORT, queue.requests[index].request_id))
        self._counts["aborted"] += len(samples)

    def _forget(self) -> None:
        """Nothing runs in vLLM any more."""
        if self._running:
            self._engine.abort_request([str(index) for index in self._running])
            self._running = {}


def settle_threads() -> None:
    """Before vLLM computes on a thread for the first time: torch gives a thread its number of OpenMP threads when it
    first asks. In the middle of a step, vLLM's attention would find another number than it has planned for, and abort.
    """
    torch.get_num_threads()


def seed_of(request: Request) -> int:
    """vLLM's seed of a sample: a hash of 32 bits, since torch's generator on CPU looks at the low 32 bits alone. A
    sample that goes on after `drawn` tokens gets a stream of its own.
    """
    return sample_seed(request.seed, request.drawn, 0, 0) & 0xFFFF_FFFF
