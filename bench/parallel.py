"""Training in a layout against one process: one GRPO-like update of a random model, one thread a process.

    python bench/parallel.py [--quick] [--layout tp=2 --layout pp=2 ...] [--hidden N] [--layers N] [--rounds N]

Each side lives in processes of its own; rounds take turns, so that other load on the machine hits all alike. The peer
is the plain engine in this process; `wrapped` is the sharded one on one rank. `update_s`: seconds of an update, median.
The ratio is how many times faster the layout is, and needs as many idle cores as the layout has ranks. `cpu_s`: CPU
seconds of all of a side's processes, without waiting: two ranks that divide the work without loss take as many as one
process. JSON lines on the standard output.

The default model has 107 M parameters: with 1,024 numbers a token, a rank's products take many times as long as the
messages between them, and of its 7 layers a pipeline's last stage, which has the head, gets 3. The update has about
eight micro-batches: the simulated bubble of pp 2 is a ninth, with schedule=zero_bubble a 25th. Layouts: name=value,
separated by commas, as in a config's `layout:` section. The default, 5 rounds, takes two to three minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

DEADLINE_S = 900.0
SAMPLES, TOKENS = 16, 80


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


def engine_of(path: Path, layout: dict[str, Any] | None, microbatch: int) -> Any:
    """The plain engine, or this rank's part of a sharded one (in a process group)."""
    from docklands.config.schema import OptimSection, TrainSection
    from docklands.models import load
    from docklands.models.sharded import load_sharded
    from docklands.parallel import Layout
    from docklands.parallel.mesh import Mesh
    from docklands.train import TrainEngine
    from docklands.train.sharded import ShardedEngine

    section, optim = TrainSection(tokens_per_microbatch=microbatch), OptimSection(lr=1e-4)
    if layout is None:
        return TrainEngine(load(path), section, optim)
    return ShardedEngine(load_sharded(path, Mesh(Layout(**layout), timeout_s=DEADLINE_S)), section, optim)


def updated(engine: Any, batch: Any) -> float:
    """One update; the CPU seconds that this process took for it."""
    from docklands.core.fields import LOSS_MASK, TOKEN_IDS
    from docklands.core.stage import Learner

    before = time.process_time()
    engine.update(batch, Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK), loss))
    return time.process_time() - before


def rank_of(pipe: Any, rank: int, store: Path, path: Path, layout: dict[str, Any], microbatch: int) -> None:
    """A process of a layout: an update for each message, until the pipe closes."""
    import torch
    import torch.distributed as dist

    from docklands.core.fields import GROUP_ID
    from docklands.parallel import Layout
    from docklands.train.share import rows_of_replicas

    torch.set_num_threads(1)
    size = Layout(**layout).world_size
    try:
        deadline = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=deadline)
        engine = engine_of(path, layout, microbatch)
        data = engine.mesh.data
        batch = batch_of(SAMPLES, TOKENS)
        rows = rows_of_replicas(batch.lengths, np.asarray(batch[GROUP_ID]), engine.mesh.layout.data)
        batch = batch.select(rows[0 if data is None else data.rank])
        pipe.send(0.0)
        while pipe.recv():
            pipe.send(updated(engine, batch))
    except EOFError:
        return
    except Exception:
        pipe.send(traceback.format_exc())


class Side:
    """An engine somewhere, and what its updates took."""

    def __init__(self, path: Path, layout: dict[str, Any] | None, microbatch: int, store: Path) -> None:
        """`layout` None: the plain engine in this process."""
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.workers: list[tuple[Any, Any]] = []
        if layout is None:
            self.engine = engine_of(path, None, microbatch)
            self.batch = batch_of(SAMPLES, TOKENS)
            return
        from docklands.parallel import Layout

        context = multiprocessing.get_context("spawn")
        for rank in range(Layout(**layout).world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, store, path, layout, microbatch)
            process: Any = context.Process(target=rank_of, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        self._answers()

    def update(self, keep: bool = True) -> None:
        """One timed update."""
        began = time.perf_counter()
        if self.workers:
            for _, pipe in self.workers:
                pipe.send(True)
            used = sum(self._answers())
        else:
            used = updated(self.engine, self.batch)
        if keep:
            self.seconds.append(time.perf_counter() - began)
            self.cpu.append(used)

    def _answers(self) -> list[float]:
        """One of each rank. SystemExit when one fails or none comes."""
        answers = []
        for _, pipe in self.workers:
            try:
                answer = pipe.recv() if pipe.poll(DEADLINE_S) else f"no answer within {DEADLINE_S:g} s"
            except EOFError:
                answer = "a rank's process ended"
            if isinstance(answer, str):
                self.close()
                raise SystemExit(answer)
            answers.append(answer)
        return answers

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join(10)
        self.workers = []


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
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    hidden, layers, rounds = (128, 4, 2) if asked.quick else (asked.hidden, asked.layers, asked.rounds)
    try:
        named = {
            text: {key: int(v) if v.isdigit() else v for key, v in (part.split("=") for part in text.split(","))}
            for text in asked.layout or ["tp=2", "pp=2"]
        }
    except ValueError:
        parser.error(f"--layout {asked.layout}: expected name=value such as tp=2,pp=2")
    run(named, hidden, layers, rounds)


def run(named: dict[str, dict[str, Any]], hidden: int, layers: int, rounds: int) -> None:
    """All sides take turns."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = model_directory(root, hidden, layers)
        microbatch = batch_of(SAMPLES, TOKENS).num_tokens // 8 + 32  # eight of them, each above the longest row
        layouts = {"plain": None, "wrapped": {}, **named}
        sides: dict[str, Side] = {}
        try:
            for name, layout in layouts.items():
                sides[name] = Side(path, layout, microbatch, root / f"store-{len(sides)}")
            for number in range(rounds + 1):
                for side in sides.values():
                    side.update(keep=number > 0)
        finally:
            for side in sides.values():
                side.close()
    plain = sides.pop("plain")
    for name, side in sides.items():
        print(json.dumps(compared(name, "update_s", side.seconds, plain.seconds)))
        print(json.dumps(compared(name, "cpu_s", side.cpu, plain.cpu)), flush=True)


if __name__ == "__main__":
    main()
