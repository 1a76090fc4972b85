"""What the resharding tests share: small models of every kind, layouts, and a plan run on numpy arrays."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from docklands.errors import LayoutError
from docklands.models.config import MlaConfig, ModelConfig, MoeConfig
from docklands.models.shard import held_by, place
from docklands.parallel.layout import Layout
from docklands.sync.boxes import view
from docklands.sync.plan import Plan
from docklands.sync.script import Held, Script

BASE = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=37,
    hidden_size=20,
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    intermediate_size=24,
)
MOE = MoeConfig(experts=8, top_k=2, expert_size=8)
MODELS = {
    "dense": BASE,
    "bias_tied": dataclasses.replace(BASE, qkv_bias=True, o_bias=True, tie_embeddings=True),
    "two_kv_heads": dataclasses.replace(BASE, num_kv_heads=2, qk_norm=True),
    "one_kv_head": dataclasses.replace(BASE, num_kv_heads=1, qkv_bias=True),
    "moe": dataclasses.replace(BASE, moe=MOE),
    "moe_shared_tied": dataclasses.replace(
        BASE, tie_embeddings=True, moe=dataclasses.replace(MOE, shared_size=8, scoring="sigmoid", first_dense=2)
    ),
    "mla": dataclasses.replace(
        BASE,
        num_kv_heads=8,
        head_dim=6,
        mla=MlaConfig(q_rank=7, kv_rank=9, nope_dim=4, rope_dim=2, v_dim=3),
        moe=dataclasses.replace(MOE, scoring="sigmoid", groups=2, top_groups=1, shared_size=16, first_dense=1),
    ),
}


def draw_model(draw: Any) -> ModelConfig:
    """Any small model: dense or with experts, grouped or latent attention, tied or not, biases and norms or not."""
    heads = draw(st.sampled_from([2, 4, 6, 8]))
    some: dict[str, Any] = {name: draw(st.booleans()) for name in ("tie_embeddings", "qkv_bias", "o_bias", "qk_norm")}
    if draw(st.booleans()):
        groups = draw(st.sampled_from([1, 2]))
        some["moe"] = MoeConfig(
            draw(st.sampled_from([4, 6, 8])),
            2,
            draw(st.sampled_from([4, 8])),
            shared_size=draw(st.sampled_from([0, 8])),
            scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
            groups=groups,
            top_groups=groups,
            first_dense=draw(st.integers(0, 2)),
            sparse_step=draw(st.integers(1, 2)),
        )
    if draw(st.booleans()):
        nope, rope, rank = 2 * draw(st.integers(1, 2)), 2 * draw(st.integers(1, 2)), draw(st.integers(0, 7))
        some["mla"] = MlaConfig(rank, draw(st.integers(1, 9)), nope, rope, draw(st.integers(1, 5)))
        some |= {"num_kv_heads": heads, "head_dim": nope + rope}
    else:
        shared = [n for n in range(1, heads + 1) if heads % n == 0]
        some |= {"num_kv_heads": draw(st.sampled_from(shared)), "head_dim": draw(st.sampled_from([2, 4]))}
    return ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=draw(st.integers(5, 40)),
        hidden_size=draw(st.integers(3, 20)),
        num_layers=draw(st.integers(1, 5)),
        num_heads=heads,
        intermediate_size=draw(st.sampled_from([8, 12, 24])),
        **some,
    )


def draw_layout(draw: Any, model: ModelConfig, ranks: int = 16) -> Layout:
    """Any layout of at most `ranks` ranks that the model divides by."""
    degree = st.sampled_from([1, 1, 2, 2, 3, 4, 8])
    while True:
        tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 1, 2, 3, 5]))
        sizes = {"dp": draw(degree), "fsdp": draw(degree), "cp": draw(st.sampled_from([1, 1, 1, 2]))}
        vpp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
        etp = draw(st.sampled_from([1, tp])) if model.moe else 1
        ep = draw(st.sampled_from([1, 2, 4, 8])) if model.moe else 1
        try:
            layout = Layout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, context="ring", **sizes)
            layout.check_model(model)
        except LayoutError:
            continue
        if layout.world_size <= ranks:
            return layout


Weights = dict[str, np.ndarray]


def whole_weights(plan: Plan, seed: int = 0) -> Weights:
    """A number of its own for every element of every stored parameter."""
    rng = np.random.default_rng(seed)
    total = sum(int(np.prod(spec.shape)) for spec in plan.table.stored())
    numbers, at, found = rng.permutation(total).astype(np.int32), 0, {}
    for spec in plan.table.stored():
        size = int(np.prod(spec.shape))
        found[spec.name] = numbers[at : at + size].reshape(spec.shape)
        at += size
    return found


def shard(held: dict[str, Held], whole: Weights) -> Weights:
    """Local arrays, by stored name."""
    found = {}
    for name, part in held.items():
        found[name] = np.full(part.shape, -1, np.int32)
        for block in part.blocks:
            found[name][block.slices(block.box)] = whole[name][tuple(slice(*edge) for edge in block.box)]
    return found


def execute(plan: Plan, sources: list[Weights]) -> tuple[list[Weights], np.ndarray]:
    """(generators' arrays by device, bytes received by device). Every element is written exactly once, or it fails."""
    scripts = [Script(plan, device) for device in range(plan.devices)]
    targets = [{n: np.full(h.shape, -1, np.int32) for n, h in script.target.items()} for script in scripts]
    writes = [{n: np.zeros(h.shape, np.int8) for n, h in script.target.items()} for script in scripts]
    received = np.zeros(plan.devices, np.int64)
    for number in range(plan.steps):
        wires: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        for device, script in enumerate(scripts):
            for part in script.steps[number].sent:
                held = (script.target if part.handed_on else script.source)[part.name]
                local = (targets if part.handed_on else sources)[device][part.name]
                wires[device, part.peer].append(view(local, held.blocks, part.box).copy())  # type: ignore[arg-type]
        for device, script in enumerate(scripts):
            step = script.steps[number]
            for part in (*step.received, *step.copied):
                if part.peer == device:
                    box = view(sources[device][part.name], script.source[part.name].blocks, part.box)  # type: ignore[arg-type]
                else:
                    box = wires[part.peer, device].pop(0)
                    received[device] += box.size * plan.family_of(part.name).itemsize
                for kept in part.kept:
                    blocks = script.target[part.name].blocks
                    inner = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(kept, part.box))
                    view(targets[device][part.name], blocks, kept)[...] = box[inner]  # type: ignore[arg-type]
                    view(writes[device][part.name], blocks, kept)[...] += 1  # type: ignore[arg-type]
        assert not any(wires.values()), "a message was not read"
    for device, found in enumerate(writes):
        for name, times in found.items():
            assert (times == 1).all(), f"device {device}: {name}: written {times.min()} to {times.max()} times"
    return targets, received


