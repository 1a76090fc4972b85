"""What a run will need on each device, phase by phase, and what resharding moves: arithmetic, before anything starts.

Legend: T tokens, D model, N heads, K kv heads, H head dim, F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config
from docklands.errors import ConfigError, LayoutError
from docklands.fleet.generation import generation_of
from docklands.models.adapters import with_lora
from docklands.models.catalog import catalog
from docklands.models.config import ModelConfig
from docklands.models.hf_io import read_config
from docklands.parallel.layout import NUMBERS, Layout
from docklands.parallel.pipeline import most_held
from docklands.sync.plan import MIB, Method, Options, Plan, plan_reshard
from docklands.train.offload import LAYERS_AT_ONCE, MOMENTS_AT_ONCE, most_at_once

GIB = 1 << 30
ITEMSIZE = {"float32": 4, "bfloat16": 2}
MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes of a trained parameter: fp32 master, fp32 gradient, two fp32 moments of Adam."""
COLUMNS = ("weights", "gradients", "optimizer", "activations", "generation", "KV cache", "messages")
ADVICE = {
    ("training", "activations"): "lower train.tokens_per_microbatch, set train.recompute, or raise layout.tp or cp",
    ("training", ""): "raise layout.fsdp, or layout.tp or pp: they divide weights, gradients and optimizer state",
    ("resharding", ""): "raise tp (and ep) of the generation layout, or lower bucket_mib of --transfer",
    ("generation", ""): "raise tp (and ep) of the generation layout",
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
    swapped    bytes that the fullest device's training state takes in the lower tier during generation
    lora       of the adapters alone, where only they are trained
    sequences  decoded at once by an engine: as configured, or fewer where the KV cache of so many does not fit
    """

    model: ModelConfig
    reshard: Plan
    phases: tuple[Phase, ...]
    capacity: int
    swapped: int
    sequences: int
    wanted: int
    lora: Plan | None = None

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
        lines = [
            f"{self.model.num_params / 1e9:.3f} B parameters on {plan.devices} devices; training: {plan.source} "
            f"({plan.source.world_size} ranks), generation: {plan.target} ({plan.target.world_size} ranks)",
            f"resharding ({plan.options.method}{fp8}): {_gib(links.total)} GiB between devices ({_gib(links.node)} "
            f"within nodes of {plan.options.node}, {_gib(links.between)} between nodes), {_gib(links.device)} copied "
            f"in place; a device receives at most {_gib(received.max())}; {len(plan.buckets)} buckets",
            f"swapped out during generation: {_gib(self.swapped)} GiB a device",
            *self._adapters(),
            "",
            "GiB on the fullest device".ljust(27) + "".join(column.rjust(13) for column in (*COLUMNS, "total")),
        ]
        for phase in self.phases:
            cells = [_gib(phase.parts[c]) if phase.parts.get(c) else "-" for c in COLUMNS]
            lines.append(phase.name.ljust(27) + "".join(cell.rjust(13) for cell in (*cells, _gib(phase.total))))
        lines.append(f"{'a device has'.ljust(27)}{''.rjust(13 * len(COLUMNS))}{_gib(self.capacity).rjust(13)}")
        if self.sequences < self.wanted:
            lines.append(f"KV cache: {self.sequences} of {self.wanted} sequences (rollout.max_batch) fit at once")
        return "\n".join(lines)

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


def parse_transfer(text: str, config: Config | None = None, node: int = 8) -> Options:
    """ "method=broadcast,bucket_mib=128,node=16,apart=1,dtype=fp8" -> Options; what is not said is the config's.
    ConfigError.
    """
    pairs = {"method": "minimal", "bucket_mib": "256", "node": str(node), "apart": "0", "dtype": "auto"}
    if config is not None:
        apart, method = config.fleet.placement == "disaggregated", config.sync.method
        chosen = ("broadcast" if apart else "minimal") if method == "auto" else method
        size = str(max(1, int(config.sync.bucket_mib)))
        pairs |= {"method": chosen, "apart": str(int(apart)), "bucket_mib": size, "dtype": config.sync.transfer_dtype}
    pairs |= _pairs(text, "transfer", tuple(pairs))
    if pairs["method"] not in get_args(Method) or pairs["apart"] not in ("0", "1"):
        raise ConfigError(f"transfer {text!r}: unknown method, or apart is not 0 or 1", ", ".join(get_args(Method)))
    if pairs["dtype"] not in ("auto", "fp8"):
        raise ConfigError(f"transfer {text!r}: unknown dtype {pairs['dtype']!r}", "auto or fp8")
    size, node = (_whole(pairs[name], f"transfer: {name}") for name in ("bucket_mib", "node"))
    apart, quantize = pairs["apart"] == "1", pairs["dtype"] == "fp8"
    return Options(pairs["method"], size * MIB, node=node, apart=apart, quantize=quantize)  # type: ignore[arg-type]


def generation_layout(config: Config, text: str = "", apart: bool = False) -> Layout | None:
    """The layout in words, else the config's (dp 0: what the training ranks leave room for), else None."""
    if text:
        return parse_layout(text)
    x = config.rollout.layout
    if not x.spread:
        return None
    if not x.dp and apart:
        raise ConfigError("rollout.layout.dp is 0 and generators have devices of their own", "say how many replicas")
    return Layout(dp=x.dp or max(1, config.training_ranks // x.tp), tp=x.tp, ep=x.ep, etp=x.etp)


def model_of(config: Config, name: str = "") -> ModelConfig:
    """The catalog's model of this name, else the config's own directory."""
    if name:
        return catalog.get(name)
    if not config.model.path:
        raise ConfigError("model.path is empty", "set it, or plan a published model with --model NAME")
    return read_config(resolve_model_path(config.model.path))


def plan_run(config: Config, model: ModelConfig, target: Layout | None, options: Options, capacity: int) -> MemoryPlan:
    """LayoutError where the model does not divide; what does not fit is left to `MemoryPlan.check`.

    target    generation layout; None: rollout.layout's, by default whole models, one on each training rank
    options   itemsize is taken from the config (rollout.dtype)
    capacity  bytes of a device
    """
    source = Layout(**config.layout.model_dump())
    if target is None and config.rollout.layout.spread:
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
    held, generated = _elements(plan.held("source"), plan), _elements(plan.held("target"), plan)
    trained = held if lora is None else _elements(lora.held("source"), lora)
    rest = held - (trained if lora is None or config.lora.publish == "adapter" else 0)  # the base of adapters
    weights_bytes = sum(c * i for _, i, c in plan.held("target"))
    copies = ITEMSIZE[config.train.dtype] if config.train.dtype != "float32" and source.fsdp == 1 else 0
    at_rest = copies or MASTER
    training = {
        "weights": rest * at_rest + trained * (MASTER + copies) + (held > 0) * _gathered(model, config, source),
        "gradients": trained * GRADIENT,
        "optimizer": _moments(config, lora or plan, trained),
        "activations": np.array([_activations(model, config, source, d) for d in range(plan.devices)]),
    }
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    wanted = config.rollout.max_batch
    if config.rollout.kv_cache_tokens:
        wanted = max(1, config.rollout.kv_cache_tokens // longest)
    each = kv_bytes_per_token(model, target) * longest * options.itemsize
    room = capacity - int(np.max(weights_bytes))
    sequences = max(1, min(wanted, room // each))
    generation = {"generation": weights_bytes, "KV cache": (generated > 0) * each * sequences}
    resharding = _resharding(plan, at_rest if lora else MASTER + copies)
    phases = (_fullest("training", training), _fullest("resharding", resharding), _fullest("generation", generation))
    swapped = int((rest * at_rest + trained * (MASTER + copies + GRADIENT + MOMENTS)).max())
    return MemoryPlan(model, plan, phases, capacity, swapped, sequences, wanted, lora)


def _elements(held: Iterable[tuple[str, int, np.ndarray]], plan: Plan) -> np.ndarray:
    return sum((counts for _, _, counts in held), np.zeros(plan.devices, np.int64))


def _moments(config: Config, plan: Plan, trained: np.ndarray) -> np.ndarray:
    """Adam's two moments on each device; with optim.offload those of a few parameters at a time."""
    if not config.train.optim.offload:
        return trained * MOMENTS
    sizes = np.array([counts for _, _, counts in plan.held("source")]) * MOMENTS
    return np.array([most_at_once(sizes[:, device].tolist(), MOMENTS_AT_ONCE) for device in range(plan.devices)])


def _fullest(name: str, parts: dict[str, np.ndarray]) -> Phase:
    total = np.sum(list(parts.values()), axis=0)
    device = int(total.argmax())
    return Phase(name, device, {part: int(sizes[device]) for part, sizes in parts.items()})


def _resharding(plan: Plan, master: int) -> dict[str, np.ndarray]:
    """Each device at its worst bucket: gradients and optimizer state are away, trained weights leave one by one."""
    trained = {name: counts * master for name, _, counts in plan.held("source")}
    generated = {name: counts * itemsize for name, itemsize, counts in plan.held("target")}
    left = np.sum(list(trained.values()), axis=0)
    made, worst = np.zeros(plan.devices, np.int64), np.full(plan.devices, -1, np.int64)
    messages = 2 * np.max([bucket.sent + bucket.received for bucket in plan.buckets], axis=0) + plan.scale_bytes
    at = [left.copy(), made.copy()]
    for bucket in plan.buckets:
        for item in bucket.items:
            made += generated[item.name] if item.is_first else 0
        fuller = left + made > worst
        worst = np.where(fuller, left + made, worst)
        at = [np.where(fuller, now, before) for now, before in zip((left, made), at)]
        for item in bucket.items:
            left = left - (trained[item.name] if item.is_last else 0)
    return {"weights": at[0], "generation": at[1], "messages": messages}


def kv_bytes_per_token(model: ModelConfig, layout: Layout) -> int:
    """Numbers that a device keeps of one token: its kv heads (latent attention: one vector, whole) in its layers."""
    layers = -(-model.num_layers // layout.pp)
    heads, size = model.cache_shape
    return layers * (size if model.mla else 2 * max(1, heads // layout.tp) * size)


def _gathered(model: ModelConfig, config: Config, layout: Layout) -> int:
    """FSDP: two layers' parameters at once, gathered in the compute dtype (of experts, this rank's)."""
    if layout.fsdp == 1:
        return 0
    moe, size = model.moe, model.hidden_size
    experts = 3 * size * moe.expert_size * moe.experts // (layout.ep * layout.etp) if moe and model.sparse_layers else 0
    dense = size * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    dense += 3 * size * (moe.shared_size if moe and model.sparse_layers else model.intermediate_size)
    return 2 * (experts + dense // layout.tp) * ITEMSIZE[config.train.dtype]


def _activated(model: ModelConfig, layer: int) -> int:
    """Width of a layer's products gate * up."""
    moe = model.moe
    if moe is None or not moe.is_sparse(layer):
        return model.intermediate_size
    return moe.shared_size + moe.top_k * moe.expert_size


def _activations(model: ModelConfig, config: Config, layout: Layout, rank: int) -> int:
    """What backward needs of a micro-batch (an estimate: the tensors that our blocks save, no allocator's waste).

    A token keeps, per layer: 4 D (two norms, in and out), q, k, v, the attention's output, and 3 F (gate, up, their
    product; of experts, those of its top_k, and D in and out for each). With recompute full only D, and one layer
    whole; selective keeps neither the norms' outputs nor the activations' products.
    Tensor parallelism with sp divides all of it, context parallelism the tokens. A pipeline's rank keeps as many
    micro-batches as its schedule holds. With activation_offload only two layers' are on the device. Beside that: the
    fp32 logits of a chunk, and their gradient.
    """
    if rank >= layout.world_size:
        return 0
    moe, size = model.moe, model.hidden_size
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    dense = 4 * size + attention + 3 * model.intermediate_size
    sparse = dense
    if moe is not None:
        sparse = 4 * size + attention + 3 * moe.shared_size + moe.top_k * (3 * moe.expert_size + 2 * size)
    stage = layout.coords(rank)["pp"]
    ranges = layout.layer_ranges(model.num_layers)
    layers = [layer for chunk in layout.chunks_of(rank) for layer in ranges[chunk]]
    per_layer = [sparse if moe is not None and moe.is_sparse(layer) else dense for layer in layers]
    kept, whole = per_layer, 0
    if config.train.recompute == "full":
        kept, whole = [size] * len(layers), max(per_layer)
    elif config.train.recompute == "selective":
        kept = [numbers - 2 * size - _activated(model, layer) for numbers, layer in zip(per_layer, layers)]
    tokens = -(-config.train.tokens_per_microbatch // layout.cp)
    held = most_held(layout.pp, layout.vpp, stage, layout.schedule == "zero_bubble")
    numbers = sum(kept) * held // layout.vpp
    if config.train.activation_offload:
        numbers = most_at_once(kept, LAYERS_AT_ONCE)
    activations = (numbers + whole) * tokens * ITEMSIZE[config.train.dtype]
    chunk = min(tokens, config.train.logprob_chunk_tokens)
    logits = 2 * 4 * chunk * -(-model.vocab_size // layout.tp) if stage == layout.pp - 1 else 0
    return activations // layout.tp + logits
