"""The engine against a naive loop: one row, one forward, one backward; nothing packed, nothing shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train_cases import (
    ACTOR,
    ACTOR_WITH_ENTROPY,
    CRITIC,
    engine,
    gradients_of,
    largest_difference,
    naive_gradients,
    naive_outputs,
    sampled,
    tiny,
)
from torch import Tensor

from docklands.core.batch import Batch
from docklands.kernels.prefix_attention import PrefixAttention, prefix_attention

CASES = [
    (share, tokens, recompute) for share in (True, False) for tokens in (64, 40, 256) for recompute in (False, True)
]


@pytest.mark.parametrize("share,tokens,recompute", CASES)
@pytest.mark.parametrize("learner", [ACTOR, ACTOR_WITH_ENTROPY, CRITIC], ids=["policy", "entropy", "value"])
def test_loss_and_gradient_equal_the_naive_loop(learner: Any, share: bool, tokens: int, recompute: bool) -> None:
    batch, value = sampled(), learner is CRITIC
    trainer = engine(value, share_prefix=share, tokens_per_microbatch=tokens, recompute=recompute, temperature=0.7)
    expected_loss, expected = naive_gradients(tiny(value), batch, learner.loss, 0.7)
    loss, found = gradients_of(trainer, batch, learner)
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 1e-2
    assert loss == pytest.approx(expected_loss, abs=2e-6, rel=1e-6)
    assert largest_difference(found, expected) < 2e-6 * max(1.0, scale)


def test_shared_prefix_gradients_equal_the_unshared_ones() -> None:
    batch = sampled(seed=4, groups=4, samples=5)
    trainers = [engine(share_prefix=share) for share in (True, False)]
    shared, plain = (gradients_of(trainer, batch, ACTOR_WITH_ENTROPY) for trainer in trainers)
    packed = [t.forward_backward(batch, ACTOR)["actor/packed_tokens"][0] for t in trainers]
    assert packed[0] < 0.75 * packed[1]  # it did share
    assert shared[0] == pytest.approx(plain[0], abs=1e-6)
    assert largest_difference(shared[1], plain[1]) < 1e-6


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tokens", [30, 256])
def test_logprobs_and_values_equal_the_naive_loop(share: bool, tokens: int) -> None:
    batch = sampled(seed=2)
    for value, name in ((False, "logprobs_T"), (True, "values_T")):
        trainer = engine(value, share_prefix=share, tokens_per_microbatch=tokens)
        found = trainer.values(batch) if value else trainer.logprobs(batch)
        for ours, naive in zip(found, naive_outputs(tiny(value), batch)):
            assert ours.dtype == torch.float32
            scale = max(1.0, float(naive[name].abs().max()))
            assert float((ours - naive[name]).abs().max()) < 2e-6 * scale


def test_pitfall_17_temperature_divides_the_logits() -> None:
    batch = sampled(seed=6)
    for temperature in (0.5, 1.7):
        found = engine(temperature=temperature).logprobs(batch)
        expected = torch.cat([row["logprobs_T"] for row in naive_outputs(tiny(), batch, temperature)]).detach()
        assert float((found.values - expected).abs().max()) < 1e-5
        assert float((found.values - engine().logprobs(batch).values).abs().max()) > 0.1  # it matters


# --- the attention alone ------------------------------------------------------------------------------------------


def naive_attention(q: Tensor, k: Tensor, v: Tensor, groups: Any, scale: float) -> Tensor:
    """Dense scores in fp64 with an explicit list of who sees whom."""
    seen = torch.zeros(len(q), len(q), dtype=torch.bool)
    at = 0
    for prefix, suffixes in groups:
        seen[at : at + prefix, at : at + prefix] = torch.ones(prefix, prefix).tril().bool()
        start = at + prefix
        for n in suffixes:
            seen[start : start + n, at : at + prefix] = True
            seen[start : start + n, start : start + n] = torch.ones(n, n).tril().bool()
            start += n
        at = start
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("tnh,snh->nts", q.double(), k.double().repeat_interleave(repeat, 1)) * scale
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("nts,snh->tnh", weights, v.double().repeat_interleave(repeat, 1))


LAYOUTS = {
    "groups": [(9, [3, 1, 5]), (9, [3, 4]), (2, [1])],
    "no prefix": [(0, [5, 1, 7, 7]), (0, [3])],
    "prefix only": [(6, []), (4, [0, 0]), (6, [0, 2])],
    "chunked": [(300, [280, 3, 40]), (0, [270]), (257, [])],
    "one token": [(1, []), (0, [1])],
}


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("heads,kv_heads,dim", [(6, 2, 16), (3, 3, 8), (4, 1, 24)])
def test_prefix_attention_forward_and_backward(
    layout: str, portable: bool, heads: int, kv_heads: int, dim: int
) -> None:
    groups = LAYOUTS[layout]
    tokens = sum(prefix + sum(suffixes) for prefix, suffixes in groups)
    q, k, v = (torch.randn(tokens, n, dim, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    attend = PrefixAttention(groups, portable=portable)
    weight = torch.randn(tokens, heads, dim)
    found = attend(0, q, k, v, 0.3)
    expected = naive_attention(q, k, v, groups, 0.3)
    assert float((found - expected).detach().abs().max()) < 5e-6
    ours = torch.autograd.grad((found * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for left, right in zip(ours, theirs):
        assert float((left - right).abs().max()) < 2e-5


def test_prefix_attention_in_bf16_stays_within_its_rounding() -> None:
    groups = LAYOUTS["groups"]
    tokens = sum(prefix + sum(suffixes) for prefix, suffixes in groups)
    q, k, v = (torch.randn(tokens, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (6, 2, 2))
    found = prefix_attention(q, k, v, groups, 0.25)
    assert found.dtype == torch.bfloat16
    expected = naive_attention(q, k, v, groups, 0.25)
    assert float((found - expected).detach().abs().max()) < 2e-2
    for left, right in zip(
        torch.autograd.grad(found.float().sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v))
    ):
        assert left.dtype == torch.bfloat16
        assert float((left.double() - right.double()).abs().max()) < 6e-2


def test_a_batch_without_group_ids_shares_nothing() -> None:
    batch = sampled()
    alone = Batch(batch.row_ids, {f: batch[f] for f in batch.fields if f.name != "group_id"})
    trainer = engine()
    packed = [trainer.forward_backward(b, ACTOR)["actor/packed_tokens"][0] for b in (batch, alone)]
    assert packed[1] == int((batch.lengths - 1).sum()) > packed[0]
