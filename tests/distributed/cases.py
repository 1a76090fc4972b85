"""What the sharded cases share: tiny models on disk, an engine in a layout, and the same in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docklands.config.schema import OptimSection, TrainSection
from docklands.core.batch import Batch
from docklands.models import ModelConfig, build, build_value, export, load, load_value
from docklands.models.sharded import load_sharded
from docklands.parallel import fsdp
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.train import TrainEngine
from docklands.train.sharded import ShardedEngine
from docklands.train.sharded_optim import ShardedOptimizer
from tests.train_cases import ACTOR_WITH_ENTROPY, CRITIC, SHAPE, sampled

STEPS = 3
TRAIN = {"tokens_per_microbatch": 70}
OPTIM = OptimSection(lr=1e-3, eps=1e-5, grad_clip=0.5, weight_decay=0.1)
"""Adam divides a gradient by its size: entries that should be 0 and are rounding noise would move at the full rate."""

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_tied": {**SHAPE, **HEADS},
    "qwen3_five_layers": {**SHAPE, **HEADS, "num_hidden_layers": 5},
    "qwen2_two_kv_heads": {
        **{k: v for k, v in SHAPE.items() if k != "head_dim"},
        **HEADS,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 48,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        **SHAPE,
        **HEADS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 20,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek": {
        **{k: v for k, v in SHAPE.items() if k != "head_dim"},
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 14,
        "kv_lora_rank": 18,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "moe_intermediate_size": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "num_nextn_predict_layers": 0,
    },
    "llama_bias": {
        **SHAPE,
        **HEADS,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}


def write_model(name: str, path: Path) -> None:
    """A random model (norms and biases too) as a Hugging Face directory: `policy` and `critic` under `path`."""
    config = ModelConfig.from_hf(MODELS[name])
    for kind, make in (("policy", build), ("critic", build_value)):
        model = make(config, seed=3)
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=draw))
        export(model, path / kind)


def batches() -> list[Batch]:
    """One per update: groups with shared prompts, ragged responses."""
    return [sampled(seed) for seed in range(STEPS)]


def run(engine: TrainEngine, rows: list[Batch], learner: Any) -> dict[str, Any]:
    """Log-probs (or values), first gradients, metrics and weights of three updates."""
    per_token = engine.values if learner is CRITIC else engine.logprobs
    found: dict[str, Any] = {"before": per_token(rows[0]).values, "metrics": []}
    for step, batch in enumerate(rows):
        metrics = engine.forward_backward(batch, learner)
        if step == 0:
            found["gradients"] = gradients_of(engine)
        found["metrics"].append({**metrics, **engine.optim_step()})
    found["after"] = per_token(rows[0]).values
    found["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    return found


def gradients_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Whole gradients, gathered."""
    optimizer = engine.optimizer
    if isinstance(engine, ShardedEngine) and isinstance(optimizer, ShardedOptimizer):
        optimizer.reduce()
        parameters = engine.sharded.parameters()
        grads = optimizer.gradients()
        local = {n: fsdp.like(p, grads[n]) if n in grads else torch.zeros_like(p) for n, p in parameters.items()}
        return {name: tensor.clone() for name, tensor in engine.sharded.whole(local)}
    assert optimizer is not None
    return {name: gradient.clone() for name, gradient in optimizer.gradients().items()}


@cache
def alone(path: Path, value: bool = False, **train: Any) -> dict[str, Any]:
    """The reference: one process, all rows."""
    model = load_value(path / "critic") if value else load(path / "policy")
    section = TrainSection(**{**TRAIN, **train})
    engine = TrainEngine(model, section, OPTIM, max_tokens=8, total_updates=10)
    return run(engine, batches(), CRITIC if value else ACTOR_WITH_ENTROPY)


def sharded(path: Path, layout: Layout, value: bool = False, **train: Any) -> dict[str, Any]:
    """A case: this rank of the layout, the rows of its replica."""
    mesh = Mesh(layout, timeout_s=60)
    section = TrainSection(**{**TRAIN, **train})
    dtype = getattr(torch, section.dtype)
    model = load_sharded(path / ("critic" if value else "policy"), mesh, value=value, dtype=dtype)
    engine = ShardedEngine(model, section, OPTIM, max_tokens=8, total_updates=10)
    replica = 0 if mesh.data is None else mesh.data.rank
    rows = [batch.select(np.arange(replica, len(batch), layout.data)) for batch in batches()]
    found = run(engine, rows, CRITIC if value else ACTOR_WITH_ENTROPY)
    if mesh.rank:
        del found["gradients"], found["weights"]  # the same on every rank: one copy travels
    return {**found, "replica": replica}


def difference(left: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float((left - right).abs().max() / right.abs().max().clamp_min(1e-12))


def compare(found: list[dict[str, Any]], expected: dict[str, Any], layout: Layout, tolerance: float = 1e-5) -> None:
    """Losses, metrics, per-token results, every gradient and every weight of all ranks, against one process."""
    for name in expected["gradients"]:
        assert difference(found[0]["gradients"][name], expected["gradients"][name]) < tolerance, f"gradient of {name}"
        assert difference(found[0]["weights"][name], expected["weights"][name]) < tolerance, f"weight {name}"
    assert found[0]["weights"].keys() == expected["weights"].keys()
    whole = batches()[0]
    for rank, mine in enumerate(found):
        for moment in ("before", "after"):
            full = [expected[moment][a:b] for a, b in zip(offsets(whole)[:-1], offsets(whole)[1:])]
            own = torch.cat([full[i] for i in range(mine["replica"], len(whole), layout.data)])
            assert difference(mine[moment], own) < tolerance, f"{moment} on rank {rank}"
        for step, metrics in enumerate(mine["metrics"]):
            for name in ("loss", "grad_norm", "tokens"):
                key = next(key for key in metrics if key.endswith("/" + name))
                mean, reference = (m[key][0] / m[key][1] for m in (metrics, expected["metrics"][step]))
                assert abs(mean - reference) <= tolerance * abs(reference) + 1e-7, (
                    f"{key} at step {step} on rank {rank}"
                )


def offsets(batch: Batch) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(batch.lengths)])
