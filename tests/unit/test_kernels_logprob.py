"""The chunked log-probability of sampled tokens against log_softmax: value, gradient, memory, precision."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from docklands import kernels
from docklands.kernels import logprob_of_logits, sampled_logprob
from docklands.kernels.logprob import Held


def naive(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_TV = (hidden_TD @ weight_VD.t() / temperature).log_softmax(-1)
    return logp_TV.gather(1, targets_T[:, None]).squeeze(1), -(logp_TV.exp() * logp_TV).sum(-1)


def case(tokens: int = 19, vocabulary: int = 53, size: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    hidden_TD = torch.randn(tokens, size, requires_grad=True)
    weight_VD = torch.randn(vocabulary, size, requires_grad=True)
    return hidden_TD, weight_VD, torch.randint(0, vocabulary, (tokens,))


@pytest.mark.parametrize("keep", [0, 2500, 1 << 20])  # bytes: none, some chunks of 1 or 7 words, all
@pytest.mark.parametrize("chunk", [1, 7, 53, 1000, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient(chunk: int | None, temperature: float, keep: int) -> None:
    hidden_TD, weight_VD, targets_T = case()
    g_T, e_T = torch.randn(2, 19)
    settings = {"temperature": temperature, "held": Held(chunk, keep)}
    found = sampled_logprob(hidden_TD, weight_VD, targets_T, entropy=True, **settings)  # type: ignore[arg-type]
    expected = naive(hidden_TD.double(), weight_VD.double(), targets_T, temperature)
    for a, b in zip(found, expected):
        assert a.dtype == torch.float32 and (a - b).abs().max() < 1e-5
    grads = torch.autograd.grad(found, (hidden_TD, weight_VD), (g_T, e_T))
    exact = torch.autograd.grad(expected, (hidden_TD, weight_VD), (g_T.double(), e_T.double()))
    for a, b in zip(grads, exact):
        assert (a - b).abs().max() < 1e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_save_products_and_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_TD, weight_VD = (x.detach().to(dtype).requires_grad_() for x in case()[:2])
    targets_T = torch.arange(19)
    products, mm = [0], torch.mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        products[0] += 1
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    chunk = 10  # six chunks, the last one of 3 words
    found, made = [], []
    for kept in (0, 2, 6):
        keep = kept * 19 * chunk * dtype.itemsize
        logprobs_T = sampled_logprob(hidden_TD, weight_VD, targets_T, held=Held(chunk, keep))
        assert isinstance(logprobs_T, Tensor)
        products[0] = 0
        grads = torch.autograd.grad(logprobs_T.sum(), (hidden_TD, weight_VD), retain_graph=True)
        made.append(products[0])
        again = torch.autograd.grad(logprobs_T.sum(), (hidden_TD, weight_VD))
        found.append((logprobs_T, *grads))
        assert all(torch.equal(a, b) for a, b in zip(grads, again))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
    assert [made[0] - n for n in made] == [0, 2, 6]
    with torch.no_grad():
        products[0] = 0
        sampled_logprob(hidden_TD, weight_VD, targets_T, held=Held(chunk))
    assert products[0] == 6


def test_fp32_error_is_below_1e_6_on_a_mean_loss() -> None:
    hidden_TD, weight_VD, targets_T = case(64, 301, 16)
    weight_VD = (weight_VD.detach() * 0.2).requires_grad_()
    ours = sampled_logprob(hidden_TD, weight_VD, targets_T, temperature=1.3, held=Held(40))
    plain, _ = naive(hidden_TD, weight_VD, targets_T, 1.3)
    assert isinstance(ours, Tensor) and (ours - plain).abs().max() < 1e-6
    for a, b in zip(*(torch.autograd.grad(x.mean(), (hidden_TD, weight_VD)) for x in (ours, plain))):
        assert (a - b).abs().max() < 1e-6


def test_only_one_output_needs_a_gradient() -> None:
    hidden_TD, weight_VD, targets_T = case()
    logprobs_T, entropy_T = sampled_logprob(hidden_TD, weight_VD, targets_T, entropy=True)
    one = torch.autograd.grad(entropy_T.sum(), hidden_TD, retain_graph=True)[0]
    plain = torch.autograd.grad(naive(hidden_TD, weight_VD, targets_T, 1.0)[1].sum(), hidden_TD)[0]
    assert (one - plain).abs().max() < 1e-5
    only = sampled_logprob(hidden_TD, weight_VD.detach(), targets_T)
    assert isinstance(only, Tensor) and torch.equal(only, logprobs_T)
    only.sum().backward()
    assert hidden_TD.grad is not None and weight_VD.grad is None


def test_no_tokens() -> None:
    hidden_TD, weight_VD, targets_T = case(0)
    logprobs_T, entropy_T = sampled_logprob(hidden_TD, weight_VD, targets_T, entropy=True)
    assert logprobs_T.shape == entropy_T.shape == (0,)
    logprobs_T.sum().backward()
    assert torch.equal(weight_VD.grad, torch.zeros(53, 12))  # type: ignore[arg-type]


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    hidden_TD, weight_VD, targets_T = case()
    for bad in (53, -1):
        targets_T[3] = bad
        with pytest.raises(IndexError, match="vocabulary of 53"):
            sampled_logprob(hidden_TD, weight_VD, targets_T)


def test_extreme_logits_stay_finite() -> None:
    hidden_TD = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight_VD = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 0.0]], requires_grad=True)
    logprobs_T, entropy_T = sampled_logprob(hidden_TD, weight_VD, torch.tensor([1]), entropy=True, held=Held(1))
    assert logprobs_T.item() == -2000.0 and entropy_T.item() == 0.0
    (logprobs_T + entropy_T).sum().backward()
    assert hidden_TD.grad is not None and hidden_TD.grad.isfinite().all()


def test_pitfall_17_temperature_divides_the_logits() -> None:
    hidden_TD, weight_VD, targets_T = case()
    generated_T = logprob_of_logits(kernels.linear(hidden_TD, weight_VD), targets_T, 0.6)
    trained_T = sampled_logprob(hidden_TD, weight_VD, targets_T, temperature=0.6, held=Held(9))
    assert (generated_T - trained_T).abs().max() < 1e-5
    assert (generated_T - sampled_logprob(hidden_TD, weight_VD, targets_T)).abs().max() > 0.1


def test_autocast_multiplies_in_bf16_and_keeps_fp32_statistics() -> None:
    hidden_TD, weight_VD, targets_T = case(64, 501, 32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = sampled_logprob(hidden_TD, weight_VD, targets_T, held=Held(100))
        logits_TV = hidden_TD @ weight_VD.t()
    assert isinstance(ours, Tensor) and ours.dtype == torch.float32 and logits_TV.dtype == torch.bfloat16
    assert (ours - logprob_of_logits(logits_TV, targets_T)).abs().max() < 1e-5
    ours.mean().backward()
    grads = hidden_TD.grad, weight_VD.grad
    expected = torch.autograd.grad(naive(hidden_TD, weight_VD, targets_T, 1.0)[0].mean(), (hidden_TD, weight_VD))
    for a, b in zip(grads, expected):
        assert a is not None and a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 0.02


MEMORY = """
import resource, torch
from docklands.kernels import sampled_logprob
torch.set_num_threads(1)
T, V, D = 4096, 150_000, 16
h, w = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
t = torch.randint(0, V, (T,))
w.grad, h.grad = torch.zeros_like(w), torch.zeros_like(h)
sampled_logprob(h[:2], w, t[:2], entropy=True)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
a, b = sampled_logprob(h, w, t, entropy=True)
(a + b).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_peak_memory_is_an_eighth_of_the_logits() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=110, check=True)
    full = 4096 * 150_000 * 4
    assert 0 <= int(done.stdout) < full / 8
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
