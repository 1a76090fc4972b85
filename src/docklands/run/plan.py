"""What a run will need on each device, phase by phase, and what resharding moves: arithmetic, before anything starts.

Legend: T tokens, D model, N heads, K kv heads, H head dim, F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from docklands.algorithms import build_algorithm
from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config
from docklands.errors import ConfigError, LayoutError
from docklands.fleet.generation import generation_of
from docklands.models.adapters import with_lora
from docklands.models.catalog import catalog
from docklands.models.config import ModelConfig
from docklands.models.hf_io import read_config
from docklands.parallel.layout import NUMBERS, Layout
from docklands.run.footprint import (
    ITEMSIZE,
    Footprint,
    activations,
    footprint,
    gathered,
    kv_bytes_per_token,
    message_room,
    other_engines,
    streamed,
)
from docklands.run.parts import check_placement
from docklands.sync.plan import MIB, Method, Options, Plan, plan_reshard
from docklands.sync.publish import check_sync
from docklands.sync.quantize import check_transfer

GIB = 1 << 30
COLUMNS = ("weights", "gradients", "optimizer", "activations", "generation", "KV cache", "messages")
ADVICE = {
    ("training", "activations"): "lower train.tokens_per_microbatch, set train.recompute, or raise layout.tp or cp",
    ("training", ""): "raise layout.fsdp, or layout.tp or pp: they divide weights, gradients and optimizer state",
    ("resharding", ""): "raise tp (and ep) of the generation layout, or lower sync.bucket_mib",
    ("resharding", "optimizer"): "let training state wait elsewhere meanwhile: sync.swap=host (disk on a CPU)",
    ("generation", ""): "raise tp (and ep) of the generation layout",
    ("generation", "optimizer"): "let training state wait elsewhere meanwhile: sync.swap=host (disk on a CPU)",
    ("generation", "KV cache"): "lower data.max_prompt_tokens or rollout.max_response_tokens, or raise generation's tp",
}


@dataclass(frozen=True)
class Phase:
    """Bytes on the fullest device in one phase, by column."""

    name: str
    device: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Phases, the resharding between the first and the last, and how many sequences' KV cache fits.

    capacity   bytes of a device
    swapped    bytes of training state that the fullest device sends to the lower tier before it generates
    stays      bytes of training state that rest on the fullest device while it generates
    lora       of the adapters alone, where only they are trained
    sequences  decoded at once by an engine: as configured, or fewer where the KV cache of so many does not fit
    """

    model: ModelConfig
    reshard: Plan
    phases: tuple[Phase, ...]
    capacity: int
    swapped: int
    stays: int
    sequences: int
    wanted: int
    lora: Plan | None = None

    @property
    def generates(self) -> bool:
        return self.phases[-1].name == "generation"

    def check(self) -> None:
        """ConfigError that says which phase does not fit, by how much, and what to change."""
        for phase in self.phases:
            if phase.total > self.capacity:
                largest = max(phase.parts, key=lambda part: phase.parts[part])
                over = (phase.total - self.capacity) / GIB
                parts = " + ".join(f"{n} {_gib(size)}" for n, size in phase.parts.items() if size)
                raise ConfigError(
                    f"{phase.name} needs {phase.total / GIB:.2f} GiB on device {phase.device} ({parts}), a device has "
                    f"{self.capacity / GIB:.2f}: {over:.2f} too many",
                    ADVICE.get((phase.name, largest)) or ADVICE[phase.name, ""],
                )

    def to_text(self) -> str:
        """The table that `docklands plan` prints."""
        plan, links = self.reshard, self.reshard.links()
        _, received = plan.traffic()
        fp8 = f", fp8 and {_gib(plan.scale_bytes)} GiB of scales to each device" if plan.options.quantize else ""
        if not self.generates:
            lines = [f"{self.model.num_params / 1e9:.3f} B parameters on {plan.source.world_size} devices; training: "
                     f"{plan.source} ({plan.source.world_size} ranks); the algorithm generates nothing"]  # fmt: skip
            return "\n".join([*lines, "", *self._table()])
        where = "generators have devices of their own" if plan.options.apart else "sync.swap is none"
        waits = f"swapped out during generation: {_gib(self.swapped)} GiB a device"
        lines = [
            f"{self.model.num_params / 1e9:.3f} B parameters on {plan.devices} devices; training: {plan.source} "
            f"({plan.source.world_size} ranks), generation: {plan.target} ({plan.target.world_size} ranks)",
            f"resharding ({plan.options.method}{fp8}): {_gib(links.total)} GiB between devices ({_gib(links.node)} "
            f"within nodes of {plan.options.node}, {_gib(links.between)} between nodes), {_gib(links.device)} copied "
            f"in place; a device receives at most {_gib(received.max())}; {len(plan.buckets)} buckets",
            waits
            if self.swapped
            else f"nothing is swapped out ({where}): {_gib(self.stays)} GiB of training state stay",
            *self._adapters(),
            "",
            *self._table(),
        ]
        if self.sequences < self.wanted:
            lines.append(f"KV cache: {self.sequences} of {self.wanted} sequences (rollout.max_batch) fit at once")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        lines = ["GiB on the fullest device".ljust(27) + "".join(column.rjust(13) for column in (*COLUMNS, "total"))]
        for phase in self.phases:
            cells = [_gib(phase.parts[c]) if phase.parts.get(c) else "-" for c in COLUMNS]
            lines.append(phase.name.ljust(27) + "".join(cell.rjust(13) for cell in (*cells, _gib(phase.total))))
        return [*lines, f"{'a device has'.ljust(27)}{''.rjust(13 * len(COLUMNS))}{_gib(self.capacity).rjust(13)}"]

    def _adapters(self) -> list[str]:
        """A line where adapters are trained."""
        if self.lora is None:
            return []
        count = sum(math.prod(spec.shape) for spec in self.lora.table)
        apart = any(spec.adapts for spec in self.reshard.table)
        alone = f"; from the second publish on they alone are sent: {_gib(self.lora.links().total)} GiB"
        return [f"adapters: {count / 1e6:.4g} M parameters are trained, the base rests{alone if apart else ''}"]


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size >= 0.01 * GIB else f"{size / GIB:.2g}"


