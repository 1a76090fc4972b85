"""What report.html and the dashboard draw alike: colours, the curves that come first, and the layout of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIGHT = """color-scheme: light; --bg:#f6f7f9; --card:#fff; --ink:#19212d; --muted:#5f6b7c; --line:#e3e7ed;
  --soft:#f1f4f8; --accent:#2563eb; --good:#0f7b55; --goodbg:#e2f5ec; --bad:#b4391a; --badbg:#fcebe5; --c0:#2f6fde;
  --c1:#e07b1f; --c2:#1f9d78; --c3:#b64fc8; --c4:#d23f57; --c5:#7a8599; --c6:#c2a20b; --c7:#19a3bd;"""

DARK = """color-scheme: dark; --bg:#0e131a; --card:#161d27; --ink:#e4e9f0; --muted:#94a1b3; --line:#293341;
  --soft:#1c2531; --accent:#74a9ff; --good:#5fd3a3; --goodbg:#12352a; --bad:#ff9b7d; --badbg:#40221a; --c0:#5b93f5;
  --c1:#e8913f; --c2:#35b58e; --c3:#c774d6; --c4:#e2627a; --c5:#8a96a8; --c6:#c9ac33; --c7:#37b3cc;"""

THEMES = f"""
:root {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
:root[data-theme=light] {{ {LIGHT} }}
:root[data-theme=dark] {{ {DARK} }}
"""

CURVES = (
    (("critic/rewards/mean", "critic/score/mean"), "Reward", "mean over the step's samples"),
    (("response_length/mean",), "Response length", "tokens, mean"),
    (("actor/pg_loss", "actor/sft_loss"), "Loss", "per trained token"),
    (("actor/kl_loss", "actor/ppo_kl"), "KL divergence", "nats per token"),
    (("actor/entropy",), "Entropy", "nats per token"),
    (("actor/grad_norm",), "Gradient norm", "before clipping"),
    (("perf/throughput", "perf/gen_tokens_per_s"), "Throughput", "tokens/s"),
    (("critic/vf_loss",), "Value loss", "per trained token"),
    (("completions/clipped_ratio",), "Cut at the limit", "share of samples"),
    (("frac_reward_zero_std",), "Groups without signal", "share with equal rewards"),
    (("memory/rss_mib",), "Memory", "resident MiB"),
)
"""(names, of which the first that a run has is drawn; title; unit)."""

# --- the dataflow graph ------------------------------------------------------------------------------------------

BOX_W, GAP_X, GAP_Y, PASS_H = 168.0, 52.0, 18.0, 6.0
PROMPTS_H = 30.0


@dataclass(frozen=True)
class GraphLayout:
    """Where the boxes of a graph stand, left to right, in pixels.

    at, tall  upper left corner and height of each box; all are BOX_W wide
    routes    SVG path of each edge
    back      SVG path of the new weights' way from the update to the rollout ("" when the graph lacks either)
    label     where the way back is named
    """

    at: Mapping[str, tuple[float, float]]
    tall: Mapping[str, float]
    size: tuple[float, float]
    routes: Sequence[str]
    back: str
    label: tuple[float, float]


