"""Random numbers by (seed, position), and truncation against the naive definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from docklands.errors import NonFinite
from docklands.rollout.sampling import Choice, Sampler, sample_seed, uniforms


def choice(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, **more: object) -> Choice:
    uniform = more.get("uniform", uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64)))
    banned = more.get("banned")
    return Choice(np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p), np.asarray(uniform), banned)  # type: ignore[arg-type]


def support(logits_V: torch.Tensor, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    """Naive: keep the k most probable, then the shortest head of the renormalised rest that reaches p."""
    p_V = torch.softmax(logits_V.double() / temperature, -1)
    order = p_V.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    total, mass, out = sum(p_V[i] for i in kept), 0.0, torch.zeros_like(p_V)
    for i in kept:
        out[i] = p_V[i]
        mass += float(p_V[i] / total)
        if mass >= top_p:
            break
    return out / out.sum()


def test_seeds_are_64_bit_and_distinct() -> None:
    seeds = {sample_seed(s, v, p, k) for s in range(3) for v in range(3) for p in range(30) for k in range(8)}
    assert len(seeds) == 3 * 3 * 30 * 8
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(-1, 0, 2**63, 0) != sample_seed(0, -1, 2**63, 0)
    assert max(seeds) > 2**63  # the top bit is used


def test_uniforms_are_uniform_and_depend_on_both_arguments() -> None:
    seeds = np.array([sample_seed(1, 0, p, 0) for p in range(200)], np.uint64)
    draws = np.stack([uniforms(seeds, np.full(200, t)) for t in range(200)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert abs(draws.mean() - 0.5) < 5 * np.sqrt(1 / 12 / draws.size)
    assert abs(draws.var() - 1 / 12) < 0.002
    assert len(np.unique(draws)) == draws.size
    neighbours = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert abs(neighbours) < 0.02


@pytest.mark.parametrize("vocabulary", [2, 40, 128, 129, 700])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    """A fine grid of uniforms recovers the probabilities to the grid's resolution."""
    torch.manual_seed(vocabulary)
    logits_V, n = torch.randn(vocabulary) * 2, 20_000
    grid = (np.arange(n) + 0.5) / n
    tokens, logprobs = Sampler()(logits_V.expand(n, -1), choice(n, 0.8, uniform=grid))
    p_V = torch.softmax(logits_V.double() / 0.8, -1)
    counts = torch.bincount(torch.from_numpy(tokens), minlength=vocabulary) / n
    assert (counts - p_V).abs().max() <= 1.5 / n
    want = torch.log_softmax(logits_V.double() / 0.8, -1)[torch.from_numpy(tokens)]
    assert (torch.from_numpy(logprobs) - want).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (5, 1.0), (0, 0.5), (0, 0.9), (7, 0.6), (1500, 0.97), (0, 0.999)]
)
@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_truncation_against_naive(top_k: int, top_p: float, vocabulary: int) -> None:
    """3000 entries with a flat tail need more candidates than are sorted at first."""
    torch.manual_seed(top_k + vocabulary)
    logits_V, n = torch.randn(vocabulary), 4000
    want_V = support(logits_V, top_k, top_p, 1.3)
    tokens, logprobs = Sampler()(logits_V.expand(n, -1), choice(n, 1.3, top_k, top_p, uniform=(np.arange(n) + 0.5) / n))
    counts_V = torch.bincount(torch.from_numpy(tokens), minlength=vocabulary).double() / n
    assert (counts_V[want_V == 0] == 0).all()
    assert (counts_V - want_V).abs().max() < 1.5 / n
    whole = torch.log_softmax(logits_V.double() / 1.3, -1)  # before truncation
    assert (torch.from_numpy(logprobs) - whole[torch.from_numpy(tokens)]).abs().max() < 3e-6


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    logits_RV = torch.randn(6, 60)
    mixed = Choice(
        np.array([0.0, 1.0, 0.5, 1.0, 2.0, 1.0]),
        np.array([0, 0, 3, 0, 0, 1]),
        np.array([1.0, 1.0, 1.0, 0.4, 1.0, 1.0]),
        uniforms(np.arange(6, dtype=np.uint64), np.arange(6)),
    )
    tokens, logprobs = Sampler()(logits_RV, mixed)
    assert tokens[0] == int(logits_RV[0].argmax()) and tokens[5] == int(logits_RV[5].argmax())
    for row in range(6):
        alone = Choice(*(x[row : row + 1] for x in (mixed.temperature, mixed.top_k, mixed.top_p, mixed.uniform)))
        token, logprob = Sampler()(logits_RV[row : row + 1], alone)
        assert (token[0], logprob[0]) == (tokens[row], logprobs[row])


def test_bans_are_kept_even_when_everything_else_underflows() -> None:
    logits_RV = torch.full((2, 10), -200.0)
    logits_RV[:, 3] = 200.0
    logits_RV[:, 7] = -190.0
    banned = np.array([[3, -1], [-1, -1]])
    tokens, logprobs = Sampler()(logits_RV, choice(2, banned=banned, uniform=[0.5, 0.5]))
    assert tokens.tolist() == [7, 3]
    assert logprobs[0] == pytest.approx(-390.0) and logprobs[1] == pytest.approx(0.0, abs=1e-6)
    greedy, _ = Sampler()(logits_RV, choice(2, 0.0, banned=banned))
    assert greedy.tolist() == [7, 3]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_extreme_uniforms_never_pick_an_impossible_token(uniform: float) -> None:
    logits_RV = torch.full((1, 300), -torch.inf)
    logits_RV[0, 130], logits_RV[0, 140] = 1.0, 1.0
    tokens, logprobs = Sampler()(logits_RV, choice(1, uniform=[uniform]))
    assert tokens[0] == (130 if uniform == 0.0 else 140)
    assert logprobs[0] == pytest.approx(np.log(0.5), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [2, 40, 128, 129, 700])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(vocabulary: int, how: dict[str, float], bad: float) -> None:
    """One row of three: an error that names it as such, not an index beyond the vocabulary; the rest may be -inf."""
    logits_RV = torch.randn(3, vocabulary)
    logits_RV[0, 0] = -torch.inf
    Sampler()(logits_RV, choice(3, **how))  # type: ignore[arg-type]
    for at in (0, vocabulary - 1):
        broken_RV = logits_RV.clone()
        broken_RV[1, at] = bad
        with pytest.raises(NonFinite, match="logits of 1 of 3 sequences"):
            Sampler()(broken_RV, choice(3, **how))  # type: ignore[arg-type]
    with pytest.raises(NonFinite):
        Sampler()(torch.full((3, vocabulary), bad), choice(3, **how))  # type: ignore[arg-type]