def _pairs(text: str, what: str, known: Sequence[str]) -> dict[str, str]:
    """ "a=1, b=x" -> {a: 1, b: x}. ConfigError for an unknown or repeated name."""
    found: dict[str, str] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = item.partition("=")
        if name not in known or not equals or name in found:
            raise ConfigError(f"{what} {text!r}: {item!r} is not NAME=VALUE with each name once", ", ".join(known))
        found[name] = value
    return found


def _whole(text: str, what: str, least: int = 1) -> int:
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{what} is {text!r}", f"a whole number from {least}")
    return int(text)


def parse_layout(text: str) -> Layout:
    """ "tp=4,ep=64,dp=64" -> Layout. ConfigError for what is no such list, LayoutError for what does not divide."""
    pairs = _pairs(text, "layout", NUMBERS)
    return Layout(**{name: _whole(value, f"layout: {name}") for name, value in pairs.items()})  # type: ignore[arg-type]


def parse_transfer(text: str, config: Config | None = None) -> Options:
    """ "method=broadcast,bucket_mib=128,node=16,apart=1,dtype=fp8" -> Options; what is not said is the config's.
    ConfigError.
    """
    pairs = {"method": "minimal", "bucket_mib": "256", "node": "8", "apart": "0", "dtype": "auto"}
    if config is not None:
        apart, method = config.fleet.placement == "disaggregated", config.sync.method
        chosen = ("broadcast" if apart else "minimal") if method == "auto" else method
        pairs |= {"method": chosen, "apart": str(int(apart)), "dtype": config.sync.transfer_dtype}
        pairs |= {"bucket_mib": str(config.sync.bucket_mib), "node": str(config.sync.node_devices)}
    pairs |= _pairs(text, "transfer", tuple(pairs))
    if pairs["method"] not in get_args(Method) or pairs["apart"] not in ("0", "1"):
        raise ConfigError(f"transfer {text!r}: unknown method, or apart is not 0 or 1", ", ".join(get_args(Method)))
    if pairs["dtype"] not in ("auto", "fp8"):
        raise ConfigError(f"transfer {text!r}: unknown dtype {pairs['dtype']!r}", "auto or fp8")
    node = _whole(pairs["node"], "transfer: node")
    try:
        size = float(pairs["bucket_mib"])
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError(f"transfer: bucket_mib is {pairs['bucket_mib']!r}", "MiB, more than 0")
    apart, quantize = pairs["apart"] == "1", pairs["dtype"] == "fp8"
    return Options(pairs["method"], max(1, int(size * MIB)), node=node, apart=apart, quantize=quantize)  # type: ignore[arg-type]


