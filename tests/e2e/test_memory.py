"""200 tiny steps leave the process no bigger: the slope of its resident memory is under 50 KB a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from docklands.obs import sinks
from tests.e2e.runs import run_here

STEPS, WARM_UP = 200, 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_200_steps_are_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resident: list[int] = []
    write = sinks.JsonlSink.write

    def watch(self: sinks.JsonlSink, step: int, metrics: dict[str, float]) -> None:
        write(self, step, metrics)
        resident.append(psutil.Process().memory_info().rss)

    monkeypatch.setattr(sinks.JsonlSink, "write", watch)
    run_here("mix6_grpo.yaml", tmp_path / "run", f"run.steps={STEPS}", "checkpoint.at_end=false")
    assert len(resident) == STEPS
    tail = np.array(resident[WARM_UP:], np.float64)
    slope = np.polyfit(np.arange(len(tail)), tail, 1)[0]
    assert slope < 50 * 1024, f"{slope / 1024:.1f} KB a step"
