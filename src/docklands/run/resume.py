"""Saving a whole run and continuing it, to the bit: engines, algorithm, data position, dock, RNG, version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from docklands.errors import CheckpointError
from docklands.train import checkpoint

if TYPE_CHECKING:
    from docklands.run.session import Run

ENGINES = ("actor", "critic")


async def save(run: Run) -> Path:
    """Write a complete checkpoint of the run as it stands between two steps; atomic.

    The flow (prompts, dock, algorithm) is read here, on the event loop, in one piece: nothing is admitted or handed out
    in between. Only the engines, which nothing changes between two steps, are read on their device's thread.
    """
    flow = {
        "step": run.step,
        "prompts": run.prompts.state_dict(),
        "dock": run.dock.state_dict(),
        "algorithm": run.algorithm.state_dict(),
        "rng": torch.get_rng_state(),
    }
    return await run.fleet["actor"].call("checkpoint", write, run, flow)


def write(run: Run, flow: dict[str, Any]) -> Path:
    """Engines and flow into a new checkpoint directory."""
    states = {name: run.fleet[name].resource.state_dict() for name in ENGINES if name in run.fleet}
    return checkpoint.save(run.run_dir.checkpoints, run.step, {**states, "flow": flow}, keep=run.config.checkpoint.keep)


def load_latest(run: Run) -> int:
    """Put the run back to its newest complete checkpoint; the step it stands at, 0 without one."""
    path = checkpoint.latest(run.run_dir.checkpoints)
    if path is None:
        return 0
    load(run, path)
    return run.step


def load(run: Run, path: Path) -> None:
    """Raises CheckpointError when a part is missing or does not fit this run."""
    for name in ENGINES:
        if name in run.fleet:
            run.fleet[name].resource.load_state_dict(checkpoint.load(path, name))
    flow = checkpoint.load(path, "flow")
    try:
        run.step = int(flow["step"])
        run.prompts.load_state_dict(flow["prompts"])
        run.dock.load_state_dict(flow["dock"])
        run.algorithm.load_state_dict(flow["algorithm"])
        torch.set_rng_state(flow["rng"])
    except KeyError as error:
        raise CheckpointError(
            f"{path}: the flow's state lacks {error}", "was it written by another version?"
        ) from error
