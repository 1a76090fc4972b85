#!/usr/bin/env python
"""Training state that waits elsewhere while its device generates: what comes free, and what its return costs a step.

A model of 1 GB of fp32 weights in the train engine, one process on a CPU, the lower tier a file in TMPDIR.

swap/resident  resident memory with weights, gradients and optimizer state on the device (peer), and when all of it is
               away (ours), both above what the process had before the model was made
swap/step      seconds (and CPU seconds) of a step from the end of generation on: old log-probs, then the update. Ours:
               state is away at the start; prefetch begins, log-probs wait for weights, the update for moments. Peers:
               `free`, where nothing was ever away; `waiting`, where all of it is brought back first, without overlap
swap/prefetch  seconds that stages waited (ours) of those that the prefetch took (peer), out of the span file

Sides take turns, after a step and a swap that are left out. The last lines are JSON, medians: ratio = peer / ours,
`spread` the quartiles of the rounds' ratios; against `free` the best there can be is 1, and 0.91 is a step 10 % longer.
Takes under 3 minutes on two free cores, and 6 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).parent)]

from reshard_parts.timeline import draw  # noqa: E402

SIDES = ("free", "overlapped", "waiting")
KINDS = ("weights", "optimizer", "gradients")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 60 MB, two rounds")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds (default 3)")
    parser.add_argument("--tokens", type=int, default=0, help="of a step (default 512)")
    parser.add_argument("--folder", default="", help="of the lower tier's file, on a disk (default TMPDIR)")
    parser.add_argument("--timeline", default="", help="SVG file to write: resident memory over one step")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.tokens) < 0:
        parser.error("--rounds and --tokens are not negative")
    return options


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


class Step:
    """The engine, a batch, and a step of each side."""

    def __init__(self, quick: bool, tokens: int, folder: Path) -> None:
        import torch

        from docklands import models
        from docklands.config.schema import OptimSection, TrainSection
        from docklands.core.batch import Batch
        from docklands.core.fields import LOSS_MASK, TOKEN_IDS
        from docklands.core.loss import LossResult
        from docklands.core.stage import Learner
        from docklands.models import ModelConfig
        from docklands.sync.memory import MemoryTiers
        from docklands.train import TrainEngine

        torch.set_num_threads(1)
        sizes = (4096, 512, 4, 8, 4, 64, 1536) if quick else (16384, 1280, 12, 10, 10, 128, 3456)  # V, D, L, N, K, H, F
        model = models.build(ModelConfig("Qwen2ForCausalLM", *sizes, tie_embeddings=True), seed=0)
        section = TrainSection(tokens_per_microbatch=tokens)
        self.engine = TrainEngine(model, section, OptimSection(lr=1e-5), max_tokens=tokens, total_updates=100)
        rows = [torch.randint(sizes[0], (tokens // 8,), dtype=torch.int32) for _ in range(8)]
        masks = [torch.arange(len(row)) > len(row) // 4 for row in rows]
        self.batch = Batch(list(range(8)), {TOKEN_IDS: rows, LOSS_MASK: masks})

        def loss(packed: Any, out: Any, denominators: Any) -> Any:
            return LossResult(-torch.where(packed.loss_mask_T, out.logprobs_T, 0.0).sum() / denominators.tokens)

        self.learner = Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK), loss)
        self.tiers, self.folder = MemoryTiers(folder=folder), folder
        self.marks: list[tuple[float, str]] = []

    def register(self) -> dict[Any, dict[str, Any]]:
        """What is on the device now."""
        from docklands.train.resident import resident as state_of

        found = state_of(self.engine)
        for kind in KINDS:
            self.tiers.register(kind, found[kind])
        return found

    def memory(self, before: int) -> dict[str, float]:
        """Resident bytes above `before`: with all state, without it, with it again; and the state's own."""
        from docklands.sync.memory import give_back

        self.engine.update(self.batch, self.learner)  # now there are moments
        self.engine.forward_backward(self.batch, self.learner)  # and gradients
        for parameter in self.engine.model.parameters():
            if parameter.grad is not None and not parameter.grad.untyped_storage().resizable():
                parameter.grad = parameter.grad.clone()  # numpy has seen it, so torch would not free it (norms)
        found = self.register()
        sums = {kind: [float(t.sum()) for t in found[kind].values()] for kind in KINDS}
        give_back()  # what the allocator keeps of activations is nobody's state
        full = resident() - before
        self.tiers.swap_out(*KINDS)
        away = resident() - before
        self.tiers.swap_in(*KINDS)
        back = resident() - before
        if any([float(t.sum()) for t in found[kind].values()] != sums[kind] for kind in KINDS):
            raise SystemExit("swap: state came back with other values")
        size = self.tiers.bytes(*KINDS)
        del found
        self.engine.optim_step()
        self.register()
        return {"full": full, "away": away, "back": back, "state": size}

    def run(self, side: str, generation_s: float = 0.0) -> tuple[float, float]:
        """(seconds, CPU seconds) of a step from the end of generation on."""
        from docklands.obs.spans import span

        self.register()
        self.marks = [(time.monotonic(), "swap out")]
        if side != "free":
            self.tiers.swap_out(*KINDS)
        self.marks.append((time.monotonic(), "generation"))
        time.sleep(generation_s)
        began, used = time.perf_counter(), time.process_time()
        self.marks.append((time.monotonic(), "prefetch"))
        if side == "overlapped":
            self.tiers.prefetch(*KINDS)
            self.tiers.swap_in("weights")
        elif side == "waiting":
            self.tiers.swap_in(*KINDS)
        self.marks.append((time.monotonic(), "log-probs"))
        with span("stage/old_logprobs"):
            self.engine.logprobs(self.batch)
        self.tiers.swap_in(*KINDS)
        self.marks.append((time.monotonic(), "update"))
        with span("stage/update"):
            self.engine.update(self.batch, self.learner)
        return time.perf_counter() - began, time.process_time() - used


