"""The predicted step against the measured one: `docklands plan --calibrate` and `docklands train`, in turns.

    python bench/cost_model.py [--quick] [--recipes mix6_grpo,learns_to_reason] [--steps N] [--rounds N] [--record FILE]

Each round calibrates (micro-benchmarks on the recipe's model) and then trains for some steps, in processes of their own
with one thread. Lengths are the run's own. Seconds are CPU seconds of the process (perf/cpu_s), because other jobs on
the machine stretch the wall clock. `ours` is the prediction, `peer` the measurement, `ratio` the smaller over the
larger: 1 is exact, 0.8 is 20 % off. JSON lines on the output; --record writes what the test reads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

QUIET = ["obs.console=off", "obs.report=false", "eval.before=false", "eval.after=false", "eval.prompts=0"]
DEADLINE_S = 1800.0
WARM = 2


def docklands(*arguments: str) -> None:
    """The command in a process of its own, with one thread; its error ends the benchmark."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "docklands.cli.main", *arguments]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if found.returncode:
        sys.exit(f"docklands {' '.join(arguments)}: exit code {found.returncode}\n{found.stderr[-2000:]}")


def one_round(recipe: str, steps: int, folder: Path) -> dict[str, Any]:
    """Calibrate, train, predict."""
    config, machine = f"configs/{recipe}.yaml", folder / "machine.yaml"
    docklands("plan", config, "run.threads=1", "--calibrate", str(machine))
    run = folder / "run"
    where = [f"run.dir={folder}", "run.name=run", f"run.steps={steps}", "run.threads=1", "checkpoint.at_end=false"]
    docklands("train", config, *where, *QUIET)
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()][WARM:]
    measured = statistics.median(row["perf/cpu_s"] for row in rows)
    found = predict(recipe, machine, run)
    return {
        **found,
        "measured": measured,
        "steps": len(rows),
        "wall": statistics.median(r["timing_s/step"] for r in rows),
    }


def predict(recipe: str, machine: Path, run: Path) -> dict[str, Any]:
    """The simulation with the run's lengths; what the fixture of the test holds."""
    from dataclasses import asdict

    from docklands.config.load import load_config
    from docklands.run.forecast import Case, busy_seconds, forecast
    from docklands.run.hardware import read_hardware
    from docklands.run.lengths import read_lengths
    from docklands.run.plan import model_of, plan_run
    from docklands.sync.plan import Options

    config, _ = load_config(ROOT / "configs" / f"{recipe}.yaml", ["run.threads=1"])
    hardware, lengths = read_hardware(machine), read_lengths(str(run), config)
    shape = model_of(config)
    memory = plan_run(config, shape, None, Options(), int(hardware.capacity))
    found = forecast(config, memory, Case(hardware, lengths)).simulated
    kept = {**asdict(lengths), "responses": evenly(lengths.responses, 400), "where": recipe}
    row = {"recipe": recipe, "hardware": asdict(hardware), "lengths": kept, "predicted": busy_seconds(found)}
    return row | ({"model": asdict(shape)} if config.model.path.startswith("cache:") else {})


def evenly(values: tuple[int, ...], most: int) -> list[int]:
    """At most so many of them, from all over the run: lengths change as a model learns."""
    return list(values[:: max(1, -(-len(values) // most))])


def main() -> None:
    """Print a line for each recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of four steps of the smallest recipe")
    parser.add_argument(
        "--recipes", default="mix6_grpo,mix6_ppo,learns_to_reason", help="names in configs/, with commas"
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path, help="write the rounds here, as tests/data/cost_model.json holds them")
    options = parser.parse_args()
    recipes = ["mix6_grpo"] if options.quick else options.recipes.split(",")
    rounds, steps = (1, WARM + 4) if options.quick else (options.rounds, max(WARM + 1, options.steps))
    kept: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "runs": []}
    for recipe in recipes:
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(one_round(recipe, steps, Path(folder)))
        ratios = [min(a / b, b / a) for a, b in ((row["predicted"], row["measured"]) for row in found)]
        ours, peer = (statistics.median(row[key] for row in found) for key in ("predicted", "measured"))
        line = {
            "bench": f"cost_model/{recipe}", "metric": "cpu_s_a_step", "ours": round(ours, 4), "peer": round(peer, 4),
            "ratio": round(min(ours / peer, peer / ours), 3), "n": rounds,
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        kept["runs"] += found
    if options.record:
        runs = ",\n".join(json.dumps(row) for row in kept.pop("runs"))
        options.record.write_text(f'{json.dumps(kept)[:-1]}, "runs": [\n{runs}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
