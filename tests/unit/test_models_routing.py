"""Routers, grouped products, balance: against the plain way of computing each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.expert_cases import saved

from docklands import kernels, models
from docklands.errors import DataError, TrainError
from docklands.kernels.grouped_mm import ExpertRows
from docklands.models.config import MlaConfig, MoeConfig
from docklands.models.routing import Routes, balance_loss, choose, route, update_bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(8, 12, 16), (5, 7, 9)])  # what torch's operator takes, and what it refuses
def test_grouped_products_equal_a_loop(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    experts, outputs, inputs = sizes
    torch.manual_seed(1)
    choice_Tk = torch.stack([torch.randperm(experts - 1)[:3] for _ in range(40)])  # the last expert has no token
    weight = torch.randn(experts, outputs, inputs, requires_grad=True)
    x_TD = torch.randn(40, inputs).to(dtype).requires_grad_()
    rows = ExpertRows(choice_Tk, weight, weight, dtype)
    found_TkO = kernels.grouped_linear(x_TD[rows.token_M], weight, rows.ends_E)[rows.row_Tk]
    assert found_TkO.dtype == dtype and found_TkO.shape == (40, 3, outputs)

    plain, x = weight.detach().clone().requires_grad_(), x_TD.detach().clone().requires_grad_()
    want_TkO = torch.stack(
        [torch.stack([x[t] @ plain[e].to(dtype).t() for e in choice_Tk[t].tolist()]) for t in range(40)]
    )
    limit = 1e-5 if dtype == torch.float32 else 0.05
    assert (found_TkO - want_TkO).abs().max() < limit
    gradient = torch.randn(want_TkO.shape).to(dtype)
    found_TkO.backward(gradient)
    want_TkO.backward(gradient)
    assert weight.grad is not None and plain.grad is not None and x_TD.grad is not None and x.grad is not None
    assert weight.grad.dtype == torch.float32 and not weight.grad[-1].any()
    scale = plain.grad.abs().max()
    assert (weight.grad - plain.grad).abs().max() < limit * scale and (x_TD.grad - x.grad).abs().max() < limit * 10


def test_rows_of_experts_are_whole_and_padded_apart() -> None:
    choice_Tk = torch.tensor([[2, 0], [0, 3], [3, 2], [0, 2]])
    weight = torch.randn(5, 8, 8)
    rows = ExpertRows(choice_Tk, weight, weight, torch.float32)
    starts = [0, *rows.ends_E.tolist()]
    for expert in range(5):
        tokens = [t for t in range(4) if expert in choice_Tk[t]]
        at = [int(rows.row_Tk[t, choice_Tk[t].tolist().index(expert)]) for t in tokens]
        assert at == list(range(starts[expert], starts[expert] + len(tokens)))
        assert [int(rows.token_M[i]) for i in at] == tokens
        size = starts[expert + 1] - starts[expert]
        assert size == 0 if not tokens else size >= 8
    assert len(rows.token_M) == starts[-1]
    empty = kernels.grouped_linear(torch.randn(0, 8), weight, torch.zeros(5, dtype=torch.int32))
    assert empty.shape == (0, 8)


def test_groups_limit_the_choice() -> None:
    """8 experts in 4 groups, 2 groups used: the two groups with the best sums of two, whatever single scores are."""
    config = MoeConfig(8, 2, 4, scoring="sigmoid", groups=4, top_groups=2)
    score_TE = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.1, 0.8, 0.3]])  # sums .9, 1.0, .7, 1.1
    assert sorted(choose(score_TE, config)[0].tolist()) == [2, 6] or sorted(choose(score_TE, config)[0].tolist()) == [
        3,
        6,
    ]
    assert sorted(choose(score_TE, MoeConfig(8, 2, 4))[0].tolist()) == [0, 6]


def test_the_bias_moves_the_choice_and_no_weight() -> None:
    config = MoeConfig(4, 2, 4, scoring="sigmoid", normalize=False, scale=2.0)
    logits_TE = torch.tensor([[1.0, 0.5, 0.0, -1.0]], requires_grad=True)
    plain = route(logits_TE, config, torch.zeros(4))
    moved = route(logits_TE, config, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert sorted(plain.choice_Tk[0].tolist()) == [0, 1] and moved.choice_Tk[0].tolist() == [3, 0]
    assert torch.equal(moved.weight_Tk, 2 * logits_TE.sigmoid()[:, [3, 0]])
    normalised = route(logits_TE, MoeConfig(4, 2, 4, scoring="sigmoid", scale=2.0), torch.zeros(4))
    assert abs(normalised.weight_Tk.sum().item() - 2) < 1e-6


def test_balance_by_bias_settles_a_skewed_router() -> None:
    """Fixed logits that all prefer two of eight experts: the bias alone brings every expert near the mean."""
    torch.manual_seed(0)
    config = MoeConfig(8, 2, 4, scoring="sigmoid")
    logits_TE = torch.randn(512, 8) + torch.tensor([2.0, 2.0, 0, 0, 0, 0, -1, -1])
    bias_E = torch.zeros(8)

    def load() -> torch.Tensor:
        return torch.bincount(route(logits_TE, config, bias_E).choice_Tk.flatten(), minlength=8)

    before = load()
    update_bias(bias_E, before, 0.01)
    assert torch.equal(bias_E, 0.01 * torch.sign(128 - before.float()))
    for _ in range(200):
        update_bias(bias_E, load(), 0.01)
    after = load()
    assert before.max() > 2.5 * 128 and before.min() < 40
    assert after.max() < 1.25 * 128 and after.min() > 0.75 * 128


def test_the_balance_loss_of_a_step_does_not_depend_on_its_split() -> None:
    torch.manual_seed(0)
    score_TE = torch.randn(30, 6).softmax(-1).requires_grad_()
    load_E = torch.bincount(score_TE.topk(2).indices.flatten(), minlength=6)
    whole = balance_loss(score_TE, load_E, 30)
    split = sum(balance_loss(part, load_E, 30).item() for part in score_TE.split([7, 3, 20]))
    assert abs(whole.item() - split) < 1e-6
    even = torch.full((6,), 10)
    assert abs(balance_loss(torch.full((30, 6), 1 / 6), even, 30).item() - 2) < 1e-6
    one_sided = torch.tensor([30, 30, 0, 0, 0, 0])
    assert balance_loss(torch.eye(6)[torch.arange(30) % 2], one_sided, 30).item() == pytest.approx(6.0)


def test_replay_refuses_another_shape() -> None:
    config = MoeConfig(4, 2, 4)
    with pytest.raises(TrainError, match=r"shape \(3, 1\), expected \(3, 2\)"):
        route(torch.randn(3, 4), config, None, torch.zeros(3, 1, dtype=torch.int16))
    with pytest.raises(TrainError, match="no router has run"):
        Routes().choices()


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"experts": 8, "top_k": 0, "expert_size": 4}, "not positive"),
        ({"experts": 9, "top_k": 2, "expert_size": 4, "groups": 2}, "9 experts in 2 groups"),
        ({"experts": 8, "top_k": 5, "expert_size": 4, "groups": 4, "top_groups": 2}, "5 experts a token"),
        ({"experts": 4, "top_k": 1, "expert_size": 4, "groups": 4, "top_groups": 2}, "needs two"),
        ({"experts": 4, "top_k": 9, "expert_size": 4}, "9 experts a token"),
    ],
)
def test_impossible_mixtures_are_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(DataError, match=said):
        MoeConfig(**fields)  # type: ignore[arg-type]


def test_impossible_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rope_dim even"):
        MlaConfig(4, 4, 4, 3, 4)
    saved("deepseek", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for change, said in (
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(DataError, match=said):
            models.read_config(tmp_path)
