"""Weight gradients put aside and made later are the same bits, and only those of parameters wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from docklands import kernels
from docklands.errors import LayoutError
from docklands.kernels.deferred import Store
from docklands.parallel import Layout


def passes(store: Store | None, dtype: torch.dtype) -> list[Tensor]:
    """Two micro-batches through a linear and a grouped linear operation -> gradients."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=draw).to(dtype).requires_grad_()
    weight, bias = (nn.Parameter(torch.randn(*size, generator=draw)) for size in ((4, 8), (4,)))
    experts = nn.Parameter(torch.randn(3, 8, 4, generator=draw))
    copy = nn.Parameter(torch.randn(4, 8, generator=draw))
    for scale in (1.0, 0.3):

        def forward(scale: float = scale) -> Tensor:
            hidden = kernels.linear(x * scale, weight, bias) + kernels.linear(x, copy * 2)
            return kernels.grouped_linear(hidden, experts, torch.tensor([2, 2, 6], dtype=torch.int32))

        if store is None:
            forward().square().sum().backward()
            continue
        with store.collecting():
            out = forward()
        before = None if weight.grad is None else weight.grad.clone()
        out.square().sum().backward()
        assert len(store) == 2  # the doubled copy is not a parameter itself: its gradient is there
        assert copy.grad is not None and bias.grad is not None
        assert weight.grad is before is None or torch.equal(weight.grad, before)  # type: ignore[arg-type]
        store.run()
        assert len(store) == 0
    found = [p.grad for p in (x, weight, bias, experts, copy)]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_is_the_same_bits(dtype: torch.dtype) -> None:
    plain, later = passes(None, dtype), passes(Store(), dtype)
    assert len(plain) == len(later) == 5
    assert all(torch.equal(a, b) for a, b in zip(plain, later))


def test_nothing_waits_outside() -> None:
    store, weight = Store(), nn.Parameter(torch.randn(3, 4))
    with store.collecting():
        pass
    kernels.linear(torch.randn(2, 4), weight).sum().backward()
    assert len(store) == 0 and weight.grad is not None


@pytest.mark.parametrize(
    ("layout", "words"),
    [({"pp": 1}, "zero_bubble with pp 1"), ({"pp": 2, "fsdp": 2}, "zero_bubble with pp 2, fsdp 2")],
)
def test_pitfall_32_zero_bubble_is_refused_where_it_cannot_be(layout: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout(**layout, schedule="zero_bubble")
    with pytest.raises(LayoutError, match="schedule is 'gpipe'"):
        Layout(pp=2, schedule="gpipe")  # type: ignore[arg-type]
