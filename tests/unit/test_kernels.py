"""Each kernel against the plain formula, value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from docklands import kernels
from docklands.errors import TrainError
from docklands.kernels import compiled_train, reference


def gradients(f: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output and the gradient of a fixed random projection of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
    return out.detach(), [x.grad for x in leaves if x.grad is not None]


def same(f: Callable[..., Tensor], g: Callable[..., Tensor], inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    (a, grads_a), (b, grads_b) = gradients(f, *inputs), gradients(g, *inputs)
    assert len(grads_a) == len(grads_b) == len(inputs)
    for x, y in zip([a, *grads_a], [b, *grads_b]):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert (x - y).abs().max() < tolerance * max(1.0, float(y.abs().max()))


def test_rms_norm() -> None:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w

    same(lambda x, w: kernels.rms_norm(x, w, 1e-5), plain, [torch.randn(7, 24), torch.randn(24)])
    same(lambda x, w: kernels.rms_norm(x, w, 1e-5), plain, [torch.randn(7, 3, 10), torch.randn(10)])
    with torch.no_grad():
        x, w = torch.randn(7, 24), torch.randn(24)
        assert torch.equal(kernels.rms_norm(x, w, 1e-5), kernels.rms_norm(x.requires_grad_(), w, 1e-5))


def test_rms_norm_of_zeros_is_zero_and_finite() -> None:
    out, (grad_x, _) = gradients(lambda x, w: kernels.rms_norm(x, w, 1e-6), torch.zeros(2, 8), torch.ones(8))
    assert torch.equal(out, torch.zeros(2, 8)) and grad_x.isfinite().all()


def test_swiglu() -> None:
    gate, up = torch.randn(7, 10), torch.randn(7, 10)
    plain: Callable[..., Tensor] = lambda a, b: a * torch.sigmoid(a) * b  # noqa: E731
    same(kernels.swiglu, plain, [gate, up])
    same(kernels.swiglu_fused, lambda x: plain(*x.chunk(2, -1)), [torch.cat([gate, up], -1)])


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_compiled_backward_passes_agree_with_the_composed_ones(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of a row, leading dimensions, gaps in memory, extreme gates, two threads."""
    x = torch.randn(300, 3, 40).to(dtype).transpose(0, 1)
    gate_up = (torch.randn(90, 2 * 1500) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([100.0, -100.0, 1e30, -1e30])
    weight = torch.randn(40)
    cases: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (lambda x, w: kernels.rms_norm(x, w, 1e-5), [x, weight]),
        (lambda x: kernels.rms_norm(x, weight, 1e-5), [x]),
        (kernels.swiglu_fused, [gate_up]),
    ]
    assert compiled_train.available(x)
    found = [gradients(f, *inputs) for f, inputs in cases]
    monkeypatch.setattr(compiled_train, "PARALLEL_FROM", 1)
    torch.set_num_threads(2)
    divided = [gradients(f, *inputs) for f, inputs in cases]
    torch.set_num_threads(1)
    monkeypatch.setattr(compiled_train, "available", lambda _: False)
    for (f, inputs), one, two in zip(cases, found, divided):
        expected = gradients(f, *inputs)
        assert torch.equal(one[0], expected[0])
        for a, b, wanted in zip(one[1], two[1], expected[1], strict=True):
            assert a.dtype == wanted.dtype and wanted.isfinite().all()
            assert (a - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(a.abs().max()))
    leaf = torch.nn.Parameter(weight.clone())
    kernels.rms_norm(x.detach().requires_grad_(), leaf, 1e-5).sum().backward()
    leaf.data.untyped_storage().resize_(0)  # memory tiers must still be able to take a weight's memory


