"""The real models that plans, layouts and resharding are checked for: their published configs, no weights.

Legend: none.
"""

from __future__ import annotations

import math

from docklands.models.config import MlaConfig, ModelConfig, MoeConfig
from docklands.models.params import table_for
from docklands.registry import Registry


def _qwen2(layers: int, size: int, heads: int, kv_heads: int, width: int) -> ModelConfig:
    """Qwen2.5-Instruct (arXiv 2412.15115)."""
    return ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=152064,
        hidden_size=size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        intermediate_size=width,
        rope_theta=1e6,
        qkv_bias=True,
        max_positions=32768,
        eos_ids=(151645,),
        bos_id=151643,
    )


def _qwen3(layers: int, size: int, heads: int, kv_heads: int, width: int, moe: MoeConfig | None = None) -> ModelConfig:
    """Qwen3 (arXiv 2505.09388)."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM" if moe is None else "Qwen3MoeForCausalLM",
        vocab_size=151936,
        hidden_size=size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        intermediate_size=width,
        rope_theta=1e6,
        qk_norm=True,
        max_positions=40960,
        eos_ids=(151645,),
        bos_id=151643,
        moe=moe,
    )


DEEPSEEK_R1 = ModelConfig(
    architecture="DeepseekV3ForCausalLM",
    vocab_size=129280,
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    intermediate_size=18432,
    rope_theta=10000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    max_positions=163840,
    eos_ids=(1,),
    bos_id=0,
    moe=MoeConfig(
        experts=256,
        top_k=8,
        expert_size=2048,
        shared_size=2048,
        scoring="sigmoid",
        scale=2.5,
        groups=8,
        top_groups=4,
        first_dense=3,
    ),
    mla=MlaConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    mtp_layers=1,
)
"""arXiv 2501.12948 and 2412.19437."""

catalog: Registry[ModelConfig] = Registry("model")
for _name, _config in {
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144, MoeConfig(experts=128, top_k=8, expert_size=768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 12288, MoeConfig(experts=128, top_k=8, expert_size=1536)),
    "deepseek-r1-671b": DEEPSEEK_R1,
}.items():
    catalog.add(_name)(_config)


def active_params(config: ModelConfig) -> int:
    """Parameters that one token goes through: of the routed experts only top_k; tied ones once."""
    total = 0
    for spec in table_for(config).stored():
        size = math.prod(spec.shape)
        total += size // spec.experts * config.moe.top_k if spec.experts and config.moe else size
    return total
