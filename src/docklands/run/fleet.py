"""A role for each that the graph names: its resource, in this process or in workers, and its device's lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from docklands import models
from docklands.config.lora import LoraSection
from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config, OptimSection
from docklands.core.graph import Graph
from docklands.core.protocols import DockClient
from docklands.data.demonstrations import Demonstrator
from docklands.dock.distributed import DistributedDock
from docklands.envs import build_env_factory
from docklands.errors import ConfigError
from docklands.fleet.engines import EngineSpec, RemoteEngine
from docklands.fleet.generation import (
    GenerationSpec,
    PlannedSync,
    RemoteGenerator,
    SyncSpec,
    generation_of,
    replica_of,
)
from docklands.fleet.local_backend import Device, LocalRole
from docklands.fleet.publishing import PartySync
from docklands.fleet.replica_role import ReplicaRole
from docklands.fleet.replicas import WISHES, Replicas
from docklands.fleet.supervise import Restarts
from docklands.fleet.warehouses import WorkersOf
from docklands.fleet.worker_role import WorkerRole
from docklands.fleet.workers import Workers
from docklands.models.adapters import with_lora
from docklands.rewards import build_scorer
from docklands.rollout import RolloutWorker
from docklands.rollout.engines import build_engine
from docklands.rollout.keeping import KeepingWorker
from docklands.run.parts import Parts, build_carrier
from docklands.sync.in_process import InProcessSync
from docklands.train.engine import TrainEngine
from docklands.train.lora import BasePolicy

Kind = Literal["plain", "adapted", "value"]

ON_DEVICE = ("rollout", "actor", "reference", "critic")
"""Roles that share the accelerator (on a laptop: the cores) by lease; all others only need a thread."""


def build_fleet(parts: Parts, graph: Graph, dock: DockClient, beat: Callable[[str], None]) -> dict[str, LocalRole]:
    """A role for each that the graph names, and the device or thread that it runs on. What fails leaves nothing."""
    shared = Device(parts.device)
    fleet: dict[str, LocalRole] = {}
    alike = shares_base(parts.config)
    try:
        for name in sorted(graph.roles, key=lambda name: alike and name == "reference"):  # after the actor that it is
            if name == "update":
                continue
            if name not in RESOURCES:
                raise ConfigError(f"the graph names the role {name!r}", f"roles are {', '.join(RESOURCES)}")
            device = shared if name in ON_DEVICE and not (parts.apart and name == "rollout") else Device(name)
            if name == "reference" and alike:
                resource = device.make(base_of, fleet["actor"].resource)
            else:
                resource = device.make(RESOURCES[name], parts)  # there: a second thread with an OpenMP pool slows both
            fleet[name] = role_of(name, resource, dock, device, beat)
            if isinstance(resource, Replicas):
                resource.wishes = parts.log.parent / WISHES
    except BaseException:
        close(fleet)
        raise
    return fleet


def role_of(name: str, resource: Any, dock: DockClient, device: Device, beat: Callable[[str], None]) -> LocalRole:
    """The handle that fits where a resource lives."""
    if isinstance(resource, Replicas):
        assert isinstance(dock, DistributedDock)
        return ReplicaRole(resource, dock, device, beat)
    kind: Any = WorkerRole if hasattr(resource, "workers") else LocalRole
    return kind(name, resource, dock, device, beat)


def close(fleet: Mapping[str, LocalRole]) -> None:
    """End the processes of resources."""
    for role in fleet.values():
        end = getattr(role.resource, "close", None)
        if callable(end):
            end()


def shares_base(config: Config) -> bool:
    """The reference is the actor's own base: no second copy of it is made."""
    return bool(config.lora.rank) and not config.reference.path


def base_of(actor: TrainEngine | RemoteEngine) -> Any:
    """The reference policy that an actor with adapters holds already."""
    return BasePolicy(actor) if isinstance(actor, TrainEngine) else RemoteEngine(actor.workers, "reference", None)


def load_model(parts: Parts, path: Path, kind: Kind, drawn: bool) -> Any:
    """fp32 masters; the engines choose their compute dtype. drawn: random weights instead of the directory's."""
    config, seed = models.read_config(path), parts.config.run.seed
    if kind == "adapted":
        config = with_lora(config, parts.config.lora)
    if drawn:
        make = models.build_value if kind == "value" else models.build
        return make(config, device=parts.device, seed=seed)
    if kind == "value":
        return models.load_value(path, dtype=torch.float32, device=parts.device)
    return models.load(path, dtype=torch.float32, device=parts.device, config=config, seed=seed)


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
    kind: Kind = "value" if value else "adapted" if role == "actor" and config.lora.rank else "plain"
    if parts.workers is None:
        return TrainEngine(load_model(parts, where, kind, drawn), config.train, optim, **settings)
    seed = config.run.seed if drawn else None
    adapters = (config.lora, config.run.seed) if kind == "adapted" else None
    swapped = config.sync.swap != "none"
    spec = EngineSpec(where.resolve(), config.train, optim, value, seed, tuple(settings.items()), adapters, swapped)
    return RemoteEngine(parts.workers, role, spec)


