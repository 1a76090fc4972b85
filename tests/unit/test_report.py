"""report.html: whole, crashed, empty and hostile run directories."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from docklands.errors import ConfigError
from docklands.obs.drawing import graph_layers
from docklands.obs.files import LineFile
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import JsonlSink
from docklands.run.report import write_report
from docklands.run.report_charts import nice_ticks, smoothed
from docklands.run.summary import before_and_after

CONFIG = """run:
  name: quickstart
  steps: {steps}
algorithm:
  name: grpo
model:
  path: cache/smollm2-135m
data:
  source: task:larger_number
rollout:
  prompts_per_step: 8
  samples_per_prompt: 8
"""


def stage(name: str, role: str, reads: list[str], writes: list[str], by: str = "group") -> dict[str, Any]:
    return {"name": name, "role": role, "by": by, "reads": reads, "writes": writes}


GRAPH = {
    "stages": [
        stage("rollout", "rollout", ["prompt_tokens", "prompt"], ["token_ids", "loss_mask", "rollout_logprobs"]),
        stage("reward", "reward", ["prompt", "token_ids"], ["reward", "reward_info"], "sample"),
        stage("ref_logprobs", "reference", ["token_ids", "loss_mask"], ["ref_logprobs"]),
        stage("advantage", "advantage", ["group_id", "reward"], ["advantage"]),
        stage("update", "actor", ["token_ids", "loss_mask", "advantage", "ref_logprobs"], [], "step"),
    ],
    "learners": ["actor"],
}


def metrics_of(step: int, rng: random.Random) -> dict[str, float]:
    gen, update = 2.1 + rng.random() / 2, 1.4 + rng.random() / 4
    return {
        "critic/rewards/mean": 0.15 + 0.62 * (1 - math.exp(-step / 9)) + rng.gauss(0, 0.05),
        "response_length/mean": 9 - 5 * (1 - math.exp(-step / 12)) + rng.gauss(0, 0.3),
        "actor/pg_loss": rng.gauss(0, 0.02),
        "actor/ppo_kl": abs(rng.gauss(0, 3e-4)),
        "actor/entropy": 1.8 * math.exp(-step / 15),
        "actor/grad_norm": 1.2 + rng.gauss(0, 0.2),
        "perf/throughput": 560 + rng.gauss(0, 40),
        "completions/clipped_ratio": 0.3 * math.exp(-step / 6),
        "timing_s/gen": gen,
        "timing_s/update_actor": update,
        "timing_s/reward": 0.05,
        "timing_s/reshard": 0.2,
        "timing_s/step": gen + update + 0.4,
    }


def write_spans(run: RunDir, steps: int) -> None:
    """A step span on the driver, stages on their roles, two overlapping rollouts."""
    file, number = LineFile(run.spans), 0
    for step in range(1, steps + 1):
        zero = 1000.0 + 4 * step
        plan = [
            ("step", "driver", 0.0, 4.0),
            ("stage/rollout", "rollout", 0.0, 1.2),
            ("stage/rollout", "rollout", 0.9, 1.3),
        ]
        plan += [("stage/reward", "reward", 2.2, 0.1), ("stage/advantage", "advantage", 2.3, 0.02)]
        plan += [("update/actor", "actor", 2.35, 1.4), ("publish", "driver", 3.75, 0.2)]
        parent = None
        for name, role, start, duration in plan:
            number += 1
            about = {"groups": f"{8 * step}-{8 * step + 7}"} if "/" in name else {}
            row = {"name": name, "role": role, "rank": 0, "id": number, "parent": parent, "attributes": about}
            file.append({**row, "step": step, "start": zero + start, "duration": duration})
            parent = number if name == "step" else parent if name != "publish" else None
    file.close()


def build_run(path: Path, steps: int = 25, planned: int = 25) -> RunDir:
    """A run directory as a real run leaves it."""
    rng = random.Random(7)
    run = RunDir.create(path)
    run.write_config(CONFIG.format(steps=planned))
    run.write_graph(GRAPH)
    run.write_env()
    sink = JsonlSink(run.metrics)
    for step in range(1, steps + 1):
        sink.write(step, metrics_of(step, rng))
        rows = []
        for i in range(8):
            good = rng.random() < 0.15 + 0.02 * step
            text = "82" if good else "The larger number is 47, because 4 is\nbefore 8 in the order of the digits."
            row = {"group_id": i // 4, "prompt": "Which number is larger, 47 or 82? Reply with the number only."}
            more = {"completion": text, "reward": float(good), "advantage": 1.1 if good else -0.4}
            rows.append({**row, **more, "finish": "stop", "response_tokens": 3})
        run.write_samples(step, rows)
    sink.close()
    write_spans(run, steps)
    for step, score in ((0, 0.18), (steps, 0.76)):
        names = {"mean@1": score, "mean@1_low": score - 0.05, "mean@1_high": score + 0.05}
        samples = []
        for i in range(5):
            right = score > 0.5
            prompt = f"Which number is larger, {20 + i} or {90 - i}? Reply with the number only."
            text = str(90 - i) if right else f"The number {20 + i} is larger than {90 - i}, so"
            samples.append({"prompt_id": i, "prompt": prompt, "completion": text, "reward": float(right)})
        run.append_eval(step, "larger_number", {f"val-core/larger_number/{k}": v for k, v in names.items()}, samples)
    return run


class Checker(HTMLParser):
    """Whether tags close in order, and every address and text of a page."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"left open: {self.open}"
        self.text = "\n".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for key, value in attrs if key in ("src", "href", "action", "data")]
        self.handlers += [key for key, _ in attrs if key.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def check(run: RunDir) -> Checker:
    page = Checker(write_report(run.path).read_text())
    assert page.addresses == [] and page.handlers == [], "nothing is fetched, nothing is clickable code"
    assert page.tags.count("script") == page.tags.count("style") == 1
    return page


def test_whole_run(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run")
    page = check(run)
    html = run.report.read_text()
    rewards = [metrics["critic/rewards/mean"] for _, metrics in run.read_metrics()]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert f'{first:.3g} <span class="arrow">→</span> {last:.3g}' in html
    assert '18.0% <span class="arrow">→</span> 76.0%' in html and "95% interval 71.0% to 81.0%" in page.text
    for text in (
        "quickstart",
        "25 steps",
        "grpo",
        "8 prompts x 8 samples a step",
        "Gradient norm",
        "Timeline of step 24",
        "The last 20 steps took 4 s each, 1.02 times their critical path of 3.92 s (rollout 2.2 s, update 1.4 s,",
    ):
        assert text in page.text
    for name in ("rollout", "ref_logprobs", "advantage", "new weights", "update_actor", "All 13 metrics", "2 more"):
        assert name in page.text
    assert "The number 20 is larger than 90, so" in page.text and page.text.count("\n90\n") == 1
    assert "url(http" not in html and "@import" not in html and "missing" not in page.text
    assert page.tags.count("details") == 1 + 1 + 10 + 2  # metrics, more pairs, ten steps, config and env


def test_policy_allows_this_script_only(tmp_path: Path) -> None:
    html = write_report(build_run(tmp_path / "run", 2).path).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    script = re.search(r"<script>(.*?)</script>", html, re.S)
    assert policy and script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy[1] == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_crashed_run(tmp_path: Path) -> None:
    """Killed in step 8 of 25: torn files, no second evaluation, a watchdog's report."""
    run = build_run(tmp_path / "run", 7)
    for path in (run.metrics, run.spans, run.sample_file(7), run.evals):
        path.write_bytes(path.read_bytes()[:-20])
    run.graph.write_text('{"stages": [{')
    run.env.unlink()
    run.watchdog.write_text("stuck")
    page = check(run)
    assert "6 of 25 steps" in page.text and "log/watchdog.txt" in page.text
    assert "No graph: graph.json is missing." in page.text and "env.json is missing." in page.text
    assert "No pair of evaluations" in page.text and "after step 0" in page.text and "18.0%" in page.text


def test_only_evaluations_of_one_kind_are_compared(tmp_path: Path) -> None:
    """One of four samples at temperature 1 beside greedy ones: neither the report nor the closing lines mix them."""
    run = RunDir.create(tmp_path / "run")
    for step, key, score in ((0, "mean@4", 0.201), (0, "mean@1", 0.3), (9, "mean@1", 0.7)):
        sample = {"prompt_id": 1, "prompt": "p", "completion": f"said at {score}", "reward": score}
        run.append_eval(step, "s", {f"val-core/s/{key}": score}, [sample])
    page = check(run).text
    assert "30.0%" in page and "70.0%" in page and "20.1%" not in page and "said at 0.201" not in page
    said: list[str] = []
    before_and_after(run, said.append)
    assert "0.300 before -> 0.700 after" in said[0]
    run.append_eval(9, "s", {"val-core/s/mean@2": 0.5})
    said.clear()
    before_and_after(run, said.append)
    assert said == [] and "50.0%" in check(run).text


def test_empty_run(tmp_path: Path) -> None:
    page = check(RunDir.create(tmp_path / "empty"))
    assert "no step finished" in page.text
    for name in ("metrics.jsonl", "samples/", "spans.jsonl", "graph.json", "config.yaml", "env.json", "evaluations"):
        assert re.search(f"No .*{re.escape(name)}|{name} is missing", page.text), name


def test_one_step_and_constant_values(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    sink = JsonlSink(run.metrics)
    sink.write(1, {"critic/rewards/mean": 0.0, "actor/grad_norm": 1e9, "timing_s/gen": 0.0})
    sink.close()
    assert "1 steps" in check(run).text
    sink = JsonlSink(run.metrics)
    sink.write(2, {"critic/rewards/mean": math.nan, "actor/grad_norm": math.inf})
    sink.close()
    assert "2 steps" in check(run).text


def test_long_run_stays_small(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    rng, sink = random.Random(1), JsonlSink(run.metrics)
    for step in range(1, 2001):
        sink.write(step, metrics_of(step, rng))
    sink.close()
    run.write_samples(5, [{"prompt": "x" * 10**6, "completion": "y" * 10**6} for _ in range(12)])
    check(run)
    assert run.report.stat().st_size < 1_000_000


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&amp; ]]> <!-- \udc80 \x00'


def test_untrusted_text_is_escaped_everywhere(tmp_path: Path) -> None:
    """The same hostile text as prompt, completion, source, stage, column, metric, span and configuration."""
    run = RunDir.create(tmp_path / "run")
    run.write_config(f"run:\n  name: {json.dumps(HOSTILE)}\nalgorithm:\n  name: {json.dumps(HOSTILE)}\n")
    run.write_graph({"stages": [stage(HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], HOSTILE)]})
    run.write_env(note=HOSTILE)
    sink = JsonlSink(run.metrics)
    sink.write(1, {HOSTILE: 1.0, f"timing_s/{HOSTILE.replace('/', '')}": 2.0, "timing_s/gen": 1.0})
    sink.close()
    messages = [{"role": HOSTILE, "content": HOSTILE}]
    sample = {"prompt": HOSTILE, "completion": messages, "reward": HOSTILE, "finish": HOSTILE, "advantage": HOSTILE}
    run.write_samples(1, [{**sample, "response_tokens": HOSTILE}])
    for step in (0, 1):
        run.append_eval(step, HOSTILE, {f"val-core/{HOSTILE}/mean@1": 0.5}, [sample])
    spans = LineFile(run.spans)
    row = {"name": HOSTILE, "role": HOSTILE, "start": 0.0, "duration": 1.0}
    spans.append({**row, "id": 1, "step": 1, "attributes": {}, "rank": 0})
    spans.close()
    page = check(run)
    assert "img" not in page.tags and page.text.count("alert(1)") >= 12


def test_foreign_shapes_do_not_break_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write_config("- a list\n")
    run.write_graph({"stages": "none"})
    run.evals.write_text(
        '{"step": 1, "metrics": 3}\n{"step": 2, "source": null, "metrics": {"m@1": "x"}, "samples": 1}\n'
    )
    run.spans.write_text(
        '{"name": 1, "role": "r", "start": 0, "duration": 1}\n{"name": "n", "role": "r", "start": "x"}\n'
    )
    run.write_samples(1, [{"completion": ["a", 1]}, {}])
    assert "no step finished" in check(run).text


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        write_report(tmp_path / "none")


def test_graph_layout_shows_nearest_dependencies() -> None:
    layer, edges = graph_layers(GRAPH["stages"])  # pyright: ignore[reportArgumentType]
    assert layer == {"prompts": 0, "rollout": 1, "reward": 2, "ref_logprobs": 2, "advantage": 3, "update": 4}
    assert set(edges) == {
        ("prompts", "rollout"),
        ("rollout", "reward"),
        ("rollout", "ref_logprobs"),
        ("reward", "advantage"),
        ("ref_logprobs", "update"),
        ("advantage", "update"),
    }


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.2, 0.9), (-3e-5, 2e-5), (5, 5), (0, 0), (1e9, 1e9 + 1), (-7, 1234)]
)
def test_ticks_cover_the_data(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1] and 2 <= len(ticks) <= 8 and ticks == sorted(set(ticks))


def test_smoothing_keeps_a_constant() -> None:
    assert smoothed([(1, 2.0), (2, 2.0), (3, 2.0)], 1) == [(1, 2.0), (2, 2.0), (3, 2.0)]
