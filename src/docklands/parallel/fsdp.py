"""Sharded parameters, gradients and optimizer state: torch's FSDP2 around our modules, in SUM mode.

One global denominator stands in the loss, so gradients of ranks are summed, never averaged (dividing first and
multiplying later would also round twice, and gloo has no pre-multiplied sum).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

Params = Iterable[nn.Parameter]


def shard_module(
    module: nn.Module, group: DeviceMesh, dtype: torch.dtype, *, inner: bool = True, dim: int = 0, apart: Params = ()
) -> None:
    """Shard the parameters of `module` that no inner module has sharded yet. Its forward gathers them in `dtype`.

    group  see Group.device_mesh
    inner  free the gathered ones after forward, and gather them again for backward (ZeRO-3); the outermost keeps them
    dim    dimension that is sharded where it divides; elsewhere dim 0, unevenly
    apart  parameters to leave as they are (experts of which every rank has other ones)

    Parameters that no gradient trains stay whole too, and in their own dtype.
    """
    ranks, left = group.size(), set(apart)
    wrapped = fully_shard(
        module,
        mesh=group,
        reshard_after_forward=inner,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        ignored_params=left | {p for p in module.parameters() if not p.requires_grad},
        shard_placement_fn=lambda p: Shard(dim) if dim < p.dim() and p.shape[dim] % ranks == 0 else Shard(0),
    )
    wrapped.set_gradient_divide_factor(1.0)
    wrapped.set_force_sum_reduction_for_comms(True)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free what a forward pass without a backward left gathered: it would be stale after an update."""
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a (possibly sharded) tensor; shares its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor before FSDP sharded it. Call on every rank of the group."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def window(tensor: Tensor) -> tuple[int, int, int] | None:
    """(dimension, first index, last + 1) that this rank holds; None: all of it."""
    if not isinstance(tensor, DTensor):
        return None
    (placement,) = tensor.placements
    assert isinstance(placement, Shard)
    size, ranks = tensor.shape[placement.dim], tensor.device_mesh.size()
    each = -(-size // ranks)  # torch.chunk: the last ranks may hold less, or nothing
    first = min(size, each * tensor.device_mesh.get_local_rank())
    return placement.dim, first, min(size, first + each)


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A local tensor (a gradient, a moment) in the sharding of its parameter, so that `whole` can gather it."""
    if not isinstance(parameter, DTensor) or isinstance(shard, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())
