"""Charts of report.html as inline SVG. Every text that comes from a run is escaped here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from docklands.obs.drawing import BOX_W, place_graph
from docklands.obs.spans import nesting

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 360.0, 178.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 8.0, 8.0, 22.0
COLOURS = 8


def number(value: float) -> str:
    """A figure for people: three to four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e7:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers that span [low, high]."""
    if not high > low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def smoothed(points: Points, reach: int) -> list[tuple[float, float]]:
    """Mean over up to `reach` neighbours on either side (unlike an exponential average, it does not lag)."""
    ys, found = [y for _, y in points], []
    for i, (x, _) in enumerate(points):
        window = ys[max(0, i - reach) : i + reach + 1]
        found.append((x, math.fsum(window) / len(window)))
    return found


def thinned(points: Points, most: int = 600) -> Points:
    """At most `most` points, evenly chosen; the ends stay."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def path(points: Points) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def line_chart(points: Points, colour: int = 0) -> str:
    """One metric over steps: raw values pale, their moving average strong, values on hover."""
    points = thinned(points)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ticks = nice_ticks(min(ys), max(ys))
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    x_span, y_span = x_high - x_low, ticks[-1] - ticks[0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / x_span * (WIDTH - LEFT - RIGHT)
        return across, TOP + (ticks[-1] - y) / y_span * (HEIGHT - TOP - BOTTOM)

    at = [place(x, y) for x, y in points]
    mean = [place(x, y) for x, y in smoothed(points, 1 + len(points) // 12)]
    shown = ",".join(number(y).replace(",", " ") for y in ys)
    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" data-x="{joined(xs, "{:g}")}" data-px="{joined([x for x, _ in at])}" '
        f'data-y="{shown}" data-py="{joined([y for _, y in at])}">'
    ]
    for tick in ticks:
        y = place(x_low, tick)[1]
        parts.append(f'<line class="rule" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in sorted({t for t in map(round, nice_ticks(x_low, x_high, 5)) if x_low <= t <= x_high}):
        x = place(tick, ticks[0])[0]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6:g}" text-anchor="middle">{tick}</text>')
    stroke = f"stroke:var(--c{colour % COLOURS})"
    if len(at) > 1:
        parts.append(f'<path class="raw" style="{stroke}" d="{path(at)}"/>')
        parts.append(f'<path class="smooth" style="{stroke}" d="{path(mean)}"/>')
    else:
        parts.append(f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="3" style="fill:var(--c{colour % COLOURS})"/>')
    parts.append(f'<line class="cross" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>')
    parts.append(f'<circle class="dot" r="3.5" style="fill:var(--c{colour % COLOURS})"/></svg>')
    return "".join(parts)


def joined(values: Sequence[float], form: str = "{:.1f}") -> str:
    return ",".join(form.format(value) for value in values)


def sparkline(points: Points) -> str:
    """A curve of the size of a word."""
    points = thinned(points, 120)
    ys = [y for _, y in points]
    low, span = min(ys), (max(ys) - min(ys)) or 1.0
    at = [(i * 116 / max(1, len(ys) - 1) + 2, 20 - (y - low) / span * 18) for i, y in enumerate(ys)]
    if len(at) == 1:
        at = [(2, 11), (118, 11)]
    return f'<svg viewBox="0 0 120 22"><path class="smooth thin" d="{path(at)}"/></svg>'


def legend(names: Sequence[str], colours: Sequence[int]) -> str:
    """Names beside their colours."""
    items = (
        f'<span><i style="background:var(--c{c % COLOURS})"></i>{escape(n)}</span>' for n, c in zip(names, colours)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def stacked_bars(steps: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    """Seconds per step, stacked by stage; rows[i][j] are those of stage j in step i. Long runs are averaged."""
    most, width, height = 120, 1100.0, 230.0
    per = -(-len(steps) // most)
    bars = []
    for i in range(0, len(steps), per):
        part = rows[i : i + per]
        mean = [sum(row[j] for row in part) / len(part) for j in range(len(names))]
        bars.append((steps[i], steps[min(i + per, len(steps)) - 1], mean))
    ticks = nice_ticks(0.0, max(sum(mean) for _, _, mean in bars) or 1.0)
    scale = (height - TOP - BOTTOM) / ticks[-1]
    slot = (width - LEFT - RIGHT) / len(bars)
    parts = [f'<svg viewBox="0 0 {width:g} {height:g}">']
    for tick in ticks:
        y = height - BOTTOM - tick * scale
        parts.append(f'<line class="rule" x1="{LEFT:g}" x2="{width - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{number(tick)} s</text>')
    every = max(1, len(bars) // 12)
    for i, (first, last, mean) in enumerate(bars):
        x, y, label = LEFT + i * slot, height - BOTTOM, str(first) if first == last else f"{first}-{last}"
        for j, seconds in enumerate(mean):
            y -= seconds * scale
            title = f"<title>step {label}, {escape(names[j])}: {number(seconds)} s</title>"
            parts.append(
                f'<rect x="{x + slot * 0.1:.2f}" y="{y:.2f}" width="{slot * 0.8:.2f}" height="{seconds * scale:.2f}" '
                f'style="fill:var(--c{j % COLOURS})">{title}</rect>'
            )
        if i % every == 0:
            parts.append(f'<text x="{x + slot / 2:.1f}" y="{height - 6:g}" text-anchor="middle">{first}</text>')
    return "".join([*parts, "</svg>"])


def timeline(spans: Sequence[dict[str, Any]], lanes: Sequence[int], window: tuple[float, float]) -> str:
    """Spans as bars: a row per role, rank and lane; time runs to the right. Spans are cut at the window's ends."""
    start, end = window
    width, left, row_height = 1100.0, 130.0, 24.0
    keys = sorted({(s["role"], int(s.get("rank") or 0), lane) for s, lane in zip(spans, lanes)})
    depth = nesting(spans, lanes)
    names = list(dict.fromkeys(s["name"] for s in spans))
    height = len(keys) * row_height + 26
    scale = (width - left - RIGHT) / max(end - start, 1e-6)
    parts = [f'<svg viewBox="0 0 {width:g} {height:g}">']
    for tick in nice_ticks(0.0, end - start, 8):
        if tick <= (end - start) * 1.0001:
            x = left + tick * scale
            parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20:g}"/>')
            parts.append(f'<text x="{x:.1f}" y="{height - 6:g}" text-anchor="middle">{number(tick)} s</text>')
    for i, (role, rank, lane) in enumerate(keys):
        label = "" if lane else role + (f" {rank}" if rank else "")
        place = f'x="{left - 10:g}" y="{i * row_height + 16:g}"'
        parts.append(f'<text class="ink" {place} text-anchor="end">{escape(label[:20])}</text>')
    for row, lane, inner in zip(spans, lanes, depth):
        a, b = max(row["start"], start) - start, min(row["start"] + row["duration"], end) - start
        x, w = left + a * scale, max(1.0, (b - a) * scale)
        inset = min(inner * 4, 12)
        y = keys.index((row["role"], int(row.get("rank") or 0), lane)) * row_height + 2 + inset / 2
        colour = names.index(row["name"]) % COLOURS
        title = f"{row['name']}: {number(row['duration'])} s"
        parts.append(
            f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y:.1f}" width="{w:.2f}" height="{20 - inset:g}" '
            f'rx="2" style="fill:var(--c{colour});stroke:var(--card);stroke-width:.7"/>'
        )
        short = row["name"].removeprefix("stage/")
        if w > 7 * len(short) + 8 and not inner:
            parts.append(f'<text class="bar" x="{x + 5:.1f}" y="{y + 14:.1f}">{escape(short)}</text>')
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


# --- the graph ---------------------------------------------------------------------------------------------------


def graph_svg(stages: Sequence[dict[str, Any]]) -> str:
    """Boxes from left to right; the dashed line is the way of new weights back to the rollout."""
    placed = place_graph(stages)
    by_name = {s["name"]: s for s in stages}
    width, height = placed.size
    parts = [f'<svg viewBox="0 0 {width:g} {height:g}" style="width:{width:g}px;max-width:none">', MARKERS]
    parts += [f'<path class="edge" marker-end="url(#m)" d="{route}"/>' for route in placed.routes]
    if placed.back:
        x, y = placed.label
        parts.append(f'<path class="edge back" marker-end="url(#mb)" d="{placed.back}"/>')
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle">new weights</text>')
    parts += [graph_box(name, by_name.get(name), at, placed.tall[name]) for name, at in placed.at.items()]
    return "".join([*parts, "</svg>"])


MARKERS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path class="head {kind}" d="M0 0L8 4L0 8z"/></marker>'
    for name, kind in (("m", ""), ("mb", "blue"))
)


def graph_box(name: str, stage: dict[str, Any] | None, at: tuple[float, float], h: float) -> str:
    """A stage: name, role, how rows are handed out, what it writes; what it reads on hover."""
    (x, y), corner = at, 8 if stage else h / 2
    parts = [f'<g><rect class="box" x="{x:g}" y="{y:g}" width="{BOX_W:g}" height="{h:g}" rx="{corner:g}"/>']
    title = 'font-weight="600" style="font-size:13px"'
    if stage is None:
        middle = f'x="{x + BOX_W / 2:g}" y="{y + 20:g}" text-anchor="middle"'
        return "".join([*parts, f'<text class="ink" {title} {middle}>{escape(name)}</text></g>'])
    parts.append(f"<title>{escape(name + ' reads ' + ', '.join(stage['reads']))}</title>")
    parts.append(f'<text class="ink" {title} x="{x + 12:g}" y="{y + 20:g}">{escape(name[:22])}</text>')
    role = f"{stage['role']} · by {stage['by']}"
    parts.append(f'<text x="{x + 12:g}" y="{y + 35:g}">{escape(role[:27])}</text>')
    for i, column in enumerate(stage["writes"]):
        parts.append(f'<text x="{x + 12:g}" y="{y + 51 + 14 * i:g}">→ {escape(column[:24])}</text>')
    return "".join([*parts, "</g>"])
