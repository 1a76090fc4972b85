"""Metrics: declarations, (sum, count), merging in any grouping."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.errors import DocklandsError
from docklands.obs.catalog import Catalog
from docklands.obs.metrics import ExactSum, Metric, Metrics, find
from docklands.obs.names import CATALOG
from docklands.obs.reference import render_metrics_markdown

NAMES = ("actor/pg_loss", "training/samples", "response_length/max", "response_length/min", "actor/lr")
FLOATS = st.floats(-1e12, 1e12, allow_nan=False)
EVENTS = st.lists(st.tuples(st.sampled_from(NAMES), FLOATS, st.integers(1, 50)), max_size=24)


def test_pitfall_02_metric_independent_of_microbatches() -> None:
    """Doubling the micro-batches leaves a mean where it was: 16 tokens of loss 0.1 are 0.1, not 0.2."""
    whole, halves, sixteenths = Metrics(), Metrics(), Metrics()
    whole.add("actor/pg_loss", 16 * 0.1, 16)
    for _ in range(2):
        halves.merge(Metrics({"actor/pg_loss": (8 * 0.1, 8)}))
    for _ in range(16):
        sixteenths.merge({"actor/pg_loss": (0.1, 1)})
    assert whole.result() == {"actor/pg_loss": pytest.approx(0.1, abs=1e-15)}
    assert halves.result() == whole.result()
    assert sixteenths.result() == whole.result()


def test_pitfall_02_unequal_microbatches_are_weighted_by_count() -> None:
    """L=[[1,1,1,1],[4]]: 8/5 = 1.6, while the mean of the micro-batches' means would be 2.5."""
    metrics = Metrics()
    metrics.add_many("actor/pg_loss", [1, 1, 1, 1])
    metrics.add_many("actor/pg_loss", np.array([4.0]))
    assert metrics.result()["actor/pg_loss"] == 1.6


def gathered(events: list[tuple[str, float, int]]) -> Metrics:
    metrics = Metrics()
    for name, value, count in events:
        metrics.add(name, value, count)
    return metrics


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(0, 24), st.integers(0, 24))
def test_merge_is_associative_and_independent_of_the_split(events: list[Any], cut: int, other_cut: int) -> None:
    """Exactly, to the last bit, also after a journey through plain lists."""
    low, high = sorted((cut, other_cut))
    a, b, c = events[:low], events[low:high], events[high:]
    left = gathered(a).merge(gathered(b)).merge(gathered(c))
    right = gathered(a).merge(gathered(b).merge(Metrics.from_dict(gathered(c).to_dict())))
    assert left.result() == right.result() == gathered(events).result()


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.randoms())
def test_order_of_workers_does_not_matter(events: list[Any], random: Any) -> None:
    events = [event for event in events if find(event[0]).reduction != "last"]
    shuffled = list(events)
    random.shuffle(shuffled)
    assert gathered(shuffled).result() == gathered(events).result()


@settings(max_examples=100, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(0, 40))
def test_add_many_equals_one_by_one(values: list[float], cut: int) -> None:
    for name in NAMES:
        one_by_one, in_two = Metrics(), Metrics()
        for value in values:
            one_by_one.add(name, value)
        in_two.add_many(name, values[:cut])
        in_two.add_many(name, np.array(values[cut:]))
        assert in_two.result() == one_by_one.result()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(-1e300, 1e300, allow_nan=False), max_size=30))
def test_exact_sum_is_the_rounded_true_sum(values: list[float]) -> None:
    total = ExactSum()
    for value in values:
        total.add(value)
    assert total.value() == math.fsum(values)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("actor/pg_loss", 2.0), ("training/samples", 6.0), ("response_length/max", 3.0), ("response_length/min", 1.0)]
    + [("actor/lr", 2.0)],
)
def test_reductions(name: str, expected: float) -> None:
    metrics = Metrics()
    for value in (1.0, 3.0, 2.0):
        metrics.add(name, value)
    assert metrics.result() == {name: expected}
    assert metrics.pairs()[name][1] == 3


def test_non_finite_values_are_not_hidden() -> None:
    for values in ([1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.nan]):
        for name in ("actor/pg_loss", "response_length/max", "response_length/min"):
            both = (Metrics(), Metrics())
            both[0].add_many(name, values)
            for value in values:
                both[1].add(name, value)
            assert all(math.isnan(metrics.result()[name]) for metrics in both)
    for values in ([math.inf, 1.0], [1e308, 1e308, 1e308]):
        metrics = Metrics()
        metrics.add_many("actor/pg_loss", values)
        for value in values:
            metrics.add("training/samples", value)
        assert metrics.result() == {"actor/pg_loss": math.inf, "training/samples": math.inf}


