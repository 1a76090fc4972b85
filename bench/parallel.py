"""Training in a layout against one process: one GRPO-like update of a random model, one thread a process.

    python bench/parallel.py [--quick] [--layout tp=2 --layout pp=2 ...] [--hidden N] [--layers N] [--rounds N]

Each side lives in processes of its own; rounds take turns, so that other load on the machine hits all alike. The peer
is the plain engine in this process; `wrapped` is the sharded one on one rank. Seconds of an update, medians; the ratio
is how many times faster the layout is. `cpu_s` compares the CPU seconds of all of its processes. JSON lines on the
standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


def model_directory(root: Path, hidden: int, layers: int) -> Path:
    """A random Qwen2-like model, untied."""
    from docklands.models import ModelConfig, build, export

    heads = max(2, hidden // 64)
    config = ModelConfig("Qwen2ForCausalLM", 8192, hidden, layers, heads, heads // 2, 64, 3 * hidden, qkv_bias=True)
    export(build(config, seed=0), root / "model")
    return root / "model"


def batch_of(samples: int, tokens: int, seed: int = 0) -> Any:
    """Ragged responses to prompts of 16 tokens that groups of 4 share; a random advantage each."""
    from docklands.core.batch import Batch
    from docklands.core.fields import ADVANTAGE, GROUP_ID, LOSS_MASK, TOKEN_IDS

    draw = np.random.default_rng(seed)
    prompts = draw.integers(0, 8192, (samples // 4, 16))
    lengths = draw.integers(tokens // 2, tokens + 1, samples)
    rows = [np.concatenate([prompts[i // 4], draw.integers(0, 8192, n)]) for i, n in enumerate(lengths)]
    columns = {
        TOKEN_IDS: [row.astype(np.int32) for row in rows],
        LOSS_MASK: [np.arange(len(row)) >= 16 for row in rows],
        GROUP_ID: np.arange(samples) // 4,
        ADVANTAGE: draw.normal(size=samples).astype(np.float32),
    }
    return Batch(np.arange(samples), columns)


def loss(packed: Any, out: Any, denominators: Any) -> Any:
    """-A log p, token mean."""
    from docklands.core.fields import ADVANTAGE
    from docklands.core.loss import LossResult

    value = -(packed.per_token(ADVANTAGE) * out.logprobs_T)[packed.loss_mask_T].sum()
    return LossResult(value / denominators.tokens)


class Side:
    """An engine somewhere, and the processes that it keeps busy."""

    def __init__(self, path: Path, layout: dict[str, Any] | None, microbatch: int, log: Path) -> None:
        """`layout` None: the plain engine in this process."""
        from docklands.config.schema import OptimSection, TrainSection
        from docklands.fleet.trainers import EngineSpec, Setup, Trainers
        from docklands.models import load
        from docklands.parallel import Layout
        from docklands.train import TrainEngine

        section = TrainSection(tokens_per_microbatch=microbatch)
        optim = OptimSection(lr=1e-4)
        self.trainers = None
        self.pids = [psutil.Process().pid]
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        if layout is None:
            self.engine: Any = TrainEngine(load(path), section, optim)
        else:
            self.trainers = Trainers(Setup(Layout(**layout), log=log))
            self.engine = self.trainers.engine("actor", EngineSpec(path, section, optim))
            self.pids = self.trainers.pids

    def update(self, batch: Any, learner: Any, keep: bool = True) -> None:
        """One timed update."""
        before, began = self._cpu(), time.perf_counter()
        self.engine.update(batch, learner)
        if keep:
            self.seconds.append(time.perf_counter() - began)
            self.cpu.append(self._cpu() - before)

    def _cpu(self) -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids)

    def close(self) -> None:
        if self.trainers is not None:
            self.trainers.close()


def compared(name: str, metric: str, ours: list[float], peer: list[float]) -> dict[str, Any]:
    """One result: peer / ours of each round, and its quartiles."""
    ratios = [p / o for o, p in zip(ours, peer)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    mine, other = statistics.median(ours), statistics.median(peer)
    figures = {"ours": mine, "peer": other, "ratio": other / mine}
    rounded = {key: round(value, 4) for key, value in figures.items()}
    return {
        "bench": f"parallel/{name}",
        "metric": metric,
        **rounded,
        "n": len(ours),
        "spread": [round(low, 3), round(high, 3)],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--layout", action="append", help="such as tp=2 or pp=2,fsdp=2; may be repeated")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    hidden, layers, rounds = (128, 4, 2) if asked.quick else (asked.hidden, asked.layers, asked.rounds)
    try:
        named = {
            text: {key: int(value) for key, value in (part.split("=") for part in text.split(","))}
            for text in asked.layout or ["tp=2", "pp=2", "fsdp=2"]
        }
    except ValueError:
        parser.error(f"--layout {asked.layout}: expected names and numbers such as tp=2,pp=2")
    run(named, hidden, layers, rounds)


def run(named: dict[str, dict[str, int]], hidden: int, layers: int, rounds: int) -> None:
    """All sides take turns."""
    import torch

    from docklands.core.fields import LOSS_MASK, TOKEN_IDS
    from docklands.core.stage import Learner

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path, batch = model_directory(root, hidden, layers), batch_of(16, 128)
        learner = Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK), loss)
        microbatch = batch.num_tokens // 8 + 160
        layouts = {"plain": None, "wrapped": {}, **named}
        sides = {name: Side(path, layout, microbatch, root / "log") for name, layout in layouts.items()}
        try:
            for number in range(rounds + 1):
                for side in sides.values():
                    side.update(batch, learner, keep=number > 0)
        finally:
            for side in sides.values():
                side.close()
    plain = sides.pop("plain")
    for name, side in sides.items():
        print(json.dumps(compared(name, "update_s", side.seconds, plain.seconds)))
        print(json.dumps(compared(name, "cpu_s", side.cpu, plain.cpu)), flush=True)


if __name__ == "__main__":
    main()
