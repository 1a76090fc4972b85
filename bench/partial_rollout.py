"""Partial rollouts against whole responses, end to end, with a long tail: seconds of a training step.

    python bench/partial_rollout.py [--quick] [--model tiny|tiny128|wide] [--kv keep|recompute] [--rounds N] [--steps N]

The whole loop in one process (GRPO: generation, rewards, old log-probs, update, publication), the length of every
response given: log-normal with mean about 16 tokens, one sample in 32 twenty times as long, 480 at most. Ours lets a
visit sample 48 tokens of a response and goes on with the longer ones in later steps (`rollout.partial_tokens`), while
younger groups are trained (`dock.max_staleness=12`, `dock.overtake=10`: the groups of three steps are in flight).
The peer is the same loop with the same bounds that waits for whole responses.

tiny     the model of assets/mix6-warm, fp32, 8 prompts x 4 samples a step: one long sample in each
tiny128  the same, 16 prompts x 8 samples a step: four long ones, which share their decode steps
wide     random weights as wide as SmolLM2-135M's, 6 layers, bf16, 8 prompts x 4 samples a step

Runs are interleaved. A run's first steps, in which the pipeline fills, do not count, nor do its last, in which no
prompts come any more. What is trained is checked: every response has the length that was given, no prompt is trained
twice, none is passed over for ever (what is trained late is bounded by `max_staleness`), and both train the same number
of samples.
Three lines: wall time, CPU time and decode steps of a training step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import numpy as np  # noqa: E402

from docklands.config.load import load_config  # noqa: E402
from docklands.core.protocols import Generation, Request  # noqa: E402
from docklands.obs.rundir import RunDir  # noqa: E402
from docklands.rollout import NativeEngine, engines  # noqa: E402
from docklands.rollout.queue import LiveQueue  # noqa: E402
from docklands.run.main import train_run  # noqa: E402

MOST, VISIT, STALE, OVERTAKE, WARM = 480, 48, 12, 10, 10
WALL, CPU, STEPS = "perf/time_per_step", "perf/cpu_s", "rollout/decode_steps"
SETTINGS = (
    "run.threads=1", "obs.console=off", "obs.report=false", "eval.prompts=0", "eval.before=false", "eval.after=false",
    f"rollout.max_response_tokens={MOST}", f"dock.max_staleness={STALE}", f"dock.overtake={OVERTAKE}",
    "dock.deterministic=false", "data.shuffle=false",
)  # fmt: skip
SHAPES = {
    "hidden_size": 576, "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 8192, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A model and its step."""

    prompts: int
    group: int
    settings: tuple[str, ...] = ()


WORKS = {
    "tiny": Work(8, 4),
    "tiny128": Work(16, 8),
    "wide": Work(8, 4, ("model.init=random", "train.dtype=bfloat16")),
}


def length_of(row: int) -> int:
    """Tokens of a row's response, the same in every run."""
    rng = np.random.default_rng([7, row])
    base = rng.lognormal(np.log(16) - 0.18, 0.6)
    return int(np.clip(base * (20 if row % 32 == 5 else 1), 2, MOST))


class GivenLengths(NativeEngine):
    """Generates responses of given lengths: no sample ends before or after."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See NativeEngine."""
        return super().generate(self.forced(requests))

    def visit(self, queue: LiveQueue, requests: Sequence[Request]) -> None:
        """See Visits."""
        super().visit(queue, self.forced(requests))

    def forced(self, requests: Iterable[Request]) -> list[Request]:
        """As long as they are to be."""
        forced = []
        for request in requests:
            left = min(request.sampling.max_tokens, length_of(request.request_id) - request.drawn)
            sampling = replace(request.sampling, max_tokens=left, min_tokens=left, stop_ids=())
            forced.append(replace(request, sampling=sampling))
        return forced


def model_of(name: str, folder: Path) -> Path:
    """A directory that says what the model is."""
    warm = ROOT / "assets/mix6-warm"
    if name != "wide":
        return warm
    folder.mkdir()
    shutil.copy(warm / "char_tokenizer.json", folder)
    told = json.loads((warm / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, **SHAPES}))
    return folder


def run(name: str, folder: Path, steps: int, partial: int, kv: str = "recompute") -> dict[str, float]:
    """-> means of a step, by metric."""
    work = WORKS[name]
    chosen = [
        *SETTINGS, *work.settings, f"model.path={model_of(name, folder / 'model')}",
        f"run.dir={folder}", "run.name=run", f"run.steps={steps}", f"rollout.partial_tokens={partial}",
        f"rollout.partial_kv={kv}", "rollout.max_batch=64",
        f"rollout.prompts_per_step={work.prompts}", f"rollout.samples_per_prompt={work.group}",
        f"dock.groups_per_take={(STALE - OVERTAKE + 1) * work.prompts}",
        f"obs.samples_per_step={work.prompts * work.group}",
    ]  # fmt: skip
    config, sources = load_config(ROOT / "configs/mix6_grpo.yaml", chosen)
    assert train_run(config, sources, False) == 0
    found = RunDir(folder / "run")
    samples = [found.read_samples(step) for step in range(1, steps + 1)]
    check(samples, work)
    metrics = dict(found.read_metrics())
    kept = [metrics[step] for step in range(WARM + 1, steps - STALE + 1)]
    return {key: statistics.fmean(each.get(key, 0.0) for each in kept) for key in (WALL, CPU, STEPS)}


def check(samples: list[list[dict]], work: Work) -> None:
    """What was trained is what was asked for."""
    trained = [{sample["prompt_id"] for sample in step} for step in samples]
    assert sum(map(len, trained)) == len(set.union(*trained)) == len(samples) * work.prompts, "no prompt comes twice"
    late = max(step - prompt // work.prompts for step, prompts in enumerate(trained) for prompt in prompts)
    assert late <= STALE, f"a prompt came {late} steps late"
    for sample in (sample for step in samples for sample in step):
        row, made = sample["row_id"], sample["response_tokens"]
        assert made == length_of(row), f"row {row} has {made} tokens, not {length_of(row)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--model", choices=sorted(WORKS), default="tiny")
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=36)
    args = parser.parse_args()
    rounds, steps = 1 if args.quick else args.rounds, args.steps
    engines.NativeEngine = GivenLengths  # type: ignore[misc]
    ours, peer = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            ours.append(run(args.model, Path(one), steps, VISIT, args.kv))
            peer.append(run(args.model, Path(other), steps, 0))
    for metric, said in ((WALL, "step_s"), (CPU, "step_cpu_s"), (STEPS, "decode_steps")):
        ratios = [b[metric] / a[metric] for a, b in zip(ours, peer)]
        spread = statistics.quantiles(ratios, n=4)[::2] if rounds > 1 else ratios * 2
        line = {
            "bench": f"partial_rollout/{args.model}", "metric": said,
            "ours": round(statistics.median(each[metric] for each in ours), 3),
            "peer": round(statistics.median(each[metric] for each in peer), 3),
            "ratio": round(statistics.median(ratios), 3), "n": rounds, "spread": [round(x, 3) for x in spread],
        }  # fmt: skip
        print(json.dumps(line))


if __name__ == "__main__":
    main()
