"""Weights on the wire in fp8: e4m3 with one scale for each block of 128 x 128, as DeepSeek-V3 keeps them (arXiv
2412.19437, section 3.3), dequantised into the generators' buffers.

Legend: X, Y blocks along rows and columns of a parameter.

Blocks are counted from the first row and column of the *whole* stored parameter (of each expert's), whatever the
layouts. A shard boundary may cut a block: its scale is then made from the whole block all the same. So the scales come
first: every trainer takes the largest magnitudes of what it holds, the maximum over all ranks makes the scales of all
blocks known everywhere (4 bytes for 16,384 elements), and from then on each element is rounded on its own. Any rank,
any executor and any layout gives the bits of quantising the whole tensor once, and what a generator hands on is
quantised again to the same bits.

    scale = largest magnitude / 448     q = e4m3(x / scale)     generators hold dtype(q * scale)

The error of an element is at most 1/28 of its block's largest magnitude (half the distance of neighbours at the top,
16 of 448), and 1/16 of its own where it is at least 2^-6 scales; the rounding to the dtype comes on top.

Quantised is what `ParamSpec.quantized` says: matrices of the layers, experts' too. Embeddings, the head, norms, biases
and the router travel in the generators' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from docklands.config.schema import Config
from docklands.errors import ConfigError, SyncError, reason_of
from docklands.obs.spans import span
from docklands.sync.boxes import Box
from docklands.sync.plan import BLOCK, Plan, grid_of
from docklands.sync.script import Script

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
NUMBERS = torch.arange(256, dtype=torch.uint8).view(FP8).float()
"""What each of the codes stands for."""
LEAST = torch.finfo(torch.float32).tiny


def check_transfer(config: Config) -> None:
    """ConfigError when `sync.transfer_dtype` is fp8 and nothing is sent, or the loss would not know.

    Generators are then another policy than the trainer by more than rounding: the loss has to weigh pi_old / mu, or
    take its ratios to mu itself.
    """
    if config.sync.transfer_dtype == "auto":
        return
    if not config.has_workers:
        raise ConfigError(
            "sync.transfer_dtype is fp8, but trainer and generator are one process: nothing is sent",
            "sync.transfer_dtype: auto, or worker processes: layout, or rollout.layout.dp=1",
        )
    section = config.algorithm
    if section.correction.mode == "off" and section.old_logprobs != "rollout":
        raise ConfigError(
            "sync.transfer_dtype is fp8: generators sample from quantised weights, and the loss takes no notice",
            "algorithm.correction.mode: token_tis, or algorithm.old_logprobs: rollout",
        )


class Quantizer:
    """Scales of one publish, and what they make of values. Every rank of the plan's group calls `measure` alike."""

    def __init__(self, plan: Plan, script: Script, device: str = "cpu", group: Any = None) -> None:
        self._script, self._device, self._group = script, device, group
        self.shapes = {spec.name: grid_of(spec) for spec in plan.table.stored() if spec.quantized}
        self.scales: dict[str, Tensor] = {}
        """Stored name -> fp32 [(experts,) X, Y]; empty before `measure` and after `forget`."""

    def __contains__(self, name: object) -> bool:
        """Whether the stored parameter is quantised."""
        return name in self.shapes

    @torch.no_grad()
    def measure(self, source: Mapping[str, Tensor]) -> None:
        """The scales of all blocks, on every rank. source: this trainer's tensors by local name, {} where none trains.

        SyncError on every rank for a weight that is not finite; and when another rank is lost.
        """
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        whole = torch.zeros(sum(sizes), device=self._device)
        largest = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, whole.split(sizes))}
        with span("reshard/scales", bytes=whole.nbytes):
            for name, held in self._script.source.items():
                for block in held.blocks if name in self else ():
                    _raise(largest[name], block.box, source[held.name][block.slices(block.box)])
            whole.nan_to_num_(nan=torch.inf, posinf=torch.inf)
            try:
                dist.all_reduce(whole, dist.ReduceOp.MAX, group=self._group)
            except RuntimeError as error:
                raise SyncError(
                    f"scales of the quantised transfer: a device is lost, or late ({reason_of(error)})", "its log says"
                ) from error
        if not bool(whole.isfinite().all()):
            name = next(name for name, part in largest.items() if not part.isfinite().all())
            raise SyncError(f"weight {name} is not finite: it cannot be quantised", "look at grad_norm of this step")
        whole.div_(LARGEST).clamp_min_(LEAST)
        self.scales = largest

    def forget(self) -> None:
        """The scales are of no more use: the weights change."""
        self.scales = {}

    def pack(self, name: str, box: Box, values: Tensor, into: Tensor) -> None:
        """Quantise `values`, which are `box` of a parameter, into fp8 of the same shape."""
        for rows, scale in self._strips(name, box):
            into[..., rows, :] = _quantized(values[..., rows, :], scale)

    def write(self, name: str, box: Box, values: Tensor, into: Tensor) -> None:
        """What generators hold of `box`: from fp8 as it came, or from the trainer's own values."""
        for rows, scale in self._strips(name, box):
            part = values[..., rows, :]
            into[..., rows, :] = _widened(part if part.dtype == FP8 else _quantized(part, scale)).mul_(scale)

    def _strips(self, name: str, box: Box) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the box in one row of blocks, the scale of each column [..., 1, columns])."""
        found = self.scales[name][tuple(slice(*edge) for edge in box[:-2])]
        low, high = box[-1]
        first = low // BLOCK
        columns = found[..., first : -(-high // BLOCK)].repeat_interleave(BLOCK, -1)
        columns = columns[..., low - first * BLOCK : high - first * BLOCK]
        for x, rows in _rows(box[-2]):
            yield rows, columns[..., x : x + 1, :]


def _rows(edge: tuple[int, int]) -> Iterator[tuple[int, slice]]:
    """(row of blocks, rows counted from the edge) of the rows between two edges."""
    low, high = edge
    for x in range(low // BLOCK, -(-high // BLOCK)):
        yield x, slice(max(low, x * BLOCK) - low, min(high, (x + 1) * BLOCK) - low)


def _raise(largest: Tensor, box: Box, values: Tensor) -> None:
    """Raise the largest magnitudes of the blocks that these values are in; NaN stays one."""
    low, high = box[-1]
    of_box = largest[tuple(slice(*edge) for edge in box[:-2])]
    for x, rows in _rows(box[-2]):
        least, most = torch.aminmax(values[..., rows, :].float(), dim=-2)
        columns = functional.pad(torch.maximum(-least, most), (low % BLOCK, -high % BLOCK))
        found = columns.unflatten(-1, (-1, BLOCK)).amax(-1)
        into = of_box[..., x, low // BLOCK : -(-high // BLOCK)]
        into.copy_(torch.maximum(into, found))


def _widened(codes: Tensor) -> Tensor:
    """In fp32. On a CPU by a table of all 256: torch's conversion takes four times as long."""
    if codes.device.type != "cpu":
        return codes.float()
    return NUMBERS.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


def _quantized(values: Tensor, scale: Tensor) -> Tensor:
    return (values.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8)