def test_fp32_products_agree_whoever_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(70, 24), torch.randn(36, 48)[:, ::2], torch.randn(36)
    plain = F.linear(x, weight, bias)
    monkeypatch.setattr(reference, "ONEDNN_FROM", 1)
    for build in (None, torch.ops.mkldnn._linear_pointwise):
        monkeypatch.setattr(reference, "_onednn", lambda build=build: build)
        assert (reference.product(x, weight, bias) - plain).abs().max() < 1e-4
        assert (reference.product(plain, weight.t()) - plain @ weight).abs().max() < 1e-3
        assert reference.product(x[:0], weight).shape == (0, 36)


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    angle_TH = torch.randn(5, 1) * torch.tensor([1.0, 0.1]).repeat(2)
    q, k = torch.randn(5, 3, 4), torch.randn(5, 1, 4)

    def plain(x: Tensor) -> Tensor:
        z = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones(5, 1, 2), angle_TH[:, None, :2])
        return torch.cat([z.real, z.imag], -1)

    same(
        lambda q, k: torch.cat(kernels.rope(q, k, angle_TH.cos(), angle_TH.sin()), 1),
        lambda q, k: plain(torch.cat([q, k], 1)),
        [q, k],
    )


def test_linear_returns_gradients_in_the_weights_dtype() -> None:
    same(kernels.linear, F.linear, [torch.randn(7, 12), torch.randn(5, 12), torch.randn(5)])
    x, w = torch.randn(7, 12).bfloat16().requires_grad_(), torch.randn(5, 12).requires_grad_()
    out = kernels.linear(x, w)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert torch.equal(out, F.linear(x, w.bfloat16()))


def test_no_cast_of_a_weight_outlives_an_optimizer_step() -> None:
    x, w = torch.randn(2, 4).bfloat16(), torch.nn.Parameter(torch.randn(3, 4))
    optimizer = torch.optim.AdamW([w], lr=1.0, fused=True)
    before = kernels.linear(x, w)
    before.sum().backward()
    optimizer.step()
    after = kernels.linear(x, w)
    assert torch.equal(after, F.linear(x, w.bfloat16())) and not torch.equal(before, after)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    outs = []
    for q_SNH, k_SKH, v_SKH in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        repeat = q.shape[1] // k.shape[1]
        k_SNH, v_SNH = k_SKH.repeat_interleave(repeat, 1), v_SKH.repeat_interleave(repeat, 1)
        scores_NST = torch.einsum("snh,tnh->nst", q_SNH, k_SNH) * scale
        later = torch.ones(len(q_SNH), len(q_SNH), dtype=torch.bool).triu(1)
        outs.append(torch.einsum("nst,tnh->snh", scores_NST.masked_fill(later, -math.inf).softmax(-1), v_SNH))
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", [[6], [4, 4, 4], [3, 5, 3, 1], [0, 4, 0, 2]])
@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (2, 2)])
def test_packed_attention(lengths: list[int], heads: tuple[int, int]) -> None:
    tokens = sum(lengths)
    inputs = [torch.randn(tokens, n, 8) for n in (heads[0], heads[1], heads[1])]
    ours: Callable[..., Tensor] = lambda *x: kernels.packed_attention(*x, lengths, 0.3)  # noqa: E731
    plain: Callable[..., Tensor] = lambda *x: plain_attention(*x, lengths, 0.3)  # noqa: E731
    same(ours, plain, inputs)
    with torch.no_grad():
        assert (ours(*inputs) - plain(*inputs)).abs().max() < 1e-5


def test_packed_attention_refuses_lengths_that_do_not_add_up() -> None:
    x = torch.randn(5, 2, 8)
    with pytest.raises(TrainError, match=r"add up to 4, the pack has 5"):
        kernels.packed_attention(x, x, x, [2, 2], 1.0)
    assert kernels.packed_attention(x[:0], x[:0], x[:0], [], 1.0).shape == (0, 2, 8)


def test_dispatch_falls_back_to_the_reference() -> None:
    from docklands.kernels import attention, cuda, npu, reference

    assert kernels.get("linear", "cuda") is reference.linear
    assert kernels.get("rms_norm", "cuda") is cuda.rms_norm
    assert kernels.get("swiglu_fused", "npu") is npu.swiglu_fused
    assert kernels.get("packed_attention", "cpu") is attention.packed_attention
    with pytest.raises(KeyError, match="no kernel 'warp'"):
        kernels.get("warp", "cpu")
