"""No split of an update into micro-batches changes its loss, its gradient or its metrics (pitfalls 1, 2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithm_cases import POLICIES, algorithm, piece, random_batch, random_output, whole

from docklands.algorithms import Algorithm
from docklands.algorithms.advantage import gae, group_advantages
from docklands.algorithms.ppo import PPO
from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK
from docklands.core.loss import LossFn
from docklands.obs.metrics import Metrics

MODES = ["token_mean", "sequence_mean", "sequence_sum", "constant"]
CORRECTIONS = ["off", "token_tis", "sequence_tis", "token_mask", "sequence_mask"]
MADE: dict[tuple[str, str, str], Algorithm] = {}


def built(name: str, aggregation: str, correction: str) -> Algorithm:
    key = (name, aggregation, correction)
    if key not in MADE:
        keys: dict[str, Any] = {"aggregation": aggregation, "entropy_coef": 0.01, "kl": {"coef": 0.1}}
        MADE[key] = algorithm(name, {**keys, "correction": {"mode": correction}})
    return MADE[key]


def cut(rows: int, marks: set[int]) -> list[list[int]]:
    """Consecutive pieces of range(rows), cut before each mark."""
    edges = [0, *sorted(m for m in marks if 0 < m < rows), rows]
    return [list(range(a, b)) for a, b in zip(edges, edges[1:])]


def check_split(loss: LossFn, rows: int, seed: int, pieces: list[list[int]]) -> None:
    batch = random_batch(rows, seed=seed)
    out, cut_out = random_output(batch, seed=seed), random_output(batch, seed=seed)
    counts = whole(batch)
    full = loss(batch.pack(), out, counts)
    full.loss.backward()
    merged, total = Metrics(), 0.0
    for part in pieces:
        part_batch, part_out = piece(batch, cut_out, part)
        result = loss(part_batch.pack(), part_out, counts)
        result.loss.backward()
        total += float(result.loss.detach())
        merged.merge(result.metrics)
    assert total == pytest.approx(float(full.loss.detach()), rel=1e-4, abs=1e-5)
    for a, b in (
        (out.logprobs_T, cut_out.logprobs_T),
        (out.entropy_T, cut_out.entropy_T),
        (out.values_T, cut_out.values_T),
    ):
        assert a is not None and b is not None and (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    assert merged.result() == pytest.approx(Metrics(full.metrics).result(), rel=1e-4, abs=1e-5)


@settings(max_examples=60)
@given(
    st.sampled_from(POLICIES),
    st.sampled_from(MODES),
    st.sampled_from(CORRECTIONS),
    st.integers(3, 9),
    st.integers(0, 10_000),
    st.sets(st.integers(1, 8)),
)
def test_policy_loss_is_invariant_to_the_split(
    name: str, aggregation: str, correction: str, rows: int, seed: int, marks: set[int]
) -> None:
    check_split(built(name, aggregation, correction).loss, rows, seed, cut(rows, marks))


@settings(max_examples=20)
@given(st.integers(3, 9), st.integers(0, 10_000), st.sets(st.integers(1, 8)))
def test_value_loss_is_invariant_to_the_split(rows: int, seed: int, marks: set[int]) -> None:
    made = built("ppo", "auto", "off")
    assert isinstance(made, PPO)
    check_split(made.value_loss, rows, seed, cut(rows, marks))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=24),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_group_advantages_sum_to_zero_and_ignore_order(
    rows: list[tuple[int, float]], std: bool, leave_one_out: bool, random: Any
) -> None:
    def solve(pairs: list[tuple[int, float]]) -> list[float]:
        group_B, reward_B = torch.tensor([g for g, _ in pairs]), torch.tensor([r for _, r in pairs])
        return group_advantages(reward_B, group_B, normalize_std=std, leave_one_out=leave_one_out).tolist()

    found = solve(rows)
    for group in {g for g, _ in rows}:
        assert sum(a for a, (g, _) in zip(found, rows) if g == group) == pytest.approx(0, abs=1e-3)
    order = list(range(len(rows)))
    random.shuffle(order)
    assert solve([rows[i] for i in order]) == pytest.approx([found[i] for i in order], abs=1e-5)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 10_000), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_of_a_batch_is_gae_of_each_row(rows: int, seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    masks = [
        torch.rand(int(torch.randint(1, 9, (), generator=generator)), generator=generator) < 0.6 for _ in range(rows)
    ]
    batch = Batch(range(rows), {LOSS_MASK: masks})
    reward_T, value_T = (torch.randn(batch.num_tokens, generator=generator) for _ in range(2))
    packed = batch.pack()
    together = gae(packed, reward_T, value_T, packed.loss_mask_T, gamma=gamma, lam=lam)
    for row in range(rows):
        here = packed.row_T == row
        alone = batch.select([row]).pack()
        apart = gae(alone, reward_T[here], value_T[here], alone.loss_mask_T, gamma=gamma, lam=lam)
        for a, b in zip(together, apart):
            torch.testing.assert_close(a[here], b)
