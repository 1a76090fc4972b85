"""`rollout.engine: vllm` in a run: refused in one line where it cannot serve, and where vLLM is installed, learning."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.e2e.runs import ROOT, run_here

from docklands.config.load import load_config
from docklands.config.schema import RolloutSection
from docklands.errors import ConfigError
from docklands.models.config import MlaConfig, ModelConfig, MoeConfig
from docklands.rollout import engines

DENSE = ModelConfig("Qwen2ForCausalLM", 32, 64, 2, 2, 1, 32, 96)
LATENT = ModelConfig("DeepseekV3ForCausalLM", 32, 64, 2, 2, 2, 32, 96, mla=MlaConfig(0, 16, 24, 8, 24))
EXPERTS = ModelConfig("Qwen3MoeForCausalLM", 32, 64, 2, 2, 1, 32, 96, moe=MoeConfig(experts=4, top_k=2, expert_size=16))

assert EXPERTS.moe is not None
SHARED = replace(EXPERTS, moe=replace(EXPERTS.moe, shared_size=16))


def check(shape: ModelConfig, *overrides: str) -> None:
    config, _ = load_config(ROOT / "configs" / "mix6_grpo.yaml", ["rollout.engine=vllm", *overrides])
    engines.check_engine(config, shape)


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vllm is not installed") as caught:
        check(DENSE)
    assert "requirements/vllm.txt" in caught.value.hint and (ROOT / "requirements" / "vllm.txt").is_file()
    check(DENSE, "rollout.engine=native")


@pytest.mark.parametrize(
    ("shape", "override", "said"),
    [
        (EXPERTS, "rollout.layout.ep=2", "experts on different ranks"),
        (replace(EXPERTS, vocab_size=128), "rollout.layout.tp=2", "whole experts on tensor ranks"),
        (DENSE, "rollout.layout.tp=2", "a vocabulary of 32 over 2 ranks"),
        (SHARED, "rollout.max_batch=8", "shared experts"),
        (LATENT, "rollout.max_batch=8", "latent attention"),
        (DENSE, "fleet.rollout_workers=2", "fleet.rollout_workers"),
        (DENSE, "fleet.backend=ray", "under Ray"),
        (DENSE, "rollout.record_routes=true", "record_routes"),
    ],
)
def test_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch, shape: ModelConfig, override: str, said: str) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: True)
    for served in (DENSE, EXPERTS):
        check(served, "rollout.layout.dp=2")
    check(replace(DENSE, vocab_size=128), "rollout.layout.tp=2")
    with pytest.raises(ConfigError, match=said) as caught:
        check(shape, override)
    assert "\n" not in str(caught.value)


if find_spec("vllm"):  # make test-vllm

    def test_a_head_size_without_a_kernel_is_one_line() -> None:
        from docklands.rollout.vllm_engine import VllmEngine

        with pytest.raises(ConfigError, match="attention heads of 16: vLLM on CPU has 32, 64") as caught:
            VllmEngine(replace(DENSE, head_dim=16, num_heads=4), RolloutSection())
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "more", [("layout.tp=2", "rollout.layout.dp=2"), ("fleet.placement=disaggregated", "rollout.layout.dp=2")]
    )
    def test_replicas_in_worker_processes(tmp_path: Path, more: tuple[str, ...]) -> None:
        """Colocated and apart: published by plan, through gate and probe; samples have the trainer's log-probs."""
        vllm = ("rollout.engine=vllm", "run.steps=3", "sync.probe_every=1")
        run = run_here("mix6_grpo.yaml", tmp_path / "run", *vllm, *more)
        rows = [metrics for _, metrics in run.read_metrics()]
        assert len(rows) == 3
        assert all(row["training/rollout_logprobs_diff_max"] < 1e-4 for row in rows)
        assert all(row["reshard/probe_diff"] < 1e-4 and row["reshard/bytes_received"] > 0 for row in rows)

    @pytest.mark.parametrize("partial", [0, 4])
    def test_a_run_on_vllm_learns_from_the_probabilities_it_sampled_with(tmp_path: Path, partial: int) -> None:
        """Every step's log-probabilities are the trainer's; those of partial samples are of several versions."""
        more = ("dock.max_staleness=1", f"rollout.partial_tokens={partial}") if partial else ()
        steps = 3 if partial else 12
        size = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=8", "train.optim.lr=3e-4")
        run = run_here("mix6_grpo.yaml", tmp_path / "run", "rollout.engine=vllm", f"run.steps={steps}", *(more or size))
        rows = [metrics for _, metrics in run.read_metrics()]
        assert len(rows) == steps
        apart = [row["training/rollout_logprobs_diff_max"] for row in rows]
        assert all(map(math.isfinite, apart))
        if not partial:
            rewards = [row["critic/rewards/mean"] for row in rows]
            assert max(apart) < 1e-4
            assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.3
