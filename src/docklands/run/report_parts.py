"""Sections of report.html: each takes what a run directory holds and gives HTML. All text of a run is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from docklands.obs.critical_path import StepPath
from docklands.obs.drawing import CURVES, plain_stages
from docklands.obs.spans import assign_lanes
from docklands.run.report_charts import (
    Points,
    graph_svg,
    legend,
    line_chart,
    number,
    sparkline,
    stacked_bars,
    timeline,
)

Series = Mapping[str, Points]
Row = dict[str, Any]

MOST_TEXT = 4000
STEPS_SHOWN, ROWS_SHOWN = 10, 8


def missing(what: str) -> str:
    return f'<div class="card missing">{escape(what)}</div>'


def text_of(value: Any) -> str:
    """A prompt or completion as text: a string, or messages one after the other. Cut when very long."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = "\n".join(f"[{item.get('role', '?')}] {item.get('content', '')}" for item in value)
    text = str(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text):,} characters)"


def series_of(metrics: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[tuple[float, float]]]:
    """name -> [(step, value)]."""
    found: dict[str, list[tuple[float, float]]] = {}
    for step, values in metrics:
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found


# --- headline ----------------------------------------------------------------------------------------------------


def card(label: str, value: str, foot: str = "") -> str:
    """A headline figure. The arguments are HTML."""
    cells = (("label", label), ("value", value), ("foot", foot))
    return f'<div class="card">{"".join(f"<div class={name}>{html}</div>" for name, html in cells)}</div>'


def change(before: float, after: float, percent: bool = False) -> str:
    """before -> after."""
    show = (lambda v: f"{100 * v:.1f}%") if percent else number
    return f'{show(before)} <span class="arrow">→</span> {show(after)}'


