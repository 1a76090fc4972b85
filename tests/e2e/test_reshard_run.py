"""Whole runs that train in one layout and generate in another: the samples and figures of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docklands.errors import ConfigError, GateFailed
from docklands.obs.rundir import RunDir
from docklands.obs.spans import read_spans
from tests.e2e.runs import run_here

pytestmark = pytest.mark.slow

ONE = ("layout.tp=1", "layout.dp=1", "layout.ep=1", "rollout.layout.ep=1", "sync.swap=none")
LARGE = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8")
SAME = ("critic/rewards/mean", "actor/grad_norm", "actor/pg_loss", "actor/tokens", "response_length/mean")


def metrics(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in run.metrics.read_text().splitlines()]


def samples(run: RunDir) -> list[tuple[object, ...]]:
    files = sorted((run.path / "samples").glob("step_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(row["prompt"], row["completion"], row["reward"]) for row in rows]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same recipe in one process."""
    return run_here("tiny_moe_reshard.yaml", tmp_path_factory.mktemp("alone") / "run", "run.steps=2", *ONE, *LARGE)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("layout.pp=2", "layout.dp=1", "layout.ep=1", "rollout.layout.ep=1", "sync.swap=none", "sync.probe_every=1"),
        (
            "layout.dp=1",
            "fleet.placement=disaggregated",
            "rollout.layout.tp=2",
            "rollout.layout.ep=2",
            "sync.swap=none",
            "sync.probe_every=1",
        ),
    ],
    ids=["tp2 ep2 to ep4", "pp2 tp2 to dp4", "tp2 ep2 beside tp2 ep2"],
)
def test_one_process_and_two_layouts_are_the_same_run(more: tuple[str, ...], alone: RunDir, tmp_path: Path) -> None:
    saves = () if more else ("checkpoint.every_steps=1",)
    run = run_here("tiny_moe_reshard.yaml", tmp_path / "run", "run.steps=2", *LARGE, *more, *saves)
    pairs = list(zip(metrics(run), metrics(alone), strict=True))
    assert len(pairs) == 2
    for mine, other in pairs:
        for name in SAME:
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
        assert mine["training/rollout_logprobs_diff_max"] < 1e-4
        assert mine["reshard/bytes_received"] > 0 and mine["timing_s/reshard"] > 0
        assert ("reshard/probe_diff" in mine) == (bool(more) or mine is pairs[0][0])
        assert (mine["reshard/freed_bytes"] > 0) == (not more)
        assert mine["rollout/decode_tokens"] == other["rollout/decode_tokens"]
    assert samples(run) == samples(alone) and len(samples(run)) == 32
    spans = read_spans(run.path)
    names = {row["name"] for row in spans}
    assert {
        "gate/check",
        "reshard/broadcast" if "fleet.placement=disaggregated" in more else "reshard/minimal",
    } <= names
    if not more:
        assert {"memory/swap_out", "handover/to_training", "checkpoint/write"} <= names
        there = [row for row in spans if row["name"] == "handover/to_generation"]
        assert len(there) == 4 * 3, "once for each publish: a checkpoint brings nothing back"
        rewards = [row["start"] for row in spans if row["name"] == "stage/reward"]
        for rank in range(4):  # training state begins to come back before the rewards, not when the trainer asks for it
            begun = [row["start"] for row in spans if row["name"] == "memory/prefetch" and row["rank"] == rank]
            weights = begun[::2]  # and moments; there are no gradients between steps
            assert len(weights) == 2 and weights[0] < rewards[0] < weights[1] < rewards[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["rollout.layout.ep=1", "rollout.layout.dp=3"], "rollout.layout: tp 1 x dp 3 = 3 ranks, layout: 4; colocated"),
        (["rollout.layout.tp=3"], "rollout.layout: .*4 heads do not divide by tp 3"),
        ([*ONE, "fleet.placement=disaggregated"], "disaggregated, but one process trains and generates"),
        (["sync.swap=host"], "sync.swap is host, but the device is the host"),
        ([*ONE, "sync.swap=disk"], "sync.swap is disk, but trainer and generator are one process"),
        (["fleet.rollout_workers=2"], "fleet.rollout_workers is 2, but generators are in worker processes"),
    ],
    ids=["ranks", "heads", "apart", "swap", "one process", "workers"],
)
def test_what_does_not_fit_is_refused_before_anything_starts(more: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run_here("tiny_moe_reshard.yaml", tmp_path / "run", *more)


def test_a_generator_that_holds_other_weights_ends_the_run(tmp_path: Path) -> None:
    """One bit of one weight of one generator, after the first update: the gate names it, and no step follows."""
    with pytest.raises((GateFailed, ExceptionGroup)) as caught:
        run_here("tiny_moe_reshard.yaml", tmp_path / "run", "run.steps=3", "env.name=tests.faulty_env:Faulty")
    error = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, GateFailed) and error.exit_code == 3
    assert error.message == (
        "after publishing version 1, generators differ from the trainer: layers.1.o.weight on device 3"
    )
    assert len(metrics(RunDir(tmp_path / "run"))) <= 1


def test_samples_that_take_several_visits_come_back_to_their_replica(tmp_path: Path) -> None:
    """Partial rollout over two generators, cut and resumed: what had been begun goes on."""
    more = (
        *LARGE,
        "layout.tp=1",
        "layout.ep=1",
        "rollout.layout.ep=2",
        "rollout.partial_tokens=6",
        "dock.max_staleness=1",
        "checkpoint.every_steps=1",
    )
    run_here("tiny_moe_reshard.yaml", tmp_path / "run", "run.steps=1", *more)
    run = run_here("tiny_moe_reshard.yaml", tmp_path / "run", "run.steps=3", *more, resume=True)
    rows = metrics(run)
    assert len(rows) == 3 and max(row.get("rollout/unfinished", 0.0) for row in rows) > 0
    assert all(row["training/staleness/max"] <= 1 for row in rows)
    assert max(row["response_length/max"] for row in rows) > 6