@contextmanager
def sampling(every_s: float = 0.02) -> Iterator[list[tuple[float, int]]]:
    """[(seconds, resident bytes)] while the block runs."""
    found: list[tuple[float, int]] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(every_s):
            found.append((time.monotonic(), resident()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def timeline(step: Step, before: int) -> str:
    """One overlapped step: the ledger's bytes, and what the system says of the process."""
    with sampling() as samples:
        step.run("overlapped", generation_s=1.0)
    zero, end = step.marks[0][0], time.monotonic()
    entries = [(at, kind, size) for at, tier, kind, size in step.tiers.ledger.history if tier == "device"]
    moved = [(0.0, kind, size) for kind, size in {kind: size for at, kind, size in entries if at <= zero}.items()]
    moved += [(at - zero, kind, size) for at, kind, size in entries if at > zero]
    return draw(
        {
            "history": moved,
            "marks": [(at - zero, text) for at, text in step.marks],
            "end": end - zero,
            "resident": [(at - zero, size - before) for at, size in samples if at >= zero],
        }
    )


def hidden(folder: Path) -> list[tuple[float, float]]:
    """(seconds waited, seconds that bringing state back took) of each overlapped step, out of the span file."""
    from docklands.obs.spans import read_spans

    found, waited, took = [], 0.0, 0.0
    for row in sorted(read_spans(folder), key=lambda row: row["start"] + row["duration"]):
        waited += row["duration"] * (row["name"] == "memory/wait")
        took += row["duration"] * (row["name"] == "memory/prefetch")
        if row["name"] == "stage/update":
            found += [(waited, took)] if took else []
            waited = took = 0.0
    return found


def line(bench: str, metric: str, ours: Sequence[float], peer: Sequence[float]) -> dict[str, Any]:
    """A result; lower is better."""
    ratios = [b / a for a, b in zip(ours, peer)]
    spread = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    a, b = float(f"{statistics.median(ours):.4g}"), float(f"{statistics.median(peer):.4g}")
    found = {"bench": bench, "metric": metric, "ours": a, "peer": b, "ratio": float(f"{b / a:.4g}")}
    return {**found, "n": len(ratios), "spread": [float(f"{value:.3g}") for value in spread]}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    rounds = options.rounds or (2 if options.quick else 3)
    import docklands.algorithms  # noqa: F401  what a step imports is there before memory is looked at
    from docklands.obs.spans import SpanRecorder, recording

    before = resident()
    with tempfile.TemporaryDirectory(prefix="swap_", dir=options.folder or None) as work:
        step = Step(options.quick, options.tokens or (256 if options.quick else 512), Path(work))
        found = step.memory(before)
        size = found["state"]
        fell, rose = (found["full"] - found["away"]) / size, (found["back"] - found["away"]) / size
        full, away, back = (found[name] / 1e6 for name in ("full", "away", "back"))
        print(
            f"state {size / 1e6:.0f} MB; resident {full:.0f} MB, away {away:.0f}: fell by {fell:.3f} of the state; "
            f"back {back:.0f}: rose by {rose:.3f}"
        )
        laps: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        with recording(SpanRecorder(Path(work) / "spans.jsonl")):
            for _ in range(rounds):
                for side in SIDES:
                    laps[side].append(step.run(side))
        waits = hidden(Path(work))
        if options.timeline:
            Path(options.timeline).write_text(timeline(step, before), encoding="utf-8")
        step.tiers.close()
    ours = laps["overlapped"]
    lines = [line("swap/resident", "resident_mb", [found["away"] / 1e6], [found["full"] / 1e6])]
    for side in ("free", "waiting"):
        for index, metric in enumerate(("step_s", "step_cpu_s")):
            mine, other = [lap[index] for lap in ours], [lap[index] for lap in laps[side]]
            lines.append(line(f"swap/step_vs_{side}", metric, mine, other))
    lines.append(line("swap/prefetch", "waited_s", [w for w, _ in waits], [t for _, t in waits]))
    for one in lines:
        print(json.dumps(one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