def owned(plan: Plan, layout: Layout, rank: int, whole: Weights) -> dict[str, np.ndarray]:
    """Elements that a rank of a layout holds, by stored name: by the rules by which models are built."""
    at, found = layout.coords(rank), {}
    layers = 1 + max(spec.layer for spec in plan.table if spec.layer is not None)
    for slot in held_by(plan.table, layout, layers, rank).values():
        local = place(slot, at, torch.from_numpy(whole[slot.spec.name]))
        if layout.fsdp > 1 and not slot.spec.keep_fp32:
            index, ranks = at["fsdp"] * layout.cp + at["cp"], layout.fsdp * layout.cp
            if slot.is_expert:
                index, ranks = at["edp"], layout.edp
            dim = 1 if slot.is_expert and local.shape[1] % ranks == 0 else 0
            pieces = local.chunk(ranks, dim)
            local = pieces[index] if index < len(pieces) else local[:0]
        found[slot.spec.name] = local.numpy().reshape(-1)
    return found


def lower_bound(plan: Plan, whole: Weights) -> np.ndarray:
    """Bytes that each device must receive: elements that it needs and does not hold, counted one by one."""
    found = np.zeros(plan.devices, np.int64)
    for rank in range(plan.target.world_size):
        device = plan.first_generator + rank
        here = owned(plan, plan.source, device, whole) if device < plan.source.world_size else {}
        for name, numbers in owned(plan, plan.target, rank, whole).items():
            missing = set(numbers.tolist()) - set(here[name].tolist() if name in here else ())
            found[device] += len(missing) * (4 if plan.table.by_name(name).keep_fp32 else plan.options.itemsize)
    return found
