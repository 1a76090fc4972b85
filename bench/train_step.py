"""One process, one thread: a training step against transformers.

    python bench/train_step.py [--quick] [--peer packed|padded] [--dtype float32|bfloat16] [--tokens N] [--rounds N]

Forward and backward of the sum of all log-probs of a ragged batch (lengths from a lognormal distribution; no prompt is
shared), random weights of the 135M model's shape. The peer is transformers (its sdpa attention): on the same pack (one
row, position ids that start anew, which it masks), or on the batch right-padded to its longest row. Tokens are useful
ones. Ours computes through the train engine's own parts: PrefixAttention and sampled_logprob (alone: logprob.py).

float32 is the default of train.dtype. In bfloat16 both sides hold 16-bit weights, as the train engine does beside its
fp32 masters: no side casts a weight, and autocast's overhead is nobody's. cpu_s are the process's CPU seconds, which
other load on the machine changes less than the time. Rounds are interleaved, after a first one with two short rows;
figures are medians, the spread is the quartiles of the ratios. JSON lines on the output. 5 rounds take two to three
minutes: of about 1,000 tokens against the pack, of 500 against the padded batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

TOKENS = {"packed": 1024, "padded": 512}


def line(case: str, metric: str, ours: list[float], peer: list[float], tokens: int = 0) -> None:
    """Print one comparison of seconds (or bytes); with `tokens` as a rate."""
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    mine, other = (tokens / x if tokens else x for x in (statistics.median(ours), statistics.median(peer)))
    found = {
        "bench": case, "metric": metric, "ours": round(mine, 3), "peer": round(other, 3),
        "ratio": round(mine / other if tokens else other / mine, 3), "n": len(ours),
        "spread": [round(x, 3) for x in quartiles],
    }  # fmt: skip
    print(json.dumps(found), flush=True)


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

    def sides_of(rows: list[Any]) -> dict[str, tuple[Any, Callable[[], float]]]:
        ours = {"ours": (model, our_step(model, rows))}
        return ours | {name: (peer, their_step(peer, rows, name == "padded")) for name in peers}

    rows = ragged(tokens, sizes[0])
    short, whole = sides_of([row[:8] for row in rows[:2]]), sides_of(rows)
    wall: dict[str, list[float]] = {name: [] for name in whole}
    cpu: dict[str, list[float]] = {name: [] for name in whole}
    for number in range(rounds + 1):
        losses = {}
        for name, (owner, once) in (whole if number else short).items():
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
        line(f"train_step/{dtype}/{name}", "tokens_per_s", wall["ours"], wall[name], useful)
        line(f"train_step/{dtype}/{name}", "cpu_s", cpu["ours"], cpu[name])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers, fewer tokens, two rounds")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peer", choices=TOKENS, default="packed")
    parser.add_argument("--tokens", type=int, default=0, help="about so many useful ones; 0: 1,024, or 512 with padded")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    tokens = asked.tokens or TOKENS[asked.peer]
    if tokens < 16 or asked.rounds < 1:
        parser.error("--tokens is a whole number from 16, --rounds from 1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(1)
    if asked.quick:
        run_step(asked.dtype, 2, 400, 2)
    else:
        run_step(asked.dtype, 30, tokens, asked.rounds, (asked.peer,))


if __name__ == "__main__":
    main()
