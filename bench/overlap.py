#!/usr/bin/env python
"""How much of a fleet's step is idle: its time against the critical path computed from the run's own spans.

    python bench/overlap.py [--quick] [--case NAME] [--steps N] [KEY=VALUE ...]

Real runs over two worker processes with one thread each. `colocated` hands their devices from role to role, `apart` has
one trainer and one generator, one step ahead: GRPO with a reference and the tiny model of assets/mix6-warm
(configs/mix6_grpo_kl.yaml), whose steps last little longer than the messages that a step cannot do without.
`quickstart` and `quickstart_apart` are the same of configs/quickstart.yaml, SmolLM2-135M, with a reference. The
critical path is that of docklands/obs/critical_path.py: the longest chain of work, each piece as long as its slowest
worker was busy, that rows, devices, weights and slots put in order. `ours` is the step's seconds, `peer` the path's, so
a ratio of 0.91 is a step of 1.1 times its path, the goal. The first steps are left out; `spread` is the middle half of
the ratios of single steps. KEY=VALUE changes the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import yaml  # noqa: E402

from docklands.config.load import load_config  # noqa: E402
from docklands.obs.critical_path import Places, StepPath, critical_path  # noqa: E402
from docklands.obs.rundir import RunDir  # noqa: E402
from docklands.obs.spans import read_spans  # noqa: E402
from docklands.run.main import train_run  # noqa: E402

WARM = 3
SETTINGS = (
    "run.name=run", "run.threads=2", "obs.console=off", "obs.report=false", "eval.prompts=0", "eval.before=false",
    "eval.after=false", "checkpoint.at_end=false",
)  # fmt: skip
TOGETHER = ("layout.dp=2", "rollout.layout.dp=2")
APART = (
    "layout.dp=1", "rollout.layout.dp=1", "fleet.placement=disaggregated", "dock.max_staleness=1",
    "dock.deterministic=false", "run.threads=1",
)  # fmt: skip
TINY, QUICKSTART = "configs/mix6_grpo_kl.yaml", "configs/quickstart.yaml"
WITH_REFERENCE = ("algorithm.kl.coef=0.01", "algorithm.kl.where=loss")
CASES = {
    "colocated": (TINY, TOGETHER, 20),
    "apart": (TINY, APART, 20),
    "quickstart": (QUICKSTART, (*TOGETHER, *WITH_REFERENCE), 8),
    "quickstart_apart": (QUICKSTART, (*APART, *WITH_REFERENCE), 8),
}
"""Recipe, changes to it, measured steps."""


def run(folder: Path, recipe: str, steps: int, settings: Sequence[str]) -> list[StepPath]:
    """-> the steps of a run, and what their critical paths were."""
    chosen = [*SETTINGS, f"run.dir={folder}", f"run.steps={steps}", *settings]
    config, sources = load_config(ROOT / recipe, chosen)
    assert train_run(config, sources, False) == 0
    found = RunDir(folder / "run")
    places = Places.of_config(yaml.safe_load(found.read_config()))
    return critical_path(read_spans(found.path), found.read_graph()["stages"], places)[WARM:]


def line(name: str, paths: Sequence[StepPath]) -> dict[str, Any]:
    """The JSON of a case. Sums: what one step of an asynchronous run leaves to the next belongs to both."""
    ratios = [path.path_s / path.seconds for path in paths]
    ours, peer = (statistics.fmean(getattr(path, what) for path in paths) for what in ("seconds", "path_s"))
    spread = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    ours, peer = float(f"{ours:.4g}"), float(f"{peer:.4g}")
    found = {"bench": f"overlap/{name}", "metric": "step_s", "ours": ours, "peer": peer}
    return {**found, "ratio": round(peer / ours, 4), "n": len(ratios), "spread": [round(x, 4) for x in spread]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six steps, the tiny model")
    parser.add_argument("--steps", type=int, default=0, help="measured steps (default 20, of SmolLM2-135M 8)")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    options = parser.parse_args(arguments)
    if options.steps < 0:
        parser.error("--steps is not negative")
    chosen = [options.case] if options.case != "all" else [n for n in CASES if not options.quick or CASES[n][0] == TINY]
    for name in chosen:
        recipe, settings, usual = CASES[name]
        steps = WARM + (options.steps or (3 if options.quick else usual))
        with tempfile.TemporaryDirectory(prefix="overlap_") as folder:
            paths = run(Path(folder), recipe, steps, (*settings, *options.settings))
        for what in ("by_stage", "idle"):
            each = [getattr(path, what) for path in paths]
            means = {stage: statistics.fmean(p.get(stage, 0.0) for p in each) for stage in sorted(set().union(*each))}
            said = "on the path" if what == "by_stage" else "idle before or around"
            print(f"{name}, {said}: " + ", ".join(f"{stage} {mean:.4f} s" for stage, mean in means.items()))
        print(json.dumps(line(name, paths)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
