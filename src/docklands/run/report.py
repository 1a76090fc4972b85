"""report.html: a run told on one page, made from its run directory alone.

Self-contained (inline SVG, style and script; a content-security policy forbids every request), light and dark. Works on
a crashed run and on an empty one: what is missing is named. Prompts and completions are untrusted text and escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml

from docklands.errors import ConfigError
from docklands.obs.critical_path import Places, critical_path
from docklands.obs.drawing import plain_stages
from docklands.obs.files import write_atomic
from docklands.obs.rundir import RunDir
from docklands.obs.spans import read_spans
from docklands.run import report_parts as parts
from docklands.run.report_style import SCRIPT, STYLE


def write_report(run_dir: Path | str, path: Path | None = None) -> Path:
    """Write the report to `path` (default: report.html in the run directory) and return where it is.

    Raises ConfigError when there is no such directory or the file cannot be written.
    """
    run = RunDir(run_dir)
    if not run.path.is_dir():
        raise ConfigError(f"no run directory {run.path}", "give the directory that holds config.yaml and metrics.jsonl")
    target = path or run.report
    try:
        write_atomic(target, render(run))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def render(run: RunDir) -> str:
    """The whole page."""
    metrics, evals = run.read_metrics(), run.read_evals()
    series = parts.series_of(metrics)
    config_text, env = run.read_config(), run.read_env()
    spans, graph = read_spans(run.path), run.read_graph()
    places = Places.of_config(parsed(config_text))
    files = dict(run.sample_files())
    steps = [(step, run.read_samples(step)[: parts.ROWS_SHOWN]) for step in parts.chosen_steps(list(files))]
    body = [
        head(run, config_text, len(metrics), metrics[-1][0] if metrics else 0),
        parts.headline(series, evals),
        "<h2>Curves</h2>",
        parts.curves(series),
        parts.all_metrics(series) if series else "",
        "<h2>Before and after</h2>",
        parts.before_after(evals),
        "<h2>Training samples</h2>",
        parts.step_samples(steps),
        "<h2>Where the time goes</h2>",
        parts.stage_seconds(metrics),
        parts.step_path(critical_path(spans, plain_stages(graph), places)),
        '<div style="height:14px"></div>',
        parts.step_timeline(spans),
        "<h2>Dataflow</h2>",
        parts.graph_section(graph),
        "<h2>Configuration and machine</h2>",
        fold("config.yaml", config_text) if config_text else parts.missing("No configuration: config.yaml is missing."),
        fold("env.json", json.dumps(env, indent=2, ensure_ascii=False))
        if env
        else parts.missing("env.json is missing."),
    ]
    return page(run.path.resolve().name, "\n".join(body))


def page(name: str, body: str) -> str:
    """The frame. Only this script may run: its hash stands in the policy, so nothing in the run's text can."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)} · Docklands</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<div id="tip"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def fold(title: str, text: str) -> str:
    return f'<details><summary>{escape(title)}</summary><div class="in"><pre>{escape(text)}</pre></div></details>'


def head(run: RunDir, config_text: str, finished: int, last_step: int) -> str:
    """Name, state, and what was trained on what."""
    config = parsed(config_text)
    planned = config_value(config, "run", "steps")
    if not finished:
        badge = '<span class="badge warn">no step finished</span>'
    elif isinstance(planned, int) and last_step < planned:
        badge = f'<span class="badge warn">{last_step} of {planned} steps</span>'
    else:
        badge = f'<span class="badge">{last_step} steps</span>'
    model = str(config_value(config, "model", "path") or "")
    facts = [
        str(config_value(config, "algorithm", "name") or ""),
        Path(model).name,
        str(config_value(config, "data", "source") or ""),
        batch_text(config),
    ]
    sub = " · ".join(escape(fact) for fact in facts if fact)
    stuck = (
        '<p class="sub down">The watchdog stopped this run: see log/watchdog.txt.</p>' if run.watchdog.exists() else ""
    )
    name = escape(str(config_value(config, "run", "name") or run.path.resolve().name))
    title = f'<div><h1>{name}{badge}</h1><p class="sub">{sub or "Docklands run"}</p>{stuck}</div>'
    return f'<header>{title}<button id="theme" type="button">light / dark</button></header>'


def batch_text(config: Mapping[str, Any]) -> str:
    """Prompts x samples, when the configuration says so."""
    prompts = config_value(config, "rollout", "prompts_per_step")
    samples = config_value(config, "rollout", "samples_per_prompt")
    return f"{prompts} prompts x {samples} samples a step" if prompts and samples else ""


def parsed(text: str) -> Mapping[str, Any]:
    """config.yaml as a mapping; empty when it is torn."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def config_value(config: Mapping[str, Any], section: str, key: str) -> Any:
    """A value of a section; None when either is missing."""
    inner = config.get(section)
    return inner.get(key) if isinstance(inner, dict) else None
