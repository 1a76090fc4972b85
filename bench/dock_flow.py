#!/usr/bin/env python
"""The sample flow through warehouses, against TransferQueue, a central Ray actor and a plain copy of the bytes.

512 prompts x 8 samples, prompts of about 256 tokens, lognormal responses of 64 to 2,048: int32 tokens and fp32
log-probs. A rollout puts chunks of 64 rows; ref and reward read the tokens and write back; the actor reads every column
in micro-batches of 32. `--hand-out` says how many rows ref, reward and the actor are handed at once, for every side
the same: 512, as the loop takes them (dock.groups_per_take: a step's), and 64, the finest that the chunks allow, where
the actor still takes 256. In the bench's name stands the case: dock_flow/512/memcpy.

Our side is the product as it is: rows are admitted, taken, acknowledged and retired through the
control process, warehouses and control authenticate their clients, readers borrow views of shared memory under a lease,
where a take has said that they lie, and the four stages stream, each a task of one event loop, with one take ahead and
two acknowledgements under way. The peers' clients block, so there the same calls are made one after the other, on the
same batches: puts of 64 rows, then metadata, a read and a write of a hand-out by ref and reward, and metadata of a
step and reads of 32 rows by the actor. `--sequential` drives our side so too, `--copy` has its readers take copies,
and `--eager` has takes give what is ready, up to a hand-out, instead of exactly one (dock.deterministic: false). Our
producer begins the puts of all chunks that it was handed, none of which waits for another one; `--puts 2` has two of
them under way at a time.

Each side is a process of its own, with its servers below it; sides take turns, a run of the flow each (A B C A B C).
Wall time is the side's; CPU time is that of its whole process tree. The first run checks every byte and is left out.
The last lines are JSON: ratio > 1 means that we are better; `spread` is the middle half of the ratios of single rounds.

    python bench/dock_flow.py --peer-python PATH    an interpreter with transferqueue==0.1.11 and ray
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

sys.path.insert(0, str(Path(__file__).parent))

from dock_flow_parts.flow import Case, arguments_of  # noqa: E402
from vs_trl_parts.turns import Side  # noqa: E402

PARTS = Path(__file__).with_name("dock_flow_parts")
LARGEST = 512
"""Rows of a hand-out at most, which are a third of what is in flight (dock_flow_parts/ours.py)."""
START_S, RUN_S = 120.0, 300.0
PEERS = {
    "memcpy": ("memory.py", ""),
    "ray_actor": ("central.py", ""),
    "transferqueue_1": ("transferqueue.py", "1"),
    "transferqueue_2": ("transferqueue.py", "2"),
    "transferqueue_4": ("transferqueue.py", "4"),
}
HERE = ("memcpy",)
"""Peers that run in this interpreter."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 prompts, two rounds, and the copy as the only peer")
    parser.add_argument("--rounds", type=int, default=0, help="measured runs of the flow per side (default 5)")
    parser.add_argument("--hand-out", type=int, nargs="+", default=[512, 64], help="rows of a take (512 and 64)")
    parser.add_argument("--warehouses", type=int, default=1)
    parser.add_argument("--tcp", action="store_true", help="our side without shared memory")
    parser.add_argument("--copy", action="store_true", help="our readers take copies, not views of shared memory")
    parser.add_argument("--sequential", action="store_true", help="our side makes one call after the other")
    parser.add_argument("--eager", action="store_true", help="our takes give what is ready, up to a hand-out")
    parser.add_argument("--puts", type=int, default=0, help="puts of our producer at a time (0: all of a hand-out)")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="default: all that can run")
    parser.add_argument(
        "--peer-python",
        default=os.environ.get("DOCKLANDS_QUEUE_PYTHON", ""),
        help="interpreter with transferqueue and ray (default: DOCKLANDS_QUEUE_PYTHON)",
    )
    options = parser.parse_args(arguments)
    if min(options.rounds, options.puts) < 0 or options.warehouses < 1:
        parser.error("--rounds and --puts are not negative, --warehouses is at least 1")
    case = case_of(options, 0)
    if any(rows % case.chunk or rows <= 0 or LARGEST % rows for rows in options.hand_out):
        parser.error(f"--hand-out is a multiple of {case.chunk} (rows of a put) that divides {LARGEST}")
    return options


