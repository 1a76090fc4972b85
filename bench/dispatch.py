#!/usr/bin/env python
"""What handing out costs: 4,096 samples a step through the dock, against driver-centric dispatch through a Ray actor.

The dataflow of GRPO with a reference, prompts -> rollout -> reward, reference log-probs -> advantage -> update, over
two worker processes, with nothing to compute: what generation writes is made ahead, other stages make one pass over
their input (2.6 ms of CPU time in a step). Ours is the loop's pumps, roles, workers and dock, as a run has them. Same
rows, same columns, same functions on all sides; what the updates give is compared in each step. Peers:

    buffer      a replay buffer: samples in one Ray actor, put and got by rows and columns; a driver that gets what a
                stage reads, calls a worker (Ray actors, too), gets what it writes, and puts it back (replay.py)
    controller  the same with buffer and driver merged into one actor, which halves the ways (central.py)
    driver      our own loop with the rows in one Ray actor and the driver between (driver.py)

Every column of every row passes through the actor in all three; their files say how they are kept fast.

A worker gets its half of the step at once (`step`, the default of `dock.groups_per_take`) or 64 rows at a time
(`chunk_64`: ours takes 128 for the two). Sizes are `short` (prompts of about 128 tokens, responses of 16 to 1,024) or
those of bench/dock_flow.py (`--sizes long`: 256, and 64 to 2,048). Each side is a process of its own; they take turns,
a step each. The first step is left out. The last lines are JSON: ratio > 1 means that we are better; `spread` is the
middle half of the ratios of single steps.

    python bench/dispatch.py --peer-python PATH     an interpreter with ray (default: this one)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_parts.work import Case, arguments_of  # noqa: E402
from vs_trl_parts.turns import Side  # noqa: E402

PARTS = Path(__file__).with_name("dispatch_parts")
START_S, STEP_S = 300.0, 300.0
SIDES = {"ours": "ours.py", "buffer": "replay.py", "controller": "central.py", "driver": "driver.py"}
SIZES: dict[str, dict[str, int]] = {
    "short": {},
    "long": {"prompt": 256, "shortest": 64, "longest": 2048, "typical": 340},
}
CASES = {"step": 0, "chunk_64": 64}
"""Rows that a worker gets at once; 0: its part of the step."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 prompts, two steps")
    parser.add_argument("--steps", type=int, default=0, help="measured steps per side (default 8)")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--sizes", choices=SIZES, default="short", help="tokens of prompts and responses")
    parser.add_argument("--side", choices=["all", *SIDES], default="all", help="one alone, for profiling")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with ray (default: this one)")
    options = parser.parse_args(arguments)
    if options.steps < 0:
        parser.error("--steps is not negative")
    return options


def measure(name: str, options: argparse.Namespace, work: Path) -> dict[str, list[dict[str, float]]]:
    """Laps of all sides, the first left out."""
    case = Case(prompts=64 if options.quick else 512, chunk=CASES[name], **SIZES[options.sizes])
    rounds = 1 + (options.steps or (2 if options.quick else 8))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sides: dict[str, Side] = {}
    try:
        for key in SIDES if options.side == "all" else [options.side]:
            python = sys.executable if key == "ours" else options.peer_python
            command = [python, str(PARTS / SIDES[key]), *arguments_of(case, rounds)]
            sides[key] = Side(key, command, work / f"{name}.{key}.log", environment)
            sides[key].ready(START_S)
        for number in range(rounds):
            for side in sides.values():
                side.step(STEP_S)
            took = ", ".join(f"{key} {side.laps[-1]['wall_s']:.3f} s" for key, side in sides.items())
            print(f"{name} step {number}: {took}", flush=True)
        for side in sides.values():
            side.finish(START_S)
    finally:
        for side in sides.values():
            side.stop()
    laps = {key: merged(side) for key, side in sides.items()}
    for step in zip(*laps.values()):
        totals = [lap["total"] for lap in step]
        if not math.isclose(min(totals), max(totals), rel_tol=1e-9):
            raise SystemExit(f"dispatch: the sides have trained on different samples: {totals}")
    return {key: each[1:] for key, each in laps.items()}


def merged(side: Side) -> list[dict[str, float]]:
    """Wall time from the turns, CPU time of the side's process tree."""
    return [{**own, "wall_s": lap["wall_s"]} for lap, own in zip(side.laps, side.result["laps"])]


def results(name: str, laps: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One JSON object per peer and metric."""
    found = []
    for peer in list(SIDES)[1:]:
        for metric, key in (("step_s", "wall_s"), ("cpu_s", "cpu_s")):
            a, b = ([max(lap[key], 0.001) for lap in laps[side]] for side in ("ours", peer))
            rounds = [y / x for x, y in zip(a, b)]
            spread = statistics.quantiles(rounds, n=4)[::2] if len(rounds) > 1 else rounds * 2
            ours, theirs = float(f"{statistics.median(a):.4g}"), float(f"{statistics.median(b):.4g}")
            line = {"bench": f"dispatch/{name}/{peer}", "metric": metric, "ours": ours, "peer": theirs}
            line |= {"ratio": float(f"{theirs / ours:.4g}"), "n": len(rounds)}
            found.append({**line, "spread": [float(f"{value:.3g}") for value in spread]})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    lines = []
    with tempfile.TemporaryDirectory(prefix="dispatch_") as work:
        for name in CASES if options.case == "all" else [options.case]:
            laps = measure(name, options, Path(work))
            if options.side == "all":
                lines += results(name if options.sizes == "short" else f"{name}/{options.sizes}", laps)
            else:
                for metric in ("wall_s", "cpu_s"):
                    print(name, options.side, metric, [round(lap[metric], 4) for lap in laps[options.side]])
    for line in lines:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
