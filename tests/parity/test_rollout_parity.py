"""Generation against transformers.generate (greedy tokens) and the trainer's forward pass (log-probs)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import rollout_cases as cases

from docklands import kernels, models
from docklands.config.schema import RolloutSection
from docklands.core.protocols import Request, Sampling
from docklands.models import PackedCausal
from docklands.rollout import NativeEngine, sample_seed
from docklands.rollout.decoder import DenseDecoder, ModelDecoder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = cases.model(cases.config(family, init_std=0.3))
    models.export(source, tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    prompts = [cases.prompt(n, seed) for seed, n in enumerate((3, 17, 40, 9))]
    found = cases.engine(source).generate(
        [Request(p, Sampling(30, temperature=0.0), 0, i) for i, p in enumerate(prompts)]
    )
    for tokens, generation in zip(prompts, found):
        out = reference.generate(
            torch.tensor([tokens]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert generation.token_ids == out[0, len(tokens) :].tolist()
        assert len(set(generation.token_ids)) > 3  # not a constant that anything would match


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_logprobs_equal_the_forward_pass(family: str) -> None:
    source = cases.model(cases.config(family))
    requests = cases.groups(4, 5, Sampling(45, temperature=1.0))
    for request, found in zip(requests, cases.engine(source).generate(requests)):
        want = cases.full_logprobs(source, request, list(found.token_ids))
        assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-5


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_pitfall_17_temperature_on_both_sides(temperature: float) -> None:
    """The trainer's kernel at the same temperature gives the generator's log-probs; at temperature 1 it does not."""
    source = cases.model()
    requests = cases.groups(3, 3, Sampling(20, temperature=temperature))
    for request, found in zip(requests, cases.engine(source).generate(requests)):
        ids = torch.tensor((*request.prompt, *found.token_ids))
        with torch.no_grad():
            hidden_TD = source(ids[:-1], torch.arange(len(ids) - 1), PackedCausal([len(ids) - 1]))
            hidden_TD, targets_T = hidden_TD[len(request.prompt) - 1 :], ids[len(request.prompt) :]
            want = kernels.sampled_logprob(hidden_TD, source.head_weight, targets_T, temperature=temperature)
            wrong = kernels.sampled_logprob(hidden_TD, source.head_weight, targets_T)
        assert isinstance(want, torch.Tensor) and isinstance(wrong, torch.Tensor)
        assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-5
        assert (wrong - torch.tensor(found.logprobs)).abs().max() > 1e-3


def test_the_written_out_decoder_equals_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both decoders, whole generations: log-probs within rounding, and tokens alike."""
    for family in cases.FAMILIES:
        source = cases.model(cases.config(family))
        requests = cases.groups(3, 4, Sampling(24))
        engine = cases.engine(source)
        fast = engine.generate(requests)
        assert isinstance(engine._decoder, DenseDecoder)
        with monkeypatch.context() as patch:
            patch.setattr("docklands.rollout.native.decoder_for", ModelDecoder)
            plain = cases.engine(source).generate(requests)
        assert [g.token_ids for g in fast] == [g.token_ids for g in plain]
        gap = max(abs(a - b) for x, y in zip(fast, plain) for a, b in zip(x.logprobs, y.logprobs))
        assert gap < 1e-5


def test_bfloat16_stays_near_the_forward_pass() -> None:
    """bf16 has 8 bits: the mean gap to the bf16 forward pass is that of rounding, not of an error."""
    source = cases.model(cases.config("llama", hidden_size=64, head_dim=16, num_heads=4, num_kv_heads=2))
    half = cases.model(source.config).to(torch.bfloat16)
    engine = NativeEngine(source.config, RolloutSection(max_batch=16), dtype=torch.bfloat16)
    engine.load_weights(source.named_parameters(), 0)
    requests = cases.groups(3, 4, Sampling(30))
    gaps = [
        (cases.full_logprobs(half, r, list(g.token_ids)) - torch.tensor(g.logprobs)).abs()
        for r, g in zip(requests, engine.generate(requests))
    ]
    assert torch.cat(gaps).mean() < 0.02
    assert torch.cat(gaps).max() < 0.2


def test_one_sample_of_a_long_response_crosses_many_pages() -> None:
    source = cases.model()
    request = Request(cases.prompt(33), Sampling(200), sample_seed(1, 2, 3, 4))
    (found,) = cases.engine(source, kv_block_tokens=16).generate([request])
    assert len(found.token_ids) == 200
    want = cases.full_logprobs(source, request, list(found.token_ids))
    assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-5
