"""AdamW against torch's own, schedules counted in updates, the norm, decay on matrices only."""

from __future__ import annotations

import math

import pytest
import torch
from tests.train_cases import ACTOR, engine, sampled
from torch import nn

from docklands.config.schema import OptimSection
from docklands.errors import NonFinite
from docklands.train import optim
from docklands.train.optim import Optimizer, global_norm, learning_rate


def test_pitfall_03_the_horizon_counts_optimizer_updates() -> None:
    schedule = OptimSection(lr=1e-2, schedule="linear", min_lr_fraction=0.1)
    trainer = engine(optim=schedule, total=10 * 4, tokens_per_microbatch=25)  # 10 batches x 4 updates
    rates = []
    for number in range(10):
        batch = sampled(seed=number, groups=2)
        for minibatch in batch.minibatches(samples=2):
            metrics = trainer.update(minibatch, ACTOR)
            rates.append(metrics["actor/lr"][0])
    assert len(rates) == trainer.updates == 40
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 40
    assert learning_rate(schedule, 40, 40) == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-3 + 9e-3 / 40)
    assert rates[9] == pytest.approx(1e-2 - 9e-3 * 9 / 40)  # after 10 updates it is nowhere near the end


@pytest.mark.parametrize("schedule,middle", [("constant", 1.0), ("linear", 0.6), ("cosine", 0.6)])
def test_schedules(schedule: str, middle: float) -> None:
    section = OptimSection.model_validate(
        {"lr": 2.0, "schedule": schedule, "warmup_updates": 4, "min_lr_fraction": 0.2}
    )
    rates = [learning_rate(section, u, 24) for u in range(40)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[14] == pytest.approx(2.0 * middle)
    assert rates[24:] == pytest.approx([2.0 if schedule == "constant" else 0.4] * 16)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def parameters(seed: int) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (37, 11), "vector": (13,), "row": (1, 5)}
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    return {name: 3.0 * p.detach() for name, p in parameters(100 + step).items()}


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_steps_equal_torch_adamw(clip: float, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "PIECE", piece)
    section = OptimSection(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, grad_clip=clip)
    ours, theirs = parameters(0), parameters(0)
    optimizer = Optimizer(ours, section, 10)
    groups = [
        {"params": [theirs["matrix"], theirs["row"]], "weight_decay": 0.3},
        {"params": [theirs["vector"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6)
    for step in range(5):
        for name, gradient in gradients(step).items():
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(theirs.values(), clip or math.inf)
        reference.step()
        norm, lr = optimizer.step()
        assert norm == pytest.approx(float(expected), rel=1e-6) and lr == 1e-2
        assert norm > 10  # so the clip matters
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-6, rtol=0)
        assert ours[name].grad is None


def test_sixteen_bit_gradients_are_summed_in_fp32() -> None:
    named = parameters(0)
    optimizer = Optimizer(named, OptimSection(lr=0.1), 10)
    optimizer.compute_in(torch.bfloat16)
    assert [p.dtype for p in named.values()] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for value in (256.0, 1.0, 1.0):  # in bf16, 256 + 1 is 256
        named["matrix"].grad = torch.full((37, 11), value, dtype=torch.bfloat16)
        optimizer.gather()
        assert named["matrix"].grad is None
    assert torch.equal(optimizer.gradients()["matrix"], torch.full((37, 11), 258.0))


def test_a_small_update_is_not_lost_in_bf16() -> None:
    named = {"w": nn.Parameter(torch.full((4, 4), 1.0))}
    optimizer = Optimizer(named, OptimSection(lr=1e-4, weight_decay=0.0), 100)
    optimizer.compute_in(torch.bfloat16)
    for _ in range(60):
        named["w"].grad = torch.ones(4, 4, dtype=torch.bfloat16)
        optimizer.step()
    assert torch.allclose(optimizer.masters["w"], torch.full((4, 4), 1.0 - 60e-4), atol=1e-5)
    assert float(named["w"].detach().float().max()) < 1.0  # the copy follows once it can


def test_global_norm() -> None:
    assert global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == pytest.approx(5.0)
    assert global_norm([]) == 0.0
    wide = torch.full((1000,), 1.01, dtype=torch.bfloat16)
    assert global_norm([wide]) == pytest.approx(math.sqrt(1000) * float(wide[0]), rel=1e-6)
    assert math.isnan(global_norm([torch.tensor([1.0, math.inf])]))


def test_an_overflowing_norm_is_an_error() -> None:
    named = parameters(0)
    named["vector"].grad = torch.full((13,), 3e38)
    with pytest.raises(NonFinite, match="the gradient norm overflows at update 1"):
        Optimizer(named, OptimSection(), 10).step()