def generation_layout(text: str) -> Layout | None:
    """The layout in words; None for none. ConfigError for degrees that no generator has."""
    layout = parse_layout(text) if text else None
    wrong = [name for name in ("fsdp", "pp", "vpp", "cp") if layout and getattr(layout, name) > 1]
    if wrong:
        raise ConfigError(f"generation {text!r}: no engine generates with {', '.join(wrong)}", "dp, tp, ep, etp")
    return layout


def model_of(config: Config, name: str = "") -> ModelConfig:
    """The catalog's model of this name, else the config's own directory."""
    if name:
        return catalog.get(name)
    if not config.model.path:
        raise ConfigError("model.path is empty", "set it, or plan a published model with --model NAME")
    return read_config(resolve_model_path(config.model.path))


def check_run(config: Config, device: str, target: Layout | None = None) -> None:
    """What a run refuses about where generators are and what waits meanwhile. ConfigError.

    device  "cpu", or any other for an accelerator
    target  in place of rollout.layout
    """
    generates = "rollout" in build_algorithm(config).graph().roles
    if target is not None:
        section = config.rollout.layout.model_copy(
            update={name: getattr(target, name) for name in ("dp", "tp", "ep", "etp")}
        )
        rollout = config.rollout.model_copy(update={"layout": section})
        config = config.model_copy(update={"rollout": rollout})
    check_placement(config, generates)
    if generates:
        check_transfer(config)
        check_sync(config.sync, device, config.fleet.placement == "disaggregated")


def ranks_of(config: Config, model: ModelConfig, target: Layout | None = None) -> int:
    """Processes that have a device of their own. target: in place of rollout.layout."""
    if config.fleet.placement == "colocated":
        return config.training_ranks
    return config.training_ranks + (target or generation_of(config, model)).world_size


def plan_run(config: Config, model: ModelConfig, target: Layout | None, options: Options, capacity: int) -> MemoryPlan:
    """LayoutError where the model does not divide; what does not fit is left to `MemoryPlan.check`.

    target    generation layout; None: as a run takes it from rollout.layout
    options   itemsize is taken from the config (rollout.dtype)
    capacity  bytes of a device
    """
    source, graph = Layout(**config.layout.model_dump()), build_algorithm(config).graph()
    generates = "rollout" in graph.roles
    if target is None and generates and config.has_workers:
        target = generation_of(config, model)
        options = replace(options, apart=config.fleet.placement == "disaggregated")
    target = target or Layout(dp=source.world_size)
    if not options.apart and target.world_size != source.world_size:
        raise LayoutError(
            f"generation layout {target} has {target.world_size} ranks, training {source} has {source.world_size}",
            "colocated roles share the devices: change dp, or use --transfer apart=1",
        )
    dtype = config.train.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    options = replace(options, itemsize=ITEMSIZE[dtype])
    adapted = with_lora(model, config.lora)
    plan = plan_reshard(adapted if config.lora.publish == "adapter" else model, source, target, options)
    lora = None if adapted.lora is None else plan_reshard(adapted, source, target, replace(options, adapters=True))
    engines = _actor(config, plan, lora) + other_engines(config, graph, model, source, plan.devices)
    return _phases(config, model, (plan, lora), engines, generates, capacity)


