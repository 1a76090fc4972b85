"""Log-probs of sampled tokens from hidden states, without [T, V] logits: memory and time against the plain form.

    python bench/logprob.py [--quick] [--dtype float32|bfloat16] [--sizes T V D] [--rounds N]

Forward and backward of log p(sampled token) for T states of D numbers and V words, each side in a process of its own,
one thread: the resident high-water mark above what inputs and gradients take, and the time. The peer is float32 logits,
log_softmax and gather. `vs_eighth_of_logits` sets our peak against T x V x 4 bytes / 8.

Ours makes four products of T x V x D, the plain form three: it has no logits to go back to. What it saves does not
depend on D, so its time relative to the plain form grows with D, to 4/3 in the end. Rounds are interleaved; figures are
medians, the spread is the quartiles of the ratios. JSON lines on the output. The default takes two to three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from train_step import line

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

DEADLINE_S = 1800.0
MIB = 1 << 20


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
    parser.add_argument("--quick", action="store_true", help="few tokens and words, two rounds")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs=3, default=[4096, 150_000, 256], help="T, V, D")
    parser.add_argument("--child", choices=["ours", "plain"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if min(asked.sizes) < 1 or asked.rounds < 1:
        parser.error("--sizes and --rounds are whole numbers from 1")
    if asked.child:
        child(asked.child, asked.sizes, asked.dtype)
        return
    run_logprob(asked.dtype, [1024, 32_000, 128] if asked.quick else asked.sizes, 2 if asked.quick else asked.rounds)


if __name__ == "__main__":
    main()
