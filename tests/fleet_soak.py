"""Resident memory of every process of a fleet over many steps: a slope each.

    python -m tests.fleet_soak --steps 200 [--mode apart] [--backend ray]

All processes that the driver has started, and those that they have, are weighed after each step. One JSON line a
process: MiB after the warm-up and at the end, and KiB a step by least squares over the steps after the warm-up, of all
that is resident and of what is its own (not of files and shared memory, which the kernel may drop). Exit code 1 when
one grows by more than LIMIT_KIB a step, or when something is left of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil

from docklands.obs.rundir import RunDir
from tests.fleet_chaos import COMMON, MODES
from tests.fleet_outside import Fleet, until

LIMIT_KIB = 50.0
STEP_S, END_S = 600.0, 120.0
"""Deadlines of a step (the first waits for all processes), and of the end after the last."""


Weight = tuple[int, int, int]
"""(step, resident bytes, those of its own)."""


def weigh(fleet: Fleet, steps: int) -> dict[str, list[Weight]]:
    """Look on until so many steps are done; -> the weights of each process, after each step that was seen."""
    found: dict[str, list[Weight]] = {}
    for step in range(1, steps + 1):
        over = not until(lambda step=step: fleet.steps >= step or fleet.process.poll() is not None, STEP_S)
        if over or fleet.process.poll() is not None:
            break
        for name, process in fleet.members().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                size = process.memory_info()
                found.setdefault(name, []).append((fleet.steps, size.rss, size.rss - size.shared))
        if step % 20 == 10:
            fleet.note()
    return found


def slopes(weights: list[Weight], after: int) -> tuple[float, float]:
    """KiB a step, by least squares: of all that is resident, of its own."""
    steps, *sizes = np.array([each for each in weights if each[0] > after], np.float64).T
    resident, own = (float(np.polyfit(steps, each, 1)[0]) / 1024 for each in sizes)
    return resident, own


def typical(weights: list[Weight], after: int, window: int = 4) -> float:
    """KiB of its own a step: the median over windows of some steps. A heap that grows at once now and then is not seen,
    nor every other step's buffers; a leak in each step is.
    """
    own = np.array([size for step, _, size in weights if step > after], np.float64)
    return float(np.median(own[window:] - own[:-window])) / window / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=60)
    parser.add_argument("--mode", choices=list(MODES), default="apart")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        recipe, placed = MODES[args.mode]
        more = (
            *COMMON,
            *placed,
            f"run.steps={args.steps}",
            f"fleet.backend={args.backend}",
            "checkpoint.every_steps=20",
        )
        fleet = Fleet(recipe, RunDir(Path(folder) / "run"), more)
        try:
            fleet.start()
            found = weigh(fleet, args.steps)
            fleet.wait(END_S)
            left = fleet.left()
        finally:
            fleet.kill()
        for name, weights in sorted(found.items()):
            if len(weights) < args.steps // 2:
                continue
            resident, own = slopes(weights, args.warm_up)
            warm = next(size for step, size, _ in weights if step > args.warm_up)
            bad += max(resident, own) > LIMIT_KIB
            told = {"warm_mib": round(warm / 2**20, 1), "end_mib": round(weights[-1][1] / 2**20, 1)}
            grows = {"kib_a_step": round(resident, 2), "own_kib_a_step": round(own, 2)}
            print(json.dumps({"process": name, **told, **grows, "seen": len(weights)}))
        print(json.dumps({"steps": fleet.steps, "exit": fleet.process.returncode, "left": left}))
        bad += bool(left) or fleet.steps != args.steps
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
