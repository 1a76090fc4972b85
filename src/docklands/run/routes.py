"""Whether router choices are recorded and replayed, from config and model; what contradicts itself is refused."""

from __future__ import annotations

from typing import Any

from docklands.algorithms.stages import with_routes
from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config
from docklands.core.fields import Field, routes_field
from docklands.core.graph import Graph
from docklands.errors import ConfigError, DataError
from docklands.models import ModelConfig, read_config


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


def as_run(config: Config, graph: Graph) -> Graph:
    """An algorithm's graph as a run of this config has it; without the model's directory, as the algorithm has it."""
    try:
        shape = read_config(resolve_model_path(config.model.path))
    except DataError:
        return graph
    column = routes_column(config, shape)
    return graph if column is None else with_routes(graph, column, replay=config.train.replay_routes)


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
