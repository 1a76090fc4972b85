"""Partial rollouts against whole responses, end to end, with a long tail: seconds of a training step.

    python bench/partial_rollout.py [--quick] [--rounds N] [--steps N]

The whole loop in one process (GRPO, 16 prompts x 8 samples, the tiny model of assets/mix6-warm), the length of every
response given: log-normal with mean about 16 tokens, one sample in 32 twenty times as long, 480 at most. Ours lets a
visit sample 96 tokens of a response and goes on with the longer ones in later steps (`rollout.partial_tokens`), while
younger groups are trained (`dock.max_staleness=6`, `dock.overtake=5`: twice the groups of a step are in flight). The
peer is the same loop with the same bounds that waits for whole responses. Runs are interleaved; a run's first steps, in
which compiled loops are loaded and the pipeline fills, do not count. No prompt is trained twice and none is passed over
for ever: what is trained late is bounded by `max_staleness`, and that is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import numpy as np  # noqa: E402

from docklands.config.load import load_config  # noqa: E402
from docklands.core.protocols import Generation, Request  # noqa: E402
from docklands.obs.rundir import RunDir  # noqa: E402
from docklands.rollout import NativeEngine  # noqa: E402
from docklands.run import fleet  # noqa: E402
from docklands.run.main import train_run  # noqa: E402

GROUP, MOST, WARM, VISIT = 8, 480, 4, 96
SETTINGS = (
    "run.threads=1", "obs.console=off", "obs.report=false", "eval.prompts=0", "eval.before=false", "eval.after=false",
    "rollout.prompts_per_step=16", f"rollout.samples_per_prompt={GROUP}", f"rollout.max_response_tokens={MOST}",
    "dock.max_staleness=6", "dock.overtake=5", "dock.deterministic=false", "data.shuffle=false",
    "obs.samples_per_step=128",
)  # fmt: skip


def length_of(row: int) -> int:
    """Tokens of a row's response, the same in every run."""
    rng = np.random.default_rng([7, row])
    base = rng.lognormal(np.log(16) - 0.18, 0.6)
    return int(np.clip(base * (20 if row % 32 == 5 else 1), 2, MOST))


class GivenLengths(NativeEngine):
    """Generates responses of given lengths: no sample ends before or after."""

    def generate(self, requests: Iterable[Request]) -> list[Generation]:
        """See NativeEngine."""
        forced = []
        for request in requests:
            left = min(request.sampling.max_tokens, length_of(request.request_id) - request.drawn)
            sampling = replace(request.sampling, max_tokens=left, min_tokens=left, stop_ids=())
            forced.append(replace(request, sampling=sampling))
        return super().generate(forced)


def run(folder: Path, steps: int, partial: int) -> float:
    """-> mean seconds of a step."""
    chosen = [*SETTINGS, f"run.dir={folder}", "run.name=run", f"run.steps={steps}", f"rollout.partial_tokens={partial}"]
    config, sources = load_config(ROOT / "configs/mix6_grpo.yaml", chosen)
    assert train_run(config, sources, False) == 0
    found = RunDir(folder / "run")
    metrics = dict(found.read_metrics())
    stamps = [metrics[step]["perf/time_per_step"] for step in range(WARM + 1, steps + 1)]
    trained = [{sample["prompt_id"] for sample in found.read_samples(step)} for step in range(1, steps + 1)]
    assert sum(map(len, trained)) == len(set.union(*trained)) == steps * 16, "no prompt is trained twice"
    late = max(step - prompt // 16 for step, prompts in enumerate(trained) for prompt in prompts)
    assert late <= 6, f"a prompt came {late} steps late"
    return statistics.fmean(stamps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of ten steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    rounds, steps = (1, 10) if args.quick else (args.rounds, args.steps)
    fleet.NativeEngine = GivenLengths  # type: ignore[misc]
    ours, peer = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            ours.append(run(Path(one), steps, VISIT))
            peer.append(run(Path(other), steps, 0))
    ratios = [b / a for a, b in zip(ours, peer)]
    spread = statistics.quantiles(ratios, n=4)[::2] if rounds > 1 else ratios * 2
    line = {
        "bench": "partial_rollout", "metric": "step_s", "ours": round(statistics.median(ours), 3),
        "peer": round(statistics.median(peer), 3), "ratio": round(statistics.median(ratios), 3), "n": rounds,
        "spread": [round(x, 3) for x in spread],
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
