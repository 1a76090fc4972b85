"""A small run directory for the dashboard's tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from docklands.obs.files import LineFile
from docklands.obs.rundir import RunDir

GRAPH = {
    "stages": [
        {"name": "rollout", "role": "rollout", "by": "group", "reads": ["prompt"], "writes": ["token_ids"]},
        {"name": "reward", "role": "reward", "by": "group", "reads": ["token_ids"], "writes": ["reward"]},
        {"name": "update", "role": "actor", "by": "step", "reads": ["token_ids", "reward"], "writes": []},
    ]
}
CONFIG = "run:\n  name: small\n  steps: 10\nalgorithm:\n  name: grpo\nmodel:\n  path: some/model\n"
EVIL = "<img src=x onerror=alert(1)>"


def span_row(name: str, role: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    base = {"name": name, "role": role, "rank": 0, "id": None, "parent": None, "step": None, "attributes": {}}
    return {**base, "start": start, "duration": duration, **more}


def build(path: Path, steps: int = 4) -> RunDir:
    """A run of some steps, its lock let go and its files old."""
    run = RunDir.create(path)
    run.write_config(CONFIG)
    run.write_graph(GRAPH)
    run.write_env()
    metrics, trace, flow = LineFile(run.metrics), LineFile(run.spans), LineFile(run.flow)
    for step in range(1, steps + 1):
        values = {"critic/rewards/mean": step / 10, "timing_s/step": 2.0, "actor/entropy": None if step == 2 else 1.0}
        metrics.append({"step": step, "metrics": values})
        zero = 1000.0 + 2 * step
        trace.append(span_row("stage/rollout", "rollout", zero, 1.0))
        trace.append(span_row("stage/reward", "reward", zero + 1.0, 0.1))
        trace.append(span_row("update/actor", "actor", zero + 1.2, 0.6))
        trace.append(span_row("step", "driver", zero, 2.0, step=step - 1))
        counts = {"rollout": {"ready": 0, "leased": step, "done": 0}}
        flow.append({"step": step - 1, "time": zero, "in_flight": 2, "bytes": 10, "stages": counts})
        rows = [{"group_id": i // 2, "prompt": f"p{i // 2}", "completion": EVIL, "reward": 1.0} for i in range(4)]
        run.write_samples(step, rows)
    run.append_eval(steps, "held", {"val-core/held/mean@1": 0.5})
    run.release()
    for file in (metrics, trace, flow):
        file.close()
        os.utime(file.path, (1, 1))
    return run
