"""How a vLLM engine starts in this process: the only module that imports vLLM.

Legend: R rows of a step, V vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine as LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.sampler import Sampler

from docklands.config.schema import RolloutSection
from docklands.errors import ConfigError
from docklands.models import ModelConfig
from docklands.rollout.capacity import MEMORY_FRACTION, free_memory
from docklands.rollout.vllm_lora import engine_arguments

PAGE = 128
"""Tokens of a page of vLLM's KV cache on CPU, its largest default: what the cache is sized with."""
PARAMS: Any = SamplingParams
DELTA: Any = RequestOutputKind.DELTA
"""Outputs tell what is new since the last."""
ON_CPU = bool(current_platform.is_cpu())
SLEEPS = bool(current_platform.is_sleep_mode_available())
LANE = "DOCKLANDS_VLLM_LANE"
"""Environment variable: a word that the ranks of a lane have in common, and no other lane of the machine."""


class TrainersSampler(Sampler):
    """vLLM's sampler, reporting log-probabilities at the temperature that the trainer divides its logits by.

    of_prompts  the temperature of prompts that are scored, which are no samples; 0: none is
    """

    of_prompts = 0.0

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        found = sampling_metadata.temperature  # [R]; None: all rows are greedy
        self._scale_R1 = None if found is None else torch.where(found < 1e-5, 1.0, found)[:, None]
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # type: ignore[override]
        logits_RV = logits.float()
        if self.of_prompts:
            return (logits_RV / self.of_prompts).log_softmax(-1)
        return (logits_RV if self._scale_R1 is None else logits_RV / self._scale_R1).log_softmax(-1)


def adapter_request(number: int, path: Path, instead: bool = False) -> LoRARequest:
    """What asks for the adapter of this number, in this directory; instead: of the one that has the number."""
    return LoRARequest("policy", number, str(path), load_inplace=instead)


class LaneExecutor(ExecutorWithExternalLauncher):
    """One worker in this process, of several that others have started; see rollout.vllm_replica."""

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return f"env://:{os.environ[LANE]}", rank, local_rank  # what is after the colon names shared memory


@dataclass(frozen=True)
class Start:
    """What an engine is made of.

    longest       tokens of the longest prompt with its response
    tensor_ranks  processes that hold a shard each
    """

    config: ModelConfig
    section: RolloutSection
    longest: int
    dtype: torch.dtype
    tensor_ranks: int = 1

    def engine(self) -> LLMEngine:
        """With random weights: vLLM reads the shape from a directory that holds a config.json alone. ConfigError."""
        if ON_CPU:
            _check_head(self.config)
        pages = cache_pages(self.config, self.section, self.longest, self.dtype)
        each = self.config.kv_bytes_per_token * self.dtype.itemsize // min(self.tensor_ranks, self.config.num_kv_heads)
        with tempfile.TemporaryDirectory() as folder, _untouched():
            (Path(folder) / "config.json").write_text(json.dumps(self.config.to_hf()))
            args = EngineArgs(
                model=folder,
                dtype=str(self.dtype).removeprefix("torch."),  # type: ignore[arg-type]
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                max_model_len=self.longest,
                max_num_seqs=self.section.max_batch,
                kv_cache_memory_bytes=pages * PAGE * each,
                enable_prefix_caching=True,
                enable_sleep_mode=SLEEPS,
                enforce_eager=ON_CPU,  # compiling takes minutes there, and the packed matrices change
                tensor_parallel_size=self.tensor_ranks,
                distributed_executor_backend=LaneExecutor if self.tensor_ranks > 1 else None,
                async_scheduling=False,  # a token's version is the one that its step began with
                disable_log_stats=True,
                **engine_arguments(self.config.lora),
            )
            try:
                return LLMEngine.from_engine_args(args)
            except Exception as error:  # vLLM refuses a model or a machine with errors of many kinds
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise ConfigError(
                    f"vLLM does not start with this model: {lines[0]}", "rollout.engine: native"
                ) from error


def _check_head(config: ModelConfig) -> None:
    """ConfigError when vLLM's CPU kernels lack the size of the heads; vLLM itself would start all the same."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if config.head_dim not in sizes:
        raise ConfigError(
            f"attention heads of {config.head_dim}: vLLM on CPU has {', '.join(map(str, sizes))}",
            "rollout.engine: native",
        )


def cache_pages(config: ModelConfig, section: RolloutSection, longest: int, dtype: torch.dtype) -> int:
    """Pages of vLLM's KV cache: as configured, or what max_batch of the longest samples need, within half of the free
    memory; at least what one sample needs.
    """
    one = -(-longest // PAGE) + 1  # vLLM keeps a page for itself
    if section.kv_cache_tokens:
        return max(one, section.kv_cache_tokens // PAGE + 1)
    free = free_memory(current_platform.device_type)
    room = int(MEMORY_FRACTION * free) // (config.kv_bytes_per_token * dtype.itemsize * PAGE)
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


def use_trainers_sampler(worker: Any) -> TrainersSampler:
    """In a worker of vLLM, which is this process."""
    runner = worker.model_runner
    runner.sampler = TrainersSampler(runner.sampler.logprobs_mode)
    return runner.sampler
