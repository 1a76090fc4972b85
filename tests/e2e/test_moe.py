"""`docklands train` on tiny random models with experts: Qwen3-MoE, and DeepSeek-V3 with latent attention."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from docklands import models
from docklands.errors import ConfigError
from docklands.models.config import MlaConfig, ModelConfig, MoeConfig
from tests.e2e.runs import ROOT, run_here

pytestmark = pytest.mark.slow

QWEN = ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=32,
    hidden_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    intermediate_size=56,
    qk_norm=True,
    max_positions=128,
    eos_ids=(1,),
    pad_id=0,
    init_std=0.1,
    moe=MoeConfig(experts=6, top_k=2, expert_size=24),
)
DEEPSEEK = dataclasses.replace(
    QWEN,
    architecture="DeepseekV3ForCausalLM",
    num_heads=5,
    num_kv_heads=5,
    head_dim=14,
    qk_norm=False,
    moe=MoeConfig(
        experts=6, top_k=2, expert_size=24, shared_size=24, scoring="sigmoid", groups=3, top_groups=2, first_dense=1
    ),
    mla=MlaConfig(q_rank=14, kv_rank=18, nope_dim=8, rope_dim=6, v_dim=10),
)

REWARDS = [{"name": "format", "args": {"pattern": p, "whole": False}} for p in ("^[0-4]", "^.[0-4]", "^..[0-4]")]
"""Several, so that the samples of a random model differ."""


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen3_moe", "deepseek"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_of_grpo(config: ModelConfig, dtype: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    models.export(models.build(config, seed=3), model)
    shutil.copyfile(ROOT / "assets/mix6-warm/char_tokenizer.json", model / "char_tokenizer.json")
    run = run_here(
        "mix6_grpo.yaml",
        tmp_path / "run",
        f"model.path={model}",
        "run.steps=3",
        f"train.dtype={dtype}",
        "algorithm.old_logprobs=recompute",
        f"reward.functions={json.dumps(REWARDS)}",
        "rollout.samples_per_prompt=8",
    )
    rows = [json.loads(line)["metrics"] for line in run.metrics.read_text().splitlines()]
    assert len(rows) == 3 and all(row["actor/updates"] == 1 for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    # log-probs taken before the update are those inside it, to the bit: the experts' products are the same
    assert all(row["actor/ratio_max"] == 1 and row["actor/ppo_kl"] == 0 for row in rows)
    # the generator's experts are replayed: rounding is left, and no choice of other experts
    limit = 1e-5 if dtype == "float32" else 0.005  # with their own choices: 0.008 and 0.010
    assert all(row["training/rollout_probs_diff_max"] < limit for row in rows)
    assert all(row["actor/router_replayed"] == 1 and row["actor/router_load_max"] >= 1 for row in rows)
    graph = json.loads((run.path / "graph.json").read_text())
    carried = [(writer, reader) for writer, reader, columns in graph["edges"] if "routes" in columns]
    assert carried == [("rollout", "old_logprobs"), ("rollout", "update")]


@pytest.mark.parametrize(
    ("config", "router"), [(QWEN, "aux_loss_coef=0.01"), (DEEPSEEK, "bias_update_rate=0.001")], ids=["aux", "bias"]
)
def test_pitfall_21_balance_in_a_run_and_a_wish_that_no_router_grants(
    config: ModelConfig, router: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    models.export(models.build(config, seed=3), model)
    shutil.copyfile(ROOT / "assets/mix6-warm/char_tokenizer.json", model / "char_tokenizer.json")
    more = (f"model.path={model}", "run.steps=2", f"reward.functions={json.dumps(REWARDS)}", f"train.router.{router}")
    run = run_here("mix6_grpo.yaml", tmp_path / "run", *more, "rollout.samples_per_prompt=8")
    rows = [json.loads(line)["metrics"] for line in run.metrics.read_text().splitlines()]
    assert len(rows) == 2 and all(("actor/router_aux_loss" in row) == ("aux" in router) for row in rows)
    other = {"aux_loss_coef=0.01": "bias_update_rate=0.1", "bias_update_rate=0.001": "aux_loss_coef=-1"}[router]
    with pytest.raises(ConfigError, match="have no bias|expected a value >= 0"):
        run_here("mix6_grpo.yaml", tmp_path / "no", *more[:3], f"train.router.{other}")