def case_of(options: argparse.Namespace, hand_out: int) -> Case:
    return Case(prompts=64 if options.quick else 512, hand_out=hand_out)


def check_peer(python: str) -> None:
    """A clear end where the peers cannot be imported."""
    try:
        found = subprocess.run([python, "-c", "import ray, transfer_queue"], capture_output=True, timeout=120)
    except OSError as error:
        raise SystemExit(f"dock_flow: cannot start {python}: {error.strerror}") from error
    if found.returncode:
        raise SystemExit(
            f"dock_flow: {python} lacks transferqueue or ray\n"
            "hint: python3 -m venv peer && peer/bin/pip install transferqueue==0.1.11, "
            "then --peer-python peer/bin/python"
        )


def measure(
    options: argparse.Namespace, case: Case, peers: Sequence[str], work: Path
) -> dict[str, list[dict[str, float]]]:
    """Laps of every side, the first left out."""
    rounds = 1 + (options.rounds or (2 if options.quick else 5))
    kinds = [kind for kind in ("tcp", "copy", "sequential", "eager") if getattr(options, kind)]
    ours = ",".join([f"{options.warehouses}/{options.puts}", *kinds])
    commands = {"ours": [sys.executable, str(PARTS / "ours.py"), *arguments_of(case, rounds, ours)]}
    for name in peers:
        script, option = PEERS[name]
        python = sys.executable if name in HERE else options.peer_python
        commands[name] = [python, str(PARTS / script), *arguments_of(case, rounds, option)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
    sides: dict[str, Side] = {}
    try:
        for name, command in commands.items():
            sides[name] = Side(name, command, work / f"{name}.log", environment)
            sides[name].ready(START_S)
        for number in range(rounds):
            for side in sides.values():
                side.step(RUN_S)
            took = ", ".join(f"{name} {side.laps[-1]['wall_s']:.3f} s" for name, side in sides.items())
            print(f"hand-outs of {case.hand_out}, round {number}: {took}", flush=True)
        for side in sides.values():
            side.finish(START_S)
        sizes = sides["ours"].result
        print(f"{sizes['stored_bytes'] / 1e6:.1f} MB stored, {sizes['moved_bytes'] / 1e6:.1f} MB moved in a round")
        return {name: side.result["laps"][1:] for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.stop()


def results(laps: dict[str, list[dict[str, float]]], case: Case) -> list[dict[str, Any]]:
    """One JSON object per peer and metric."""
    found = []
    for name, theirs in laps.items():
        if name == "ours":
            continue
        for metric in ("wall_s", "cpu_s"):
            a = [max(lap[metric], 0.01) for lap in laps["ours"]]
            b = [max(lap[metric], 0.01) for lap in theirs]
            rounds = [y / x for x, y in zip(a, b)]
            spread = statistics.quantiles(rounds, n=4)[::2] if len(rounds) > 1 else rounds * 2
            ours, peer = float(f"{statistics.median(a):.4g}"), float(f"{statistics.median(b):.4g}")
            found.append(
                {
                    "bench": f"dock_flow/{case.hand_out}/{name}",
                    "metric": metric,
                    "ours": ours,
                    "peer": peer,
                    "ratio": float(f"{peer / ours:.4g}"),
                    "n": len(rounds),
                    "spread": [float(f"{value:.3g}") for value in spread],
                }
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    peers = options.peers if options.peers is not None else list(PEERS)
    if options.peers is None and (options.quick or not options.peer_python):
        peers = list(HERE)
    if set(peers) - set(HERE):
        check_peer(options.peer_python)
    lines = []
    for hand_out in options.hand_out:
        case = case_of(options, hand_out)
        with tempfile.TemporaryDirectory(prefix="dock_flow_") as work:
            lines += results(measure(options, case, peers, Path(work)), case)
    for line in lines:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
