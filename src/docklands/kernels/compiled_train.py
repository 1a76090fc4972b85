"""Backward passes of norms and SwiGLU on CPU through loops compiled by numba: each tensor is passed over once.

Composed of torch's operations, a norm's backward reads and writes its input some fifteen times and takes four to seven
times as long, SwiGLU's twice. (Forward passes are as fast in torch.) Where numba is missing, `available()` is false and
reference.py composes them.

Legend: R rows (all leading dimensions together), D size of a row, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.kernels.compiled_decode import workers

PARALLEL_FROM = 1 << 18
"""Numbers of a call from which its rows are worth dividing over threads."""


@cache
def _rows() -> Any:
    """The compiled functions, or None without numba."""
    try:
        from docklands.kernels import compiled_rows
    except ImportError:
        return None
    return compiled_rows


def available(x: Tensor) -> bool:
    """Whether these functions take tensors of this kind, here."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and _rows() is not None


def rms_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """-> (gradient of x, gradient of the weight in fp32 [D])."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    weight, scale_R = _copy(weight_D.to(x.dtype)), scale.reshape(-1).numpy()
    grad_RD, x_RD, grad_x_RD = _flat(grad), _flat(x), _flat(grad_x)
    sums: dict[int, np.ndarray] = {}

    def some(part: slice) -> None:
        total = sums[part.start] = np.zeros(x_RD.shape[1], np.float32)
        inputs = grad_RD[part], x_RD[part], weight
        _rows().rms_norm_backward(inputs, scale_R[part], grad_x_RD[part], total)

    _in_parts(some, x_RD)
    return grad_x, torch.from_numpy(np.sum([sums[start] for start in sorted(sums)], axis=0, dtype=np.float32))


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of the output [*, F] -> of gate and up [*, 2F]."""
    out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    grad_RF, gate_up_RF, out_RF = _flat(grad), _flat(gate_up), _flat(out)
    _in_parts(lambda part: _rows().swiglu_backward(grad_RF[part], gate_up_RF[part], out_RF[part]), gate_up_RF)
    return out


def _in_parts(run: Callable[[slice], None], rows: np.ndarray) -> None:
    """run(slice of the rows) for all of them, divided over torch's threads."""
    threads = torch.get_num_threads()
    if threads == 1 or rows.size < PARALLEL_FROM:
        run(slice(0, len(rows)))
        return
    edges = np.linspace(0, len(rows), threads + 1).astype(int).tolist()
    rest = [workers(threads - 1).submit(run, slice(a, b)) for a, b in zip(edges[1:-1], edges[2:])]
    run(slice(edges[0], edges[1]))
    for future in rest:
        future.result(timeout=600)


def _flat(tensor: Tensor) -> np.ndarray:
    """[R, D], the tensor's memory where it has no gaps; bf16 as its bits."""
    tensor = tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _copy(weight_D: Tensor) -> np.ndarray:
    """A parameter's numbers in memory of their own: torch never again resizes a storage that numpy has seen."""
    return _flat(weight_D.detach().clone()[None])[0]
