"""Calls of torch_npu against its documented signatures, results against the reference; CUDA's varlen call too."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import npu_api
from torch import Tensor

from docklands import device, kernels
from docklands.cli import doctor
from docklands.errors import TrainError
from docklands.kernels import attention, cuda, grouped_mm, npu, reference
from docklands.kernels.prefix_attention import PrefixAttention, prefix_attention

BF16 = 2e-2


@pytest.fixture(autouse=True)
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, "torch_npu", npu_api.module())
    return npu_api.calls


def agree(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], tolerance: float) -> None:
    """Values and gradients, relative to the largest entry of each."""
    found = []
    for f in (ours, plain):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = f(*leaves)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
        found.append([out.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found):
        assert a is not None and b is not None and a.dtype == b.dtype and a.shape == b.shape
        assert (a.float() - b.float()).abs().max() <= tolerance * max(1.0, float(b.float().abs().max()))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, BF16)])
def test_pointwise_operations(dtype: torch.dtype, tolerance: float, torch_npu: list[str]) -> None:
    x, weight = torch.randn(7, 24).to(dtype), torch.randn(24)  # the weight stays fp32: cast for the call
    agree(lambda x, w: npu.rms_norm(x, w, 1e-5), lambda x, w: reference.rms_norm(x, w, 1e-5), [x, weight], tolerance)
    agree(npu.swiglu_fused, reference.swiglu_fused, [x], tolerance)
    agree(npu.swiglu, reference.swiglu, [x, x + 1], tolerance)
    angle_TH = torch.randn(5, 4).repeat(1, 2)
    tables = angle_TH.cos(), angle_TH.sin()
    heads = [torch.randn(5, 3, 8).to(dtype), torch.randn(5, 1, 8).to(dtype)]
    both = lambda f: lambda q, k: torch.cat(f(q, k, *tables), 1)  # noqa: E731
    agree(both(npu.rope), both(reference.rope), heads, tolerance)
    assert torch_npu == ["npu_rms_norm", "npu_swiglu", "npu_swiglu", "npu_rotary_mul", "npu_rotary_mul"]


@pytest.mark.parametrize("lengths", [[6], [3, 5, 0, 1]])
def test_packed_attention(lengths: list[int], torch_npu: list[str]) -> None:
    inputs = [torch.randn(sum(lengths), n, 8).bfloat16() for n in (4, 2, 2)]
    agree(
        lambda *x: npu.packed_attention(*x, lengths, 0.3),
        lambda *x: attention.packed_attention(*x, lengths, 0.3),
        inputs,
        BF16,
    )
    assert torch_npu == ["npu_fusion_attention"]
    wide = [x.float() for x in inputs]
    assert torch.equal(
        npu.packed_attention(*wide, lengths, 0.3), attention.packed_attention(*wide, lengths, 0.3)
    )  # fp32: the reference
    assert npu.packed_attention(*(x[:0] for x in inputs), [], 0.3).shape == (0, 4, 8)
    assert torch_npu == ["npu_fusion_attention"]
    with pytest.raises(TrainError, match="add up to 4"):
        npu.packed_attention(*inputs, [2, 2], 0.3)


GROUPS = [(3, [2, 4, 1]), (0, [5]), (6, []), (2, [0, 3])]


def test_a_shared_prefix_is_one_call(torch_npu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(26, n, 8) for n in (4, 2, 2)]
    found = [x.bfloat16() for x in inputs]
    plain: Callable[..., Tensor] = lambda *x: prefix_attention(*x, GROUPS, 0.4)  # noqa: E731
    agree(lambda *x: PrefixAttention(GROUPS).varlen(*x, 0.4), plain, inputs, 1e-5)  # the reference
    monkeypatch.setattr(kernels, "get", lambda op, _: getattr(npu, op))
    agree(lambda *x: PrefixAttention(GROUPS).varlen(*x, 0.4), plain, found, BF16)
    assert torch_npu == ["npu_fusion_attention"]
    assert PrefixAttention([(0, [3, 4])]).key_S is None  # nothing shared: the pack's own keys


def test_cuda_calls_torchs_varlen_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel needs a GPU; the call is bound to torch's real signature."""
    import torch.nn.attention.varlen as varlen

    signature = inspect.signature(varlen.varlen_attn)

    def plain(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        ends = given["cu_seq_q"], given["cu_seq_k"]
        assert all(end.dtype == torch.int32 and end[0] == 0 for end in ends)
        lengths = [end.diff().tolist() for end in ends]
        assert [max(some) for some in lengths] == [given["max_q"], given["max_k"]]
        assert given["window_size"] == (-1, 0) and given["enable_gqa"] is True
        heads = given["query"], given["key"], given["value"]
        return attention.varlen_attention(*heads, (lengths[0], lengths[1]), given["scale"])

    monkeypatch.setattr(varlen, "varlen_attn", plain)
    monkeypatch.setattr(kernels, "get", lambda op, _: getattr(cuda, op))
    inputs = [torch.randn(26, n, 8).bfloat16() for n in (4, 2, 2)]
    agree(
        lambda *x: PrefixAttention(GROUPS).varlen(*x, 0.4),
        lambda *x: prefix_attention(*x, GROUPS, 0.4),
        inputs,
        BF16,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, BF16)])
