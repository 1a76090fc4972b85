"""The operations in plain torch: what the CPU runs, and what every other backend is tested against.

Legend: T packed tokens, D model, F feed-forward, N heads, K kv heads, M heads of either kind, H head dim.

Each is one autograd function with a hand-written backward: it saves only its inputs and writes each result once, where
the composed form would save and pass over memory several times. Statistics are fp32 whatever the activation dtype. On a
CPU the backward passes of norms and SwiGLU are compiled loops (compiled_train.py), and where oneDNN multiplies fp32
faster than MKL, it does (`product`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from docklands.kernels import compiled_train, deferred

ONEDNN_FROM = 1 << 18
"""Numbers of a weight: below, a call of oneDNN takes longer than it saves. (Rows do not count: the bits of one must not
depend on how many others there are.)"""


@cache
def _onednn() -> Any:
    """oneDNN's product of a CPU on which it is faster than MKL in fp32: those with AVX-512 that Intel did not make
    (1.1 to 1.2 times, seen on an AMD EPYC 9004). None elsewhere, or where this build of torch has none that works.
    """
    try:
        if "AVX512" not in torch.backends.cpu.get_cpu_capability() or not _is_amd():
            return None
        found = torch.ops.mkldnn._linear_pointwise
        one = torch.ones(8, 8)
        with torch.inference_mode():
            return found if bool((found(one, one, None, "none", [], "") == 8).all()) else None
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return None


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """F.linear, without autograd."""
    large = weight_OI.numel() >= ONEDNN_FROM and x.dim() == 2 and len(x)
    if large and x.dtype == torch.float32 and x.device.type == "cpu" and _onednn() is not None:
        return _onednn()(x, weight_OI, bias_O, "none", [], "")
    return F.linear(x, weight_OI, bias_O)


class _Linear(torch.autograd.Function):
    """F.linear with the weight cast to the activation's dtype, its gradient in its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        ctx.later = deferred.store_for(weight)
        return product(x, cast, bias.to(x.dtype) if bias is not None else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        x, cast = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        grad_2d = grad.reshape(-1, grad.shape[-1])
        grad_x = product(grad, cast.t()) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            make = lambda: (grad_2d.t() @ x.reshape(-1, x.shape[-1])).to(weight_dtype)  # noqa: E731
            grad_weight = deferred.gradient(ctx.later, make)
        grad_bias = grad_2d.sum(0, dtype=bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See kernels.linear."""
    if not torch.is_grad_enabled():
        return product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return _Linear.apply(x, weight, bias)  # type: ignore[return-value]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out, scale = _rms_norm(x, weight_D, eps)
        ctx.save_for_backward(x, weight_D, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, scale = ctx.saved_tensors
        if compiled_train.available(x):
            grad_x, wide_D = compiled_train.rms_norm_backward(grads[0], x, weight_D, scale)
            return grad_x, wide_D.to(weight_D.dtype) if ctx.needs_input_grad[1] else None, None
        # All in fp32: an operation on two dtypes is about five times slower on CPU than a conversion and the operation.
        weight = weight_D.to(x.dtype).float()
        normed, grad = x.float() * scale, grads[0].float()
        product = grad * normed
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.reshape(-1, x.shape[-1]).sum(0).to(weight_D.dtype)
        projection = (product @ weight).unsqueeze(-1) / x.shape[-1]
        grad_x = (grad * weight).addcmul_(normed, projection, value=-1).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


def _rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> (normed and weighted [*, D], 1 / rms [*, 1] fp32)."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight_D.to(x.dtype), scale


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels.rms_norm."""
    if not torch.is_grad_enabled():
        return _rms_norm(x_TD, weight_D, eps)[0]
    return _RmsNorm.apply(x_TD, weight_D, eps)  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    """The rotation is orthogonal: its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_TMH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TH, sin_TH)
        return _rotate(x_TMH, cos_TH, sin_TH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_TH, sin_TH = ctx.saved_tensors
        return _rotate(grads[0], cos_TH, -sin_TH), None, None


def _rotate(x_TMH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    half = x_TMH.shape[-1] // 2
    cos, sin = cos_TH[:, None, :half].to(x_TMH.dtype), sin_TH[:, None, :half].to(x_TMH.dtype)
    first, second = x_TMH[..., :half], x_TMH[..., half:]
    out = torch.empty(x_TMH.shape, dtype=x_TMH.dtype, device=x_TMH.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rotate(x_TMH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotary embedding of one tensor of heads; see kernels.rope."""
    if not torch.is_grad_enabled():
        return _rotate(x_TMH, cos_TH, sin_TH)
    return _Rotate.apply(x_TMH, cos_TH, sin_TH)  # type: ignore[return-value]


def rope(q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels.rope."""
    return rotate(q_TNH, cos_TH, sin_TH), rotate(k_TKH, cos_TH, sin_TH)


class _Swiglu(torch.autograd.Function):
    """Gate and up side by side: one product of the fused projection, one gradient back to it."""

    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        gate, up = gate_up_TF.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_TF,) = ctx.saved_tensors
        if compiled_train.available(gate_up_TF):
            return (compiled_train.swiglu_backward(grads[0], gate_up_TF),)
        gate, up = gate_up_TF.chunk(2, -1)
        out = torch.empty_like(gate_up_TF)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return (out,)


def swiglu_fused(gate_up_TF: Tensor) -> Tensor:
    """See kernels.swiglu_fused."""
    if not torch.is_grad_enabled():
        gate, up = gate_up_TF.chunk(2, -1)
        return F.silu(gate).mul_(up)
    return _Swiglu.apply(gate_up_TF)  # type: ignore[return-value]


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """See kernels.swiglu."""
    return F.silu(gate_TF) * up_TF
