"""From a config to a run: tokenizer, algorithm, data, engines, dock, roles, recorders, in that order.

Whatever is wrong with the user's input is found here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from docklands import device as devices
from docklands import models
from docklands.algorithms import build_algorithm
from docklands.algorithms.base import Algorithm
from docklands.algorithms.stages import with_routes
from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config, OptimSection
from docklands.config.summary import arithmetic
from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.graph import Graph
from docklands.core.protocols import Dock as AnyDock
from docklands.core.protocols import DockClient, Sampling
from docklands.data.demonstrations import Demonstrator
from docklands.data.sources import Source
from docklands.data.stream import PromptStream, open_splits
from docklands.data.tokenizer import Tokenizer, load_tokenizer
from docklands.dock import Dock, DockOptions
from docklands.dock.hosted import HostedDock
from docklands.envs import build_env_factory
from docklands.errors import ConfigError
from docklands.fleet.local_backend import Device, LocalRole
from docklands.fleet.trainers import EngineSpec, Setup, Trainers
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import Sinks
from docklands.obs.watchdog import Watchdog
from docklands.parallel import Layout
from docklands.rewards import build_scorer
from docklands.rollout import NativeEngine, RolloutWorker
from docklands.rollout.capacity import check_lengths, check_vocabulary
from docklands.run.describe import SampleRecorder
from docklands.run.prompts import Prompts, group_of
from docklands.run.routes import check_router, routes_column
from docklands.run.session import Evaluation, Run
from docklands.sync.in_process import InProcessSync
from docklands.train.engine import TrainEngine

ON_DEVICE = ("rollout", "actor", "reference", "critic")
"""Roles that share the accelerator (on a laptop: the cores) by lease; all others only need a thread."""


@dataclass(frozen=True)
class Parts:
    """What roles are made from."""

    config: Config
    tokenizer: Tokenizer
    algorithm: Algorithm
    device: str
    model_path: Path
    log: Path
    trainers: Trainers | None = None
    routes: Field[Any] | None = None

    def graph(self) -> Graph:
        """The algorithm's, with the column of router choices when those are recorded."""
        plain = self.algorithm.graph()
        if self.routes is None:
            return plain
        return with_routes(plain, self.routes, replay=self.config.train.replay_routes)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the trainers."""
        return getattr(torch, self.config.train.dtype)

    @property
    def rollout_dtype(self) -> torch.dtype:
        name = self.config.rollout.dtype
        return self.dtype if name == "auto" else getattr(torch, name)


def build_parts(config: Config, log: Path) -> Parts:
    """Check the config against model, tokenizer and algorithm. Raises ConfigError and its kind."""
    devices.keep_freed_memory()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    if not config.model.path:
        raise ConfigError("model.path is empty", "the path of a Hugging Face directory, or cache:NAME")
    algorithm = build_algorithm(config)
    path = resolve_model_path(config.model.path)
    tokenizer = load_tokenizer(resolve_model_path(config.model.tokenizer) if config.model.tokenizer else path)
    where = str(devices.choose(config.run.device))
    shape = models.read_config(path)
    check_vocabulary(tokenizer.vocab_size, shape)
    if "rollout" in algorithm.graph().roles:
        check_lengths(config.rollout, config.data.max_prompt_tokens, shape)
    check_router(config, shape)
    routes = routes_column(config, shape)
    return Parts(config, tokenizer, algorithm, where, path, log, build_trainers(config, path, where, log), routes)


def build(config: Config, run_dir: RunDir, sinks: Sinks, show: Callable[[str], None] = lambda _: None) -> Run:
    """A run that stands ready at step 0. Call inside an event loop.

    show  told the name of each stage as it begins and ends
    """
    parts = build_parts(config, run_dir.log)
    graph = parts.graph()
    source, held_out = open_splits(config.data, config.eval, config.run.seed)
    stream = PromptStream(source, parts.tokenizer, config.data, config.run.seed)
    stream.check()
    dock = build_dock(config, graph, run_dir.path / "dock")
    recorder = SampleRecorder(config.obs.samples_per_step)
    watchdog = Watchdog(config.run.watchdog_s, dock.describe, run_dir.watchdog)

    def beat(stage: str) -> None:
        watchdog.beat(stage)
        show(stage)

    fleet = build_fleet(parts, graph, dock, beat)
    return Run(
        config=config,
        algorithm=parts.algorithm,
        graph=graph,
        dock=dock,
        fleet=fleet,
        weights=build_sync(fleet),
        prompts=Prompts(stream, config.rollout.samples_per_prompt),
        run_dir=run_dir,
        sinks=sinks,
        watchdog=watchdog,
        evaluation=build_evaluation(parts, held_out) if "rollout" in fleet else None,
        recorder=recorder,
    )


def build_dock(config: Config, graph: Graph, folder: Path) -> AnyDock:
    """In this process, or in processes that `open` starts and whose files lie in `folder`."""
    options = dock_options(config)
    if config.dock.transport == "processes":
        return HostedDock(graph, options, folder, config.dock.durability)
    if config.dock.durability != "none":
        raise ConfigError(
            f"dock.durability is {config.dock.durability}, but the dock lives and dies with the driver",
            "set dock.transport=processes",
        )
    return Dock(graph, options)


def dock_options(config: Config) -> DockOptions:
    return DockOptions(
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.samples_per_prompt,
        max_staleness=config.dock.max_staleness,
        warehouses=config.dock.warehouses,
        capacity_bytes=config.dock.capacity_mib * 2**20,
        groups_per_take=config.dock.groups_per_take,
        deterministic=config.dock.deterministic,
        overtake=config.dock.overtake,
        lease_s=config.dock.lease_s,
        wait_s=config.dock.wait_s,
        max_dropped_groups_per_step=config.algorithm.max_dropped_groups,
        total_groups=config.run.steps * config.rollout.prompts_per_step,
    )


def build_fleet(parts: Parts, graph: Graph, dock: DockClient, beat: Callable[[str], None]) -> dict[str, LocalRole]:
    """A role for each that the graph names, and the device or thread that it runs on."""
    shared = Device(parts.device)
    fleet: dict[str, LocalRole] = {}
    for name in graph.roles:
        if name == "update":
            continue
        if name not in RESOURCES:
            raise ConfigError(f"the graph names the role {name!r}", f"roles are {', '.join(RESOURCES)}")
        device = shared if name in ON_DEVICE else Device(name)
        resource = device.make(RESOURCES[name], parts)  # there: a second thread with an OpenMP pool slows both
        fleet[name] = LocalRole(name, resource, dock, device, beat)
    return fleet


def load_model(parts: Parts, path: Path, value: bool = False) -> Any:
    """fp32 masters; the engines choose their compute dtype."""
    if parts.config.model.init == "random":
        make = models.build_value if value else models.build
        return make(models.read_config(path), device=parts.device, seed=parts.config.run.seed)
    load = models.load_value if value else models.load
    return load(path, dtype=torch.float32, device=parts.device)


def train_engine(parts: Parts, role: str, path: str, optim: OptimSection | None, value: bool = False) -> Any:
    """`optim` None: frozen. In this process, or one in each process of the layout."""
    config = parts.config
    where = resolve_model_path(path) if path else parts.model_path
    settings = {
        "temperature": config.rollout.temperature if "rollout" in parts.algorithm.graph().roles else 1.0,
        "max_tokens": config.rollout.max_response_tokens,
        "total_updates": updates_of(config, role),
    }
    if parts.trainers is None:
        return TrainEngine(load_model(parts, where, value), config.train, optim, **settings)
    seed = config.run.seed if config.model.init == "random" else None
    spec = EngineSpec(where, config.train, optim, value, seed, tuple(settings.items()))
    return parts.trainers.engine(role, spec)


def updates_of(config: Config, role: str) -> int:
    """Optimizer updates of the whole run, the horizon of a schedule: the actor's begin when its critic is warm."""
    waits = config.algorithm.critic_warmup_steps if role == "actor" else 0
    return max(0, config.run.steps - waits) * config.updates_per_step