def headline(series: Series, evals: Sequence[Row]) -> str:
    """The figures that matter, first."""
    cards = []
    reward = next((series[k] for k in CURVES[0][0] if k in series), None)
    if reward:
        n = max(1, min(5, len(reward) // 2))
        first, last = fmean(y for _, y in reward[:n]), fmean(y for _, y in reward[-n:])
        trend = "up" if last > first else "down" if last < first else ""
        foot = f'<span class="{trend}">{last - first:+.3g}</span> · first and last {n} step{"s" * (n > 1)}'
        cards.append(card("Reward", change(first, last), foot))
    cards += [eval_card(source, rows) for source, rows in by_source(evals).items()]
    length = series.get("response_length/mean")
    if length:
        cards.append(card("Response length", change(length[0][1], length[-1][1]), "tokens, first and last step"))
    speed = series.get("perf/throughput") or series.get("perf/gen_tokens_per_s")
    if speed:
        cards.append(card("Throughput", number(fmean(y for _, y in speed)), "tokens/s, mean"))
    seconds = series.get("timing_s/step")
    if seconds:
        total = sum(y for _, y in seconds)
        cards.append(
            card("Seconds per step", number(total / len(seconds)), f"{len(seconds)} steps in {number(total)} s")
        )
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def by_source(evals: Sequence[Row]) -> dict[str, list[Row]]:
    """Evaluations of each source that carry the score that its last one has, by step: others cannot be compared."""
    found: dict[str, list[Row]] = {}
    for row in evals:
        if score_key(row):
            found.setdefault(str(row.get("source", "")), []).append(row)
    return {source: [r for r in rows if score_key(r) == score_key(rows[-1])] for source, rows in found.items()}


def score_key(row: Row) -> str:
    """The name of an evaluation's main score: its mean@N."""
    metrics = row.get("metrics")
    names = metrics if isinstance(metrics, dict) else {}
    plain = [n for n, v in names.items() if isinstance(v, (int, float)) and not n.endswith(("_low", "_high"))]
    return next((n for n in plain if "mean@" in n), next((n for n in plain if "@" in n), ""))


def eval_card(source: str, rows: Sequence[Row]) -> str:
    """Held-out score before and after, with its interval."""
    first, last = rows[0], rows[-1]
    key, low, high = score_key(last), score_key(last) + "_low", score_key(last) + "_high"
    before, after = float(first["metrics"][score_key(first)]), float(last["metrics"][key])
    percent = 0 <= min(before, after) and max(before, after) <= 1
    label = f"Held-out score, {escape(source)}"
    foot = escape(key.rsplit("/", 1)[-1])
    if isinstance(last["metrics"].get(low), (int, float)) and isinstance(last["metrics"].get(high), (int, float)):
        ends = [last["metrics"][name] for name in (low, high)]
        foot += ", 95% interval " + " to ".join(f"{100 * v:.1f}%" if percent else number(v) for v in ends)
    if len(rows) == 1:
        return card(label, f"{100 * after:.1f}%" if percent else number(after), f"{foot} · after step {last['step']}")
    return card(label, change(before, after, percent), f"{foot} · steps {first['step']} and {last['step']}")


def curves(series: Series) -> str:
    """A chart for each well-known metric that the run has."""
    cells = []
    for i, (names, title, unit) in enumerate(CURVES):
        name = next((n for n in names if n in series), None)
        if name is not None:
            head = f'<h3>{title} <span class="muted" style="font-weight:400">{unit}</span></h3>'
            cells.append(f'<div class="card">{head}{line_chart(series[name], i)}</div>')
    return (
        f'<div class="grid">{"".join(cells)}</div>'
        if cells
        else missing("No metrics: metrics.jsonl is missing or empty.")
    )


def header(*names: str) -> str:
    """A table's head; a name that ends in > heads a column of numbers."""
    cells = (f'<th class="n">{n[:-1]}</th>' if n.endswith(">") else f"<th>{n}</th>" for n in names)
    return f"<tr>{''.join(cells)}</tr>"


def all_metrics(series: Series) -> str:
    """Every metric in one table that can be filtered by name."""
    rows = []
    for name, points in sorted(series.items()):
        ys = [y for _, y in points]
        figures = "".join(f'<td class="n">{number(v)}</td>' for v in (ys[0], ys[-1], min(ys), max(ys)))
        rows.append(f'<tr><td class="name">{escape(name)}</td><td>{sparkline(points)}</td>{figures}</tr>')
    head = header("name", "", "first>", "last>", "min>", "max>")
    table = f'<table id="metrics"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    field = '<p><input id="filter" placeholder="filter by name" aria-label="filter by name"></p>'
    return f'<details><summary>All {len(series)} metrics</summary><div class="in scroll">{field}{table}</div></details>'


# --- samples -----------------------------------------------------------------------------------------------------


def reward_chip(value: Any, name: str = "reward") -> str:
    """A reward, coloured by its sign."""
    if not isinstance(value, (int, float)):
        return f'<span class="chip">{name}: none</span>'
    kind = "good" if value > 0 else "bad"
    return f'<span class="chip {kind}">{name} {number(float(value))}</span>'


def before_after(evals: Sequence[Row], shown: int = 3) -> str:
    """Completions of the first and the last evaluation for the same prompts, side by side."""
    parts = []
    for source, rows in by_source(evals).items():
        first, last = rows[0], rows[-1]
        if first is last:
            continue
        later = {sample_key(s): s for s in samples_of(last)}
        pairs = [(s, later[sample_key(s)]) for s in samples_of(first) if sample_key(s) in later]
        if not pairs:
            continue
        parts.append(f"<h3>{escape(source)}: after step {first['step']} and after step {last['step']}</h3>")
        parts += [pair(old, new, (first["step"], last["step"])) for old, new in pairs[:shown]]
        if pairs[shown:]:
            rest = "".join(pair(old, new, (first["step"], last["step"])) for old, new in pairs[shown:])
            parts.append(f'<details><summary>{len(pairs) - shown} more</summary><div class="in">{rest}</div></details>')
    return "".join(parts) or missing(
        "No pair of evaluations with samples: set eval.before, eval.after and eval.prompts."
    )


def samples_of(row: Row) -> list[Row]:
    """The sample records of an evaluation."""
    samples = row.get("samples")
    return [s for s in samples if isinstance(s, dict)] if isinstance(samples, list) else []


def sample_key(sample: Row) -> str:
    return f"{sample.get('prompt_id', '')}|{text_of(sample.get('prompt', ''))}"


def pair(old: Row, new: Row, steps: tuple[int, int]) -> str:
    """One prompt with the completions of both evaluations."""
    cells = "".join(
        f'<div class="card"><span class="chip">step {step}</span>{reward_chip(sample.get("reward"))}'
        f'<div class="text">{escape(text_of(sample.get("completion", "")))}</div></div>'
        for sample, step in zip((old, new), steps)
    )
    return f'<div class="pair"><div class="prompt">{escape(text_of(old.get("prompt", "")))}</div>{cells}</div>'


def step_samples(steps: Sequence[tuple[int, Sequence[Row]]]) -> str:
    """Training samples of some steps, a fold each."""
    folds = []
    for step, rows in steps:
        head = header("prompt", "completion", "reward", "advantage>", "end", "tokens>")
        body = "".join(sample_row(row) for row in rows)
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        scores = [float(r["reward"]) for r in rows if isinstance(r.get("reward"), (int, float))]
        mean = f" · mean reward of these {len(rows)}: {number(fmean(scores))}" if scores else ""
        opened = " open" if step == steps[-1][0] else ""
        title = f"<summary>Step {step}{mean}</summary>"
        folds.append(f'<details{opened}>{title}<div class="in scroll">{table}</div></details>')
    return "".join(folds) or missing("No samples: samples/ is empty (obs.samples_per_step: 0, or no step finished).")


def sample_row(row: Row) -> str:
    """A training sample as a row of its step's table."""
    texts = [
        f'<td><div class="text">{escape(text_of(row.get(key, "")))}</div></td>' for key in ("prompt", "completion")
    ]
    advantage, tokens = row.get("advantage"), escape(str(row.get("response_tokens", "")))
    figure = number(float(advantage)) if isinstance(advantage, (int, float)) else ""
    return (
        f"<tr>{''.join(texts)}<td>{reward_chip(row.get('reward'), '')}</td>"
        f'<td class="n">{figure}</td><td>{escape(str(row.get("finish", "")))}</td><td class="n">{tokens}</td></tr>'
    )


def chosen_steps(steps: Sequence[int], most: int = STEPS_SHOWN) -> list[int]:
    """Evenly spread over the run, both ends included."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


# --- time and graph ----------------------------------------------------------------------------------------------


def stage_seconds(metrics: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """Stacked bars of the stages' seconds; what no stage accounts for is "rest"."""
    totals: dict[str, float] = {}
    for _, values in metrics:
        for name, value in values.items():
            if name.startswith("timing_s/") and name.count("/") == 1 and name != "timing_s/step":
                totals[name] = totals.get(name, 0.0) + max(0.0, value)
    if not totals:
        return missing("No stage timings: metrics.jsonl has no timing_s/* values.")
    ranked = sorted(totals, key=lambda n: -totals[n])
    top = ranked[:6]
    names = [name.removeprefix("timing_s/") for name in top] + ["rest"]
    rows, overlap = [], False
    for _, values in metrics:
        parts = [max(0.0, values.get(name, 0.0)) for name in top]
        others = sum(max(0.0, values.get(name, 0.0)) for name in ranked[6:])
        left = values.get("timing_s/step", sum(parts) + others) - sum(parts)
        overlap |= left < -0.02 * sum(parts)
        rows.append([*parts, max(0.0, left)])
    note = '<p class="note">Stages overlap in time, so bars are longer than steps.</p>' if overlap else ""
    bars = stacked_bars([step for step, _ in metrics], names, rows)
    return f'<div class="card">{bars}{legend(names, range(len(names)))}{note}</div>'


def step_path(paths: Sequence[StepPath], most: int = 20) -> str:
    """What the last steps took, against what they would take if nothing lay idle on the way."""
    if not paths:
        return ""
    last = paths[-most:]
    took, path = (fmean(getattr(each, name) for each in last) for name in ("seconds", "path_s"))
    stages = dict.fromkeys(stage for each in last for stage in each.by_stage)
    by_stage = {stage: fmean(each.by_stage.get(stage, 0.0) for each in last) for stage in stages}
    ranked = sorted(by_stage, key=lambda name: -by_stage[name])
    told = ", ".join(f"{escape(name)} {number(by_stage[name])} s" for name in ranked)
    steps = f"The last {len(last)} steps took {number(took)} s each"
    ratio = f", {took / path:.2f} times their critical path of {number(path)} s" if path > 0 else ""
    still = {stage: fmean(each.idle.get(stage, 0.0) for each in last) for stage in stages}
    most_idle = max(stages, key=lambda stage: still[stage], default="")
    idle = f" It stood still most before {escape(most_idle)}: {number(still[most_idle])} s." if most_idle else ""
    return f'<p class="note">{steps}{ratio} ({told}).{idle}</p>'


def step_timeline(spans: Sequence[Row], most: int = 400) -> str:
    """What ran when, in one late step."""
    if not spans:
        return missing("No spans: spans.jsonl is missing or empty.")
    window = step_window(spans)
    within = [s for s in spans if s["start"] < window[1] and s["start"] + s["duration"] > window[0]]
    cut = f'<p class="note">The first {most} of {len(within)} spans.</p>' if len(within) > most else ""
    within = within[:most]
    steps = [s["step"] for s in within if isinstance(s.get("step"), int)]
    title = f"Timeline of step {max(set(steps), key=steps.count)}" if steps else "Timeline"
    names = list(dict.fromkeys(s["name"] for s in within))
    keys = legend(names[:16], range(16))
    note = '<p class="note">Hover a bar for its length. `docklands trace` exports the whole run for Perfetto.</p>'
    return f'<div class="card"><h3>{title}</h3>{timeline(within, assign_lanes(within), window)}{keys}{note}{cut}</div>'


def step_window(spans: Sequence[Row]) -> tuple[float, float]:
    """From start to end of the last finished step span but one; else of the last step's spans; else of all."""
    whole = [s for s in spans if s["name"] == "step"]
    numbers = [s["step"] for s in spans if isinstance(s.get("step"), int)]
    if whole:
        chosen = [whole[-2] if len(whole) > 2 else whole[-1]]
    elif numbers:
        chosen = [s for s in spans if s.get("step") == max(numbers)]
    else:
        chosen = list(spans)
    return min(s["start"] for s in chosen), max(s["start"] + s["duration"] for s in chosen)


def graph_section(graph: Mapping[str, Any]) -> str:
    """The algorithm's dataflow; graph.json of another shape counts as missing."""
    plain = plain_stages(graph)
    if not plain:
        return missing("No graph: graph.json is missing.")
    note = '<p class="note">Arrows show the nearest dependency; hover a box for the columns it reads.</p>'
    return f'<div class="card"><div class="scroll">{graph_svg(plain)}</div>{note}</div>'
