"""Which slices of which parameters a rank of a layout holds, without processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from docklands.errors import LayoutError
from docklands.models import ModelConfig, table_for
from docklands.models.catalog import catalog
from docklands.models.model import CausalLM
from docklands.models.params import HfPart, ParamSpec
from docklands.models.shard import Slot, Window, assemble, held_by, place, slot_of
from docklands.models.sharded import ShardedModel
from docklands.parallel import Layout, fsdp
from docklands.parallel.mesh import Mesh

Q, KV, UNIT = 8, 2, 3
ROWS = (Q * UNIT, KV * UNIT, KV * UNIT)
SPECS = [
    ParamSpec("qkv.weight", (sum(ROWS), 5), tuple(HfPart(x, n) for x, n in zip("qkv", ROWS)), "column", UNIT),
    ParamSpec("o.weight", (5, Q * UNIT), (HfPart("o"),), "row", UNIT),
    ParamSpec("embed.weight", (13, 4), (HfPart("e"),), "vocab"),
    ParamSpec("layers.0.q_norm.weight", (7,), (HfPart("n"),)),
    ParamSpec(
        "experts.gate_up",
        (4, 16, 5),
        tuple(HfPart(f"{e}{x}", 8) for e in range(4) for x in "gu"),
        "column",
        expert_dim=0,
    ),
    ParamSpec("experts.down", (4, 5, 8), tuple(HfPart(str(e)) for e in range(4)), "row", expert_dim=0),
]


def numbered(spec: ParamSpec) -> torch.Tensor:
    return torch.arange(math.prod(spec.shape)).view(spec.shape)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=4), Layout(tp=8), Layout(tp=2, ep=2, etp=2, dp=2), Layout(dp=4, ep=4)], ids=str
)
def test_the_ranks_together_hold_every_element(spec: ParamSpec, layout: Layout) -> None:
    slot = slot_of(spec.name, spec, layout)
    ranks = [layout.coords(rank) for rank in range(layout.world_size)]
    parts = [(at, place(slot, at, numbered(spec))) for at in ranks]
    assert all(part.shape == slot.local_shape(at) for at, part in parts)
    assert torch.equal(assemble(slot, parts), numbered(spec))


def test_a_rank_holds_its_heads() -> None:
    """tp 4, 8 query and 2 kv heads of 3 rows: rank 3 has query heads 6 and 7 and the second kv head, as has rank 2."""
    slot = slot_of("qkv.weight", SPECS[0], Layout(tp=4))
    rows = place(slot, {"tp": 3}, numbered(SPECS[0]))[:, 0] // 5
    assert rows.tolist() == [*range(18, 24), *range(27, 30), *range(33, 36)]
    assert slot.copies() == [(0, 6, 1), (6, 9, 2), (9, 12, 2)]


def test_a_region_of_a_file_goes_where_it_belongs() -> None:
    """The up-projection of expert 2 is rows 8..16 of that expert."""
    slot = slot_of("experts.gate_up", SPECS[4], Layout(tp=2, ep=2, etp=2, dp=2))
    at = {"ep": 1, "etp": 1}
    found = list(slot.overlaps(at, [(2, 3), (8, 16), (0, 5)]))
    assert found == [((slice(0, 1), slice(4, 8), slice(0, 5)), (slice(0, 1), slice(4, 8), slice(0, 5)))]
    assert list(slot.overlaps({"ep": 0, "etp": 1}, [(2, 3), (8, 16), (0, 5)])) == []


@settings(max_examples=60)
@given(spec=st.sampled_from(SPECS), ranks=st.integers(1, 5), tp=st.sampled_from([1, 2, 4]), data=st.data())
def test_windows_cut_a_local_tensor_without_loss(spec: ParamSpec, ranks: int, tp: int, data: st.DataObject) -> None:
    slot = slot_of(spec.name, spec, Layout(tp=tp))
    at = {"tp": data.draw(st.integers(0, tp - 1))}
    local = place(slot, at, numbered(spec))
    each = -(-len(local) // ranks)
    pieces = []
    for rank in range(ranks):
        window = Window(0, min(len(local), each * rank), min(len(local), each * (rank + 1)))
        piece = local.new_full((window.stop - window.start, *local.shape[1:]), -1)
        for ours, theirs in slot.overlaps(at, [(0, n) for n in spec.shape], window):
            piece[ours] = numbered(spec)[theirs]
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces), local)


def test_whose_gradients_are_partial() -> None:
    table = table_for(dense(qk_norm=True))
    with_sp = {s.name for s in table.stored() if slot_of(s.name, s, Layout(tp=2)).partial}
    without = {s.name for s in table.stored() if slot_of(s.name, s, Layout(tp=2, sp=False)).partial}
    assert without == {f"layers.{i}.{x}_norm.weight" for i in range(3) for x in "qk"}
    assert with_sp - without == {
        "final_norm.weight",
        *(f"layers.{i}.{x}_norm.weight" for i in range(3) for x in ("attn", "mlp")),
    }


def dense(**changes: bool) -> ModelConfig:
    return ModelConfig("Qwen3ForCausalLM", 64, 32, 3, 4, 2, 8, 48, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=3), Layout(tp=2, fsdp=2)], ids=str)
def test_a_tied_head_is_held_at_both_ends_of_a_pipeline(layout: Layout) -> None:
    table = table_for(dense(tie_embeddings=True))
    held = Counter(name for rank in range(layout.world_size) for name in held_by(table, layout, 3, rank))
    assert ("head.weight" in held) == (layout.pp > 1)
    inner = layout.inner_size
    assert set(held.values()) == {inner} and len(held) == len(table) - (layout.pp == 1)


REAL = [
    ("deepseek-r1-671b", Layout(tp=4, pp=8, ep=8, dp=8)),
    ("qwen3-235b-a22b", Layout(tp=2, pp=16, ep=4, dp=4)),
    ("qwen3-30b-a3b", Layout(tp=4, ep=2, dp=4)),
    ("qwen2.5-32b", Layout(tp=8, pp=2, cp=2, context="ring", dp=2)),
]


@pytest.mark.parametrize(("name", "layout"), REAL, ids=str)
def test_the_shards_of_real_models_add_up(name: str, layout: Layout) -> None:
    """Every rank's shapes and bytes without memory; weighted by copies they are the whole model, to the element."""
    config = catalog.get(name)
    layout.check_model(config)
    table = table_for(config)
    total, size, largest = Fraction(0), Fraction(0), 0
    for rank in range(layout.world_size):
        at, mine = layout.coords(rank), 0
        for slot in held_by(table, layout, config.num_layers, rank).values():
            elements = math.prod(slot.local_shape(at))
            mine += elements
            total += Fraction(elements, copies_of(slot, layout))
            size += Fraction(elements * itemsize(slot.spec), copies_of(slot, layout))
        largest = max(largest, mine)
    assert total == config.num_params
    assert size == sum(math.prod(spec.shape) * itemsize(spec) for spec in table.stored())
    assert largest < config.num_params / layout.pp  # and no rank holds a stage


