"""From a config to a run: tokenizer, algorithm, data, engines, dock, roles, recorders, in that order.

Whatever is wrong with the user's input is found here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docklands import models
from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config
from docklands.config.summary import arithmetic
from docklands.core.batch import Batch
from docklands.core.graph import Graph
from docklands.core.protocols import Dock as AnyDock
from docklands.core.protocols import Sampling
from docklands.data.sources import Source
from docklands.data.stream import PromptStream, open_splits
from docklands.dock import Dock, DockOptions
from docklands.dock.hosted import HostedDock
from docklands.errors import ConfigError
from docklands.fleet.local_backend import LocalRole
from docklands.fleet.replicas import Replicas
from docklands.fleet.saving import RemoteCheckpoint
from docklands.fleet.warehouses import spread
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import Sinks
from docklands.obs.watchdog import Watchdog
from docklands.run.describe import SampleRecorder
from docklands.run.fleet import build_fleet, build_sync, close, workers_of
from docklands.run.parts import Parts, build_parts
from docklands.run.prompts import Prompts, groups_of
from docklands.run.session import Evaluation, Run


def build(config: Config, run_dir: RunDir, sinks: Sinks, show: Callable[[str], None] = lambda _: None) -> Run:
    """A run that stands ready at step 0. Call inside an event loop.

    show  told the name of each stage as it begins and ends
    """
    parts = build_parts(config, run_dir)
    graph = parts.graph()
    source, held_out = open_splits(config.data, config.eval, config.run.seed)
    stream = PromptStream(source, parts.tokenizer, config.data, config.run.seed)
    stream.check()
    dock = build_dock(config, graph, run_dir.path / "dock")
    decode = parts.tokenizer.decode
    recorder = SampleRecorder(config.obs.samples_per_step, config.obs.tokens_per_sample, lambda i: decode([i], False))
    fleet: dict[str, LocalRole] = {}
    watchdog = Watchdog(config.run.watchdog_s, lambda: state_text(dock, parts, fleet), run_dir.watchdog)

    def beat(stage: str) -> None:
        watchdog.beat(stage)
        show(stage)

    try:
        fleet |= build_fleet(parts, graph, dock, beat)
        if parts.workers is not None and isinstance(dock, HostedDock):
            spread(dock, parts.workers.carrier, workers_of(parts, fleet), config.dock.warehouses)
        return Run(
            config=config,
            algorithm=parts.algorithm,
            graph=graph,
            dock=dock,
            fleet=fleet,
            weights=build_sync(parts, fleet),
            prompts=Prompts(stream, config.rollout.samples_per_prompt),
            run_dir=run_dir,
            sinks=sinks,
            watchdog=watchdog,
            saver=None if parts.workers is None else RemoteCheckpoint(parts.workers),
            evaluation=build_evaluation(parts, held_out) if "rollout" in fleet else None,
            recorder=recorder,
        )
    except BaseException:
        close(fleet)
        if parts.workers is not None:
            parts.workers.close()
        raise


def state_text(dock: AnyDock, parts: Parts, fleet: Mapping[str, LocalRole]) -> str:
    """For a stuck run: what the dock holds; workers write their stacks into their logs."""
    workers = f"\n\n{parts.workers.describe()}" if parts.workers else ""
    apart = [role.resource.describe() for role in fleet.values() if isinstance(role.resource, Replicas)]
    return "\n".join([dock.describe() + workers, *apart])


def build_dock(config: Config, graph: Graph, folder: Path) -> AnyDock:
    """In this process, or in processes that `open` starts and whose files lie in `folder`."""
    options = dock_options(config)
    if config.dock.transport == "processes" or config.has_workers:
        return HostedDock(graph, options, folder, config.dock.durability)
    keys = {"durability": "none", "fsync": "never", "spill_mib": 0}
    for key in [key for key, default in keys.items() if getattr(config.dock, key) != default]:
        raise ConfigError(
            f"dock.{key} is {getattr(config.dock, key)}, but the dock lives and dies with the driver",
            "set dock.transport=processes",
        )
    return Dock(graph, options)


def dock_options(config: Config) -> DockOptions:
    return DockOptions(
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.samples_per_prompt,
        max_staleness=config.dock.max_staleness,
        warehouses=max(1, config.dock.warehouses),  # 0: one for each node, which are known later
        capacity_bytes=config.dock.capacity_mib * 2**20,
        spill_bytes=config.dock.spill_mib * 2**20,
        fsync=config.dock.fsync,
        groups_per_take=config.dock.groups_per_take,
        deterministic=config.dock.deterministic,
        overtake=config.dock.overtake,
        lease_s=config.dock.lease_s,
        wait_s=config.dock.wait_s,
        max_dropped_groups_per_step=config.algorithm.max_dropped_groups,
        total_groups=config.run.steps * config.rollout.prompts_per_step,
    )


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
    groups = [groups_of([prompt], i, config.eval.samples_per_prompt) for i, prompt in enumerate(prompts)]
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
