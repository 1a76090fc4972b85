"""Whether router choices are recorded and replayed, from config and model; what contradicts itself is refused."""

from __future__ import annotations

from typing import Any

from docklands.config.schema import Config
from docklands.core.fields import Field, routes_field
from docklands.errors import ConfigError
from docklands.models import ModelConfig


def routes_column(config: Config, shape: ModelConfig) -> Field[Any] | None:
    """The column of router choices that rollout writes; None: they are not recorded. ConfigError."""
    record, replay = config.rollout.record_routes, config.train.replay_routes
    if shape.routed is None:
        if record:
            raise ConfigError(
                "rollout.record_routes is true, but the model has no layer with experts", "remove rollout.record_routes"
            )
        return None
    if record is False and replay:
        raise ConfigError(
            "train.replay_routes is true, but rollout.record_routes is false: there is nothing to replay",
            "set train.replay_routes to false too, or remove rollout.record_routes",
        )
    return routes_field(*shape.routed) if record or replay else None


def check_router(config: Config, shape: ModelConfig) -> None:
    """ConfigError for a balance that the model's routers cannot have."""
    router = config.train.router
    for key in ("aux_loss_coef", "bias_update_rate"):
        if getattr(router, key) and shape.routed is None:
            raise ConfigError(
                f"train.router.{key} is set, but the model has no layer with experts", f"remove train.router.{key}"
            )
    if router.bias_update_rate and shape.moe is not None and not shape.moe.biased:
        raise ConfigError(
            "train.router.bias_update_rate is set, but this model's routers have no bias",
            "use train.router.aux_loss_coef (0.001 is usual)",
        )