def itemsize(spec: ParamSpec) -> int:
    """Of a bf16 model."""
    return 4 if spec.keep_fp32 else 2


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, Layout], Mesh]]:
    """-> the mesh of one rank of a layout, over process groups that reach nobody."""

    def make(rank: int, layout: Layout) -> Mesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        return Mesh(layout)

    yield make
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "step"),
    [(*REAL[0], 7), (*REAL[1], 5), ("deepseek-r1-671b", Layout(tp=4, pp=8, ep=8, fsdp=8), 67)],
    ids=str,
)
def test_the_modules_of_real_models_have_these_shapes(
    name: str, layout: Layout, step: int, as_rank: Callable[[int, Layout], Mesh]
) -> None:
    """The model that training runs, on the device "meta", of ranks on every stage and at every place in it."""
    config = catalog.get(name)
    table, stages = table_for(config), set()
    for rank in range(0, layout.world_size, step):
        mesh = as_rank(rank, layout)
        model = ShardedModel(CausalLM, config, mesh, dtype=torch.bfloat16, device="meta")
        held = held_by(table, layout, config.num_layers, rank)
        at = layout.coords(rank)
        found = {name: tuple(parameter.shape) for name, parameter in model.parameters().items()}
        assert found == {name: slot.local_shape(at) for name, slot in held.items()}
        assert all(parameter.is_meta for parameter in model.parameters().values())
        if layout.fsdp > 1:  # and FSDP divides the most of it by its ranks; of experts those that hold the same ones
            local = sum(fsdp.local(parameter).numel() for parameter in model.parameters().values())
            whole = sum(map(math.prod, found.values()))
            experts = sum(math.prod(slot.local_shape(at)) for slot in held.values() if slot.is_expert)
            assert local == pytest.approx(experts / layout.edp + (whole - experts) / layout.fsdp, rel=1e-3)
        stages.add(at["pp"])
    assert len(stages) == layout.pp or layout.fsdp > 1


def copies_of(slot: Slot, layout: Layout) -> int:
    if slot.is_expert:
        return layout.edp * (1 if slot.cuts else layout.ep)
    return layout.inner_size // (layout.tp if slot.cuts else 1)


def test_pitfall_32_a_parameter_that_does_not_divide() -> None:
    with pytest.raises(LayoutError, match="8 units of 3 do not divide by tp 3"):
        slot_of("qkv.weight", SPECS[0], Layout(tp=3)).local_shape({"tp": 0})