def plain_stages(graph: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stages of a graph.json as texts and lists of texts; empty when it has another shape."""
    stages = graph.get("stages")
    lists, texts = ("reads", "writes"), ("name", "role", "by")
    if not isinstance(stages, list) or not all(isinstance(s, dict) for s in stages):
        return []
    good = (all(k in s for k in texts) and all(isinstance(s.get(k), list) for k in lists) for s in stages)
    if not all(good):
        return []
    plain: list[dict[str, Any]] = [
        {k: str(s[k]) for k in texts} | {k: [str(c) for c in s[k]] for k in lists} for s in stages
    ]
    names = {stage["name"] for stage in plain}
    return plain if len(names) == len(plain) and "prompts" not in names else []


def place_graph(stages: Sequence[dict[str, Any]], extra: float = 0.0) -> GraphLayout:
    """Lay `plain_stages` out; `extra` pixels more for each stage's box than its name and its columns need."""
    layer, edges = graph_layers(stages)
    columns, routes = graph_columns(layer, edges)
    need = {s["name"]: 46 + 14.0 * len(s["writes"]) + extra for s in stages}
    tall = {n: need.get(n, PASS_H) for nodes in columns for n in nodes} | {"prompts": PROMPTS_H}
    tallest = max(sum(tall[n] for n in nodes) + GAP_Y * (len(nodes) - 1) for nodes in columns)
    at: dict[str, tuple[float, float]] = {}
    for column, nodes in enumerate(columns):
        y = (tallest - sum(tall[n] for n in nodes) - GAP_Y * (len(nodes) - 1)) / 2 + 4
        for name in nodes:
            at[name] = (column * (BOX_W + GAP_X) + 4, y)
            y += tall[name] + GAP_Y
    size = (len(columns) * (BOX_W + GAP_X) - GAP_X + 8, tallest + 46)
    middle = {name: y + tall[name] / 2 for name, (_, y) in at.items()}
    back, label = "", (0.0, 0.0)
    if "update" in at and "rollout" in at:
        (ux, uy), (rx, ry), low = at["update"], at["rollout"], tallest + 24
        ux, rx = ux + BOX_W / 2, rx + BOX_W / 2
        back = f"M{ux:.0f} {uy + tall['update']:.0f}V{low:.0f}H{rx:.0f}V{ry + tall['rollout'] + 3:.0f}"
        label = ((ux + rx) / 2, low + 15)
    boxes = [name for name in at if name in layer]
    found = {name: at[name] for name in boxes}, {name: tall[name] for name in boxes}
    return GraphLayout(*found, size, [route_path(r, at, middle) for r in routes], back, label)


def graph_layers(stages: Sequence[dict[str, Any]]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(column of each stage by longest path, edges without those that a longer path implies)."""
    writer = {column: s["name"] for s in stages for column in s["writes"]}
    before = {s["name"]: {writer.get(column, "prompts") for column in s["reads"]} - {s["name"]} for s in stages}
    layer: dict[str, int] = {"prompts": 0}
    reach: dict[str, set[str]] = {"prompts": set()}
    edges = []
    for stage in stages:  # in order: every writer stands before its readers
        name = stage["name"]
        sources = [source for source in before[name] if source in layer] or ["prompts"]
        layer[name] = 1 + max(layer[source] for source in sources)
        implied = set().union(*(reach[source] for source in sources))
        reach[name] = implied | set(sources)
        edges += [(source, name) for source in sources if source not in implied]
    return layer, edges


def graph_columns(layer: dict[str, int], edges: Sequence[tuple[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """(nodes of each column, nodes along each edge). An edge over several columns passes through a slot in each."""
    columns: list[list[str]] = [[] for _ in range(max(layer.values()) + 1)]
    for name, column in layer.items():
        columns[column].append(name)
    routes = []
    for source, name in edges:
        slots = [f"{source}>{name}@{c}" for c in range(layer[source] + 1, layer[name])]
        for column, slot in enumerate(slots, layer[source] + 1):
            columns[column].append(slot)
        routes.append([source, *slots, name])
    height: dict[str, float] = {}  # relative height of each node, to keep edges from crossing
    for nodes in columns:
        sources = {n: [route[route.index(n) - 1] for route in routes if n in route[1:]] for n in nodes}
        nodes.sort(key=lambda n: sum(height[s] for s in sources[n]) / max(1, len(sources[n])))
        height.update({n: (i + 0.5) / len(nodes) for i, n in enumerate(nodes)})
    return columns, routes


def route_path(route: Sequence[str], at: dict[str, tuple[float, float]], middle: dict[str, float]) -> str:
    """A curve from box to box; level while it passes through a column."""
    x = at[route[0]][0] + BOX_W
    path = f"M{x:.0f} {middle[route[0]]:.0f}"
    for before, name in zip(route[:-1], route[1:]):
        end, half = at[name][0], GAP_X / 2
        path += f"C{x + half:.0f} {middle[before]:.0f} {end - half:.0f} {middle[name]:.0f} {end:.0f} {middle[name]:.0f}"
        if name != route[-1]:
            path += f"H{end + BOX_W:.0f}"
        x = end + BOX_W
    return path
