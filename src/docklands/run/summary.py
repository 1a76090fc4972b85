"""What the terminal says when a run ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from docklands.obs.rundir import RunDir

Say = Callable[[str], None]


def one_line(text: Any, most: int = 34) -> str:
    """A completion in one short line; a conversation is its last message."""
    if isinstance(text, list):
        text = text[-1].get("content", "") if text else ""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def before_and_after(run_dir: RunDir, say: Say, examples: int = 3) -> None:
    """Held-out figures of the first and the last evaluation, and the same prompts answered by both."""
    evals = run_dir.read_evals()
    last = evals[-1] if evals else {"metrics": {}}
    key = next((name for name in last["metrics"] if "/mean@" in name and not name.endswith(("_low", "_high"))), None)
    alike = [row for row in evals if key in row["metrics"]]  # the source is part of the key
    if key is None or len(alike) < 2:
        return
    first, source = alike[0], str(last["source"])
    say(f"\nheld-out {source}: {interval(first['metrics'], key)} before -> {interval(last['metrics'], key)} after")
    later = {sample.get("prompt_id"): sample for sample in last["samples"]}
    pairs = [(s, later[s.get("prompt_id")]) for s in first["samples"] if s.get("prompt_id") in later]
    pairs.sort(key=lambda pair: pair[0]["reward"] - pair[1]["reward"])
    say(f"\n{'prompt':<34}  {'before':<34}  after")
    for before, after in pairs[:examples]:
        say(f"{one_line(before['prompt']):<34}  {one_line(before['completion']):<34}  {one_line(after['completion'])}")


def interval(metrics: dict[str, float], key: str) -> str:
    """0.765 [0.70, 0.82]"""
    low, high = metrics.get(f"{key}_low"), metrics.get(f"{key}_high")
    text = f"{metrics[key]:.3f}"
    return text if low is None or high is None else f"{text} [{low:.2f}, {high:.2f}]"


def closing_lines(run_dir: RunDir, report: Path | None, done: tuple[int, float], say: Say) -> None:
    """Reward at both ends, time, and where everything lies. `done`: steps of this process and its seconds."""
    names = ("critic/rewards/mean", "critic/score/mean")  # as the console shows them: with penalties, where there are
    shown = [next((m[name] for name in names if name in m), None) for _, m in run_dir.read_metrics()]
    rewards = [reward for reward in shown if reward is not None]
    if rewards:
        ends = min(5, max(1, len(rewards) // 2))
        start, stop = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
        say(f"\nmean reward of the first {ends} steps {start:.3f}, of the last {ends} {stop:.3f}")
    steps, seconds = done
    say(f"{steps} step{'' if steps == 1 else 's'} in {seconds:.0f} s; run directory: {run_dir.path}")
    if report is not None:
        say(f"report: {report}")
