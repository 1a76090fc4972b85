"""One process, one thread: a training step against transformers, sampled log-probs against their plain form.

    python bench/train_step.py [--quick] [--case step|logprob|both] [--dtype float32|bfloat16] [--rounds N]

step     Forward and backward of the sum of all log-probs of a ragged batch (lengths from a lognormal distribution; no
         prompt is shared), random weights of the 135M model's shape. Peers are transformers (its sdpa attention) on the
         same pack (one row, position ids that start anew, which it masks) and on the batch right-padded to its longest
         row. Tokens are useful ones. Ours computes through the train engine's own parts: PrefixAttention and
         sampled_logprob.
logprob  Forward and backward of log p(sampled token) for T states and V words, each side in a process of its own: the
         resident high-water mark above what inputs and gradients take, and the time. The peer is float32 logits,
         log_softmax and gather. `vs_eighth_of_logits` sets our peak against T x V x 4 bytes / 8.

float32 is the default of train.dtype. In bfloat16 both sides hold 16-bit weights, as the train engine does beside its
fp32 masters: no side casts a weight, and autocast's overhead is nobody's. cpu_s are the process's CPU seconds, which
other load on the machine changes less than the time. Rounds are interleaved; figures are medians, the spread is the
quartiles of the ratios. JSON lines on the output.
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
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

DEADLINE_S = 1800.0
MIB = 1 << 20


def line(case: str, metric: str, ours: list[float], peer: list[float], tokens: int = 0) -> None:
    """Print one comparison of seconds (or bytes); with `tokens` as a rate."""
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    mine, other = (tokens / x if tokens else x for x in (statistics.median(ours), statistics.median(peer)))
    found = {
        "bench": f"train_step/{case}", "metric": metric, "ours": round(mine, 3), "peer": round(other, 3),
        "ratio": round(mine / other if tokens else other / mine, 3), "n": len(ours),
        "spread": [round(x, 3) for x in quartiles],
    }  # fmt: skip
    print(json.dumps(found), flush=True)


# --- step ---------------------------------------------------------------------------------------------------------


def ragged(tokens: int, vocabulary: int) -> list[Any]:
    """Rows of random ids: lengths of mean about 100, at most 512, about `tokens` in all."""
    import torch

    draw, rows, total = np.random.default_rng(0), [], 0
    while total < tokens:
        length = int(np.clip(draw.lognormal(np.log(100) - 0.32, 0.8), 8, min(512, max(8, tokens - total + 8))))
        rows.append(torch.from_numpy(draw.integers(0, vocabulary, length)))
        total += length
    return rows


def our_step(model: Any, rows: list[Any]) -> Callable[[], float]:
    """-> a function that runs once and returns the loss."""
    import torch

    from docklands import kernels
    from docklands.kernels.prefix_attention import PrefixAttention

    ids = torch.cat(rows)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    last = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
    source = torch.ones(len(ids), dtype=torch.bool).index_fill(0, last, False).nonzero().flatten()

    def once() -> float:
        attend = PrefixAttention([(0, [len(row) for row in rows])])
        hidden = model(ids, positions, attend)
        logprobs = kernels.sampled_logprob(hidden[source], model.head_weight, ids[source + 1])
        assert isinstance(logprobs, torch.Tensor)
        loss = logprobs.sum()
        loss.backward()
        return float(loss.detach())

    return once


def their_step(model: Any, rows: list[Any], padded: bool) -> Callable[[], float]:
    """transformers: one packed row, or a padded batch."""
    import torch

    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if padded else torch.cat(rows)[None]
    real = [torch.arange(1, len(row)) for row in rows]
    if padded:
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        inputs, where = {"attention_mask": mask}, torch.cat([i * ids.shape[1] + at for i, at in enumerate(real)])
    else:
        starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
        inputs = {"position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None]}
        where = torch.cat([start + at for start, at in zip(starts, real)])
    targets = ids.flatten()[where]

    def once() -> float:
        logits = model(input_ids=ids, use_cache=False, **inputs).logits.flatten(0, 1)[where - 1]
        loss = logits.float().log_softmax(-1).gather(1, targets[:, None]).sum()
        loss.backward()
        return float(loss.detach())

    return once


def run_step(dtype: str, layers: int, tokens: int, rounds: int, peers: tuple[str, ...] = ("packed", "padded")) -> None:
    """All sides take turns; their losses must agree."""
    import torch
    from transformers import AutoModelForCausalLM

    from docklands import models
    from docklands.models import ModelConfig

    sizes = (49152, 576, layers, 9, 3, 64, 1536)  # V, D, L, N, K, H, F
    model = models.build(ModelConfig("LlamaForCausalLM", *sizes, tie_embeddings=True), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        models.export(model, Path(folder) / "model")
        peer: Any = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32).train()
    if dtype == "bfloat16":
        model.bfloat16()
        peer.bfloat16()
    rows = ragged(tokens, sizes[0])
    sides = {"ours": (model, our_step(model, rows))}
    sides |= {name: (peer, their_step(peer, rows, name == "padded")) for name in peers}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        losses = {}
        for name, (owner, once) in sides.items():
            owner.zero_grad(set_to_none=True)
            began, used = time.perf_counter(), time.process_time()
            losses[name] = once()
            if number:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
        worst = max(abs(loss / losses["ours"] - 1) for loss in losses.values())
        if worst > (1e-4 if dtype == "float32" else 2e-2):
            raise SystemExit(f"the sides do not compute the same: {losses}")
    useful = sum(map(len, rows))
    for name in peers:
        line(f"{dtype}/{name}", "tokens_per_s", wall["ours"], wall[name], useful)
        line(f"{dtype}/{name}", "cpu_s", cpu["ours"], cpu[name])


# --- logprob ------------------------------------------------------------------------------------------------------


def high_water() -> int:
    """Bytes: the most that this process was resident."""
    for text in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if text.startswith("VmHWM"):
            return int(text.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status: this bench needs Linux")


def child(side: str, sizes: list[int], dtype: str) -> None:
    """One side: sizes T, V, D. Prints [bytes above inputs and gradients, seconds, CPU seconds, sum of log-probs]."""
    import torch

    from docklands import kernels

    torch.set_num_threads(1)
    tokens, vocabulary, size = sizes
    draw = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(tokens, size, generator=draw).to(kind).requires_grad_()
    weight = torch.empty(vocabulary, size).normal_(0, size**-0.5, generator=draw).to(kind).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)

    def once(states: Any, words: Any, wanted: Any) -> Any:
        if side == "ours":
            found = kernels.sampled_logprob(states, words, wanted)
            assert isinstance(found, torch.Tensor)
        else:
            found = (states @ words.t()).float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        found.sum().backward()
        return found

    once(hidden[:8], weight[:64], targets[:8] % 64)  # libraries are loaded, threads started
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the mark starts from here
    before, began, used = high_water(), time.perf_counter(), time.process_time()
    found = once(hidden, weight, targets)
    seconds = [time.perf_counter() - began, time.process_time() - used]
    gradients = sum(x.grad.numel() * x.grad.itemsize for x in (hidden, weight) if x.grad is not None)
    print(json.dumps([high_water() - before - gradients, *seconds, float(found.detach().sum())]))


def run_logprob(dtype: str, sizes: list[int], rounds: int) -> None:
    """Both sides take turns, each round in a process of its own."""
    found: dict[str, list[list[float]]] = {"ours": [], "plain": []}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(rounds):
        for side, results in found.items():
            command = [sys.executable, __file__, "--child", side, "--dtype", dtype, "--sizes", *map(str, sizes)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
            if done.returncode:
                raise SystemExit(f"the {side} side ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
            results.append(json.loads(done.stdout.splitlines()[-1]))
    for ours, plain in zip(found["ours"], found["plain"]):
        if abs(ours[3] / plain[3] - 1) > (1e-4 if dtype == "float32" else 2e-2):
            raise SystemExit(f"the sides do not compute the same: {ours[3]} and {plain[3]}")
    case = f"logprob/{dtype}/T{sizes[0]}_V{sizes[1]}_D{sizes[2]}"
    peaks, seconds, used = ([[row[i] for row in found[side]] for side in ("ours", "plain")] for i in range(3))
    ours, plain = ([max(x, 4096.0) / MIB for x in side] for side in peaks)
    line(case, "peak_extra_mib", ours, plain)
    line(case, "peak_extra_mib_vs_eighth_of_logits", ours, [sizes[0] * sizes[1] * 4 / 8 / MIB] * rounds)
    line(case, "step_s", seconds[0], seconds[1])
    line(case, "cpu_s", used[0], used[1])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few layers, tokens and words, two rounds")
    parser.add_argument("--case", choices=["step", "logprob", "both"], default="both")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=["ours", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs=3, default=[4096, 150_000, 256], help="T, V, D of logprob")
    asked = parser.parse_args()
    if min(asked.sizes) < 1 or asked.rounds < 1:
        parser.error("--sizes and --rounds are whole numbers from 1")
    if asked.child:
        child(asked.child, asked.sizes, asked.dtype)
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(1)
    rounds = 2 if asked.quick else asked.rounds
    if asked.case in ("step", "both"):
        run_step(asked.dtype, *((2, 400) if asked.quick else (30, 2048)), rounds)
    if asked.case in ("logprob", "both"):
        run_logprob(asked.dtype, [1024, 32_000, 128] if asked.quick else asked.sizes, rounds)


if __name__ == "__main__":
    main()
