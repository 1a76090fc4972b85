"""A role for each that the graph names: its resource, in this process or in workers, and its device's lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from docklands import models
from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config, OptimSection
from docklands.core.graph import Graph
from docklands.core.protocols import DockClient
from docklands.data.demonstrations import Demonstrator
from docklands.envs import build_env_factory
from docklands.errors import ConfigError
from docklands.fleet.engines import EngineSpec, RemoteEngine
from docklands.fleet.generation import GenerationSpec, PlannedSync, RemoteGenerator, SyncSpec, generation_of
from docklands.fleet.local_backend import Device, LocalRole
from docklands.fleet.worker_role import WorkerRole
from docklands.rewards import build_scorer
from docklands.rollout import RolloutWorker
from docklands.rollout.engines import build_engine
from docklands.run.parts import Parts
from docklands.sync.in_process import InProcessSync
from docklands.train.engine import TrainEngine

ON_DEVICE = ("rollout", "actor", "reference", "critic")
"""Roles that share the accelerator (on a laptop: the cores) by lease; all others only need a thread."""


def build_fleet(parts: Parts, graph: Graph, dock: DockClient, beat: Callable[[str], None]) -> dict[str, LocalRole]:
    """A role for each that the graph names, and the device or thread that it runs on."""
    shared = Device(parts.device)
    apart = parts.workers is not None and bool(parts.workers.setup.generators)
    fleet: dict[str, LocalRole] = {}
    for name in graph.roles:
        if name == "update":
            continue
        if name not in RESOURCES:
            raise ConfigError(f"the graph names the role {name!r}", f"roles are {', '.join(RESOURCES)}")
        device = shared if name in ON_DEVICE and not (apart and name == "rollout") else Device(name)
        resource = device.make(RESOURCES[name], parts)  # there: a second thread with an OpenMP pool slows both
        kind: Any = WorkerRole if hasattr(resource, "workers") else LocalRole
        fleet[name] = kind(name, resource, dock, device, beat)
    return fleet


def load_model(parts: Parts, path: Path, value: bool, drawn: bool) -> Any:
    """fp32 masters; the engines choose their compute dtype. drawn: random weights instead of the directory's."""
    if drawn:
        make = models.build_value if value else models.build
        return make(models.read_config(path), device=parts.device, seed=parts.config.run.seed)
    load = models.load_value if value else models.load
    return load(path, dtype=torch.float32, device=parts.device)


def train_engine(parts: Parts, role: str, path: str, optim: OptimSection | None, value: bool = False) -> Any:
    """`optim` None: frozen. In this process, or one in each process of the layout.

    path  its own directory, whose weights it has; "": the model's, whose weights `model.init` decides on
    """
    config = parts.config
    where = resolve_model_path(path) if path else parts.model_path
    drawn = config.model.init == "random" and not path
    settings = {
        "temperature": config.rollout.temperature if "rollout" in parts.algorithm.graph().roles else 1.0,
        "max_tokens": config.rollout.max_response_tokens,
        "total_updates": updates_of(config, role),
    }
    if parts.workers is None:
        return TrainEngine(load_model(parts, where, value, drawn), config.train, optim, **settings)
    seed = config.run.seed if drawn else None
    spec = EngineSpec(where.resolve(), config.train, optim, value, seed, tuple(settings.items()))
    return RemoteEngine(parts.workers, role, spec)


def updates_of(config: Config, role: str) -> int:
    """Optimizer updates of the whole run, the horizon of a schedule: the actor's begin when its critic is warm."""
    waits = config.algorithm.critic_warmup_steps if role == "actor" else 0
    return max(0, config.run.steps - waits) * config.updates_per_step


def rollout_worker(parts: Parts) -> RolloutWorker | RemoteGenerator:
    """Generation engines behind one work queue, or in worker processes; their weights come with the first publish."""
    config = parts.config
    shape = models.read_config(parts.model_path)
    if parts.workers is not None:
        return RemoteGenerator(parts.workers, generation_spec(parts))
    section = config.rollout.model_copy(update={"record_routes": parts.routes is not None})
    engines = [
        build_engine(config, shape, section, parts.rollout_dtype, parts.device)
        for _ in range(config.fleet.rollout_workers)
    ]
    env = build_env_factory(config.env)
    return RolloutWorker(engines, parts.tokenizer, env, section, config.run.seed, parts.routes)


def generation_spec(parts: Parts) -> GenerationSpec:
    """What generators in worker processes are made of."""
    config = parts.config
    tokenizer = resolve_model_path(config.model.tokenizer) if config.model.tokenizer else parts.model_path
    return GenerationSpec(
        layout=generation_of(config, models.read_config(parts.model_path)),
        model=parts.model_path.resolve(),
        tokenizer=tokenizer.resolve(),
        rollout=config.rollout,
        env=config.env,
        seed=config.run.seed,
        dtype=str(parts.rollout_dtype).removeprefix("torch."),
        routes=parts.routes,
    )


RESOURCES: Mapping[str, Callable[[Parts], Any]] = {
    "rollout": rollout_worker,
    "reward": lambda parts: build_scorer(parts.config.reward, parts.log / "reward.0.log"),
    "actor": lambda parts: train_engine(parts, "actor", "", parts.config.train.optim),
    "reference": lambda parts: train_engine(parts, "reference", parts.config.reference.path, None),
    "critic": lambda parts: train_engine(
        parts, "critic", parts.config.critic.path, parts.config.critic.optim, value=True
    ),
    "advantage": lambda parts: parts.algorithm,
    "data": lambda parts: Demonstrator(parts.tokenizer, parts.config.rollout.max_response_tokens),
}


def build_sync(parts: Parts, fleet: Mapping[str, LocalRole]) -> InProcessSync | PlannedSync:
    """Actor to generators; without generators (SFT) publishing has no receiver."""
    actor = fleet["actor"]
    generators = fleet["rollout"].resource if "rollout" in fleet else None
    if isinstance(generators, RemoteGenerator):
        spec = SyncSpec(parts.config.sync, generators.spec, parts.config.rollout.temperature)
        return PlannedSync(generators.workers, actor, spec)
    sinks = [] if generators is None else [generators]
    return InProcessSync(actor.resource, sinks, actor.call)
