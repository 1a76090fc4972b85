"""What is said of a step's batch, against loops over its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.core.batch import Batch, Jagged, offsets_of
from docklands.core.fields import (
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    REWARD,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    WEIGHT_VERSIONS,
)
from docklands.run.describe import describe

ROWS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), max_size=5), st.sampled_from([0.0, 1.0])))


def batch_of(rows: list[tuple[int, list[bool], float]], seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    offsets = offsets_of([len(mask) for _, mask, _ in rows])
    total = int(offsets[-1])

    def column(values: Any, dtype: torch.dtype) -> Jagged:
        return Jagged(torch.tensor(values, dtype=dtype), offsets)

    columns = {
        TOKEN_IDS: column(rng.integers(0, 9, total), torch.int32),
        LOSS_MASK: column([kept for _, mask, _ in rows for kept in mask], torch.bool),
        OLD_LOGPROBS: column(-rng.random(total), torch.float32),
        ROLLOUT_LOGPROBS: column(-rng.random(total), torch.float32),
        WEIGHT_VERSIONS: column(rng.integers(0, 7, total), torch.int32),
        GROUP_ID: torch.tensor([group for group, _, _ in rows], dtype=torch.int64),
        REWARD: torch.tensor([reward for _, _, reward in rows], dtype=torch.float32),
    }
    return Batch(np.arange(len(rows)), columns)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 99))
def test_the_figures_are_those_of_a_loop_over_rows(rows: list[tuple[int, list[bool], float]], seed: int) -> None:
    batch = batch_of(rows, seed)
    found = describe(SimpleNamespace(version=7, record=lambda _: None), batch).metrics
    prompts = [mask.index(True) if any(mask) else len(mask) for _, mask, _ in rows]
    lengths = [len(mask) for _, mask, _ in rows]
    groups = {group: [reward for g, _, reward in rows if g == group] for group, _, _ in rows}
    ages, gaps = [], []
    for i, (_, mask, _) in enumerate(rows):
        kept = torch.tensor(mask, dtype=torch.bool)
        if any(mask):
            ages.append(7 - int(batch[WEIGHT_VERSIONS][i][kept].min()))
        gaps += (batch[OLD_LOGPROBS][i][kept].exp() - batch[ROLLOUT_LOGPROBS][i][kept].exp()).abs().tolist()

    def check(name: str, values: list[Any]) -> None:
        assert (f"{name}/mean" in found) == bool(values)
        if values:
            assert found[f"{name}/mean"] == (float(sum(values)), float(len(values)))
            assert found[f"{name}/max"] == (float(max(values)), 1.0)
            assert found[f"{name}/min"] == (float(min(values)), 1.0)

    check("prompt_length", prompts)
    check("response_length", [length - prompt for length, prompt in zip(lengths, prompts)])
    check("training/staleness", ages)
    equal = sum(len(set(rewards)) == 1 for rewards in groups.values())
    assert found["frac_reward_zero_std"] == (float(equal), float(len(groups)))
    assert ("training/rollout_probs_diff_mean" in found) == bool(gaps)
    if gaps:
        total, count = found["training/rollout_probs_diff_mean"]
        assert count == len(gaps) and abs(total - sum(gaps)) < 1e-6
        assert abs(found["training/rollout_probs_diff_max"][0] - max(gaps)) < 1e-6
