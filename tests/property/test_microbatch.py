"""Micro-batch planning: the cap is hard, every row is in exactly one, and what the model sees rebuilds every row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train_cases import batch_of

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, LOSS_MASK, TOKEN_IDS
from docklands.errors import TrainError
from docklands.train.microbatch import Inputs, balanced_bins, common_prefix, family_of, lay_out, plan_microbatches
from docklands.train.share import rows_of_replicas

COSTS = st.lists(st.integers(0, 60), min_size=1, max_size=40)


@given(COSTS, st.integers(60, 240))
@settings(max_examples=1000)
def test_pitfall_35_no_bin_exceeds_the_cap(costs: list[int], cap: int) -> None:
    bins = balanced_bins(costs, cap)
    assert sorted(i for found in bins for i in found) == list(range(len(costs)))
    assert all(bins)
    loads = [sum(costs[i] for i in found) for found in bins]
    assert max(loads) <= cap
    # Longest first: the fullest bin without its last item is no fuller than the emptiest one.
    fullest = max(range(len(bins)), key=lambda b: loads[b])
    if len(bins) > 1 and loads[fullest]:
        assert loads[fullest] - costs[bins[fullest][-1]] <= min(loads)
    # Never more bins than first fit would be allowed to open: all but one are more than half full on average.
    assert len(bins) <= max(1, 2 * -(-sum(costs) // cap))


def test_bins_of_one_long_tail() -> None:
    assert balanced_bins([20, 1, 1, 1, 1], 20) == [[0], [1, 2, 3, 4]]
    assert balanced_bins([], 5) == []
    with pytest.raises(TrainError, match="an item of 7 tokens does not fit into 6"):
        balanced_bins([1, 7], 6)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups with shared prompts over a small alphabet, equal rows, empty responses, observations, in any order."""
    rows = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
        for _ in range(draw(st.integers(1, 5))):
            response = draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=9))
            ids = prompt + [token for token, _ in response]
            rows.append((group, ids, [False] * len(prompt) + [trained for _, trained in response]))
    return batch_of(draw(st.permutations(rows)))


def sequences_seen(batch: Batch, share: bool) -> dict[int, tuple[list[int], int]]:
    """For each trained token (by its place in the batch): the tokens that its hidden state has seen, and its target."""
    layout = lay_out(batch, share)
    ids, positions = layout.token_ids_S.tolist(), layout.positions_S.tolist()
    history: list[list[int]] = []
    at = 0
    for prefix, suffixes in layout.groups:
        history += [ids[at : at + i + 1] for i in range(prefix)]
        start = at + prefix
        for length in suffixes:
            history += [ids[at : at + prefix] + ids[start : start + i + 1] for i in range(length)]
            start += length
        at = start
    assert at == layout.num_tokens == len(history)
    assert positions == [len(seen) - 1 for seen in history]
    source, target = layout.source.tolist(), layout.target.tolist()
    assert len(set(zip(source, target))) == len(source)
    pairs = [(history[source[i]], target[i]) for i in layout.of_M.tolist()]
    return dict(zip(layout.trained.tolist(), pairs))


@given(batches(), st.booleans())
@settings(max_examples=150)
def test_every_trained_token_sees_exactly_what_precedes_it(batch: Batch, share: bool) -> None:
    seen = sequences_seen(batch, share)
    offsets = batch[TOKEN_IDS].offsets
    for row, (ids, mask) in enumerate(zip(batch[TOKEN_IDS], batch[LOSS_MASK])):
        for t in range(len(ids)):
            place = int(offsets[row]) + t
            if mask[t]:
                assert seen.pop(place) == (ids[:t].tolist(), int(ids[t]))
    assert not seen


@pytest.mark.slow
@given(batches(), st.integers(16, 60), st.booleans())
@settings(max_examples=800)
def test_pitfall_35_no_microbatch_exceeds_its_tokens(batch: Batch, cap: int, share: bool) -> None:
    plan = plan_microbatches(batch, cap, share)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(batch)))
    for rows in plan:
        assert rows.tolist() == sorted(rows.tolist())
        assert lay_out(batch.select(rows), share).num_tokens <= cap
    again = plan_microbatches(batch, cap, share)
    assert [rows.tolist() for rows in again] == [rows.tolist() for rows in plan]


@given(batches())
@settings(max_examples=100)
def test_groups_that_fit_stay_whole(batch: Batch) -> None:
    inputs = Inputs(batch, True)
    groups = batch[GROUP_ID].numpy()
    cap = max(family_of(inputs, np.flatnonzero(groups == g).tolist()).cost for g in set(groups.tolist())) + 1
    for rows in plan_microbatches(batch, cap):
        for group in set(groups[rows].tolist()):
            assert np.isin(np.flatnonzero(groups == group), rows).all()


def test_a_group_over_the_cap_is_split_and_its_prefix_repeated() -> None:
    prompt = list(range(10))
    rows = [(0, [*prompt, 20 + i, 30 + i, 40 + i], [False] * 10 + [True] * 3) for i in range(6)]
    batch = batch_of(rows)
    layouts = [lay_out(batch.select(rows)) for rows in plan_microbatches(batch, 16)]
    assert [layout.groups for layout in layouts] == [[(10, [2, 2, 2])], [(10, [2, 2, 2])]]
    assert len(layouts) == 2 and {layout.num_tokens for layout in layouts} == {16}


def test_equal_prompts_of_two_groups_do_not_merge() -> None:
    row = ([1, 2, 3, 4], [False, False, False, True])
    layout = lay_out(batch_of([(0, *row), (1, *row)]))
    assert layout.groups == [(3, [0]), (3, [0])]


def test_common_prefix() -> None:
    a, b = np.array([1, 2, 3, 4]), np.array([1, 2, 5])
    assert [common_prefix(x) for x in ([], [a], [a, b], [a, a], [a, a[:2]], [a, a[:0]])] == [0, 4, 2, 4, 2, 0]


@pytest.mark.parametrize("share", [True, False])
def test_pitfall_34_one_of_32_samples_is_20_times_longer(share: bool) -> None:
    """Two replicas get token counts within 5 % of each other, and no micro-batch of either passes its cap."""
    draw = np.random.default_rng(0)
    rows = []
    for row in range(32):
        response = 200 if row == 13 else 10
        ids = [row // 4 + 1, row // 4 + 2, *draw.integers(0, 50, response).tolist()]
        rows.append((row // 4, ids, [False] * 2 + [True] * response))
    batch, cap = batch_of(rows), 210
    found = rows_of_replicas(batch.lengths, batch[GROUP_ID].numpy(), 2)
    tokens = [int(batch.lengths[mine].sum()) for mine in found]
    assert sum(tokens) == batch.num_tokens and max(tokens) <= 1.05 * min(tokens)
    for mine in found:
        whole = batch.select(mine)
        layouts = [lay_out(whole.select(rows), share) for rows in plan_microbatches(whole, cap, share)]
        assert max(layout.num_tokens for layout in layouts) <= cap
        assert len(layouts) <= 2 and sum(len(layout.trained) for layout in layouts) == whole.num_trained_tokens
