"""vLLM as the generation engine, in this process: the contract of rollout.native on vLLM's scheduler and kernels.

The only module that imports vLLM. Engine and model are driven step by step on the caller's thread, so that new weights
may come between two steps and every token says which version made it.

Legend: R rows of a step, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights need no copy between processes
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer computes on the same cores
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it reports its use to its authors unless told not to

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.sampler import Sampler

from docklands.config.schema import RolloutSection
from docklands.core.fields import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from docklands.core.protocols import Generation, Request
from docklands.errors import ConfigError, NonFinite, RolloutError, VersionMismatch
from docklands.models import ModelConfig
from docklands.models.params import table_for
from docklands.rollout.capacity import MEMORY_FRACTION, check_requests, free_memory
from docklands.rollout.native import too_late, without_empty
from docklands.rollout.queue import WorkQueue
from docklands.rollout.sampling import sample_seed
from docklands.rollout.vllm_weights import InPlace

log = logging.getLogger("docklands.rollout")
PAGE = 128
"""Tokens of a page of vLLM's KV cache on CPU, its largest default: what the cache is sized with."""
COUNTED = ("prefill_tokens", "decode_tokens", "decode_steps", "aborted")


class TrainersSampler(Sampler):
    """vLLM's sampler, reporting log-probabilities at the temperature that the trainer divides its logits by."""

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        found = sampling_metadata.temperature  # [R]; None: all rows are greedy
        self._scale_R1 = None if found is None else torch.where(found < 1e-5, 1.0, found)[:, None]
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # type: ignore[override]
        logits_RV = logits.float()
        return (logits_RV if self._scale_R1 is None else logits_RV / self._scale_R1).log_softmax(-1)


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

    longest  tokens of the longest prompt with its response; 0: the model's positions

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
    ) -> None:
        self.config, self.version = config, -1
        self._section = rollout
        self._longest = min(longest or config.max_positions, config.max_positions)
        self._asleep = self._complete = False
        self._abort = threading.Event()
        self._step_lock = threading.RLock()
        self._serving = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._running: dict[int, _Sample] = {}
        self._sleeps = bool(current_platform.is_sleep_mode_available())
        self._on_cpu = bool(current_platform.is_cpu())
        if self._on_cpu:
            _check_head(config)
        self._engine = self._start(dtype)
        self._engine.collective_rpc(_use_trainers_sampler)
        self._weights = self._engine.apply_model(lambda model: InPlace(model, table_for(config), self._on_cpu))[0]

    def _start(self, dtype: torch.dtype) -> LLMEngine:
        """An engine with random weights: vLLM reads the shape from a directory that holds a config.json alone."""
        pages = cache_pages(self.config, self._section, self._longest, dtype)
        with tempfile.TemporaryDirectory() as folder, _untouched():
            (Path(folder) / "config.json").write_text(json.dumps(self.config.to_hf()))
            args = EngineArgs(
                model=folder,
                dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                max_model_len=self._longest,
                max_num_seqs=self._section.max_batch,
                kv_cache_memory_bytes=pages * PAGE * self.config.kv_bytes_per_token * dtype.itemsize,
                enable_prefix_caching=True,
                enable_sleep_mode=self._sleeps,
                enforce_eager=self._on_cpu,  # compiling takes minutes there, and the packed matrices change
                async_scheduling=False,  # a token's version is the one that its step began with
                disable_log_stats=True,
            )
            try:
                return LLMEngine.from_engine_args(args)
            except Exception as error:  # vLLM refuses a model or a machine with errors of many kinds
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise ConfigError(
                    f"vLLM does not start with this model: {lines[0]}", "rollout.engine: native"
                ) from error

    # --- weights and memory ------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy our named parameters in place and start `version`; everything in the KV cache is forgotten.

        MissingWeight names a parameter that did not come, or that the model does not have; ShapeMismatch both shapes.
        After such an error the engine refuses to generate until a complete set has come. VersionMismatch when vLLM does
        not say the new version afterwards.
        """
        with self._step_lock:
            self._complete = False
            self._weights.load(weights)
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
            if self._sleeps and not self._asleep:
                self._engine.sleep(level=1)
            elif not self._asleep:
                log.warning("vLLM has no sleep on this platform: its weights and KV cache stay in memory")
            self._asleep = True
        finally:
            self._serving.release()

    def wake(self) -> None:
        """Ready to generate again."""
        if self._sleeps and self._asleep:
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
            self._abort.clear()
            self._check(queue)
            deadline = time.monotonic() + self._section.sample_deadline_s
            while self._iterate(queue):
                if time.monotonic() > deadline:
                    too_late(queue, self._section.sample_deadline_s)
        finally:
            with self._step_lock:
                self._forget()
            self._serving.release()

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
            if self._abort.is_set():
                self._end_all(queue)
                return False
            room = self._section.max_batch - len(self._running)
            for index in without_empty(queue, queue.pull(room)) if room > 0 else ():
                self._add(index, queue.requests[index])
            if self._running:
                self._step(queue)
            return bool(self._running or not queue.empty)

    def _add(self, index: int, request: Request) -> None:
        s = request.sampling
        params = SamplingParams(
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
            output_kind=RequestOutputKind.DELTA,
        )
        self._running[index] = _Sample()
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt)}
        self._engine.add_request(str(index), prompt, params)

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


def _check_head(config: ModelConfig) -> None:
    """ConfigError when vLLM's CPU kernels lack the size of the heads; vLLM itself would start all the same."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if config.head_dim not in sizes:
        raise ConfigError(
            f"attention heads of {config.head_dim}: vLLM on CPU has {', '.join(map(str, sizes))}",
            "rollout.engine: native",
        )


def seed_of(request: Request) -> int:
    """vLLM's seed of a sample: a hash of 32 bits, since torch's generator on CPU looks at the low 32 bits alone. A
    sample that goes on after `drawn` tokens gets a stream of its own.
    """
    return sample_seed(request.seed, request.drawn, 0, 0) & 0xFFFF_FFFF


def cache_pages(config: ModelConfig, section: RolloutSection, longest: int, dtype: torch.dtype) -> int:
    """Pages of vLLM's KV cache: as configured, or what max_batch of the longest samples need, within half of the free
    memory; at least what one sample needs.
    """
    one = -(-longest // PAGE) + 1  # vLLM keeps a page for itself
    if section.kv_cache_tokens:
        return max(one, section.kv_cache_tokens // PAGE + 1)
    room = int(MEMORY_FRACTION * free_memory()) // (config.kv_bytes_per_token * dtype.itemsize * PAGE)
    return max(one, min(section.max_batch * one, room))


@contextmanager
def _untouched() -> Iterator[None]:
    """vLLM seeds every generator of the process and takes torch.set_num_threads away: both are the trainer's too.

    It also looks at every value of every module for kernels to replace, and stumbles over one of llvmlite (under numba)
    that has no real __dict__: that module is out of its sight meanwhile.
    """
    hidden = {name: sys.modules.pop(name) for name in ("llvmlite.binding.ffi",) if name in sys.modules}
    states, threads, set_threads = torch.get_rng_state(), torch.get_num_threads(), torch.set_num_threads
    others = random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that look, too, at old names of torch
            yield
    finally:
        sys.modules.update(hidden)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(states)
        random.setstate(others[0])
        np.random.set_state(others[1])


def _use_trainers_sampler(worker: Any) -> None:
    """In a worker of vLLM."""
    runner = worker.model_runner
    runner.sampler = TrainersSampler(runner.sampler.logprobs_mode)
