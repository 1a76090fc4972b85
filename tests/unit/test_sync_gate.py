"""Checksums: the same in every layout, another after any change. The probe. (Planted faults: tests/distributed.)"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.reshard_cases import MODELS

from docklands.errors import GateFailed
from docklands.models.params import table_for
from docklands.parallel.layout import Layout
from docklands.sync.boxes import blocks_of
from docklands.sync.gate import MODULUS, check_probe, checksum


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=4), Layout(fsdp=3), Layout(tp=2, ep=2, dp=2, etp=2), Layout(fsdp=4, ep=2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_shards_add_up_in_every_layout(layout: Layout, dtype: torch.dtype) -> None:
    for spec in table_for(MODELS["moe"]).stored():
        whole = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        boxes = {
            block.box for rank in range(layout.world_size) for block in blocks_of(spec, layout, layout.coords(rank))[0]
        }
        sums = [checksum(whole[tuple(slice(*edge) for edge in box)], box, spec.shape) for box in boxes]
        assert sum(sums) % MODULUS == checksum(whole, tuple((0, n) for n in spec.shape), spec.shape), spec.name


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 6), st.integers(0, 15))
def test_any_changed_bit_of_any_element_changes_it(i: int, j: int, k: int, bit: int) -> None:
    values, box = torch.zeros(4, 5, 7, dtype=torch.int16), ((2, 6), (0, 5), (1, 8))
    before = checksum(values.view(torch.bfloat16), box, (6, 5, 9))
    values[i, j, k] ^= torch.tensor(1 << bit).to(torch.int16)
    assert checksum(values.view(torch.bfloat16), box, (6, 5, 9)) != before


def test_moved_elements_change_it() -> None:
    whole = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(2))
    box, shape = ((0, 4), (0, 6), (0, 6)), (4, 6, 6)
    moved = [whole.flip(0), whole.flip(1), whole.transpose(1, 2), whole[:, [3, 4, 5, 0, 1, 2]], whole[[0, 2, 1, 3]]]
    assert len({checksum(values.contiguous(), box, shape) for values in (whole, *moved)}) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64], ids=str)
def test_words_and_single_elements_give_the_same(dtype: torch.dtype) -> None:
    """Columns 8..24 as whole words, the same through a view that is not aligned, and in two uneven pieces."""
    whole = torch.randn(6, 37, generator=torch.Generator().manual_seed(3)).to(dtype)
    values = whole[:, 8:24].contiguous()
    aligned = checksum(values, ((0, 6), (8, 24)), (6, 37))
    assert checksum(values.t().contiguous().t(), ((0, 6), (8, 24)), (6, 37)) == aligned
    assert checksum(whole[:, 8:24], ((0, 6), (8, 24)), (6, 37)) == aligned
    pieces = [checksum(values[:, a:b], ((0, 6), (8 + a, 8 + b)), (6, 37)) for a, b in ((0, 5), (5, 16))]
    assert sum(pieces) % MODULUS == aligned


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(50, 33)
    box = ((0, 50), (0, 33))
    expected = checksum(whole, box, (50, 33))
    monkeypatch.setattr("docklands.sync.gate.CHUNK", 100)
    assert checksum(whole, box, (50, 33)) == expected


def test_the_probe_says_where_and_by_how_much() -> None:
    trainer = torch.tensor([-1.0, -2.0, -3.0])
    assert check_probe(trainer, trainer + 1e-6, 1e-4, 3) == pytest.approx(1e-6, rel=0.1)
    with pytest.raises(
        GateFailed, match="version 3, log-probs of the probe differ by 0.5 nats at token 1 .trainer -2, generator -2.5"
    ):
        check_probe(trainer, trainer - torch.tensor([0.0, 0.5, 0.1]), 1e-4, 3)
    with pytest.raises(GateFailed, match="at token 2"):
        check_probe(trainer, torch.tensor([-1.0, -2.0, torch.nan]), 1e-4, 3)
    with pytest.raises(GateFailed, match="trainer has 3 log-probs, generator 2"):
        check_probe(trainer, trainer[:2], 1e-4, 3)
