"""What runs write: every metric of the reference, and true ones."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from docklands.algorithms.grpo import GRPO
from docklands.cli.main import run as cli
from docklands.config.load import load_config
from docklands.envs import StepResult
from docklands.obs.metrics import Metrics
from docklands.obs.names import CATALOG
from docklands.obs.rundir import RunDir
from docklands.run.main import evaluate_run
from docklands.run.session import Run
from tests.e2e.runs import ROOT, overrides, run_here

ELSEWHERE = re.compile(
    r"memory/device_mib|.*/(skipped_updates|router_.*|recompute_.*|.*_offloaded_mib)|dock/(?!in_flight|bytes$|dropped).*"
    r"|reshard/.*|timing_s/reshard/.*|fleet/.*|checkpoint/failed|timing_s/checkpoint_write"
)
"""Of accelerators; of updates without a token, models with experts and memory savers, which have their own tests; of
`dock.stats()` alone; of resharding and of generators
and checkpoints in processes of their own, see test_reshard_run, test_fleet_elastic, test_sharded_runs."""


class Talker:
    """Says something once, then pays by the length of the answer."""

    max_turns = 2

    async def reset(self, row: dict) -> None:
        self.turns = 0

    async def step(self, completion: str, finish: str) -> StepResult:
        self.turns += 1
        return StepResult("1=", float(len(completion)), self.turns == 2)


UNEVEN = """
def uneven(data_source, solution_str, ground_truth, extra_info):
    'Groups of each kind that a filter drops, and others.'
    kind = int(extra_info["index"]) % 8
    return {"score": {0: 0.0, 1: 1.0, 2: 0.5}.get(kind, float(len(solution_str))), "seen": True}
"""

TALK = (
    f"env.name={__name__}:Talker",
    "reward.functions=[{name: env}]",
    "rollout.max_response_tokens=32",
    "data.overlong=drop",
    "algorithm.correction.mode=token_tis",
    "algorithm.entropy_coef=0.01",
    "algorithm.dual_clip=3.0",
    "algorithm.samples_per_update=8",
    "run.steps=2",
    "checkpoint.every_steps=1",
    "eval.prompts=4",
    "eval.every_steps=1",
)
RUNS: dict[str, tuple[str, ...]] = {
    "mix6_grpo.yaml": TALK,
    "mix6_dapo.yaml": (
        "algorithm.correction.mode=sequence_mask",
        "algorithm.old_logprobs=recompute",
        "algorithm.kl.coef=0.01",
        "run.steps=2",
    ),
    "mix6_ppo.yaml": (
        "algorithm.kl.coef=0.01",
        "algorithm.kl.where=reward",
        "algorithm.samples_per_update=16",
        "run.steps=1",
    ),
    "mix6_dpo.yaml": ("rollout.samples_per_prompt=2", "run.steps=1"),
    "mix6_distill.yaml": ("dock.max_staleness=1", "rollout.partial_tokens=3", "run.steps=2"),
    "warm_mix6.yaml": ("rollout.samples_per_prompt=1", "run.steps=1"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """Names of all metrics of a few runs."""
    base = tmp_path_factory.mktemp("metrics")
    rows = base / "rows.jsonl"
    row = '{{"prompt": "{i:03d}=", "answer": "1", "extra_info": {{"index": {i}}}}}\n'
    rows.write_text("".join(row.format(i=i) for i in range(64)))
    (base / "uneven.py").write_text(UNEVEN)
    function = f"reward.functions=[{{name: '{base / 'uneven.py'}:uneven', isolate: false}}]"
    found: set[str] = set()
    for recipe, more in RUNS.items():
        own = (f"data.source={rows}", "data.shuffle=false", function) if "dapo" in recipe else ()
        run = run_here(recipe, base / recipe.removesuffix(".yaml"), *more, *own)
        found.update(name for _, metrics in run.read_metrics() for name in metrics)
        found.update(name for row in run.read_evals() for name in row["metrics"])
    config, sources = load_config(ROOT / "configs/mix6_grpo.yaml", overrides(base / "eval", "eval.prompts=4"))
    found.update(evaluate_run(config, sources, None, 2, [1, 2]))
    yield found


def test_every_metric_of_the_reference_is_written_by_some_run(written: set[str]) -> None:
    seen = {CATALOG.find(name).name for name in written}
    assert [m.name for m in CATALOG if m.name not in seen and not ELSEWHERE.fullmatch(m.name)] == []


def test_rewards_as_trained_on_differ_from_the_score(tmp_path: Path) -> None:
    """critic/rewards: 'as trained on'; with the overlong penalty it is below critic/score."""
    more = ("algorithm.overlong_buffer_tokens=8", "rollout.max_response_tokens=8", "run.steps=1")
    ((_, metrics),) = run_here("mix6_dapo.yaml", tmp_path / "run", *more).read_metrics()
    assert metrics["critic/rewards/mean"] < metrics["critic/score/mean"]


def test_rewards_are_those_of_the_step_that_is_trained(tmp_path: Path) -> None:
    """Asynchronous: without a penalty, critic/rewards is critic/score in every step, whatever the stages do."""
    run = run_here("mix6_grpo.yaml", tmp_path / "run", "dock.max_staleness=1", "run.steps=4")
    steps = [metrics for _, metrics in run.read_metrics()]
    assert len({metrics["critic/score/mean"] for metrics in steps}) > 1
    for kind in ("mean", "max", "min"):
        scores = [metrics[f"critic/score/{kind}"] for metrics in steps]
        assert [metrics.get(f"critic/rewards/{kind}") for metrics in steps] == scores


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_moves_the_kl_coefficient_once(staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the measurement and its column: the stage comes again after the resume, and pays the same."""
    keys = [f"algorithm.kl.{key}" for key in ("coef=0.05", "where=reward", "target=0.01", "horizon=100")]
    more = (*keys, f"dock.max_staleness={staleness}", "run.steps=4")
    whole = run_here("mix6_grpo.yaml", tmp_path / "whole", *more)
    take_step, advantage, runs, calls = Run.take_step, GRPO.advantage, [], []

    async def seen(run: Run, metrics: Metrics) -> Any:
        runs[:] = [run]
        return await take_step(run, metrics)

    def interrupted(made: GRPO, batch: Any) -> Any:
        result = advantage(made, batch)
        calls.append(result.metrics["actor/kl_coef"][0])
        if len(calls) == 3:
            wait_until(lambda: runs[0].step == 2 and not runs[0].updating)  # this step's rows are all that it waits for
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: runs[0].stop_asked)
        return result

    monkeypatch.setattr(Run, "take_step", seen)
    monkeypatch.setattr(GRPO, "advantage", interrupted)
    arguments = overrides(tmp_path / "run", *more)
    assert cli(["train", str(ROOT / "configs/mix6_grpo.yaml"), *arguments]) == 130
    assert cli(["train", str(ROOT / "configs/mix6_grpo.yaml"), *arguments, "--resume"]) == 0
    assert calls[2] == calls[3] and len(set(calls)) == 4
    ours, theirs = (
        [m["critic/rewards/mean"] for _, m in run.read_metrics()] for run in (whole, RunDir(tmp_path / "run"))
    )
    assert len(ours) == len(theirs) == 4
    if staleness == 0:  # else it depends on the hour which weights made a sample, and so on what it is penalised by
        assert ours[:3] == theirs[:3]


