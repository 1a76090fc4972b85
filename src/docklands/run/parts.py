"""What roles are made from, checked against each other: config, model, tokenizer, algorithm, worker processes."""

from __future__ import annotations

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
from docklands.config.schema import Config
from docklands.core.fields import Field
from docklands.core.graph import Graph
from docklands.data.tokenizer import Tokenizer, load_tokenizer
from docklands.errors import ConfigError
from docklands.fleet.generation import generation_of
from docklands.fleet.host import Setup
from docklands.fleet.local_carrier import LocalCarrier
from docklands.fleet.workers import Carrier, Workers
from docklands.models.adapters import with_lora
from docklands.obs.rundir import RunDir
from docklands.parallel import Layout
from docklands.rollout.capacity import check_lengths, check_vocabulary
from docklands.rollout.engines import check_engine
from docklands.rollout.partial import check_partial
from docklands.run.routes import check_router, routes_column
from docklands.sync.publish import check_sync
from docklands.sync.quantize import check_transfer


@dataclass(frozen=True)
class Parts:
    """What roles are made from. workers: None when all engines live in this process."""

    config: Config
    tokenizer: Tokenizer
    algorithm: Algorithm
    device: str
    model_path: Path
    log: Path
    workers: Workers | None = None
    routes: Field[Any] | None = None

    @property
    def apart(self) -> bool:
        """Generators have processes of their own."""
        return self.workers is not None and self.config.fleet.placement == "disaggregated"

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


def build_parts(config: Config, run_dir: RunDir) -> Parts:
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
    with_lora(shape, config.lora)
    check_vocabulary(tokenizer.vocab_size, shape)
    if "rollout" in algorithm.graph().roles:
        check_lengths(config.rollout, config.data.max_prompt_tokens, shape)
        check_engine(config, shape)
    alone = not config.has_workers and config.fleet.rollout_workers == 1 and config.env.name == "single_turn"
    check_partial(config.rollout, config.dock.max_staleness, alone)
    check_router(config, shape)
    routes = routes_column(config, shape)
    workers = build_workers(config, path, where, run_dir, "rollout" in algorithm.graph().roles)
    return Parts(config, tokenizer, algorithm, where, path, run_dir.log, workers, routes)


def build_workers(config: Config, path: Path, device: str, run_dir: RunDir, generates: bool) -> Workers | None:
    """Processes of the layouts; None when the driver is the only one. LayoutError, before any starts, when they do not
    fit the model or each other.
    """
    layout = Layout(**config.layout.model_dump())
    shape = models.read_config(path)
    layout.check_model(shape)
    check_placement(config, generates)
    if generates:
        check_transfer(config)
    if not config.has_workers:
        return None
    apart = config.fleet.placement == "disaggregated" and generates
    generation = generation_of(config, shape) if generates else layout
    if generates:
        check_sync(config.sync, device, apart)
    setup = Setup(
        layout,
        device=device.split(":")[0],
        threads=max(1, (config.run.threads or torch.get_num_threads()) // layout.world_size),
        wait_s=config.dock.wait_s,
        log=run_dir.log.resolve(),
        spans=run_dir.spans.resolve(),
        heartbeat_s=config.fleet.heartbeat_s,
    )
    return Workers(setup, build_carrier(config, layout.world_size + (generation.world_size if apart else 0)))


def check_placement(config: Config, generates: bool) -> None:
    """ConfigError for a wish about generators that nothing grants: there are none, or no process to put them in."""
    apart, layout = config.fleet.placement == "disaggregated", config.rollout.layout
    if apart and not config.has_workers:
        raise ConfigError(
            "fleet.placement is disaggregated, but one process trains and generates",
            "give layout or rollout.layout more than one rank, or set fleet.placement=colocated",
        )
    if not generates and (apart or layout.spread or config.sync.swap != "none"):
        key = "fleet.placement" if apart else "rollout.layout" if layout.spread else "sync.swap"
        raise ConfigError(f"{key} is set, but algorithm {config.algorithm.name} generates nothing", "remove it")
    if not config.has_workers and config.sync.swap != "none":
        raise ConfigError(
            f"sync.swap is {config.sync.swap}, but trainer and generator are one process",
            "sync.swap: none, or worker processes: layout, or rollout.layout.dp=1",
        )


def build_carrier(config: Config, workers: int) -> Carrier:
    """Where worker processes run. Ray is imported only when it is asked for.

    workers  that the run has in all: a Ray that is started here has room for them
    """
    fleet = config.fleet
    if fleet.backend == "local":
        return LocalCarrier()
    try:
        from docklands.fleet.ray_carrier import RayCarrier
    except ImportError as error:
        raise ConfigError(
            f"fleet.backend is ray, but Ray cannot be imported: {error}", "pip install docklands[ray]"
        ) from None
    return RayCarrier(fleet.ray_address, fleet.ray_resource, fleet.ray_strategy, workers)