def build_trainers(config: Config, path: Path, device: str, log: Path) -> Trainers | None:
    """Processes of the layout; None when it is one process. LayoutError, before any starts, when it does not fit."""
    layout = Layout(**config.layout.model_dump())
    layout.check_model(models.read_config(path))
    if layout.world_size == 1:
        return None
    threads = max(1, (config.run.threads or torch.get_num_threads()) // layout.world_size)
    return Trainers(Setup(layout, device.split(":")[0], threads, config.dock.wait_s, log))


def rollout_worker(parts: Parts) -> RolloutWorker:
    """Generation engines behind one work queue; they get their weights from the first publish."""
    config = parts.config
    shape = models.read_config(parts.model_path)
    section = config.rollout.model_copy(update={"record_routes": parts.routes is not None})
    engines = [
        NativeEngine(shape, section, dtype=parts.rollout_dtype, device=parts.device)
        for _ in range(config.fleet.rollout_workers)
    ]
    env = build_env_factory(config.env)
    return RolloutWorker(engines, parts.tokenizer, env, section, config.run.seed, parts.routes)


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


def build_sync(fleet: Mapping[str, LocalRole]) -> InProcessSync:
    """Actor to generators; without generators (SFT) publishing has no receiver."""
    actor = fleet["actor"]
    sinks = [fleet["rollout"].resource] if "rollout" in fleet else []
    return InProcessSync(actor.resource, sinks, actor.call)


def eval_sampling(config: Config) -> Sampling:
    """Without stop ids: a rollout worker then stops where training samples stop."""
    return Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
    )


def build_evaluation(parts: Parts, held_out: Source | None) -> Evaluation | None:
    """Held-out prompts as rows that never enter the dock."""
    if held_out is None:
        return None
    config = parts.config
    data = config.data.model_copy(update={"shuffle": False, "epochs": 1})
    prompts = PromptStream(held_out, parts.tokenizer, data, config.run.seed).take(config.eval.prompts)
    groups = [group_of(prompt, i, config.eval.samples_per_prompt) for i, prompt in enumerate(prompts)]
    name = (config.eval.source or config.data.source).rsplit(":", 1)[-1].rsplit("/", 1)[-1]
    return Evaluation(name, Batch.concat(groups), eval_sampling(config))


def headline(config: Config, graph: Graph) -> str:
    """What will be done, in numbers (pitfall 36)."""
    shape = models.read_config(resolve_model_path(config.model.path))
    return (
        f"{config.algorithm.name} · {shape.num_params / 1e6:.1f} M parameters · {config.run.steps} steps of "
        f"{arithmetic(config)}\n"
        f"{' -> '.join(stage.name for stage in graph.stages)}"
    )
