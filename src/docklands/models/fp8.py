"""Reading fp8 checkpoints quantised by blocks, as DeepSeek publishes V3 and R1 (arXiv 2412.19437, section 3.3).

Legend: O rows, I columns of a weight; X, Y blocks along them.

A weight is float8_e4m3 beside `<name>_scale_inv` in fp32 [X, Y], one number for each block of (usually) 128 x 128, that
the block is multiplied by. Blocks at the lower and right edges may be smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from docklands.errors import DataError

SCALE = "_scale_inv"
Block = tuple[int, int]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def block_of(config: Mapping[str, Any], where: str) -> Block | None:
    """The block size that a config.json says its weights are quantised by, None if they are not quantised.

    DataError for any other kind of quantisation: those weights cannot be trained.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if size is None or quantization.get("quant_method") != "fp8":
        raise DataError(
            f"{where}: quantised weights cannot be trained",
            "use the unquantised model; of the quantised ones only fp8 with a weight_block_size is read",
        )
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise DataError(f"{where}: weight_block_size is {size!r}, expected two positive integers")
    return size[0], size[1]


def dequantize(weight_OI: Tensor, scale_XY: Tensor, block: Block, name: str = "weight") -> Tensor:
    """Each block times its scale, in fp32. [O, I] DataError when weight, scale and block do not fit each other."""
    if weight_OI.dtype not in FP8 or weight_OI.dim() != 2:
        raise DataError(f"tensor {name} has a scale, but is {weight_OI.dtype} with shape {tuple(weight_OI.shape)}")
    rows, columns = weight_OI.shape
    expected = -(-rows // block[0]), -(-columns // block[1])
    if tuple(scale_XY.shape) != expected:
        raise DataError(
            f"tensor {name}{SCALE} has shape {tuple(scale_XY.shape)}, expected {expected}",
            f"the weight is {rows} x {columns}, its blocks {block[0]} x {block[1]}",
        )
    out_OI = weight_OI.float()
    scale_XI = scale_XY.float().repeat_interleave(block[1], 1)[:, :columns]
    for x in range(expected[0]):  # by strips of blocks: no second tensor of the weight's size
        out_OI[x * block[0] : (x + 1) * block[0]].mul_(scale_XI[x])
    return out_OI
