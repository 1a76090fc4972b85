"""Native generation against transformers.generate, and vLLM on CPU where DOCKLANDS_VLLM_PYTHON names its interpreter.

    python bench/generate.py [--quick] [--model tiny|135m|both] [--peer transformers|vllm|both] [--prompt N]
        [--threads N] [--rounds N]

Work: prompts x 8 samples, 64 sequences at once, response lengths drawn from a lognormal distribution (mean about 48, at
most 256) and forced by min_tokens = max_tokens. Random weights of the real shapes; temperature 1. Only useful tokens
count: transformers generates one left-padded batch of 64 to its longest response, which is how it is used. Ours also
records log-probabilities and keeps every sample reproducible; the peers do not have to. Prompts have 20 to 40 tokens or
`--prompt` tokens each. Every engine computes them anew in each round, as after an update of the weights: vLLM's prefix
cache is emptied before. vLLM gets a seed for each sample, but for long prompts, where its CPU build then fails.

Rounds are interleaved (ours, peer, ours, peer, ...), figures are medians, the spread is the middle half of the ratios
of single rounds. Each pair is given in wall time and in CPU time, which other jobs on the machine disturb less. Threads
that wait spin briefly, as the `docklands` command sets it, on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

SAMPLES, BATCH, LONGEST = 8, 64, 256

VLLM = """
import json, os, sys, time
import torch
torch.cpu._init_amx()
from vllm import LLM, SamplingParams
work = json.load(open(sys.argv[1]))
llm = LLM(work["path"], dtype=work["dtype"], skip_tokenizer_init=True, max_num_seqs=work["batch"],
          max_model_len=work["longest"], kv_cache_memory_bytes=1 << 30, enforce_eager=work["eager"])
prompts = [{"prompt_token_ids": p} for p in work["prompts"]]
params = [SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False,
                         seed=i if work["seeded"] else None)
          for i, n in enumerate(work["lengths"])]
print("ready", flush=True)
for _ in sys.stdin:
    llm.reset_prefix_cache()
    began = time.perf_counter(), time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    print(time.perf_counter() - began[0], time.process_time() - began[1], flush=True)
"""


Spent = tuple[float, float]  # seconds of wall time, of CPU time


def spent_since(began: Spent) -> Spent:
    """What has passed."""
    return time.perf_counter() - began[0], time.process_time() - began[1]


@dataclass(frozen=True)
class Work:
    """Prompts (one per sample, equal within a group) and forced lengths."""

    name: str
    dtype: str
    prompts: list[tuple[int, ...]]
    lengths: list[int]
    config: Any
    model: Any


def make_work(name: str, groups: int, prompt: int = 0) -> Work:
    """The model and its requests, the same numbers every time. prompt: tokens of each; 0: 20 to 40."""
    import torch

    from docklands import models
    from docklands.models import ModelConfig

    if name == "tiny":
        dtype, sizes = "float32", (64, 128, 3, 4, 2, 32, 512)  # V, D, L, N, K, H, F
        config = ModelConfig("Qwen2ForCausalLM", *sizes, qkv_bias=True)
    else:
        dtype, sizes = "bfloat16", (49152, 576, 30, 9, 3, 64, 1536)
        config = ModelConfig("LlamaForCausalLM", *sizes, tie_embeddings=True)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, 64, prompt or rng.integers(20, 41)).tolist()) for _ in range(groups)]
    drawn = rng.lognormal(np.log(48) - 0.32, 0.8, groups * SAMPLES)
    lengths = np.clip(drawn.round(), 2, LONGEST).astype(int).tolist()
    model = models.build(config, dtype=getattr(torch, dtype), seed=0)
    return Work(name, dtype, [p for p in prompts for _ in range(SAMPLES)], lengths, config, model)


def native(work: Work) -> Callable[[], Spent]:
    """-> a function that generates everything once and returns what it took."""
    import torch

    from docklands.config.schema import RolloutSection
    from docklands.core.protocols import Request, Sampling
    from docklands.rollout import NativeEngine, sample_seed

    section = RolloutSection(max_batch=BATCH, max_response_tokens=LONGEST, kv_block_tokens=32)
    engine = NativeEngine(work.config, section, dtype=getattr(torch, work.dtype))
    engine.load_weights(work.model.named_parameters(), 0)
    requests = [
        Request(p, Sampling(n, min_tokens=n), sample_seed(0, 0, i // SAMPLES, i % SAMPLES), i)
        for i, (p, n) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]

    def once() -> Spent:
        began = time.perf_counter(), time.process_time()
        found = engine.generate(requests)
        spent = spent_since(began)
        assert [len(g.token_ids) for g in found] == work.lengths
        return spent

    once()  # warm
    return once


def transformers_peer(work: Work, path: Path) -> Callable[[], Spent]:
    """Batches of 64 in order, left-padded, cached, each to its longest response."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, work.dtype)).eval()

    def once(most: int = LONGEST) -> Spent:
        began = time.perf_counter(), time.process_time()
        for start in range(0, len(work.prompts), BATCH):
            prompts = work.prompts[start : start + BATCH]
            width, longest = max(map(len, prompts)), min(most, max(work.lengths[start : start + BATCH]))
            ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=True,
                    temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, use_cache=True,
                )  # fmt: skip
            assert out.shape[1] == width + longest
        return spent_since(began)

    once(8)  # warm
    return once


