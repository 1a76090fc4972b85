"""The batch arithmetic of a run in one line, with the units in words."""

from __future__ import annotations

from docklands.config.schema import Config


def arithmetic(config: Config) -> str:
    """ "16 prompts x 8 = 128 samples -> 2 updates x 64" """
    rollout, algorithm = config.rollout, config.algorithm
    updates = config.updates_per_step
    passes = f" in {algorithm.epochs_per_step} passes" if algorithm.epochs_per_step > 1 else ""
    return (
        f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} = {config.samples_per_step} samples -> "
        f"{updates} update{'s' if updates > 1 else ''} x {config.samples_per_update}{passes}"
    )
