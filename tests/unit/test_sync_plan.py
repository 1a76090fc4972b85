"""The planner on the published models and clusters, and what it says of slices against what models really hold."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from tests.reshard_cases import MODELS

from docklands.errors import ConfigError, MissingWeight
from docklands.models.catalog import catalog
from docklands.models.params import ParamSpec, table_for
from docklands.models.shard import Window, held_by
from docklands.parallel.layout import Layout
from docklands.sync import plan as planning
from docklands.sync.boxes import Block, blocks_of, fsdp_share, homes_of
from docklands.sync.plan import Family, Options, Plan, plan_reshard
from docklands.sync.script import Script

PUBLISHED = {
    "7b tp2 pp2 -> tp1 @16": ("qwen2.5-7b", Layout(tp=2, pp=2, dp=4), Layout(dp=16)),
    "32b tp4 pp4 -> tp2 @16": ("qwen2.5-32b", Layout(tp=4, pp=4), Layout(tp=2, dp=8)),
    "32b long tp8 pp2 cp2 -> tp4 @64": (
        "qwen2.5-32b",
        Layout(tp=8, pp=2, cp=2, dp=2, context="ring"),
        Layout(tp=4, dp=16),
    ),
    "30b tp4 ep2 -> tp1 ep8 @16": ("qwen3-30b-a3b", Layout(tp=4, ep=2, dp=4), Layout(ep=8, dp=16)),
    "235b tp2 pp16 ep4 -> tp4 ep8 @128": (
        "qwen3-235b-a22b",
        Layout(tp=2, pp=16, ep=4, dp=4),
        Layout(tp=4, ep=8, etp=4, dp=32),
    ),
    "671b tp4 pp8 ep8 -> tp4 ep64 @256": (
        "deepseek-r1-671b",
        Layout(tp=4, pp=8, ep=8, dp=8),
        Layout(tp=4, ep=64, etp=4, dp=64),
    ),
    "671b tp4 pp8 ep8 -> tp4 ep64 @384": (
        "deepseek-r1-671b",
        Layout(tp=4, pp=8, ep=8, dp=12),
        Layout(tp=4, ep=64, dp=96),
    ),
    "tp up": ("qwen3-32b", Layout(tp=2, dp=8), Layout(tp=8, dp=2)),
    "tp down": ("qwen3-32b", Layout(tp=8, dp=2), Layout(tp=2, dp=8)),
    "pp8 -> pp2": ("qwen2.5-32b", Layout(pp=8, dp=2), Layout(pp=2, dp=8)),
    "ep64 -> ep8": ("deepseek-r1-671b", Layout(tp=2, ep=64, dp=32), Layout(tp=2, ep=8, dp=32)),
    "fsdp256 -> tp8": ("qwen2.5-32b", Layout(fsdp=256), Layout(tp=8, dp=32)),
    "fsdp64 ep8 -> tp4 ep16": ("qwen3-235b-a22b", Layout(fsdp=64, tp=2, ep=8), Layout(tp=4, ep=16, dp=32)),
}


@cache
def planned(case: str, method: str) -> Plan:
    name, source, target = PUBLISHED[case]
    return plan_reshard(catalog.get(name), source, target, Options(method=method))  # type: ignore[arg-type]


def covered(family: Family, receives: np.ndarray, wanted: tuple[tuple[int, int], ...]) -> None:
    """Boxes int64 [m, n, 2] lie in `wanted`, apart from each other, and fill it: each element exactly once."""
    sizes = (receives[:, :, 1] - receives[:, :, 0]).prod(1)
    low, high = np.array(wanted).T
    assert (receives[:, :, 0] >= low).all() and (receives[:, :, 1] <= high).all() and (sizes > 0).all()
    both = (receives[:, None, :, 0] < receives[None, :, :, 1]).all(2)
    both &= both.T
    assert both.sum() == len(receives), f"{family.names[0]}: an element of {wanted} arrives twice"
    assert sizes.sum() == (high - low).prod(), f"{family.names[0]}: an element of {wanted} has no source"


def check_coverage(plan: Plan) -> None:
    """Of every family on every device (alike ones once): each element that is wanted arrives once, and from a device
    that has it (a trainer, or a generator that got it before).
    """
    for family in plan.families:
        spec = plan.table.by_name(family.names[0])
        stages, seen = plan.homes[1][spec.name], set()
        for rank in range(plan.target.world_size):
            at, device = plan.target.coords(rank), plan.first_generator + rank
            mine = family.boxes[family.target == device]
            if at["pp"] not in stages:
                assert len(mine) == 0
                continue
            wants = [block.box for block in blocks_of(spec, plan.target, at)[0]]
            if plan.options.method == "allgather_swap":
                rows = (
                    (min(b[0][0] for b in wants), max(b[0][1] for b in wants)) if spec.experts else (0, spec.shape[0])
                )
                wants = [(rows, *((0, size) for size in spec.shape[1:]))]
            key = (mine.tobytes(), tuple(wants))
            if key in seen:
                continue
            seen.add(key)
            inside = [(mine[:, :, 0] >= [e[0] for e in w]) & (mine[:, :, 1] <= [e[1] for e in w]) for w in wants]
            homes = np.stack([found.all(1) for found in inside])
            assert (homes.sum(0) == 1).all(), f"{family.names[0]}: what device {device} receives, it does not want"
            for want, chosen in zip(wants, homes):
                covered(family, mine[chosen], want)
        check_sources(plan, family, spec)


def check_sources(plan: Plan, family: Family, spec: ParamSpec) -> None:
    """Every box is read where it is: in a trainer's shard, or (handed on) where the hop before brought it."""
    moved, first = np.column_stack([family.source, family.boxes.reshape(len(family.hop), -1)]), family.hop == 0
    came = np.column_stack([family.target, moved[:, 1:], family.hop + 1])
    went = np.column_stack([moved, family.hop])
    assert np.isin(_as_keys(went[~first]), _as_keys(came)).all()
    read = np.unique(moved[first], axis=0)
    for device in np.unique(read[:, 0]).tolist():
        at = plan.source.coords(device)
        assert at["pp"] in plan.homes[0][spec.name]
        held = np.array([block.box for block in blocks_of(spec, plan.source, at)[0]])[None]
        boxes = read[read[:, 0] == device, 1:].reshape(-1, 1, *held.shape[2:])
        within = (held[..., 0] <= boxes[..., 0]) & (boxes[..., 1] <= held[..., 1])
        assert within.all(2).any(1).all(), f"{family.names[0]}: device {device} does not have what it sends"


