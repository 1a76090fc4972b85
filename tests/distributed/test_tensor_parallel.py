"""Tensor and sequence parallelism against one process: losses, every gradient, parameters after three updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from docklands.kernels.logprob import Held
from docklands.kernels.logprob_parallel import VocabularyPart, sampled_logprob_parallel
from docklands.parallel import Layout
from tests.distributed.cases import alone, compare, difference, sharded
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2_two_kv_heads", Layout(tp=4, sp=False)),
        ("llama_bias", Layout(tp=2)),
    ],
    ids=str,
)
def test_tensor_parallel_equals_one_process(name: str, layout: Layout, models: Path, pool: Pool) -> None:
    compare(pool.run(layout.world_size, sharded, models / name, layout), alone(models / name), layout)


def test_tensor_parallel_value_model(models: Path, pool: Pool) -> None:
    layout = Layout(tp=2)
    found = pool.run(2, sharded, models / "qwen3_tied", layout, True)
    compare(found, alone(models / "qwen3_tied", True), layout)


def pieces(tokens: int, words: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, head, targets and weights of the two sums, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    hidden_TD, weight_VD = torch.randn(tokens, 12, generator=draw), torch.randn(words, 12, generator=draw)
    return hidden_TD, weight_VD, torch.arange(tokens) * 7 % words, torch.randn(2, tokens, generator=draw)


def of_words_here(words: int, held: Held) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """Log-probs, entropies, this rank's gradient of the states (partial) and of its rows; which rows these are."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hidden_TD, weight_VD, target_T, sums = pieces(19, words)
    first, last = words * rank // ranks, words * (rank + 1) // ranks
    states, rows = hidden_TD.requires_grad_(), weight_VD[first:last].clone().requires_grad_()
    part = VocabularyPart(dist.group.WORLD, first, held)
    found = sampled_logprob_parallel(states, rows, target_T, part, temperature=0.7, entropy=True)
    (found[0] * sums[0] + found[1] * sums[1]).sum().backward()
    return [found[0].detach(), found[1].detach(), states.grad, rows.grad], (first, last)


@pytest.mark.parametrize(
    "held", [Held(7, 0), Held(5, 2 * 19 * 5 * 4), Held(64)], ids=["again", "some_kept", "one_chunk"]
)
@pytest.mark.parametrize(("ranks", "words"), [(2, 61), (4, 50)])
def test_log_probs_over_a_vocabulary_that_is_split_and_chunked(ranks: int, words: int, held: Held, pool: Pool) -> None:
    """Uneven rows on each rank, of which a chunk takes fewer; log-probs and entropies, and the gradients of both."""
    hidden_TD, weight_VD, target_T, sums = pieces(19, words)
    hidden_TD, weight_VD = hidden_TD.double().requires_grad_(), weight_VD.double().requires_grad_()
    log_p_TV = torch.log_softmax(hidden_TD @ weight_VD.t() / 0.7, -1)
    expected = log_p_TV.gather(1, target_T[:, None])[:, 0], -(log_p_TV.exp() * log_p_TV).sum(-1)
    (expected[0] * sums[0] + expected[1] * sums[1]).sum().backward()
    assert hidden_TD.grad is not None and weight_VD.grad is not None
    answers = pool.run(ranks, of_words_here, words, held)
    for found, (first, last) in answers:
        assert difference(found[0], expected[0].detach()) < 1e-5 and difference(found[1], expected[1].detach()) < 1e-5
        assert difference(found[3], weight_VD.grad[first:last]) < 1e-5
    assert difference(sum(found[2] for found, _ in answers), hidden_TD.grad) < 1e-5
