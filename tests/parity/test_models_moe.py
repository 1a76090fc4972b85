"""Qwen3-MoE against transformers: logits, gradients, files; generation against the trainer; routes and replay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tests import rollout_cases
from tests.expert_cases import (
    MOE_CASES,
    check_generation,
    check_logits_and_gradients,
    check_round_trip,
    file_tensors,
    saved,
)
from tests.model_cases import logits_of, pack
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from docklands import models
from docklands.models import PackedCausal
from docklands.models.config import MoeConfig
from docklands.models.moe import Moe, MoeBlock
from docklands.models.routing import Routes


@pytest.mark.parametrize("case", MOE_CASES)
def test_logits_and_gradients(case: str, tmp_path: Path) -> None:
    check_logits_and_gradients(case, tmp_path)


@pytest.mark.parametrize("case", MOE_CASES)
def test_round_trip_is_bitwise(case: str, tmp_path: Path) -> None:
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_moe_some_layers_yarn"])
def test_generation_equals_the_trainer(case: str, tmp_path: Path) -> None:
    check_generation(case, tmp_path)


def test_older_keys_and_layers(tmp_path: Path) -> None:
    saved("qwen3_moe_some_layers_yarn", tmp_path)
    config = models.read_config(tmp_path)
    assert config.sparse_layers == (1,)  # layers 1 and 3 by the step of two, 3 is excepted
    values = json.loads((tmp_path / "config.json").read_text())
    values["num_experts"] = values.pop("num_local_experts")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert models.read_config(tmp_path) == config


def test_pitfall_21_replay_gives_the_same_and_the_router_still_learns(tmp_path: Path) -> None:
    """Choices recorded by one model and replayed in another keep its experts, and its router's gradient."""
    saved("qwen3_moe", tmp_path)
    first, second = models.load(tmp_path), models.load(tmp_path)
    ids_T, positions_T = pack([11, 6])
    attend, routes = PackedCausal([11, 6]), Routes()
    before_TD = first(ids_T, positions_T, attend, routes=routes)
    choices_TLk = routes.choices()
    assert choices_TLk.shape == (17, 3, 3) and choices_TLk.dtype == torch.int16
    assert torch.equal(before_TD, first(ids_T, positions_T, attend))  # keeping changes nothing

    for block in second.layers:
        assert isinstance(block, MoeBlock)
        block.moe.router.weight.data.mul_(-1)  # would choose the opposite experts
    own = Routes()
    second(ids_T, positions_T, attend, routes=own)
    assert not torch.equal(own.choices(), choices_TLk)
    replayed = Routes(choices_TLk)
    second(ids_T, positions_T, attend, routes=replayed).square().sum().backward()
    assert torch.equal(replayed.choices(), choices_TLk)
    assert all(block.moe.router.weight.grad.abs().max() > 0 for block in second.layers)  # type: ignore[union-attr]

    partly_TLk = choices_TLk.clone()
    partly_TLk[5:] = -1
    mixed = Routes(partly_TLk)
    second(ids_T, positions_T, attend, routes=mixed)
    assert torch.equal(mixed.choices()[:5], choices_TLk[:5])
    assert not torch.equal(mixed.choices()[5:], choices_TLk[5:])


def test_pitfall_21_replay_closes_the_gap_between_two_precisions(tmp_path: Path) -> None:
    """A bf16 engine and an fp32 one choose other experts for some tokens; the choices of the one replayed in the other
    leave the difference of rounding.
    """
    saved("qwen3_moe_aligned_bias", tmp_path)
    trainer, generator = models.load(tmp_path), models.load(tmp_path, dtype=torch.bfloat16)
    lengths = [60] * 8
    ids_T, positions_T = pack(lengths)
    attend, routes, own = PackedCausal(lengths), Routes(), Routes()

    def logprobs(model: models.CausalLM, routes: Routes) -> torch.Tensor:
        logits_TV = model.logits(model(ids_T, positions_T, attend, routes=routes)).float()
        return logits_TV.log_softmax(-1)[:-1].gather(1, ids_T[1:, None]).squeeze(1)

    with torch.no_grad():
        wanted_T = logprobs(generator, routes)
        free_T = (logprobs(trainer, own) - wanted_T).abs()
        replayed_T = (logprobs(trainer, Routes(routes.choices())) - wanted_T).abs()
    differs_T = (routes.choices().sort(-1).values != own.choices().sort(-1).values).flatten(1).any(1)
    assert 0 < differs_T.sum() < len(ids_T) / 2
    assert replayed_T.max() < 0.5 * free_T.max() and replayed_T.mean() < free_T.mean()


