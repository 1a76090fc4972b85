"""A run in a line each: its batch arithmetic, with the units in words; and what was set but does nothing in it."""

from __future__ import annotations

from docklands.config.schema import Config
from docklands.config.section import Section


def arithmetic(config: Config) -> str:
    """ "16 prompts x 8 = 128 samples -> 2 updates x 64" """
    rollout, algorithm = config.rollout, config.algorithm
    updates = config.updates_per_step
    passes = f" in {algorithm.epochs_per_step} passes" if algorithm.epochs_per_step > 1 else ""
    return (
        f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} = {config.samples_per_step} samples -> "
        f"{updates} update{'s' if updates > 1 else ''} x {config.samples_per_update}{passes}"
    )


def without_effect(config: Config, generates: bool = True) -> str:
    """One line that names what was set but nothing reads in a run like this; "" without any.

    generates  whether the algorithm samples at all
    """
    published = config.has_workers and generates
    idle = [] if published else [f"sync.{name}" for name in _set(config.sync)]
    if published and not config.sync.probe_every and config.rollout.engine == "native":
        idle += [f"sync.{name}" for name in _set(config.sync) if name == "probe_tolerance"]
    if not config.has_workers and config.dock.transport != "processes":
        idle += [f"fleet.{name}" for name in _set(config.fleet) if name == "max_restarts"]
    if config.fleet.backend != "ray":
        idle += [f"fleet.{name}" for name in _set(config.fleet) if name.startswith("ray_")]
    layout = config.layout
    idle += ["layout.context"] if layout.context == "ring" and layout.cp == 1 else []
    idle += ["layout.sp"] if not layout.sp and layout.tp == 1 else []
    if not idle:
        return ""
    where = "with these workers" if config.has_workers else "in one process"
    return f"set, but without effect {where}: {', '.join(idle)}"


def _set(section: Section) -> list[str]:
    """Keys that are not at their defaults."""
    plain = type(section)()
    return [name for name in type(section).model_fields if getattr(section, name) != getattr(plain, name)]
