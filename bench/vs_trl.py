#!/usr/bin/env python
"""End to end against TRL's GRPOTrainer on one CPU: samples a second, and where the time goes.

Each side is a process of its own; they take turns step by step (A B A B), so that both see the same machine. Same model
directory, prompts, reward function, optimizer settings, batch, threads and environment. The first steps are left out.
Each case ends with lines of JSON: ratio > 1 means that we are better; `spread` is the middle half of the ratios of
single rounds.

    python bench/vs_trl.py --peer-python PATH       an interpreter that has TRL: requirements/bench.txt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = Path(__file__).with_name("vs_trl_parts")
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

from vs_trl_parts.cases import CASES, Case, prepare  # noqa: E402
from vs_trl_parts.turns import Side  # noqa: E402

START_S, STEP_S = 300.0, 600.0
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
PROCESS = {
    "GOMP_SPINCOUNT": "30000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""For both sides, unless set outside. A waiting thread spins for about 0.1 ms before it sleeps: spinning on made the
peer generate 10 times slower on a shared machine; never spinning, 1.5 (peer) to 2 times (ours) slower on a quiet one.
Freed memory is kept: giving it back cost the peer's 135M step 40 % more CPU time, in page faults."""
LOWER_IS_BETTER = ("generate_s", "logprobs_s", "update_s", "step_s", "cpu_s_per_step")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument(
        "--side", choices=["both", "ours", "peer"], default="both", help="one side alone, for profiling"
    )
    parser.add_argument("--steps", type=int, default=0, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps left out at the start")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--peer-python",
        default=os.environ.get("DOCKLANDS_PEER_PYTHON", sys.executable),
        help="interpreter with TRL (default: DOCKLANDS_PEER_PYTHON, else this one)",
    )
    parser.add_argument("--peer-option", action="append", default=[], metavar="KEY=JSON", help="GRPOConfig setting")
    parser.add_argument("--ours-option", action="append", default=[], metavar="KEY=VALUE", help="config override")
    parser.add_argument("--work", default="", help="directory for logs and run directories; default: a temporary one")
    options = parser.parse_args(arguments)
    if options.steps < 0 or options.warmup < 0 or options.threads < 1:
        parser.error("--steps and --warmup are not negative, --threads is at least 1")
    return options


def check_peer(python: str) -> str:
    """The peer's version, or a clear end."""
    try:
        code = "import importlib.metadata as m; print(m.version('trl'))"
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise SystemExit(f"vs_trl: cannot start {python}: {error.strerror}") from error
    if found.returncode:
        raise SystemExit(
            f"vs_trl: {python} has no TRL\n"
            "hint: python3 -m venv peer && peer/bin/pip install -r requirements/cpu.txt -r requirements/bench.txt, "
            "then --peer-python peer/bin/python"
        )
    return found.stdout.strip()


def run_case(case: Case, options: argparse.Namespace, work: Path) -> dict[str, Side]:
    """Both sides step by step, in turns."""
    measured = options.steps or (STEPS_QUICK if options.quick else STEPS)[case.name]
    steps = options.warmup + measured
    spec = prepare(case, work, steps, options.threads, options.seed).write(work / "spec.json")
    environment = {**PROCESS, **os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), environment.get("PYTHONPATH")]))
    pythons = {"ours": sys.executable, "peer": options.peer_python}
    sides: dict[str, Side] = {}
    try:
        for name in pythons if options.side == "both" else [options.side]:
            command = [pythons[name], str(PARTS / f"{name}.py"), str(spec)]
            sides[name] = Side(name, command, work / f"{name}.log", environment)
            sides[name].ready(START_S)
        for step in range(steps):
            for side in sides.values():
                side.step(STEP_S)
            took = ", ".join(f"{name} {side.laps[-1]['wall_s']:.2f} s" for name, side in sides.items())
            print(f"{case.name} step {step + 1}/{steps}: {took}", flush=True)
        for side in sides.values():
            side.finish(START_S)
    finally:
        for side in sides.values():
            side.stop()
    return sides


STEPS = {"quickstart": 10, "ragged": 12}
STEPS_QUICK = {"quickstart": 3, "ragged": 3}


