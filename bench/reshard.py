#!/usr/bin/env python
"""Resharding against the naive way, on real processes, and the methods against each other on the published layouts.

Part 1, measured: a dense model with fp32 masters (1.0 GB; 117 MB with --quick), TP4 PP2 -> TP2 in bf16 on 8 processes
(gloo). The naive way gathers the whole fp32 state dict on every rank (all-gather over the tensor group, broadcast from
the pipeline stage), cuts its slices out of it in bf16, and keeps the training weights as well. Ours casts before it
sends, and lets go of each training tensor when it is not read any more. Results of all sides are compared bitwise.
Sides take turns; a lap begins and ends with a barrier; figures are of the worst rank. Peak memory is the kernel's
(VmHWM) above what the process had before the first training weights. The naive way takes 15 GB in all.

Part 2, simulated: bytes that the busiest device moves over the two kinds of links, and seconds at the stated speeds,
counting neither latency nor contention: `minimal` (ours) against `allgather_swap` (peer). What making each plan took
is printed beside it, and the same for `broadcast`.

The last lines are JSON: ratio > 1 means that we are better; `spread` is the middle half of the ratios of single rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from reshard_parts.timeline import draw, record  # noqa: E402

WORLD = 8
METHODS = ("minimal", "allgather_swap")
SIDES = (*METHODS, "naive")
DEADLINE_S = 600.0
SIMULATED = {
    "7b_16": ("qwen2.5-7b", {"tp": 2, "pp": 2, "dp": 4}, {"dp": 16}),
    "32b_16": ("qwen2.5-32b", {"tp": 4, "pp": 4}, {"tp": 2, "dp": 8}),
    "32b_long_64": ("qwen2.5-32b", {"tp": 8, "pp": 2, "cp": 2, "dp": 2, "context": "ring"}, {"tp": 4, "dp": 16}),
    "30b_a3b_16": ("qwen3-30b-a3b", {"tp": 4, "ep": 2, "dp": 4}, {"ep": 8, "dp": 16}),
    "235b_128": ("qwen3-235b-a22b", {"tp": 2, "pp": 16, "ep": 4, "dp": 4}, {"tp": 4, "ep": 8, "etp": 4, "dp": 32}),
    "671b_256": ("deepseek-r1-671b", {"tp": 4, "pp": 8, "ep": 8, "dp": 8}, {"tp": 4, "ep": 64, "etp": 4, "dp": 64}),
    "671b_384": ("deepseek-r1-671b", {"tp": 4, "pp": 8, "ep": 8, "dp": 12}, {"tp": 4, "ep": 64, "dp": 96}),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 117 MB, two rounds")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds (default 3)")
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--timeline", default="", help="SVG file to write: memory of rank 0 over a hand-over and back")
    parser.add_argument("--only", choices=["measured", "simulated"], help="one of the two parts")
    parser.add_argument("--node-gbs", type=float, default=200.0, help="GB/s of a device within its node")
    parser.add_argument("--between-gbs", type=float, default=25.0, help="GB/s of a device between nodes")
    options = parser.parse_args(arguments)
    if options.rounds < 0 or options.bucket_mib < 1 or min(options.node_gbs, options.between_gbs) <= 0:
        parser.error("--rounds is not negative, --bucket-mib at least 1, speeds are positive")
    return options


def model_of(quick: bool) -> Any:
    from docklands.models.config import ModelConfig

    size, layers = (512, 4) if quick else (1536, 6)
    return ModelConfig(
        "Qwen2ForCausalLM", 16384 if quick else 32768, size, layers, size // 128, 4, 128, 2 * size * 4 // 3 // 64 * 64
    )


def peak_memory(reset: bool = False) -> int:
    """Most resident bytes of this process since the last reset (Linux)."""
    if reset:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def check_room(quick: bool) -> None:
    """The naive way has the whole model twice on each of 8 ranks: refuse rather than push others out of memory."""
    needed = int(WORLD * 1.9 * 4 * model_of(quick).num_params)
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    if free < needed:
        raise SystemExit(
            f"reshard: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free (--quick: less than 2)"
        )


class Rank:
    """One process: its training weights, and each side's way from them to generation weights."""

    def __init__(self, rank: int, quick: bool, bucket_mib: int) -> None:
        import torch

        from docklands.models.params import table_for
        from docklands.parallel.layout import Layout
        from docklands.parallel.mesh import Mesh
        from docklands.sync.memory import give_back
        from docklands.sync.plan import MIB, Options, plan_reshard
        from docklands.sync.reshard import Resharder

        self.torch, self.rank, self.model = torch, rank, model_of(quick)
        self.source, self.target = Layout(tp=4, pp=2), Layout(tp=2, dp=4)
        self.mesh = Mesh(self.source, timeout_s=DEADLINE_S)
        self.table = table_for(self.model)
        self.movers = {
            method: Resharder(
                plan_reshard(self.model, self.source, self.target, Options(method, bucket_mib * MIB)),  # type: ignore[arg-type]
                dtype=torch.bfloat16,
                timeout_s=DEADLINE_S,
            )
            for method in METHODS
        }
        self.received = 0
        give_back()
        self.before = peak_memory(reset=True)

    def trained(self) -> dict[str, Any]:
        """This rank's fp32 masters: numbers that tell where an element lies in the whole."""
        from docklands.sync.boxes import volume

        torch, found = self.torch, {}
        for name, held in self.movers["minimal"].script.source.items():
            found[held.name] = torch.empty(held.shape)
            for block in held.blocks:
                seed = zlib.crc32(repr((name, block.box)).encode())  # replicas draw the same
                draw = torch.Generator().manual_seed(seed)
                shape = [high - low for low, high in block.box]
                found[held.name][block.slices(block.box)] = torch.randn(volume(block.box), generator=draw).view(shape)
        return found

    def ours(self, method: str, weights: dict[str, Any]) -> dict[str, Any]:
        mover = self.movers[method]

        def let_go(name: str) -> None:
            del weights[name]

        found = mover.run(weights, released=let_go)
        self.received = mover.counts.received
        return found

    def naive(self, _: str, weights: dict[str, Any]) -> dict[str, Any]:
        """The whole state dict on every rank, then slices; training weights stay."""
        import torch.distributed as dist

        from docklands.models.shard import assemble, place, slots_of
        from docklands.sync.boxes import homes_of

        torch, mesh, whole = self.torch, self.mesh, {}
        slots, after = slots_of(self.table, self.source), slots_of(self.table, self.target)
        homes = homes_of(self.table, self.source, self.model.num_layers)
        self.received = 0
        for spec in self.table.stored():
            (stage,) = homes[spec.name]
            if mesh.coords["pp"] == stage:
                local, slot = weights[spec.name], slots[spec.name]
                whole[spec.name] = local
                if slot.cuts:
                    places = [{**mesh.coords, "tp": rank} for rank in range(4)]
                    pieces = [torch.empty(slot.local_shape(at)) for at in places]
                    dist.all_gather(pieces, local.contiguous(), group=mesh.tp.pg)  # type: ignore[union-attr]
                    self.received += 3 * local.numel() * 4
                    whole[spec.name] = assemble(slot, list(zip(places, pieces)))
            else:
                whole[spec.name] = torch.empty(spec.shape)
                self.received += whole[spec.name].numel() * 4
            dist.broadcast(whole[spec.name], mesh.pp.ranks[stage], group=mesh.pp.pg)  # type: ignore[union-attr]
        at = self.target.coords(self.rank)
        return {name: place(after[name], at, tensor).to(torch.bfloat16) for name, tensor in whole.items()}

    def lap(self, side: str) -> tuple[dict[str, float], dict[str, Any]]:
        import torch.distributed as dist

        from docklands.sync.memory import give_back

        gc.collect()
        give_back()  # what the side before has freed
        weights = self.trained()
        run: Callable[[str, dict[str, Any]], dict[str, Any]] = self.naive if side == "naive" else self.ours
        dist.barrier()
        peak_memory(reset=True)
        began = time.perf_counter()
        found = run(side, weights)
        dist.barrier()
        lap = {"wall_s": time.perf_counter() - began, "received_mb": self.received / 1e6}
        return {**lap, "peak_mb": (peak_memory() - self.before) / 1e6}, found


