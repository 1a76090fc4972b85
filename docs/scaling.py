"""Writes the tables of docs/scaling.md, and docs/scaling_*.svg: predictions for published models on 16 to 384 devices.

    python docs/scaling.py [--quick]

Nothing here is measured. The cost model (run/cost_model.py) and the simulation (run/simulate.py) with the figures of
run/hardware.py; the layouts are those that MindSpeed RL published (arXiv 2507.19017).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from docklands.config.load import make_config
from docklands.config.schema import Config
from docklands.core.fields import REF_LOGPROBS
from docklands.errors import DocklandsError
from docklands.models.catalog import catalog
from docklands.parallel.layout import Layout
from docklands.run.cost_model import size_of
from docklands.run.forecast import Case, Dock, Forecast, forecast
from docklands.run.hardware import HARDWARE
from docklands.run.lengths import Lengths
from docklands.run.plan import plan_run
from docklands.run.simulate import Group
from docklands.sync.plan import Options

FOLDER = Path(__file__).parent
MACHINE = HARDWARE.get("ascend-910c")
PROMPT, MEAN, MOST, GROUP = 512, 1500, 6144, 16
COLOURS = ("#2a6f97", "#c1666b", "#6a994e", "#8e7dbe", "#d4a373", "#444444")


@dataclass(frozen=True)
class Cluster:
    """A published model and layout, and how many devices it is spread over here.

    base      devices of the layout as published, with prompts so many a step
    training, generation  degrees but fsdp and dp, which the number of devices gives
    """

    name: str
    model: str
    base: int
    prompts: int
    training: dict[str, Any]
    generation: dict[str, int]
    devices: tuple[int, ...]
    tokens: int = 8192

    def layouts(self, devices: int) -> tuple[Layout, Layout]:
        inner = np.prod([self.training.get(axis, 1) for axis in ("tp", "pp", "cp")])
        train = Layout(**self.training, fsdp=int(devices // inner))  # type: ignore[arg-type]
        return train, Layout(**self.generation, dp=devices // self.generation.get("tp", 1))  # type: ignore[arg-type]


CLUSTERS = (
    Cluster("7B TP2 PP2 -> TP1", "qwen2.5-7b", 16, 64, {"tp": 2, "pp": 2}, {}, (16, 32, 64, 128)),
    Cluster("32B TP4 PP4 -> TP2", "qwen2.5-32b", 16, 64, {"tp": 4, "pp": 4}, {"tp": 2}, (16, 32, 64, 128)),
    Cluster("32B TP8 PP2 CP2 -> TP4", "qwen2.5-32b", 64, 64, {"tp": 8, "pp": 2, "cp": 2, "context": "ring"}, {"tp": 4},
            (64, 128, 256)),
    Cluster("30B-A3B TP4 EP2 -> EP8", "qwen3-30b-a3b", 16, 64, {"tp": 4, "ep": 2, "etp": 4}, {"ep": 8},
            (16, 32, 64, 128)),
    Cluster("235B-A22B TP2 PP16 EP4 -> TP4 EP8", "qwen3-235b-a22b", 128, 128, {"tp": 2, "pp": 16, "ep": 4},
            {"tp": 4, "ep": 8, "etp": 4}, (128, 256, 384)),
    Cluster("671B TP4 PP8 EP8 -> TP4 EP64", "deepseek-r1-671b", 256, 256, {"tp": 4, "pp": 8, "ep": 8},
            {"tp": 4, "ep": 64}, (256, 384)),
)  # fmt: skip


def config_of(prompts: int, tokens: int, visit: int = 0, **dock: object) -> Config:
    """GRPO with a KL term: old and reference log-probs, four updates a step. visit: tokens (partial rollouts)."""
    config, _ = make_config(
        {
            "data": {"max_prompt_tokens": PROMPT},
            "rollout": {
                "prompts_per_step": prompts, "samples_per_prompt": GROUP,
                "max_response_tokens": MOST, "max_batch": 1024, "partial_tokens": visit,
            },
            "train": {"dtype": "bfloat16", "recompute": "full", "tokens_per_microbatch": tokens},
            "algorithm": {"kl": {"coef": 0.001}, "samples_per_update": prompts * GROUP // 4},
            "sync": {"swap": "host"},
            "dock": dock,
        }
    )  # fmt: skip
    return config


def predict(
    cluster: Cluster, devices: int, prompts: int, keep: bool = False, options: Options | None = None, **more: object
) -> Forecast:
    """keep: training weights stay beside the generator's, in bf16."""
    dock = {key: more.pop(key) for key in ("max_staleness", "deterministic", "groups_per_take") if key in more}
    config = config_of(prompts, cluster.tokens, int(more.pop("visit", 0)), **dock)  # type: ignore[call-overload]
    train, generate = cluster.layouts(devices)
    options = options or Options(node=MACHINE.node)
    if options.apart:
        train, generate = cluster.layouts(devices // 2)
    machine = more.pop("machine", MACHINE)
    config = config.model_copy(update={"layout": config.layout.model_copy(update={
        name: getattr(train, name) for name in ("dp", "fsdp", "tp", "pp", "cp", "ep", "etp", "context")
    })})  # fmt: skip
    capacity = int(MACHINE.capacity)
    memory = plan_run(config, catalog.get(cluster.model), generate, options, capacity)
    memory.check()
    if keep:
        local = size_of(memory.model)
        weights = 2 * (local.dense / (train.tp * train.pp) + local.routed / (train.ep * train.etp * train.pp))
        memory = replace(memory, capacity=int(capacity - weights))
    lengths = more.pop("lengths", Lengths(PROMPT, MEAN, MOST, where="lognormal"))
    case = Case(machine, lengths, steps=int(more.pop("steps", 3)), **more)  # type: ignore[arg-type]
    return forecast(config, memory, case)


# --- tables ---------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def linearity(clusters: Sequence[Cluster]) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """Weak scaling (prompts grow with the devices) and strong (they stay), against the smallest number of devices."""
    rows, lines = [], {}
    for cluster in clusters:
        first = None
        for devices in cluster.devices:
            times = devices / cluster.devices[0]
            weak = predict(cluster, devices, int(cluster.prompts * times))
            strong = predict(cluster, devices, cluster.prompts)
            first = first or (weak, strong)
            shares = [now.throughput / base.throughput for now, base in zip((weak, strong), first)]
            found = weak.simulated
            rows.append([
                cluster.name, str(devices), f"{int(cluster.prompts * times)} x {GROUP}", f"{found.seconds:.0f}",
                f"{found.total('rollout') / found.seconds:.0%}", f"{found.total('update') / found.seconds:.0%}",
                f"{found.total('publish'):.1f}", f"{weak.throughput:.0f}", f"{shares[0]:.0%}", f"{shares[1]:.0%}",
            ])  # fmt: skip
            lines.setdefault(cluster.name, []).append((devices, weak.throughput * devices))
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    head = ["model: training -> generation", "devices", "samples a step", "s a step", "generating", "updating",
            "publish, s", "tokens/s a device", "linear, weak", "linear, strong"]  # fmt: skip
    return table(head, rows), lines


def sample_flow(devices: Sequence[int]) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """Seconds a step in which rows move: one central buffer, and warehouses beside the devices (formula R8)."""
    from docklands.algorithms import build_algorithm

    rows: list[list[str]] = []
    lines: dict[str, list[tuple[float, float]]] = {"central buffer": [], "dock": []}
    graph = build_algorithm(config_of(64, 16384)).graph()
    assert any(REF_LOGPROBS in stage.writes for stage in graph.stages)
    for count in devices:
        prompts, nodes = 4 * count, -(-count // MACHINE.server)
        lengths = Lengths(PROMPT, MEAN, MOST)
        drawn = lengths.draw(prompts, GROUP, np.random.default_rng(0))
        groups = [Group(i, p, r, {}) for i, (p, r) in enumerate(zip(*drawn, strict=True))]
        speed = MACHINE.endpoint
        central, dock = (Dock(graph, s, speed) for s in (1, nodes))
        stages = [stage.name for stage in graph.stages]
        moved = sum(dock.moved(name, g.prompt, g.responses) for name in stages for g in groups)
        alone = replace(MACHINE, server=10**6)
        steps = [predict(CLUSTERS[0], count, prompts, machine=m).simulated.seconds for m in (alone, MACHINE)]
        published = 4 * prompts * GROUP * (7 * PROMPT + 20 * MOST)
        slow, fast = (sum(d.seconds(name, groups) for name in stages) for d in (central, dock))
        rows.append([str(count), f"{prompts} x {GROUP}", f"{moved / 1e9:.1f}", f"{published / 1e9:.1f}", str(nodes),
                     f"{slow:.2f}", f"{fast:.3f}", f"{published / speed:.1f}", f"{slow / fast:.0f} x",
                     f"{steps[0]:.1f}", f"{steps[1]:.1f}"])  # fmt: skip
        lines["central buffer"].append((count, slow))
        lines["dock"].append((count, fast))
    head = ["devices", "samples a step", "GB moved", "GB, published columns, padded", "warehouses", "central, s",
            "dock, s", "central, published columns, s", "dock faster by",
            "7B step, s, central", "dock"]  # fmt: skip
    return table(head, rows), lines


def keeping_both(clusters: Sequence[Cluster]) -> str:
    """Room for the KV cache with and without the training weights beside it, and what it is worth."""
    rows, lengths = [], Lengths(2048, 8000, 30720)
    for cluster in clusters:
        devices = cluster.devices[0]
        swap, keep = (predict(cluster, devices, 2 * cluster.prompts, keep=k, lengths=lengths) for k in (False, True))
        ours, theirs = (f.simulated.total("rollout") for f in (swap, keep))
        rows.append([cluster.name, str(devices), str(swap.slots), str(keep.slots), f"{ours:.0f}", f"{theirs:.0f}",
                     f"{swap.throughput / keep.throughput:.2f} x"])  # fmt: skip
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    head = ["model: training -> generation", "devices", "sequences at once, swapped", "kept", "generation, s, swapped",
            "kept", "step faster by"]  # fmt: skip
    return table(head, rows)


def modes(cluster: Cluster, devices: int) -> str:
    """One cluster in every mode."""
    apart = Options(method="broadcast", node=MACHINE.node, apart=True)
    cases: list[tuple[str, dict[str, object]]] = [
        ("colocated, synchronous", {}),
        ("colocated, max_staleness 1, visits of 2,048 tokens", {"max_staleness": 1, "visit": 2048}),
        (
            "colocated, max_staleness 2, visits of 1,024 tokens, 3 steps' groups a take, in any order",
            {"max_staleness": 2, "visit": 1024, "groups_per_take": 3 * cluster.prompts, "deterministic": False},
        ),
        ("half and half, synchronous", {"options": apart}),
        ("half and half, max_staleness 1", {"options": apart, "max_staleness": 1}),
        ("half and half, max_staleness 2", {"options": apart, "max_staleness": 2}),
    ]
    rows, first = [], None
    for name, more in cases:
        found = predict(cluster, devices, cluster.prompts, steps=8, **more)  # type: ignore[arg-type]
        first = first or found
        tail = 1 - found.simulated.active
        rows.append([name, f"{found.simulated.seconds:.0f}", f"{tail:.0%}", found.short.split(" (")[0],
                     f"{found.throughput:.0f}", f"{found.throughput / first.throughput:.2f} x"])  # fmt: skip
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    head = ["mode", "s a step", "tail of generation", "short of", "tokens/s a device", "against the first"]
    return table(head, rows)


# --- plots ----------------------------------------------------------------------------------------------------------


def plot(lines: dict[str, list[tuple[float, float]]], labels: tuple[str, str], ideal: bool) -> str:
    """An SVG with logarithmic axes. ideal: dashed lines of exact proportion from each line's first point."""
    width, height, left, top, right, bottom = 760, 360, 70, 24, 280, 45
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    low, high = np.log([min(ys) * 0.8, max(ys) * 1.25])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (np.log(x) - np.log(min(xs))) / (np.log(max(xs)) - np.log(min(xs)) or 1)
        up = (np.log(y) - low) / (high - low)
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    def path(points: Sequence[tuple[float, float]], style: str) -> str:
        return f'<polyline fill="none" {style} points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
           f'font-size="11"><rect width="{width}" height="{height}" fill="#fff"/>']  # fmt: skip
    for x in sorted(set(xs)):
        across = at(x, min(ys))[0]
        out.append(f'<text x="{across:.1f}" y="{height - bottom + 16}" text-anchor="middle">{x:g}</text>')
    for power in range(int(np.floor(low / np.log(10))), int(np.ceil(high / np.log(10))) + 1):
        if low <= power * np.log(10) <= high:
            up = at(min(xs), 10.0**power)[1]
            out.append(f'<line x1="{left}" x2="{width - right}" y1="{up:.1f}" y2="{up:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{left - 6}" y="{up + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour, (x0, y0) = COLOURS[index % len(COLOURS)], line[0]
        if ideal:
            ends = [at(x, y0 * x / x0) for x, _ in line]
            out.append(path(ends, f'stroke="{colour}" stroke-dasharray="3 4" stroke-opacity="0.5"'))
        out.append(path([at(x, y) for x, y in line], f'stroke="{colour}" stroke-width="2"'))
        where = top + 14 + 16 * index
        out.append(f'<text x="{width - right + 10}" y="{where}" fill="{colour}">{name.replace("->", "→")}</text>')
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">{labels[0]}</text>')
    out.append(f'<text x="12" y="14">{labels[1]}</text></svg>')
    return "\n".join(out) + "\n"


def filled(page: str, name: str, body: str) -> str:
    """The page with one table anew, between its marks."""
    begin, end = f"<!-- {name}: made by docs/scaling.py -->", f"<!-- end of {name} -->"
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{body}\n\n{end}{tail}"


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first model only, to standard output")
    options = parser.parse_args()
    clusters = CLUSTERS[:1] if options.quick else CLUSTERS
    try:
        scaled, lines = linearity(clusters)
        flow, flows = sample_flow((16, 32, 64, 128, 256, 384))
        both, mode = keeping_both(clusters), modes(clusters[min(1, len(clusters) - 1)], 64)
    except DocklandsError as error:
        sys.exit(f"{error.message} ({error.hint})")
    parts = {"linearity": scaled, "sample flow": flow, "memory": both, "modes": mode}
    if options.quick:
        return print("\n\n".join(parts.values()))
    page = (FOLDER / "scaling.md").read_text(encoding="utf-8")
    for name, body in parts.items():
        page = filled(page, name, body)
    (FOLDER / "scaling.md").write_text(page, encoding="utf-8")
    (FOLDER / "scaling_linearity.svg").write_text(plot(lines, ("devices", "tokens/s"), True), encoding="utf-8")
    (FOLDER / "scaling_dock.svg").write_text(plot(flows, ("devices", "seconds a step"), False), encoding="utf-8")


if __name__ == "__main__":
    main()
