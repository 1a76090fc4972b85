"""DeepSeek-V3 against transformers: logits, gradients, files, the rows it carries; generation against the trainer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests import rollout_cases
from tests.expert_cases import (
    MLA_CASES,
    check_generation,
    check_logits_and_gradients,
    check_round_trip,
    engine_in,
    file_tensors,
    saved,
)
from tests.model_cases import pack
from tests.rollout_cases import groups

from docklands import models
from docklands.core.protocols import Sampling
from docklands.models import PackedCausal
from docklands.models.hf_io import hf_tensors
from docklands.models.moe import balance
from docklands.models.routing import Routes
from docklands.rollout.kv_cache import PagedCache


@pytest.mark.parametrize("case", MLA_CASES)
def test_logits_and_gradients(case: str, tmp_path: Path) -> None:
    check_logits_and_gradients(case, tmp_path)


@pytest.mark.parametrize("case", MLA_CASES)
def test_round_trip_is_bitwise(case: str, tmp_path: Path) -> None:
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", ["deepseek", "deepseek_wide_values_no_rank"])
def test_generation_equals_the_trainer(case: str, tmp_path: Path) -> None:
    """Decoding attends to the kept latent vectors, training to the keys and values that they expand to."""
    check_generation(case, tmp_path)


def test_the_cache_keeps_latent_vectors_only(tmp_path: Path) -> None:
    saved("deepseek", tmp_path)
    config = models.read_config(tmp_path)
    cache = PagedCache(config, 4, 8, torch.float32, "cpu")
    assert config.cache_shape == (1, 24) and config.kv_bytes_per_token == 3 * 24
    assert cache.k[0].shape == (4, 1, 8, 24) and cache.v[0] is cache.k[0]


def test_preemption_and_compaction_with_latent_pages(tmp_path: Path) -> None:
    """A pool too small for the batch: samples are moved and computed again, and come out the same."""
    saved("deepseek", tmp_path)
    source = models.load(tmp_path)
    requests = groups(3, 6, Sampling(40))
    roomy = engine_in(source, torch.float32).generate(requests)
    tight = engine_in(source, torch.float32, kv_cache_tokens=192, kv_block_tokens=8)
    found = tight.generate(requests)
    assert tight.take_metrics()["rollout/preemptions"][0] > 0
    assert [g.token_ids for g in found] == [g.token_ids for g in roomy]


def test_the_routers_bias_stays_fp32(tmp_path: Path) -> None:
    """Its steps of 0.001 are lost in bf16: in the model, in the generator that is sent it, and in the file."""
    saved("deepseek", tmp_path / "in")
    whole, half = models.load(tmp_path / "in"), models.load(tmp_path / "in", dtype=torch.bfloat16)
    name = "layers.1.moe.router.bias"
    assert half.get_parameter(name).dtype == torch.float32
    assert torch.equal(half.get_parameter(name), whole.get_parameter(name))
    assert torch.equal(whole.to(torch.bfloat16).get_parameter(name), half.get_parameter(name))
    assert not half.get_parameter(name).requires_grad
    generator = engine_in(half, torch.bfloat16)
    assert torch.equal(generator._model.get_parameter(name), half.get_parameter(name))
    models.export(half, tmp_path / "out", dtype=torch.bfloat16)
    tensors = file_tensors(tmp_path / "out")
    theirs = [n for n in tensors if n.endswith("e_score_correction_bias")]
    assert theirs and {n for n in tensors if tensors[n].dtype == torch.float32} == set(theirs)


def test_balance_moves_every_router_s_bias_and_evens_the_load(tmp_path: Path) -> None:
    saved("deepseek", tmp_path)
    model = models.load(tmp_path)
    ids_T, positions_T = pack([200])

    def load() -> torch.Tensor:
        routes = Routes()
        with torch.no_grad():
            model(ids_T, positions_T, PackedCausal([200]), routes=routes)
        return routes.load()

    first_LE, before = load(), model.get_parameter("layers.2.moe.router.bias").clone()
    balance(model, first_LE, 0.01)
    step = 0.01 * torch.sign(50 - first_LE[1].float())  # 200 tokens x 3 of 12 experts
    assert torch.allclose(model.get_parameter("layers.2.moe.router.bias"), before + step)
    for _ in range(60):
        balance(model, load(), 0.01)
    last_LE = load()
    assert (last_LE.float().std(1) < 0.5 * first_LE.float().std(1)).all()


def with_mtp(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Give the directory a multi-token-prediction layer, in a file of its own as DeepSeek's. -> its tensors."""
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 1}))
    names = ("eh_proj.weight", "enorm.weight", "shared_head.head.weight", "mlp.experts.3.up_proj.weight")
    torch.manual_seed(0)
    extra = {f"model.layers.{values['num_hidden_layers']}.{name}": torch.randn(5, 7).to(dtype) for name in names}
    weight_map = dict.fromkeys(file_tensors(path), "model.safetensors") | dict.fromkeys(extra, "mtp.safetensors")
    save_file(extra, path / "mtp.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return extra


def test_mtp_layers_are_carried_untouched(tmp_path: Path) -> None:
    saved("deepseek", tmp_path / "in")
    extra = with_mtp(tmp_path / "in", torch.bfloat16)
    ours = models.load(tmp_path / "in")
    assert ours.config.mtp_layers == 1 and not any("eh_proj" in name for name, _ in hf_tensors(ours))
    models.export(ours, tmp_path / "out", tmp_path / "in", max_shard_bytes=50_000)
    before, after = file_tensors(tmp_path / "in"), file_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and extra.keys() < after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    assert models.read_config(tmp_path / "out") == ours.config

    models.export(ours, tmp_path / "bare")  # without a source there are no such weights, and the config says so
    assert models.read_config(tmp_path / "bare") == dataclasses.replace(ours.config, mtp_layers=0)
    assert not file_tensors(tmp_path / "bare").keys() & extra.keys()
    assert models.load(tmp_path / "bare").config.mtp_layers == 0


def test_recomputation_and_bf16(tmp_path: Path) -> None:
    saved("deepseek_yarn_tied", tmp_path)
    ids_T, positions_T = pack([11, 5])
    gradients = []
    for recompute in (False, True):
        model = models.load(tmp_path)
        model.recompute = recompute
        with torch.autocast("cpu", torch.bfloat16):
            hidden_TD = model(ids_T, positions_T, PackedCausal([11, 5]))
        assert hidden_TD.dtype == torch.bfloat16
        half_TD = models.load(tmp_path, dtype=torch.bfloat16)(ids_T, positions_T, PackedCausal([11, 5]))
        assert torch.equal(hidden_TD, half_TD)
        hidden_TD.float().square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(g is not None and torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())


def test_yarn_in_a_dense_model(tmp_path: Path) -> None:
    """The written-out decoder turns heads as the modules do, cos and sin scaled; so does transformers."""
    rule = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    source = rollout_cases.model(rollout_cases.config("qwen2", rope_scaling=rule, tie_embeddings=True))
    requests = groups(2, 3, Sampling(60))
    for request, found in zip(requests, rollout_cases.engine(source).generate(requests)):
        want = rollout_cases.full_logprobs(source, request, list(found.token_ids))
        assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-5
    models.export(source, tmp_path)
    assert models.read_config(tmp_path) == source.config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = pack([70])[0] % source.config.vocab_size
    expected_TV = theirs(ids[None]).logits[0]
    assert (rollout_cases.full_logits(source, ids.tolist()) - expected_TV).abs().max() < 1e-4