def test_counts_are_those_of_the_trained_samples(tmp_path: Path) -> None:
    """A sample that its environment lost is not counted as trained."""
    more = (f"env.name={__name__}:Picky", "reward.functions=[{name: env}]", "run.steps=1")
    ((_, metrics),) = run_here("mix6_grpo.yaml", tmp_path / "run", *more).read_metrics()
    assert metrics["training/samples"] == metrics["reward/scored"] < 16
    assert metrics["dock/dropped/env_error"] == metrics["env/errors"] == 16 - metrics["training/samples"]
    assert metrics["training/staleness/max"] == 0 and metrics["training/weight_version"] == 1
    rate = metrics["training/samples"] / metrics["timing_s/step"]
    assert metrics["perf/samples_per_s"] == pytest.approx(rate)


class Picky(Talker):
    """Fails for completions that end in an odd digit."""

    max_turns = 1

    async def step(self, completion: str, finish: str) -> StepResult:
        if completion[-1:] in "13579":
            raise OSError("no")
        return StepResult(None, float(len(completion)), True)


def test_evaluation_stops_where_training_stops(tmp_path: Path) -> None:
    """rollout.stop ends a training sample; a held-out sample ends there too."""
    more = ("rollout.stop=['9']", "eval.prompts=8", "eval.after=true", "run.steps=1")
    run = run_here("mix6_grpo.yaml", tmp_path / "run", *more)
    said = [sample["completion"] for row in run.read_evals() for sample in row["samples"]]
    assert said and not [text for text in said if "9" in text]


def test_pitfall_17_18_generator_and_trainer_agree_in_every_step(tmp_path: Path) -> None:
    """Through `build`: both divide by one temperature, and after large updates the generator has the new weights."""
    more = ("rollout.temperature=0.7", "train.optim.lr=0.05", "algorithm.old_logprobs=recompute", "run.steps=3")
    run = run_here("mix6_grpo.yaml", tmp_path / "run", *more)
    steps = [metrics for _, metrics in run.read_metrics()]
    assert len(steps) == 3 and steps[0]["actor/grad_norm"] > 0
    assert max(metrics["training/rollout_logprobs_diff_max"] for metrics in steps) < 1e-5
