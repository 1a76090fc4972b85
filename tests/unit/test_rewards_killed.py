"""A reward's process that somebody else kills costs no sample; one whose process dies so twice is at fault itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from docklands.config.schema import RewardItem, RewardSection
from docklands.rewards import build_scorer
from docklands.rewards.base import RewardOutcome, RewardSample
from docklands.rewards.scorer import Scorer

SOURCE = """
import os

def each(solution_str, ground_truth):
    return float(os.kill(os.getpid(), 9) or 0 if solution_str == "die" else solution_str)

def batch(completions, **columns):
    return [each(text, "") for text in completions]
"""


@pytest.fixture(params=["each", "batch"])
def scorer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scorer]:
    file = tmp_path / f"rewards_{request.param}.py"
    file.write_text(SOURCE)
    made = build_scorer(RewardSection(functions=[RewardItem(name=f"{file}:{request.param}")], deadline_s=60.0))
    yield made
    made.close()


def score(scorer: Scorer, *texts: str) -> list[RewardOutcome]:
    samples = [RewardSample({"prompt": "q", "answer": "1"}, text) for text in texts]
    return asyncio.run(scorer.score_samples(samples))


def test_what_a_killed_process_was_at_is_scored_once_more(scorer: Scorer) -> None:
    assert [outcome.value for outcome in score(scorer, "1")] == [1.0]
    (pid,) = scorer.sandbox.pids
    os.kill(pid, signal.SIGKILL)
    assert [outcome.value for outcome in score(scorer, "1", "0.5")] == [1.0, 0.5]
    assert scorer.sandbox.pids != [pid]
    outcomes = score(scorer, "1", "die", "0.5")
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok"]
    assert "SIGKILL" in outcomes[1].detail
