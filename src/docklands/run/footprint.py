"""What an engine keeps on each device, what passes through it in a phase: the sums behind `docklands plan`.

Legend: D model, F feed-forward, V vocabulary, p parameters, d devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from docklands.config.paths import resolve_model_path
from docklands.config.schema import Config, OptimSection
from docklands.core.graph import Graph
from docklands.models.config import ModelConfig
from docklands.models.hf_io import read_config
from docklands.models.params import ParamTable, table_for
from docklands.parallel.layout import Layout
from docklands.parallel.pipeline import most_held
from docklands.run.fleet import shares_base
from docklands.sync.boxes import blocks_of, homes_of, stage_ranks, volume
from docklands.sync.plan import Plan
from docklands.train.offload import LAYERS_AT_ONCE, MOMENTS_AT_ONCE, most_at_once

ITEMSIZE = {"float32": 4, "bfloat16": 2}
MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes of a trained parameter: fp32 master, fp32 gradient, two fp32 moments of Adam."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of an engine, int64 [d] each: weights with copies to compute with, gradients, what is here of moments."""

    weights: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer
        )

    @property
    def between_steps(self) -> np.ndarray:
        """Gradients are made and used within an update."""
        return self.weights + self.optimizer


def copy_bytes(config: Config, layout: Layout) -> int:
    """Of an element's copy in the compute dtype beside its fp32 master; FSDP gathers instead."""
    return ITEMSIZE[config.train.dtype] if config.train.dtype != "float32" and layout.fsdp == 1 else 0


def elements_by_name(table: ParamTable, layout: Layout, num_layers: int, devices: int) -> np.ndarray:
    """int64 [p, d]: elements of each stored parameter on each device, of which the first are the layout's ranks."""
    homes, known = homes_of(table, layout, num_layers), {}
    rows = []
    for spec in table.stored():
        stages = tuple(sorted(homes[spec.name]))
        key = (stages, spec.shape, spec.split, spec.parts, spec.unit, spec.experts, spec.keep_fp32)
        if key not in known:
            known[key] = counts = np.zeros(devices, np.int64)
            for stage in stages:
                for rank in stage_ranks(layout, stage):
                    blocks, _ = blocks_of(spec, layout, layout.coords(rank))
                    counts[rank] = sum(volume(block.box) for block in blocks)
        rows.append(known[key])
    return np.array(rows)


def footprint(sizes: np.ndarray, config: Config, layout: Layout, optim: OptimSection | None) -> Footprint:
    """Of parameters with int64 [p, d] elements. optim None: they are frozen."""
    held, copies = sizes.sum(0), copy_bytes(config, layout)
    nothing = np.zeros_like(held)
    if optim is None:
        return Footprint(held * (copies or MASTER), nothing, nothing)
    moments = held * MOMENTS
    if optim.offload:
        columns = (sizes * MOMENTS).T.tolist()
        moments = np.array([most_at_once(column, MOMENTS_AT_ONCE) for column in columns])
    return Footprint(held * (MASTER + copies), held * GRADIENT, moments)


def other_engines(config: Config, graph: Graph, model: ModelConfig, layout: Layout, devices: int) -> Footprint:
    """Critic and reference, where the graph names them. The base of adapters is its own reference."""
    nothing = np.zeros(devices, np.int64)
    found = Footprint(nothing, nothing, nothing)
    shared = shares_base(config)
    for role, section in (("critic", config.critic), ("reference", config.reference)):
        if role not in graph.roles or (role == "reference" and shared):
            continue
        shape = read_config(resolve_model_path(section.path)) if section.path else model
        layout.check_model(shape)
        table = table_for(shape, value_head=role == "critic")
        sizes = elements_by_name(table, layout, shape.num_layers, devices)
        found += footprint(sizes, config, layout, config.critic.optim if role == "critic" else None)
    return found


# --- resharding -----------------------------------------------------------------------------------------------------