def columns(side: Side, warmup: int) -> dict[str, list[float]]:
    """Measurements of the steps after the warm-up, by metric."""
    found = {
        "step_s": [lap["wall_s"] for lap in side.laps],
        "cpu_s_per_step": [lap["cpu_s"] for lap in side.laps],
    }
    for stage in ("generate", "logprobs", "update"):
        found[f"{stage}_s"] = [step[stage] for step in side.result["steps"]]
    return {name: values[warmup:] for name, values in found.items()}


def same_work(sides: dict[str, Side], case: Case) -> None:
    """Both sides must have seen the same prompts and, where given, made the same lengths."""
    ours, peer = (sides[name].result["steps"] for name in ("ours", "peer"))
    names = ("prompt_tokens", "response_tokens") if case.ragged else ("prompt_tokens",)
    for step, (a, b) in enumerate(zip(ours, peer)):
        for name in names:
            if abs(a[name] - b[name]) > 1e-3:
                raise SystemExit(f"vs_trl: step {step + 1}: mean {name} {a[name]:g} ours, {b[name]:g} the peer's")


def results(case: Case, sides: dict[str, Side], warmup: int) -> list[dict[str, Any]]:
    """One JSON object per metric."""
    ours, peer = (columns(sides[name], warmup) for name in ("ours", "peer"))
    found = [compared(case, "samples_per_s", ours["step_s"], peer["step_s"], case.samples)]
    found += [compared(case, name, ours[name], peer[name]) for name in LOWER_IS_BETTER if sum(peer[name]) > 0]
    rewards = [[step["reward_mean"] for step in sides[name].result["steps"]] for name in ("ours", "peer")]
    part = min(3, len(rewards[0]))
    for name, piece in (("reward_first", slice(None, part)), ("reward_last", slice(-part, None))):
        a, b = (statistics.mean(values[piece]) for values in rewards)
        found.append(record(case, name, (a, b, a / b if b else 0.0), part, [0.0, 0.0]))
    return found


def compared(case: Case, metric: str, ours: list[float], peer: list[float], samples: int = 0) -> dict[str, Any]:
    """Medians of both sides and their ratio; the spread over rounds. `samples`: a rate instead of seconds."""
    rounds = [b / a for a, b in zip(ours, peer)]
    spread = statistics.quantiles(rounds, n=4)[::2] if len(rounds) > 1 else [rounds[0]] * 2
    a, b = statistics.median(ours), statistics.median(peer)
    values = (samples / a, samples / b) if samples else (a, b)
    return record(case, metric, (*values, b / a), len(rounds), spread)


def record(
    case: Case, metric: str, values: tuple[float, float, float], n: int, spread: Sequence[float]
) -> dict[str, Any]:
    ours, peer, ratio = (float(f"{value:.4g}") for value in values)
    return {
        "bench": f"vs_trl/{case.name}",
        "metric": metric,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "n": n,
        "spread": [float(f"{value:.3g}") for value in spread],
    }


def alone(case: Case, name: str, side: Side, warmup: int) -> dict[str, Any]:
    """Medians of one side."""
    medians = {metric: round(statistics.median(values), 4) for metric, values in columns(side, warmup).items()}
    rewards = [round(step["reward_mean"], 3) for step in side.result["steps"]]
    return {"bench": f"vs_trl/{case.name}", "side": name, **medians, "rewards": rewards}


def with_options(case: Case, options: argparse.Namespace) -> Case:
    """The case with the settings of the command line."""
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    for pair in options.peer_option:
        key, _, value = pair.partition("=")
        fields["peer"] = {**fields["peer"], key: json.loads(value)}
    fields["ours"] = (*fields["ours"], *options.ours_option)
    return Case(**fields)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.side != "ours":
        print(f"peer: trl {check_peer(options.peer_python)}, {options.threads} threads on each side")
    with tempfile.TemporaryDirectory(prefix="vs_trl_") as temporary:
        for name in CASES if options.case == "all" else [options.case]:
            case = with_options(CASES[name], options)
            sides = run_case(case, options, Path(options.work or temporary) / name)
            if options.side == "both":
                same_work(sides, case)
                lines = results(case, sides, options.warmup)
            else:
                lines = [alone(case, options.side, sides[options.side], options.warmup)]
            for line in lines:
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