def serve(rank: int, store: str, options: argparse.Namespace, rounds: int, pipe: Any) -> None:
    """Body of a process: all sides in turn, `rounds` times; the first round checks and is left out."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    kept = dist.FileStore(store, WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=WORLD, timeout=timedelta(seconds=DEADLINE_S))
    me, laps = Rank(rank, options.quick, options.bucket_mib), {side: [] for side in SIDES}
    for number in range(rounds + 1):
        expected = None
        for side in SIDES:
            lap, found = me.lap(side)
            if number == 0:
                expected = expected or {name: tensor.clone() for name, tensor in found.items()}
                if any(not torch.equal(found[name], tensor) for name, tensor in expected.items()):
                    raise SystemExit(f"reshard: rank {rank}: {side} gives other weights")
            else:
                laps[side].append(lap)
            del found
    timeline = record(me) if options.timeline else {}
    pipe.send((laps, timeline))
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Part 1."""
    check_room(options.quick)
    rounds = options.rounds or (2 if options.quick else 3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "docklands.models.shard"])
    with tempfile.TemporaryDirectory(prefix="reshard_") as work:
        pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
        store = os.path.join(work, "store")
        processes = [
            context.Process(target=serve, args=(rank, store, options, rounds, pipes[rank][1]), daemon=True)
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        ranks = []
        for rank, (pipe, ours) in enumerate(pipes):
            ours.close()
            try:
                if not pipe.poll(DEADLINE_S):
                    raise SystemExit(f"reshard: rank {rank} did not answer within {DEADLINE_S:g} s")
                laps, timeline = pipe.recv()
                ranks.append(laps)
                if rank == 0 and options.timeline:
                    Path(options.timeline).write_text(draw(timeline), encoding="utf-8")
            except EOFError:
                raise SystemExit(f"reshard: rank {rank} ended early (its message is above)") from None
        for process in processes:
            process.join(30)
    worst = {
        side: [{key: max(laps[side][n][key] for laps in ranks) for key in ranks[0][side][n]} for n in range(rounds)]
        for side in SIDES
    }
    for side in SIDES:
        print(
            f"{side}: "
            + ", ".join(f"{key} {statistics.median(x[key] for x in worst[side]):.4g}" for key in worst[side][0])
        )
    return [
        line(f"reshard/{method}_vs_naive", key, [x[key] for x in worst[method]], [x[key] for x in worst["naive"]])
        for method in METHODS
        for key in ("wall_s", "received_mb", "peak_mb")
    ]


def line(bench: str, metric: str, ours: Sequence[float], peer: Sequence[float]) -> dict[str, Any]:
    """A result; lower is better."""
    rounds = [b / a for a, b in zip(ours, peer)]
    spread = statistics.quantiles(rounds, n=4)[::2] if len(rounds) > 1 else rounds * 2
    a, b = float(f"{statistics.median(ours):.4g}"), float(f"{statistics.median(peer):.4g}")
    found = {"bench": bench, "metric": metric, "ours": a, "peer": b, "ratio": float(f"{b / a:.4g}")}
    return {**found, "n": len(rounds), "spread": [float(f"{value:.3g}") for value in spread]}


def busiest(plan: Any, node_gbs: float, between_gbs: float) -> tuple[float, float, float]:
    """(GB within the node, GB between nodes, seconds) of the slowest device; it sends and receives at once."""
    import numpy as np

    moved = np.zeros((2, 2, plan.devices))  # [link, direction, device]
    for family in plan.families:
        sizes = np.prod(family.boxes[:, :, 1] - family.boxes[:, :, 0], axis=1) * family.itemsize * len(family.names)
        away = family.source != family.target
        near = family.source // plan.options.node == family.target // plan.options.node
        for link, chosen in enumerate((away & near, away & ~near)):
            np.add.at(moved[link, 0], family.source[chosen], sizes[chosen])
            np.add.at(moved[link, 1], family.target[chosen], sizes[chosen])
    within, between = moved.max(1) / 1e9
    seconds = within / node_gbs + between / between_gbs
    worst = int(seconds.argmax())
    return float(within[worst]), float(between[worst]), float(seconds[worst])


def simulate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Part 2."""
    from docklands.models.catalog import catalog
    from docklands.parallel.layout import Layout
    from docklands.sync.plan import Options, plan_reshard

    lines = []
    for case, (name, source, target) in SIMULATED.items():
        found = {}
        for method in (*METHODS, "broadcast"):  # the last to generators on devices of their own
            peak_memory(reset=True)
            began = time.perf_counter()
            how = Options(method, apart=method == "broadcast")  # type: ignore[arg-type]
            plan = plan_reshard(catalog.get(name), Layout(**source), Layout(**target), how)
            made = f"planned in {time.perf_counter() - began:.1f} s, process at most {peak_memory() / 1e6:.0f} MB"
            within, between, seconds = busiest(plan, options.node_gbs, options.between_gbs)
            found[method] = (plan.links().total / 1e9, within + between, seconds)
            print(
                f"{case} {method}: {found[method][0]:.1f} GB in all, one receives at most "
                f"{plan.traffic()[1].max() / 1e9:.1f}; busiest device {within:.2f} GB within its node, "
                f"{between:.2f} GB between nodes: {seconds:.3f} s; {made}"
            )
        ours, peer = found["minimal"], found["allgather_swap"]
        lines.append(line(f"reshard/{case}", "moved_gb", [ours[0]], [peer[0]]))
        lines.append(line(f"reshard/{case}", "simulated_s", [ours[2]], [peer[2]]))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    lines = measure(options) if options.only != "simulated" else []
    lines += simulate(options) if options.only != "measured" else []
    for found in lines:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