def updates_of(config: Config, role: str) -> int:
    """Optimizer updates of the whole run, the horizon of a schedule: the actor's begin when its critic is warm."""
    waits = config.algorithm.critic_warmup_steps if role == "actor" else 0
    return max(0, config.run.steps - waits) * config.updates_per_step


def rollout_worker(parts: Parts) -> RolloutWorker | RemoteGenerator | Replicas:
    """Generation engines behind one work queue, or in worker processes; their weights come with the first publish."""
    config = parts.config
    shape = models.read_config(parts.model_path)
    if applied(config) is not None:
        shape = with_lora(shape, config.lora)
    if parts.workers is not None:
        return replicas(parts) if parts.apart else RemoteGenerator(parts.workers, generation_spec(parts))
    section = config.rollout.model_copy(update={"record_routes": parts.routes is not None})
    engines = [
        build_engine(config, shape, section, parts.rollout_dtype, parts.device)
        for _ in range(config.fleet.rollout_workers)
    ]
    env = build_env_factory(config.env)
    made = engines, parts.tokenizer, env, section, config.run.seed, parts.routes
    if section.partial_kv == "keep":
        sizes = {"longest_prompt": config.data.max_prompt_tokens, "vocabulary": shape.vocab_size}
        return KeepingWorker(*made, **sizes)
    return RolloutWorker(*made)


def replicas(parts: Parts) -> Replicas:
    """Generators in processes of their own: numbered after the trainers."""
    config, workers = parts.config, parts.workers
    assert workers is not None
    spec = generation_spec(parts)
    one, count = replica_of(spec.layout)
    spec = replace(spec, layout=one, longest_prompt=config.data.max_prompt_tokens)
    sync = SyncSpec(config.sync, spec, config.rollout.temperature, workers.setup.layout)
    trainers = workers.setup.world_size
    every = trainers + one.world_size * count

    def make(first: int, on_hang: Callable[[], None]) -> Workers:
        setup = replace(workers.setup, layout=one, first=trainers + first)
        return Workers(setup, build_carrier(config, every), on_hang)

    made = Replicas(make, (spec, sync), count, Restarts(config.fleet.max_restarts))
    made.drains = config.fleet.publish == "drain"
    return made


def applied(config: Config) -> LoraSection | None:
    """The adapters that generators apply themselves; None: there are none, or they are merged."""
    return config.lora if config.lora.rank and config.lora.publish == "adapter" else None


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
        lora=applied(config),
        longest=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )


def workers_of(parts: Parts, fleet: Mapping[str, LocalRole]) -> WorkersOf:
    """Where the worker processes are, once they have been started, and the generators among them."""
    generators = fleet["rollout"].resource if "rollout" in fleet else None

    def leaders() -> list[str]:
        """Of the generators, in the order in which they get groups (generation.GenerationShard._mine)."""
        if isinstance(generators, Replicas):
            return [replica.workers.lines[0].address for replica in generators.standing()]
        if isinstance(generators, RemoteGenerator):
            layout, lines = generators.spec.layout, generators.workers.lines
            return [lines[layout.rank_of(dp=index)].address for index in range(layout.dp)]
        return []

    return WorkersOf(leaders, [line.address for line in parts.workers.lines] if parts.workers else [])


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


def build_sync(parts: Parts, fleet: Mapping[str, LocalRole]) -> InProcessSync | PlannedSync | PartySync:
    """Actor to generators; without generators (SFT) publishing has no receiver."""
    actor = fleet["actor"]
    generators = fleet["rollout"].resource if "rollout" in fleet else None
    if isinstance(generators, Replicas):
        return PartySync(generators, actor, generators.specs[1])
    if isinstance(generators, RemoteGenerator):
        spec = SyncSpec(parts.config.sync, generators.spec, parts.config.rollout.temperature)
        return PlannedSync(generators.workers, actor, spec)
    sinks = [] if generators is None else [generators]
    lora = parts.config.lora
    note = actor.note if lora.rank and sinks else None
    return InProcessSync(actor.resource, sinks, actor.call, applied(parts.config) is not None, note)