def _as_keys(rows: np.ndarray) -> np.ndarray:
    """Rows as single values."""
    found = np.ascontiguousarray(rows)
    return found.view(np.dtype((np.void, found.dtype.itemsize * found.shape[1]))).ravel()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["minimal", "allgather_swap", "broadcast"])
@pytest.mark.parametrize("case", PUBLISHED)
def test_published_layouts(case: str, method: str) -> None:
    """Full size: coverage is exact, and the plan is small (`bench/reshard.py --only simulated` says what it costs)."""
    plan = planned(case, method)
    assert len(plan.families) <= 150 and sum(len(family.source) for family in plan.families) < 10**6
    check_coverage(plan)
    limit = plan.options.bucket_bytes
    assert all(max(b.sent.max(), b.received.max()) <= limit for b in plan.buckets if len(b.items) > 1)
    if method != "minimal":
        return
    script = Script(plan, plan.devices // 2)
    assert script.peak().total <= sum(h.bytes for h in (*script.source.values(), *script.target.values())) + 4 * limit


def needed(plan: Plan) -> np.ndarray:
    """Bytes of generation weights that each device holds, from the sizes of slices alone."""
    found = np.zeros(plan.devices, np.int64)
    for _, itemsize, counts in plan.held("target"):
        found += counts * itemsize
    return found


@pytest.mark.slow
def test_the_largest_plan_needs_little_memory() -> None:
    """671 B parameters on 384 devices: less than 2 GB while it is made (numpy's arrays too)."""
    name, source, target = PUBLISHED["671b tp4 pp8 ep8 -> tp4 ep64 @384"]
    tracemalloc.start()
    plan_reshard(catalog.get(name), source, target)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e9


def test_bytes_that_the_paper_states() -> None:
    """32.764 B parameters, 65.5 GB; TP8 -> TP4: 8.19 GB a device in training, 16.4 GB in generation (SYSTEM.md)."""
    model = catalog.get("qwen2.5-32b")
    assert model.num_params == pytest.approx(32.764e9, rel=1e-4)
    script = Script(plan_reshard(model, Layout(tp=8, dp=2), Layout(tp=4, dp=4)), 0)
    training, generation = (sum(h.bytes for h in side.values()) for side in (script.source, script.target))
    assert (training / 1e9, generation / 1e9) == pytest.approx((8.19, 16.4), rel=0.005)


@pytest.mark.slow
def test_minimal_moves_less_than_gathering() -> None:
    for case in PUBLISHED:
        assert planned(case, "minimal").links().total <= planned(case, "allgather_swap").links().total, case


def test_a_holder_on_the_same_node_is_preferred() -> None:
    """TP2 DP8 -> TP1 on two nodes: every rank lacks a half that its neighbour has."""
    links = plan_reshard(catalog.get("qwen2.5-7b"), Layout(tp=2, dp=8), Layout(dp=16)).links()
    assert links.between == 0 and links.node > 0
    sent, received = plan_reshard(catalog.get("qwen2.5-7b"), Layout(tp=2, dp=8), Layout(dp=16)).traffic()
    assert sent.max() == sent.min() and received.max() == received.min()


def test_broadcast_sends_each_element_once_out_of_the_trainers() -> None:
    model, source, target = catalog.get("qwen2.5-7b"), Layout(tp=2, pp=2), Layout(tp=2, dp=8)
    plan = plan_reshard(model, source, target, Options(method="broadcast", apart=True))
    sent, received = plan.traffic()
    weights = model.num_params * 2
    assert sent[:4].sum() == weights and (received == needed(plan)).all()
    assert plan.hops == 16  # norms are on both tensor ranks of 8 replicas
    direct = plan_reshard(model, source, target, Options(apart=True)).traffic()[0]
    assert direct[:4].sum() == needed(plan).sum()


def test_broadcast_is_a_pipeline() -> None:
    """While a replica hands one bucket on, the next one comes to it; each further replica costs one step, not all."""
    model, source = MODELS["bias_tied"], Layout(pp=2)
    steps, options = {}, Options(method="broadcast", bucket_bytes=700, apart=True)
    for replicas in (1, 2, 4):
        plan = plan_reshard(model, source, Layout(dp=replicas), options)
        steps[replicas] = plan.steps
        assert plan.steps == len(plan.buckets) + replicas - 1
    assert steps[4] == steps[1] + 3 and steps[1] > 10
    middle = Script(plan, plan.first_generator + 1).steps  # the second of four
    both = [step for step in middle if step.received and any(part.handed_on for part in step.sent)]
    assert len(both) == len(plan.buckets) - 1


LAYOUTS = [
    Layout(),
    Layout(tp=4),
    Layout(tp=2, pp=2, vpp=2),
    Layout(fsdp=3, cp=2, context="ring"),
    Layout(fsdp=2, tp=4, pp=2),
    Layout(dp=2, fsdp=2, tp=2, pp=3),
]
SPARSE = [
    Layout(fsdp=4, ep=2),
    Layout(fsdp=2, dp=2, tp=2, ep=2, etp=2),
    Layout(tp=4, dp=2, ep=8),
    Layout(tp=2, fsdp=8, ep=2),
]


@pytest.mark.parametrize("name", MODELS)
def test_slices_are_those_that_models_hold(name: str) -> None:
    """Names, local shapes and the elements at every place, against models.shard (and torch's rule of chunks)."""
    model = MODELS[name]
    table = table_for(model)
    for layout in LAYOUTS + (SPARSE if model.moe else []):
        homes = homes_of(table, layout, model.num_layers)
        for rank in range(layout.world_size):
            at = layout.coords(rank)
            slots = held_by(table, layout, model.num_layers, rank)
            mine = {names[at["pp"]]: stored for stored, names in homes.items() if at["pp"] in names}
            assert mine.keys() == slots.keys()
            for local, stored in mine.items():
                spec, slot = table.by_name(stored), slots[local]
                blocks, shape = blocks_of(spec, layout, at)
                place, ranks = fsdp_share(spec, layout, at)
                full = slot.local_shape(at)
                window = None
                if ranks > 1:
                    dim = 1 if spec.experts and full[1] % ranks == 0 else 0
                    each = math.ceil(full[dim] / ranks)
                    window = Window(dim, min(full[dim], each * place), min(full[dim], each * (place + 1)))
                    full = (*full[:dim], window.stop - window.start, *full[dim + 1 :])
                assert shape == full
                pairs = slot.overlaps(at, [(0, size) for size in spec.shape], window)
                expected = [(ours, theirs) for ours, theirs in pairs]
                whole = [(b.slices(b.box), tuple(slice(*edge) for edge in b.box)) for b in blocks]
                assert {str(pair) for pair in whole} == {str(pair) for pair in expected}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (Layout(tp=8), Layout(), "28 heads do not divide by tp 8"),
        (Layout(), Layout(pp=32), "32 chunks for 28 layers"),
        (Layout(), Layout(dp=2, ep=2), "the model has no experts"),
    ],
)
def test_pitfall_32_what_does_not_divide_is_refused_with_the_arithmetic(
    source: Layout, target: Layout, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_reshard(catalog.get("qwen2.5-7b"), source, target)


@pytest.mark.parametrize("shift", [-1, 1], ids=["overlap", "outside"])
def test_a_gap_and_an_overlap_of_one_size_do_not_cancel(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout whose last rank holds rows one too early or too late: as many elements as there are, but not all."""
    blocks = planning._blocks

    def shifted(spec: ParamSpec, layout: Layout, stages: tuple[int, ...]) -> Iterator[tuple[int, tuple[Block, ...]]]:
        for rank, held in blocks(spec, layout, stages):
            if layout.fsdp == 2 and rank == 1:
                (low, high), *rest = held[0].box
                held = (Block(((low + shift, high + shift), *rest), held[0].at),)
            yield rank, held

    monkeypatch.setattr(planning, "_blocks", shifted)
    with pytest.raises(MissingWeight, match=r"trainers hold (\d+) of \1 elements"):
        plan_reshard(MODELS["bias_tied"], Layout(fsdp=2), Layout())
