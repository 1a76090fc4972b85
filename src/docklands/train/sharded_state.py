"""The state of a sharded engine as one process knows it: whole tensors by name, whatever the layout."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from docklands.errors import CheckpointError
from docklands.parallel import fsdp
from docklands.train.optim import check_named

if TYPE_CHECKING:
    from docklands.train.sharded import ShardedEngine

log = logging.getLogger("docklands.train")

MOMENTS = ("exp_avg", "exp_avg_sq")


def collect(engine: ShardedEngine) -> dict[str, Any]:
    """What TrainEngine.state_dict gives, whole tensors on the CPU of rank 0; on other ranks their dicts are empty.

    Every rank calls it. For models that one process can hold.
    """
    state: dict[str, Any] = {"version": engine.version, "model": _whole(engine, engine.masters())}
    if engine.optimizer:
        state["optimizer"] = engine.optimizer.counts()
        for slot, key in enumerate(MOMENTS):
            state["optimizer"][key] = _whole(engine, {n: pair[slot] for n, pair in engine.optimizer.moments.items()})
    return state


def _whole(engine: ShardedEngine, shards: dict[str, Tensor]) -> dict[str, Tensor]:
    parameters = engine.sharded.parameters()
    kept = {}
    local = {name: fsdp.like(parameters[name].data, shard) for name, shard in shards.items()}
    for name, tensor in engine.sharded.whole(local):  # every rank takes part in gathering each
        if engine.mesh.rank == 0:
            kept[name] = tensor.cpu().clone()
    return kept


def take(engine: ShardedEngine, state: dict[str, Any]) -> None:
    """This rank's slices of a whole state. Nothing is changed when a part is missing or of another model."""
    shapes = {spec.name: torch.empty(spec.shape, device="meta") for spec in engine.sharded.table.stored()}
    check_named(state.get("model"), shapes, "weights")
    targets = [(engine.masters(), state["model"])]
    optimizer = engine.optimizer
    if optimizer is not None:
        saved = state.get("optimizer")
        if not isinstance(saved, dict) or "updates" not in saved:
            raise CheckpointError("the checkpoint has no optimizer state", "it cannot be resumed from")
        for slot, key in enumerate(MOMENTS):
            check_named(saved.get(key), shapes, f"optimizer {key}")
            targets.append(({name: pair[slot] for name, pair in optimizer.moments.items()}, saved[key]))
        engine.notes = optimizer.load_counts(saved)
    for shards, whole in targets:
        engine.sharded.scatter(shards, whole)
    if optimizer is not None:
        optimizer.round_copies()
        optimizer.clear()
    engine.version = int(state.get("version", 0))
    for note in engine.notes:
        log.warning("resumed with a changed setting: optim.%s", note)
