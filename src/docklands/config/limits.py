"""Values that are each allowed but make no sense where they stand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docklands.config.schema import Config

COLDEST = 0.01
"""Lowest sampling temperature: logits divided by less leave one token a chance, and in the end overflow."""


def check_values(config: Config) -> None:
    """ValueError that begins with the key at fault."""
    if Path(config.run.name).is_absolute() or ".." in Path(config.run.name).parts:
        raise ValueError(f"run.name: {config.run.name} leads out of run.dir")
    if not Path(config.run.name).parts:
        raise ValueError(f"run.name: {config.run.name!r} names no directory below run.dir")
    check_sampling(config)
    check_lora(config)
    saves = "recompute: full" if config.train.recompute == "full" else "activation_offload"
    if config.layout.schedule == "zero_bubble" and (
        config.train.recompute == "full" or config.train.activation_offload
    ):
        raise ValueError(
            f"layout.schedule: zero_bubble keeps the input of every product until its weight gradient is made, so "
            f"train.{saves} would spare nothing; layout.schedule: 1f1b"
        )
    functions = config.reward.functions
    if functions and not any(item.weight for item in functions):
        raise ValueError("reward.functions: every weight is 0, so every sample would earn the same")
    if config.env.name == "single_turn" and any(item.name == "env" for item in functions):
        raise ValueError("reward.functions: env is what the environment paid; env.name: single_turn pays nothing")


def check_lora(config: Config) -> None:
    """Keys of adapters that there are none of, and what adapters do not go with."""
    lora, plain = config.lora, type(config.lora)()
    if not lora.rank:
        for key in type(lora).model_fields:
            if getattr(lora, key) != getattr(plain, key):
                raise ValueError(f"lora.{key}: is set, but lora.rank is 0: all weights are trained; set lora.rank: 16")
        return
    if lora.dropout:
        raise ValueError(
            f"lora.dropout: {lora.dropout:g}; only 0: with dropout the trainer's log-probs are not the generator's"
        )
    if not lora.targets:
        raise ValueError("lora.targets: is empty, so nothing would be trained; all-linear, or names such as q_proj")
    if config.algorithm.name == "ppo":
        raise ValueError(
            f"lora.rank: {lora.rank}, but algorithm.name: ppo trains a critic, whose value head has no adapter; "
            "grpo and its kind need none"
        )
    if config.train.router.bias_update_rate:
        raise ValueError("train.router.bias_update_rate: moves the routers, but with lora.rank the base rests; set 0")
    if lora.publish == "adapter" and config.sync.swap != "none":
        raise ValueError(
            f"lora.publish: adapter keeps the base with the generators, but sync.swap: {config.sync.swap} empties them "
            "after each generation; lora.publish: merged"
        )
    if lora.publish == "adapter" and config.sync.quantized:
        raise ValueError("lora.publish: adapter sends no matrices that sync.transfer_dtype could round; leave it auto")


def check_sampling(config: Config) -> None:
    """Training samples are drawn from what the trainer computes, undistorted; held-out samples differ."""
    if config.rollout.min_response_tokens:
        raise ValueError(
            "rollout.min_response_tokens: keeping a sequence from ending truncates what is sampled; the trainer does "
            "not truncate"
        )
    if config.rollout.top_k or config.rollout.top_p != 1:
        raise ValueError("rollout.top_k/top_p: truncated sampling is for evaluation; the trainer does not truncate")
    if config.rollout.temperature < COLDEST:
        raise ValueError(
            f"rollout.temperature: {config.rollout.temperature:g} (greedy) gives a group of equal samples; "
            "use eval.temperature"
        )
    if 0 < config.eval.temperature < COLDEST:
        raise ValueError(f"eval.temperature: {config.eval.temperature:g} is below {COLDEST}; 0 is greedy")
    if config.eval.prompts and config.eval.samples_per_prompt > 1 and not config.eval.temperature:
        raise ValueError(
            f"eval.temperature: 0 (greedy) makes {config.eval.samples_per_prompt} equal samples of a prompt; "
            "raise it, or set eval.samples_per_prompt: 1"
        )
