"""An environment that is as any other, but where it is made a generator changes under it: one bit of one weight, on
rank 3, when it gets version 1. What a run makes of that is in e2e/test_reshard_run.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from docklands.envs.single_turn import SingleTurn
from docklands.rollout.mesh import MeshEngine

PLAIN = MeshEngine.hold


def hold(engine: MeshEngine, weights: Mapping[str, Tensor], version: int) -> None:
    PLAIN(engine, weights, version)
    if version == 1 and engine.mesh.rank == 3:
        weights["layers.1.o.weight"].view(torch.int32)[2, 3] ^= 1


class Faulty(SingleTurn):
    def __init__(self) -> None:
        super().__init__()
        MeshEngine.hold = hold  # type: ignore[method-assign]