def test_what_cuda_compiles(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, without the code that needs a GPU; the same for other numbers of tokens."""
    monkeypatch.setattr(cuda, "BACKEND", "aot_eager")
    for tokens in (5, 8):
        angle_TH = torch.randn(tokens, 4).repeat(1, 2)
        tables = angle_TH.cos(), angle_TH.sin()
        heads = [torch.randn(tokens, 3, 8).to(dtype), torch.randn(tokens, 1, 8).to(dtype)]
        both = lambda f: lambda q, k: torch.cat(f(q, k, *tables), 1)  # noqa: E731, B023
        x = torch.randn(tokens, 24).to(dtype)
        agree(both(cuda.rope), both(reference.rope), heads, tolerance)
        agree(cuda.swiglu_fused, reference.swiglu_fused, [x], tolerance)
        agree(cuda.swiglu, reference.swiglu, [x, x + 1], tolerance)
        with torch.no_grad():
            assert (cuda.swiglu_fused(x) - reference.swiglu_fused(x)).abs().sum() <= tolerance * x.numel()
    assert cuda.swiglu_fused(x[:0]).shape == (0, 12)


def test_what_cannot_be_compiled_is_computed_in_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def without_triton(*_: Any) -> Any:
        calls.append(1)
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(cuda, "BACKEND", without_triton)
    x = torch.randn(7, 24)
    for _ in range(3):
        assert torch.equal(cuda.swiglu_fused(x), reference.swiglu_fused(x))
    said = [record.getMessage() for record in caplog.records if record.name == "docklands.kernels"]
    assert len(calls) == len(said) == 1
    assert "no Triton here" in said[0] and said[0].startswith("_swiglu_fused is not compiled")


def test_varlen_attention_refuses_lengths_that_do_not_fit() -> None:
    q, k = torch.randn(3, 2, 8), torch.randn(5, 2, 8)
    with pytest.raises(TrainError, match="a key for every query"):
        kernels.varlen_attention(q, k, k, ([2, 1], [1, 4]), 1.0)
    with pytest.raises(TrainError, match="add up to 4, the pack has 5"):
        kernels.varlen_attention(q, k, k, ([3], [4]), 1.0)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, BF16)])
def test_experts(dtype: torch.dtype, tolerance: float, torch_npu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm, "row_step", lambda *_: 1)  # no padding rows, as on an accelerator
    draw = torch.Generator().manual_seed(0)
    choice_Tk = torch.rand(9, 5, generator=draw).topk(2, 1).indices % 4  # expert 4 has no row
    up_EOI, down_EOI = torch.randn(5, 6, 8, generator=draw), torch.randn(5, 8, 6, generator=draw)
    rows = grouped_mm.ExpertRows(choice_Tk, up_EOI, down_EOI, dtype)
    x_TD, weight_Tk = torch.randn(9, 8, generator=draw).to(dtype), torch.rand(9, 2, generator=draw)

    def layer(kernel: Any) -> Callable[..., Tensor]:
        def forward(x: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
            hidden = kernel("grouped_linear")(kernel("permute")(x, rows), up, rows.ends_E)
            return kernel("unpermute")(kernel("grouped_linear")(hidden, down, rows.ends_E), rows, weight)

        return forward

    inputs = [x_TD, weight_Tk, up_EOI, down_EOI]  # fp32 weights under bf16 rows: their gradients are fp32
    agree(layer(lambda op: getattr(npu, op)), layer(lambda op: getattr(grouped_mm, op)), inputs, tolerance)
    assert torch_npu.count("npu_grouped_matmul") == 6
    assert torch_npu[:2] == ["npu_moe_token_permute", "npu_grouped_matmul"]
    assert "npu_moe_token_unpermute" in torch_npu


def test_without_rows_the_reference_computes(torch_npu: list[str]) -> None:
    weight_EOI, x_MI = torch.randn(3, 6, 8), torch.randn(0, 8)
    rows = grouped_mm.ExpertRows(
        torch.zeros(0, 2, dtype=torch.int64), weight_EOI, weight_EOI.transpose(1, 2), x_MI.dtype
    )
    assert npu.permute(x_MI, rows).shape == (0, 8)
    assert npu.grouped_linear(x_MI, weight_EOI, rows.ends_E).shape == (0, 6)
    assert npu.unpermute(x_MI, rows, torch.zeros(0, 2)).shape == (0, 8)
    assert torch_npu == []


def test_what_is_used_where() -> None:
    assert set(kernels.used("cpu").values()) == {
        *("attention", "block_attention", "reference", "grouped_mm", "logprob")
    }
    on_npu = [op for op, module in kernels.used("npu").items() if module == "npu"]
    assert on_npu == [
        *("varlen_attention", "packed_attention", "block_forward", "block_backward"),
        *("rms_norm", "rope", "swiglu", "swiglu_fused"),
        *("grouped_linear", "permute", "unpermute"),
    ]
    on_cuda = [op for op, module in kernels.used("cuda").items() if module == "cuda"]
    assert on_cuda == [
        *("varlen_attention", "packed_attention", "block_forward", "block_backward"),
        *("rms_norm", "rope", "swiglu", "swiglu_fused"),
    ]
    for op in kernels.OPERATIONS:
        assert callable(getattr(kernels, op))


@pytest.mark.parametrize(
    ("kind", "who"), [("cpu", ""), ("cuda", "torch's fused CUDA"), ("npu", "torch_npu")], ids=["cpu", "cuda", "npu"]
)
def test_doctor_prints_what_is_used(kind: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation once, beside what computes it on the device that a run would choose."""
    monkeypatch.setattr(device, "choose", lambda: SimpleNamespace(type=kind))
    lines = [finding.text for finding in doctor.kernels() if finding.text.startswith(f"{kind}: ")]
    said = {}
    for line in lines:
        operations, _, by = line.removeprefix(f"{kind}: ").rpartition(": ")
        said |= dict.fromkeys(operations.split(", "), by)
    assert said.keys() == set(kernels.OPERATIONS)
    for op, module in kernels.used(kind).items():
        assert said[op] == (who if module == kind else f"reference ({module})")