def streamed(plan: Plan, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(training weights, generation weights) int64 [d], each device at its worst bucket, where training state is
    swapped out: all but the published weights is away before, and those leave one by one.
    """
    copies = copy_bytes(config, plan.source)
    trained = {}
    for name, _, counts in plan.held("source"):  # only matrices have copies
        trained[name] = counts * (copies if copies and len(plan.table.by_name(name).shape) > 1 else MASTER)
    generated = {name: counts * itemsize for name, itemsize, counts in plan.held("target")}
    left = np.sum(list(trained.values()), axis=0)
    made, worst = np.zeros(plan.devices, np.int64), np.full(plan.devices, -1, np.int64)
    at = [left.copy(), made.copy()]
    for bucket in plan.buckets:
        for item in bucket.items:
            made += generated[item.name] if item.is_first else 0
        fuller = left + made > worst
        worst = np.where(fuller, left + made, worst)
        at = [np.where(fuller, now, before) for now, before in zip((left, made), at)]
        for item in bucket.items:
            left = left - (trained[item.name] if item.is_last else 0)
    return at[0], at[1]


def message_room(plan: Plan) -> np.ndarray:
    """int64 [d]: messages of the largest exchange, twice (one is under way while one is unpacked), and scales."""
    return 2 * np.max(plan.step_bytes(), axis=0) + plan.scale_bytes


# --- passes ---------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(model: ModelConfig, layout: Layout) -> int:
    """Numbers that a device keeps of one token: its kv heads (latent attention: one vector, whole) in its layers."""
    layers = -(-model.num_layers // layout.pp)
    heads, size = model.cache_shape
    return layers * (size if model.mla else 2 * max(1, heads // layout.tp) * size)


def gathered(model: ModelConfig, config: Config, layout: Layout, rank: int) -> int:
    """FSDP: bytes of whole parameters in the compute dtype. Two layers' at once; the embedding and the head, which stay
    as long as a pass lasts, on the stages that have them; and where no two ranks hold the same experts, so that those
    are not sharded, a copy of this rank's.
    """
    if layout.fsdp == 1 or rank >= layout.world_size:
        return 0
    moe, size = model.moe, model.hidden_size
    stage, itemsize = layout.coords(rank)["pp"], ITEMSIZE[config.train.dtype]
    sparse = 0
    if moe:
        ranges = layout.layer_ranges(model.num_layers)
        sparse = sum(moe.is_sparse(layer) for chunk in layout.chunks_of(rank) for layer in ranges[chunk])
    experts = 3 * size * moe.expert_size * moe.experts // (layout.ep * layout.etp) if moe and sparse else 0
    dense = size * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    dense += 3 * size * (moe.shared_size if moe and sparse else model.intermediate_size)
    at_once = 2 if layout.edp > 1 else sparse if itemsize < MASTER else 0
    ends = (stage == 0) + (stage == layout.pp - 1)
    if model.tie_embeddings and layout.pp == 1:
        ends = 1
    return (at_once * experts + (2 * dense + ends * model.vocab_size * size) // layout.tp) * itemsize


def _activated(model: ModelConfig, layer: int) -> int:
    """Width of a layer's products gate * up."""
    moe = model.moe
    if moe is None or not moe.is_sparse(layer):
        return model.intermediate_size
    return moe.shared_size + moe.top_k * moe.expert_size


def _saved(model: ModelConfig, layer: int, recompute: str) -> tuple[int, int]:
    """Numbers that a layer keeps of a token: of its states, which only sequence parallelism divides, and of what
    tensor parallelism divides in any case.
    """
    moe, size = model.moe, model.hidden_size
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if recompute == "full":
        return size, 0
    states, inner = 4 * size, attention + 3 * _activated(model, layer)
    if moe is not None and moe.is_sparse(layer):
        states += 2 * size * moe.top_k
    if recompute == "selective":
        return states - 2 * size, inner - _activated(model, layer)
    return states, inner


def activations(model: ModelConfig, config: Config, layout: Layout, rank: int) -> int:
    """What backward needs of a micro-batch (an estimate: the tensors that our blocks save, no allocator's waste).

    A token keeps, per layer: 4 D (two norms, in and out), q, k, v, the attention's output, and 3 F (gate, up, their
    product; of experts, those of its top_k, and D in and out for each). With recompute full only D, and one layer
    whole; selective keeps neither the norms' outputs nor the activations' products.
    Tensor parallelism with sp divides all of it, without sp all but the D; context parallelism divides the tokens. A
    pipeline's rank keeps as many micro-batches as its schedule holds. With activation_offload only two layers' are on
    the device. Beside that: the fp32 logits of a chunk, and their gradient.
    """
    if rank >= layout.world_size:
        return 0
    section, stage = config.train, layout.coords(rank)["pp"]
    ranges = layout.layer_ranges(model.num_layers)
    layers = [layer for chunk in layout.chunks_of(rank) for layer in ranges[chunk]]
    apart = layout.tp if layout.sp else 1

    def each(recompute: str) -> list[int]:
        saved = (_saved(model, layer, recompute) for layer in layers)
        return [states * layout.tp // apart + inner for states, inner in saved]

    kept = each(section.recompute)
    whole = max(each("none")) if section.recompute == "full" else 0
    held = most_held(layout.pp, layout.vpp, stage, layout.schedule == "zero_bubble")
    numbers = sum(kept) * held // layout.vpp
    if section.activation_offload:
        numbers = most_at_once(kept, LAYERS_AT_ONCE)
    tokens = -(-section.tokens_per_microbatch // layout.cp)
    chunk = min(tokens, section.logprob_chunk_tokens)
    logits = 2 * 4 * chunk * -(-model.vocab_size // layout.tp) if stage == layout.pp - 1 else 0
    return (numbers + whole) * tokens * ITEMSIZE[section.dtype] // layout.tp + logits