def test_replay_under_recomputation_changes_no_bit(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    ids_T, positions_T = pack([11, 6])
    found = []
    for recompute in (False, True):
        model = models.load(tmp_path)
        model.recompute = recompute
        routes = Routes()
        hidden_TD = model(ids_T, positions_T, PackedCausal([11, 6]), routes=routes)
        (hidden_TD.square().mean() + 0.1 * routes.balance_loss()).backward()
        found.append((routes.choices(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert torch.equal(found[0][0], found[1][0])
    assert len(found[0][1]) == len(found[1][1]) > 20
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_balance_loss_equals_transformers(tmp_path: Path) -> None:
    theirs, ours = saved("qwen3_moe", tmp_path), models.load(tmp_path)
    ids_T, positions_T = pack([23])
    routes = Routes()
    ours(ids_T, positions_T, PackedCausal([23]), routes=routes)
    logits = theirs(ids_T[None], output_router_logits=True).router_logits
    wanted = [load_balancing_loss_func((layer.reshape(23, 7),), 7, 3) for layer in logits]
    expected = torch.stack(wanted).mean()  # type: ignore[arg-type]
    assert abs(routes.balance_loss().item() - expected.item()) < 1e-5
    assert routes.load().shape == (3, 7) and routes.load().sum(1).tolist() == [69, 69, 69]


def test_autocast_over_fp32_masters_equals_bf16_weights(tmp_path: Path) -> None:
    saved("qwen3_moe_aligned_bias", tmp_path)
    masters, copies = models.load(tmp_path), models.load(tmp_path, dtype=torch.bfloat16)
    ids_T, positions_T = pack([11, 5])
    with torch.autocast("cpu", torch.bfloat16):
        trained_TD = masters(ids_T, positions_T, PackedCausal([11, 5]))
    generated_TD = copies(ids_T, positions_T, PackedCausal([11, 5]))
    assert trained_TD.dtype == torch.bfloat16 and torch.equal(trained_TD, generated_TD)
    trained_TD.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in masters.layers.parameters())


def test_a_tokens_output_has_the_same_bits_in_any_company() -> None:
    """Rows of an expert are padded, so how many others chose it does not matter."""
    config = dataclasses.replace(rollout_cases.config("qwen3"), moe=MoeConfig(9, 2, 20))
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        moe = Moe(config.moe, config.hidden_size, 0).to(dtype)  # type: ignore[arg-type]
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter, 0, 0.1)
        x_TD = torch.randn(500, config.hidden_size).to(dtype)
        whole_TD = moe(x_TD)
        for start, size in ((0, 8), (96, 16), (200, 96), (300, 192)):
            part = slice(start, start + size)
            # the router's own product is padded by whoever batches: sizes here are buckets
            assert torch.equal(moe(x_TD[part].contiguous()), whole_TD[part])


def test_value_model(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "in")
    ours = models.load_value(tmp_path / "in")
    ids_T, positions_T = pack([5, 9])
    assert torch.equal(ours(ids_T, positions_T, PackedCausal([5, 9])), torch.zeros(14))
    models.export(ours, tmp_path / "out", tmp_path / "in")
    assert "score.weight" in file_tensors(tmp_path / "out") and "lm_head.weight" not in file_tensors(tmp_path / "out")
    assert models.load_value(tmp_path / "out").config == ours.config


def test_bf16_export_of_masters(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "in")
    models.export(models.load(tmp_path / "in"), tmp_path / "out", dtype=torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in file_tensors(tmp_path / "out").values())
    ids_T, positions_T = pack([9])
    one, two = (models.load(tmp_path / x, dtype=torch.bfloat16) for x in ("in", "out"))
    assert torch.equal(logits_of(one, [9], ids_T, positions_T), logits_of(two, [9], ids_T, positions_T))
