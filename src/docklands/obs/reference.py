"""docs/reference/metrics.md, made from the declarations."""

from __future__ import annotations

from docklands.obs.names import SECTIONS

HEAD = """# Metrics

Made from `docklands.obs.names` by `docklands.obs.reference.render_metrics_markdown()`; do not edit by hand.

Each line of `metrics.jsonl` is one step: `{"metrics": {name: value}, "step": step}`. A metric is declared once. It is
gathered as (sum, count) and divided once, after all reductions, so neither the number of micro-batches nor the number
of workers changes it. Reductions: `mean` sum / count; `sum`, `max`, `min` over the step; `last` the latest value.
Units: `1` has no dimension, `fraction` lies in 0..1, `B` is bytes. Names in italics differ between two runs with one
seed (clocks, memory, what the warehouses hold); all others are equal to the last digit. `{...}` stands for a parameter.

The figures of a step are of the samples that it trains, but for those that end in "since the last step": they count
what the stages did since the step before, as do their `timing_s/...`. With `dock.max_staleness: 0` that is the same.
With more, it is work on samples of later steps, so a step may lack it; and what a stage repeats is counted again.
"""


NOTES = {
    "Dock": [
        "`metrics.jsonl` has `dock/in_flight`, `dock/bytes` and the drops, as they are when a step's rows have been "
        "taken; `dock.stats()` and `log/watchdog.txt` have all of them.",
        "",
    ]
}


def render_metrics_markdown() -> str:
    """The whole page; ends with one newline."""
    lines = [HEAD]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", *NOTES.get(title, [])]
        lines += ["| name | unit | reduction | meaning |", "|---|---|---|---|"]
        for metric in metrics:
            name = f"*`{metric.name}`*" if metric.is_volatile else f"`{metric.name}`"
            lines.append(f"| {name} | {metric.unit} | {metric.reduction} | {metric.doc.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"
