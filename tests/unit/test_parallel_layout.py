"""The arithmetic of parallel layouts, without processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.errors import LayoutError
from docklands.parallel import Layout
from docklands.parallel.layout import DENSE

degree = st.sampled_from([1, 2, 3])


def test_ranks_are_dense_with_tp_fastest() -> None:
    layout = Layout(pp=2, dp=1, fsdp=2, tp=2)
    assert layout.world_size == 8
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("fsdp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("fsdp", "tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.groups() == [(rank,) for rank in range(8)]
    assert layout.group_of(6, "fsdp") == (4, 6)
    coords = layout.coords(5)
    assert (coords["pp"], coords["fsdp"], coords["tp"]) == (1, 0, 1)


def test_experts_fold_over_the_other_axes() -> None:
    layout = Layout(dp=2, tp=2, ep=2)
    assert layout.edp == 2
    assert layout.groups("ep") == [(0, 1), (2, 3)]  # etp 1: expert ranks lie inside the tensor group
    assert layout.groups("edp") == [(0, 2), (1, 3)]
    folded = Layout(dp=2, tp=2, ep=2, etp=2)
    assert folded.groups("ep") == [(0, 2), (1, 3)]
    assert folded.groups("etp") == folded.groups("tp")


@settings(max_examples=40)
@given(dp=degree, fsdp=degree, tp=degree, pp=degree, cp=degree, data=st.data())
def test_every_rank_is_in_one_group_and_coordinates_invert(dp, fsdp, tp, pp, cp, data) -> None:  # type: ignore[no-untyped-def]
    inner = dp * fsdp * tp * cp
    ep = data.draw(st.sampled_from([n for n in range(1, inner + 1) if inner % n == 0]))
    layout = Layout(dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep)
    everyone = list(range(layout.world_size))
    for axes in [("tp",), ("fsdp", "cp"), ("pp",), ("ep",), ("edp",), DENSE]:
        groups = layout.groups(*axes)
        assert sorted(itertools.chain.from_iterable(groups)) == everyone
        assert len({len(group) for group in groups}) == 1
    for rank in data.draw(st.sets(st.sampled_from(everyone), max_size=8)):
        coords = layout.coords(rank)
        assert layout.rank_of(**{axis: coords[axis] for axis in DENSE}) == rank
        for axis in ("tp", "ep", "edp", "pp"):
            assert layout.group_of(rank, axis)[coords[axis]] == rank


@given(layers=st.integers(1, 70), pp=st.integers(2, 6), vpp=st.integers(1, 3))
def test_layers_are_split_without_gap(layers: int, pp: int, vpp: int) -> None:
    layout = Layout(pp=pp, vpp=vpp)
    if layers < pp * vpp:
        with pytest.raises(LayoutError, match=f"= {pp * vpp} chunks for {layers} layers"):
            layout.layer_ranges(layers)
        return
    ranges = layout.layer_ranges(layers)
    assert list(itertools.chain.from_iterable(ranges)) == list(range(layers))
    sizes = [len(r) for r in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)  # the head is work too


def test_chunks_of_a_stage_interleave() -> None:
    layout = Layout(pp=2, vpp=2)
    assert [layout.chunks_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]


def sizes(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"num_heads": 12, "num_kv_heads": 4, "num_layers": 4, "intermediate_size": 64, **changes})


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        ({"tp": 8}, {}, "12 heads do not divide by tp 8 (12 / 8 = 1.50)"),
        ({"tp": 3}, {}, "4 kv heads and tp 3"),
        ({"tp": 4}, {"intermediate_size": 66}, "66 feed-forward columns do not divide by tp 4"),
        ({"pp": 3, "vpp": 2}, {}, "pp 3 x vpp 2 = 6 chunks for 4 layers"),
        ({"ep": 2, "dp": 2}, {}, "the model has no experts"),
        (
            {"ep": 4, "dp": 4},
            {"moe": SimpleNamespace(experts=6, expert_size=8, shared_size=0)},
            "6 experts do not divide by ep 4",
        ),
    ],
)
def test_pitfall_32_a_model_that_does_not_divide_is_refused(layout: dict, model: dict, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(**layout).check_model(sizes(**model))
    assert words in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"vpp": 2}, "vpp 2 with pp 1"),
        ({"tp": 0}, "tp is 0"),
        ({"dp": True}, "dp is True"),
        ({"tp": 4, "etp": 2}, "etp 2 with tp 4"),
        ({"dp": 2, "tp": 2, "ep": 3}, "= 4 ranks of a stage do not divide by ep 3 x etp 1 = 3"),
        ({"tp": 2, "ep": 2, "sp": False}, "without sp"),
    ],
)
def test_pitfall_32_a_layout_that_does_not_hold_together_is_refused(layout: dict, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(**layout)
    assert words in str(caught.value) and caught.value.hint


def test_pitfall_32_the_number_of_processes_is_checked() -> None:
    with pytest.raises(LayoutError, match="pp 2 x dp 1 x fsdp 1 x cp 1 x tp 2 = 4 ranks, 6 processes"):
        Layout(pp=2, tp=2).check_world(6)
    Layout(pp=2, tp=2).check_world(4)


def test_layout_needs_no_torch() -> None:
    code = "import sys, docklands.parallel; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