def _actor(config: Config, plan: Plan, lora: Plan | None) -> Footprint:
    """The trained weights, and what rests beneath adapters."""
    sizes = np.array([counts for _, _, counts in plan.held("source")])
    if lora is None:
        return footprint(sizes, config, plan.source, config.train.optim)
    trained = np.array([counts for _, _, counts in lora.held("source")])
    within = trained.sum(0, keepdims=True) if config.lora.publish == "adapter" else 0  # the plan moves them, too
    frozen = footprint(sizes.sum(0, keepdims=True) - within, config, plan.source, None)
    return frozen + footprint(trained, config, plan.source, config.train.optim)


def _phases(
    config: Config,
    model: ModelConfig,
    plans: tuple[Plan, Plan | None],
    engines: Footprint,
    generates: bool,
    capacity: int,
) -> MemoryPlan:
    """Where training state is swapped out, a device has it or the generation weights; else it has both all the time."""
    plan, lora = plans
    source, apart, devices = plan.source, plan.options.apart, range(plan.devices)
    away = config.sync.swap != "none" and not apart
    held = np.sum([counts for _, _, counts in plan.held("source")], axis=0)
    generation = np.sum([counts * itemsize for _, itemsize, counts in plan.held("target")], axis=0)
    passes = np.array([gathered(model, config, source, device) for device in devices])
    parts = {
        "weights": engines.weights + (held > 0) * passes,
        "gradients": engines.gradients,
        "optimizer": engines.optimizer,
        "activations": np.array([activations(model, config, source, device) for device in devices]),
    }
    wanted, longest = config.rollout.max_batch, config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.rollout.kv_cache_tokens:
        wanted = max(1, config.rollout.kv_cache_tokens // longest)
    stays = int(engines.between_steps.max())
    if not generates:
        return MemoryPlan(model, plan, (_fullest("training", parts),), capacity, 0, stays, wanted, wanted, lora)
    resident = {} if away else {"weights": engines.weights, "optimizer": engines.optimizer}
    here, messages = streamed(plan, config) if away else (engines.weights, generation), message_room(plan)
    resharding = {**resident, "weights": here[0], "generation": here[1], "messages": messages}
    if not away:
        parts["generation"] = generation
    lasts = apart and config.fleet.publish == "in_flight"  # samples under way keep their KV cache
    used = generation + (0 if away else engines.between_steps) + lasts * messages
    each = kv_bytes_per_token(model, plan.target) * longest * plan.options.itemsize
    sequences = max(1, min(wanted, (capacity - int(used[generation > 0].max())) // each))
    cache = (generation > 0) * each * sequences
    resharding["KV cache"] = lasts * cache
    at_work = {name: (generation > 0) * sizes for name, sizes in resident.items()}  # apart, trainers train meanwhile
    at_work |= {"generation": generation, "KV cache": cache}
    named = {"training": parts, "resharding": resharding, "generation": at_work}
    phases = tuple(_fullest(name, sizes) for name, sizes in named.items())
    swapped = stays if away else 0
    return MemoryPlan(model, plan, phases, capacity, swapped, stays - swapped, sequences, wanted, lora)


def _fullest(name: str, parts: dict[str, np.ndarray]) -> Phase:
    total = np.sum(list(parts.values()), axis=0)
    device = int(total.argmax())
    return Phase(name, device, {part: int(sizes[device]) for part, sizes in parts.items()})