def vllm_peer(work: Work, path: Path, threads: int, seeded: bool) -> tuple[Callable[[], Spent], subprocess.Popen[str]]:
    """A process of the other environment; it generates everything once per line that it reads."""
    spec = {
        "path": str(path), "dtype": work.dtype, "batch": BATCH, "prompts": work.prompts, "lengths": work.lengths,
        "eager": work.name == "tiny", "longest": max(map(len, work.prompts)) + LONGEST + 1,
        "seeded": seeded,
    }  # fmt: skip
    file = path / "work.json"
    file.write_text(json.dumps(spec))
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    command = [os.environ["DOCKLANDS_VLLM_PYTHON"], "-c", VLLM, str(file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def answer() -> list[str]:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            if words == ["ready"] or len(words) == 2 and all(word.replace(".", "", 1).isdigit() for word in words):
                return words
        raise SystemExit("vLLM ended without an answer; its error is above")

    def once() -> Spent:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        wall, cpu = map(float, answer())
        return wall, cpu

    answer()
    once()  # warm
    return once, process


def compare(work: Work, peer: str, ours: Callable[[], Spent], theirs: Callable[[], Spent], rounds: int) -> None:
    """Run A B A B (both are warm), print a JSON line for wall time and one for CPU time."""
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    rows = [(ours(), theirs()) for _ in range(rounds)]
    for i, clock in enumerate(("useful", "cpu_time_useful")):
        ratios = [other[i] / mine[i] for mine, other in rows]
        a, b = (sum(work.lengths) / statistics.median(row[side][i] for row in rows) for side in (0, 1))
        line = {
            "bench": f"generate/{work.name}", "metric": f"vs_{peer}_{dtype}_{clock}_tokens_per_s", "ours": round(a, 1),
            "peer": round(b, 1), "ratio": round(a / b, 3), "n": rounds,
            "spread": [round(x, 3) for x in (statistics.quantiles(ratios, n=4)[::2] if rounds > 1 else ratios * 2)],
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, one round")
    parser.add_argument("--model", choices=["tiny", "135m", "both"], default="both")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of every prompt; 0: 20 to 40")
    parser.add_argument("--unseeded", action="store_true", help="vLLM without a seed for each sample; so with --prompt")
    parser.add_argument("--peer", choices=["transformers", "vllm", "both"], default="both")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core, for every engine")
    parser.add_argument("--rounds", type=int, default=0, help="default: 3, with --quick 1")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    import torch

    from docklands import models

    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    for name in ("tiny", "135m") if args.model == "both" else (args.model,):
        groups = {"tiny": (8, 32), "135m": (8, 16)}[name][not args.quick]
        rounds = args.rounds or (1 if args.quick else 3)
        work = make_work(name, groups, args.prompt)
        ours = native(work)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            models.export(work.model, path)
            if args.peer != "vllm":
                compare(work, "transformers", ours, transformers_peer(work, path), rounds)
            if args.peer != "transformers" and os.environ.get("DOCKLANDS_VLLM_PYTHON"):
                once, process = vllm_peer(work, path, threads, not (args.unseeded or args.prompt))
                try:
                    compare(work, "vllm_cpu", ours, once, rounds)
                finally:
                    process.terminate()
                    process.wait(60)


if __name__ == "__main__":
    main()
