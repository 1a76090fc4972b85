"""What lies on a device over one hand-over to generation and back, out of the ledger, as a drawing.

Legend: none.
"""

from __future__ import annotations

import time
from typing import Any

KINDS = {
    "weights": ("training weights", "#4269d0"),
    "gradients": ("gradients", "#97bbf5"),
    "optimizer": ("optimizer state", "#6cc5b0"),
    "generation": ("generation weights", "#efb118"),
    "messages": ("messages", "#ff725c"),
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 300, 56, 34, 28


def record(rank: Any) -> dict[str, Any]:
    """One cycle on a bench rank: {"history": [(seconds, kind, bytes)], "marks": [(seconds, text)]} of its device."""
    import torch

    from docklands.sync.gate import Gate
    from docklands.sync.handover import Handover
    from docklands.sync.memory import MemoryTiers
    from docklands.sync.reshard import Resharder

    weights, tiers = rank.trained(), MemoryTiers()
    plan = rank.movers["minimal"].plan
    mover = Resharder(plan, dtype=torch.bfloat16, timeout_s=600, ledger=tiers.ledger)
    handover = Handover(mover, tiers, Gate(plan, mover.as_held))
    gradients = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    moments = {f"{name}.{i}": torch.zeros_like(tensor) for name, tensor in weights.items() for i in (1, 2)}
    marks = [(time.monotonic(), "to generation")]
    handover.to_generation(1, weights, gradients, moments)
    marks.append((time.monotonic(), "generation"))
    time.sleep(0.5)  # stands for generation
    marks.append((time.monotonic(), "prefetch"))
    handover.prefetch()
    handover.to_training()
    marks.append((time.monotonic(), "training"))
    time.sleep(0.2)
    end = time.monotonic()
    history = [(at, kind, size) for at, tier, kind, size in tiers.ledger.history if tier == "device"]
    zero = marks[0][0]
    return {
        "history": [(max(0.0, at - zero), kind, size) for at, kind, size in history],
        "marks": [(at - zero, text) for at, text in marks],
        "end": end - zero,
    }


def thinned(points: list[tuple[float, dict[str, int]]], width: float) -> list[tuple[float, dict[str, int]]]:
    """At most three points for each pixel: the first, the fullest and the last."""
    bins: dict[int, list[int]] = {}
    for index, (at, _) in enumerate(points):
        bins.setdefault(int(at / width), []).append(index)
    kept = set()
    for indices in bins.values():
        kept |= {indices[0], indices[-1], max(indices, key=lambda index: sum(points[index][1].values()))}
    return [points[index] for index in sorted(kept)]


def draw(found: dict[str, Any]) -> str:
    """The drawing (SVG): stacked bytes over time; as a line what the system says, where it was asked ("resident")."""
    now, points = dict.fromkeys(KINDS, 0), []
    for at, kind, size in found["history"]:
        points.append((at, dict(now)))
        now[kind] = size
        points.append((at, dict(now)))
    points.append((found["end"], dict(now)))
    points = thinned(points, found["end"] / WIDTH)
    seen = found.get("resident", [])
    top = max([sum(levels.values()) for _, levels in points] + [size for _, size in seen]) * 1.05
    x0, y0 = LEFT, HEIGHT - BOTTOM

    def place(at: float, size: float) -> str:
        x = x0 + at / found["end"] * (WIDTH - LEFT - 8)
        return f"{x:.1f},{y0 - size / top * (y0 - TOP):.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    below = [0] * len(points)
    shown = {kind: style for kind, style in KINDS.items() if any(levels[kind] for _, levels in points)}
    for number, (kind, (name, color)) in enumerate(shown.items()):
        above = [low + levels[kind] for low, (_, levels) in zip(below, points)]
        edge = [place(at, size) for (at, _), size in zip(points, above)]
        back = [place(at, size) for (at, _), size in zip(reversed(points), reversed(below))]
        out.append(f'<polygon points="{" ".join(edge + back)}" fill="{color}"/>')
        x = LEFT + number * 140
        out.append(
            f'<rect x="{x}" y="8" width="10" height="10" fill="{color}"/><text x="{x + 14}" y="17">{name}</text>'
        )
        below = above
    if seen:
        last = {int(at / found["end"] * WIDTH): (at, size) for at, size in seen}  # one for each pixel
        path = " ".join(place(at, max(0, size)) for at, size in last.values())
        out.append(f'<polyline points="{path}" fill="none" stroke="#222"/>')
        out.append(f'<text x="{WIDTH - 8}" y="17" text-anchor="end">line: resident memory</text>')
    for number, (at, text) in enumerate(found["marks"]):
        x = place(at, 0).split(",")[0]
        side = "end" if float(x) > WIDTH * 0.9 else "start"
        out.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{y0}" stroke="#555" stroke-dasharray="3 3"/>')
        shift, y = (-3 if side == "end" else 3), TOP + 10 + 12 * number
        out.append(f'<text x="{float(x) + shift:.1f}" y="{y}" text-anchor="{side}">{text}</text>')
    for share in (0, 0.5, 1):
        size = top / 1.05 * share
        y = place(0, size).split(",")[1]
        out.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{size / 1e6:.0f} MB</text>')
    out.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">{found["end"]:.1f} s</text></svg>')
    return "\n".join(out) + "\n"