def test_nothing_observed_leaves_no_trace() -> None:
    metrics = Metrics()
    metrics.add("actor/pg_loss", 0.0, 0)
    metrics.add_many("actor/entropy", [])
    metrics.merge(Metrics())
    assert metrics.result() == {} and len(metrics) == 0


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_a_count_must_be_a_count(count: float) -> None:
    with pytest.raises(DocklandsError, match="actor/pg_loss"):
        Metrics().add("actor/pg_loss", 1.0, count)


@pytest.mark.parametrize("add", ["add", "add_many"])
def test_undeclared_name_names_the_nearest(add: str) -> None:
    with pytest.raises(DocklandsError, match="actor/pg_los'.*did you mean 'actor/pg_loss'"):
        getattr(Metrics(), add)("actor/pg_los", [1.0] if add == "add_many" else 1.0)


def test_families() -> None:
    assert find("timing_s/gen").doc == "generation"
    assert find("timing_s/filter_groups").name == "timing_s/{stage}"
    assert find("dock/reward/ready").name == "dock/{stage}/ready"
    assert find("val-core/reasoning_gym:chain_sum/mean@8").name == "val-core/{source}/mean@{n}"
    assert find("val-core/openai/gsm8k/pass@4_low").name == "val-core/{source}/pass@{n}_low"
    for wrong in ("val-core/x/mean@many", "timing_s/a/b", "dock/reward/readyy", "timing_s/"):
        with pytest.raises(DocklandsError, match="not declared"):
            find(wrong)


def test_every_conventional_name_is_declared() -> None:
    spread = ("mean", "max", "min")
    names = [f"actor/{n}" for n in "pg_loss kl_loss entropy pg_clipfrac ppo_kl grad_norm lr".split()]
    names += [f"critic/{n}/{s}" for n in "score rewards advantages returns values".split() for s in spread]
    names += [f"critic/{n}" for n in "vf_loss vf_clipfrac vf_explained_var".split()]
    names += [f"{n}/{s}" for n in ("response_length", "prompt_length") for s in spread]
    names += ["response_length/clip_ratio"]
    names += [f"timing_s/{n}" for n in "gen reward old_log_prob ref adv update_actor reshard step".split()]
    names += [f"perf/{n}" for n in "throughput total_num_tokens time_per_step".split()]
    names += [f"training/{n}" for n in "rollout_probs_diff_max rollout_probs_diff_mean global_step epoch".split()]
    names += ["frac_reward_zero_std", "completions/clipped_ratio", "dock/in_flight", "dock/bytes"]
    names += ["dock/rollout/ready", "dock/rollout/leased"]
    names += [f"val-core/s/{n}@4" for n in ("mean", "best", "maj")]
    for name in names:
        assert find(name).unit and find(name).doc


def test_declaring() -> None:
    catalog = Catalog(Metric("a/b", "1", "mean", "first"))
    catalog.declare(Metric("a/b", "1", "mean", "first"), Metric("a/{x}", "s", "sum", "rest"))
    assert (catalog.find("a/b").unit, catalog.find("a/c").unit, len(catalog)) == ("1", "s", 2)
    with pytest.raises(DocklandsError, match="declared twice"):
        catalog.declare(Metric("a/b", "s", "mean", "second"))


def test_what_the_stages_count_says_so() -> None:
    """Of an asynchronous step it is the work on other samples than the trained ones."""
    counted = ("reward/", "env/", "dynamic_sampling/", "rollout/")
    assert all("since the last step" in metric.doc for metric in CATALOG if metric.name.startswith(counted))
    assert "since the last step" not in find("critic/rewards/mean").doc


def test_reference_page_has_every_metric() -> None:
    page = render_metrics_markdown()
    assert all(f"`{metric.name}` | {metric.unit} |" in page.replace("*", "") for metric in CATALOG)
    assert page.endswith("|\n") and "*`timing_s/gen`*" in page and "| `actor/pg_loss` |" in page


def test_obs_imports_neither_torch_nor_numpy() -> None:
    """Importing obs must not slow `docklands --help` down."""
    modules = "metrics names spans sinks console log rundir watchdog reference files catalog"
    lines = "; ".join(f"import docklands.obs.{name}" for name in modules.split())
    check = (
        "import sys; assert not {'torch', 'numpy', 'tensorboard', 'rich', 'wandb'} & set(sys.modules), 'slow import'"
    )
    done = subprocess.run([sys.executable, "-c", f"{lines}; {check}"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
