"""Half of the prompts answer five times as slowly: an asynchronous run trains them as often as the others.

Admission bounds how old a sample may get, so nothing is ever discarded for being old. A loop that discarded what is
more than a version old would train few of them: that is counted here too, on the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from docklands.core.fields import LOSS_MASK, WEIGHT_VERSIONS
from docklands.core.protocols import Generation, Request
from docklands.dock import DockOptions
from docklands.rollout import NativeEngine, engines
from tests import rollout_cases as cases
from tests.e2e.runs import run_here
from tests.e2e.test_long_tail import GRAPH, ROLLOUT, SAMPLES, UPDATE, Beside, StepClock, prompts, stand

FAST, SLOW = 8, 40
PROMPTS, STEPS, UPDATE_TAKES = 8, 20, 20


@dataclass(frozen=True)
class Trained:
    """A trained sample: tokens made, versions between the oldest of them and the weights that it updates."""

    tokens: int
    lag: int

    @property
    def slow(self) -> bool:
        return self.tokens == SLOW


def holds(trained: list[Trained]) -> None:
    """From 400 samples on, half of what has been trained is slow; both kinds whole."""
    slow = np.array([sample.slow for sample in trained])
    assert {sample.tokens for sample in trained} == {FAST, SLOW}
    shares = np.cumsum(slow)[399:] / np.arange(400, len(slow) + 1)
    print(f"{len(slow)} samples, {slow.mean():.4f} of them slow; from 400 on {shares.min():.4f} to {shares.max():.4f}")
    assert 0.47 <= shares.min() and shares.max() <= 0.53


async def fleet_run(overtake: int) -> list[Trained]:
    """Two replicas that go on through updates of weights, and a trainer. Time is counted in decode steps."""
    count = PROMPTS * STEPS * SAMPLES
    table = np.where(np.arange(count) // SAMPLES % 2, SLOW, FAST)
    dock = Beside(
        GRAPH,
        DockOptions(
            PROMPTS, SAMPLES, max_staleness=1 + overtake, overtake=overtake, deterministic=False, wait_s=1e6,
            total_groups=PROMPTS * STEPS,
        ),
    )  # fmt: skip
    role, here = stand(2, 16, table, 7, dock)
    trained: list[Trained] = []
    model = cases.model()

    async def admit() -> None:
        for group in prompts(count):
            if await dock.slots():
                await dock.admit(group)

    admitting, serving = asyncio.ensure_future(admit()), asyncio.ensure_future(role.serve(ROLLOUT, None))
    for step in range(STEPS):
        rows = await dock.take(UPDATE)
        batch = await dock.fetch(rows, (LOSS_MASK, WEIGHT_VERSIONS))
        for mask, versions in zip(batch[LOSS_MASK], batch[WEIGHT_VERSIONS]):
            trained.append(Trained(int(mask.sum()), step - int(versions[mask].min())))
        await asyncio.sleep(UPDATE_TAKES)
        for process in here:
            process.engine.load_weights(model.named_parameters(), step + 1)
        await dock.retire(rows)
    await dock.close()
    await asyncio.gather(admitting, serving)
    role.device.close()
    return trained


@pytest.mark.parametrize("overtake", [0, 3])
def test_replicas_that_never_stop_train_both_halves(overtake: int) -> None:
    loop = StepClock()
    try:
        trained = loop.run_until_complete(fleet_run(overtake))
    finally:
        loop.close()
    assert len(trained) == PROMPTS * STEPS * SAMPLES
    holds(trained)
    lags = [sample.lag for sample in trained]
    assert 1 <= max(lags) <= 1 + overtake
    if overtake:
        kept = [sample.slow for sample in trained if sample.lag <= 1]
        assert np.mean(kept) < 0.47, "discarding would be no worse: the run shows nothing"


class Forced(NativeEngine):
    """Every other prompt's samples are five times as long."""

    def generate(self, requests: Iterable[Request]) -> list[Generation]:
        """See NativeEngine."""
        forced = []
        for request in requests:
            length = SLOW if request.request_id // SAMPLES % 2 else FAST
            left = min(request.sampling.max_tokens, length - request.drawn)
            sampling = replace(request.sampling, max_tokens=left, min_tokens=left, stop_ids=())
            forced.append(replace(request, sampling=sampling))
        return super().generate(forced)


def test_a_run_in_one_process_trains_both_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole loop, with partial rollouts: a slow sample needs four visits, a fast one ends in its first."""
    monkeypatch.setattr(engines, "NativeEngine", Forced)
    more = (
        "run.steps=28", "dock.max_staleness=4", "dock.overtake=3", "dock.deterministic=false", "data.shuffle=false",
        "rollout.partial_tokens=10", f"rollout.max_response_tokens={SLOW}", "obs.samples_per_step=16",
    )  # fmt: skip
    run = run_here("mix6_grpo_tis.yaml", tmp_path / "run", *more)
    samples = [(step, sample) for step in range(1, 29) for sample in run.read_samples(step)]
    trained = [Trained(s["response_tokens"], step - 1 - s["versions"][0]) for step, s in samples]
    assert len({sample["row_id"] for _, sample in samples}) == len(trained) == 28 * 16
    holds(trained)
    assert 1 < max(sample.lag for sample in trained) <= 4
    assert all(s["versions"][1] > s["versions"][0] for _, s in samples if s["response_tokens"] == SLOW)
