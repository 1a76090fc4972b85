"""Products of rows with the weight of their own expert, and the order of rows that these products want.

Legend: T tokens, k experts of a token, E experts, M rows sorted by expert, I inputs, O outputs.

On the CPU each expert's rows are padded to a multiple of a row count at which a matrix product gives a row the same
bits in any company: with 1 to 3 rows, and with two threads with 5 to 7, MKL sums in another order. So a token's output
does not depend on how many others chose its expert, and engines that batch differently compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from docklands.kernels import deferred

_torch = getattr(F, "grouped_mm", None)
ALIGNMENT = 16  # bytes; what torch's operator asks of every stride
STEPS = (8, 16, 32, 64, 128)


class ExpertRows:
    """Where each (token, chosen expert) stands among the rows sorted by expert.

    choice_Tk int64, as given
    token_M   int64, the token of each row; a padding row repeats token 0
    row_Tk    int64, the row of each choice
    ends_E    int32, one past the last row of each expert, its padding included
    """

    def __init__(
        self,
        choice_Tk: Tensor,
        gate_up_EOI: Tensor,
        down_EOI: Tensor,
        dtype: torch.dtype,
        more: Iterable[Tensor] = (),
    ) -> None:
        """more: other matrices of experts that these rows are multiplied with."""
        experts, (tokens, top_k) = len(gate_up_EOI), choice_Tk.shape
        self.choice_Tk = choice_Tk
        load_E = count(choice_Tk, experts)
        size_E = load_E
        if choice_Tk.device.type == "cpu":
            threads = torch.get_num_threads()
            step = max(row_step(tuple(weight.shape[1:]), dtype, threads) for weight in (gate_up_EOI, down_EOI, *more))
            size_E = (load_E + step - 1) // step * step
        order_M = torch.argsort(choice_Tk.flatten(), stable=True)  # by expert, then by token
        shift_E = (size_E.cumsum(0) - size_E) - (load_E.cumsum(0) - load_E)
        sorted_row = torch.arange(tokens * top_k, device=choice_Tk.device)
        sorted_row = sorted_row + shift_E[choice_Tk.flatten()[order_M]]
        self.row_Tk = torch.empty_like(sorted_row).index_copy_(0, order_M, sorted_row).view(tokens, top_k)
        rows = int(size_E.sum()) if choice_Tk.device.type == "cpu" else tokens * top_k
        self.token_M = torch.zeros(rows, dtype=torch.int64, device=choice_Tk.device)
        self.token_M[sorted_row] = order_M // top_k
        self.ends_E = size_E.cumsum(0).to(torch.int32)


def count(choice_Tk: Tensor, experts: int) -> Tensor:
    """int64 [E]: how often each expert was chosen (torch.bincount would wait for an accelerator)."""
    flat = choice_Tk.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def permute(x_TD: Tensor, rows: ExpertRows) -> Tensor:
    """See kernels.permute."""
    return _Permute.apply(x_TD, rows.token_M, rows.row_Tk)  # type: ignore[return-value]


def unpermute(y_MD: Tensor, rows: ExpertRows, weight_Tk: Tensor) -> Tensor:
    """See kernels.unpermute: in fp32, in the order of the choice."""
    return _Unpermute.apply(y_MD, rows.row_Tk, weight_Tk)  # type: ignore[return-value]


class _Permute(torch.autograd.Function):
    """Backward adds k rows for each token: no scattered sums, whose order some devices leave open."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_M: Tensor, row_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(row_Tk)
        return x_TD.index_select(0, token_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (row_Tk,) = ctx.saved_tensors
        total_TD = grads[0].new_zeros(len(row_Tk), grads[0].shape[1], dtype=torch.float32)
        for row_T in row_Tk.unbind(1):
            total_TD += grads[0].index_select(0, row_T)
        return total_TD.to(grads[0].dtype), None, None


class _Unpermute(torch.autograd.Function):
    """One [T, D] at a time: composed, it would hold [T, k, D] in fp32 until backward."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, row_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(y_MD, row_Tk, weight_Tk)
        total_TD = y_MD.new_zeros(len(row_Tk), y_MD.shape[1], dtype=torch.float32)
        for row_T, weight_T in zip(row_Tk.unbind(1), weight_Tk.unbind(1)):
            total_TD.addcmul_(y_MD.index_select(0, row_T).float(), weight_T[:, None])
        return total_TD.to(y_MD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_MD, row_Tk, weight_Tk = ctx.saved_tensors
        grad_TD = grads[0].float()
        grad_MD, grad_Tk = torch.zeros_like(y_MD), torch.empty_like(weight_Tk)  # padding rows: no gradient
        for j, row_T in enumerate(row_Tk.unbind(1)):
            grad_MD.index_copy_(0, row_T, (grad_TD * weight_Tk[:, j, None]).to(y_MD.dtype))
            torch.linalg.vecdot(grad_TD, y_MD.index_select(0, row_T).float(), out=grad_Tk[:, j])
        return grad_MD, None, grad_Tk


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """See kernels.grouped_linear."""
    if not torch.is_grad_enabled():
        return _forward(x_MI, weight_EOI.to(x_MI.dtype), ends_E)
    return _GroupedMm.apply(x_MI, weight_EOI, ends_E)  # type: ignore[return-value]


class _GroupedMm(torch.autograd.Function):
    """The weight is cast to the activation's dtype, its gradient comes in its own."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        cast_EOI = weight_EOI.to(x_MI.dtype)
        ctx.save_for_backward(x_MI, cast_EOI, ends_E)
        ctx.dtype, ctx.later = weight_EOI.dtype, deferred.store_for(weight_EOI)
        return _forward(x_MI, cast_EOI, ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, cast_EOI, ends_E = ctx.saved_tensors
        grad_MO = grads[0].contiguous()
        grad_x = _forward(grad_MO, cast_EOI.transpose(1, 2), ends_E) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            dtype = ctx.dtype
            grad_weight = deferred.gradient(ctx.later, lambda: _outer(grad_MO, x_MI, ends_E).to(dtype))
        return grad_x, grad_weight, None


def _forward(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    if _torch_can(x_MI, weight_EOI):
        return _torch(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)  # type: ignore[misc]
    out_MO = x_MI.new_empty(len(x_MI), weight_EOI.shape[1])
    for expert, (start, end) in enumerate(_spans(ends_E)):
        if end > start:
            out_MO[start:end] = F.linear(x_MI[start:end], weight_EOI[expert])
    return out_MO


def _outer(grad_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
    """Gradient of the weights: grad.T @ x over the rows of each expert, 0 without rows. -> [E, O, I]"""
    if _torch_can(x_MI, grad_MO):
        return _torch(grad_MO.t(), x_MI, offs=ends_E)  # type: ignore[misc]
    out_EOI = x_MI.new_zeros(len(ends_E), grad_MO.shape[1], x_MI.shape[1])
    for expert, (start, end) in enumerate(_spans(ends_E)):
        if end > start:
            torch.mm(grad_MO[start:end].t(), x_MI[start:end], out=out_EOI[expert])
    return out_EOI


def _spans(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends], ends))


def _torch_can(*operands: Tensor) -> bool:
    """Whether torch's operator takes these: its strides, and on an accelerator bfloat16 only."""
    if _torch is None or (operands[0].device.type != "cpu" and operands[0].dtype != torch.bfloat16):
        return False
    if operands[0].device.type not in ("cpu", "cuda") or not len(operands[0]):
        return False
    sizes = [stride * x.itemsize for x in operands for stride in x.stride() if stride != 1]
    return all(size % ALIGNMENT == 0 for size in sizes)


@cache
def row_step(shape: tuple[int, ...], dtype: torch.dtype, threads: int) -> int:
    """The smallest step whose multiples all give each row the same bits, by trying them with a weight [O, I] of this
    shape on the CPU; the largest step if none does. `threads`: torch's, which the choice of kernels depends on.
    """
    generator = torch.Generator().manual_seed(0)
    weight_EOI = torch.randn(1, *shape, generator=generator).to(dtype)
    x_MI = torch.randn(STEPS[-1], shape[1], generator=generator).to(dtype)

    def product(rows: int) -> Tensor:
        return _forward(x_MI[:rows].contiguous(), weight_EOI, torch.tensor([rows], dtype=torch.int32))

    whole_MO = product(len(x_MI))
    same = {rows for rows in range(STEPS[0], len(x_MI) + 1, STEPS[0]) if torch.equal(product(rows), whole_MO[:rows])}
    return next((n for n in STEPS if same.issuperset(range(n, len(x_MI) + 1, n))), STEPS[-1])
