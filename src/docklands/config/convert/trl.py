"""TRL's GRPOConfig (with the TrainingArguments below it) as ours."""

from __future__ import annotations

import json
from typing import Any

from docklands.config.convert.base import (
    Given,
    System,
    drop,
    flag,
    keep_readable,
    lack,
    number,
    one_of,
    put_budget,
    put_warmup,
    rule,
    text,
    to,
    whole,
)
from docklands.errors import ConfigError

LOSSES = {
    "grpo": ("grpo", "sequence_mean"),
    "bnpo": ("grpo", "token_mean"),
    "dapo": ("grpo", "token_mean"),
    "dr_grpo": ("dr_grpo", None),
    "cispo": ("cispo", None),
}
"""loss_type -> algorithm, aggregation. TRL's dapo is a denominator; the filter of groups is another matter."""

CORRECTIONS = {
    "token_truncate": "token_tis",
    "token_mask": "token_mask",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mask",
}


def seconds_or_steps(value: Any) -> str:
    return str(value)


def report_to(value: Any) -> list[str]:
    """A word or a list of words. ValueError."""
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("expected words")
    return words


def combine(given: Given) -> None:
    """What several keys say together."""
    loss = given.get("loss_type", text)
    if loss not in LOSSES:
        raise ConfigError(f"loss_type: {loss} has no counterpart", f"known: {', '.join(LOSSES)}")
    algorithm, aggregation = LOSSES[loss]
    if given.get("importance_sampling_level", text, "token") == "sequence":
        algorithm, aggregation = "gspo", None
    given.put("algorithm.name", algorithm)
    if aggregation:
        given.put("algorithm.aggregation", aggregation)
    put_batch(given)
    low = given.get("epsilon", number)
    given.put("algorithm.clip_low", low if algorithm != "cispo" else None)
    high = given.get("epsilon_high", number, low)
    given.put("algorithm.clip_high", high if algorithm != "cispo" else given.get("epsilon_high", number))
    scale = given.get("scale_rewards", lambda value: value, "group")
    if scale in (True, False, "group", "none"):
        given.put("algorithm.normalize_std", scale in (True, "group"))
    else:
        given.refuse("scale_rewards", f"{scale}: ours scales by group, or not")
    if given.get("beta", number, 0.0):
        given.put("algorithm.kl.coef", given.get("beta", number))
        given.put("algorithm.kl.estimator", "k3")
    put_correction(given)
    put_run(given)
    put_rewards(given)
    if not given.ours.get("algorithm.overlong_buffer_tokens"):
        put_budget(given, None)
    keep_readable(given, algorithm)


def put_batch(given: Given) -> None:
    """Samples of a step: what is generated at once; of an update: what one optimizer step sees. Both over processes."""
    world, group = given.get("num_processes", whole, 1), given.get("num_generations", whole)
    each = given.get("per_device_train_batch_size", whole) * world
    accumulate = given.get("gradient_accumulation_steps", whole)
    update = each * accumulate
    step = given.get("generation_batch_size", whole, each * given.get("steps_per_generation", whole, accumulate))
    if step % group:
        raise ConfigError(
            f"generation_batch_size: {step} samples are no multiple of num_generations {group}",
            "it is per_device_train_batch_size x num_processes x steps_per_generation; num_processes is a key too",
        )
    given.put("rollout.prompts_per_step", step // group)
    given.put("rollout.samples_per_prompt", group)
    if update < step:
        given.put("algorithm.samples_per_update", update)
    elif update > step:
        given.refuse("gradient_accumulation_steps", f"an update of {update} samples over several steps of {step}")
    if world > 1:
        given.put("layout.fsdp" if given.has("fsdp") or given.has("deepspeed") else "layout.dp", world)


def put_correction(given: Given) -> None:
    """Importance sampling between vLLM and the trainer."""
    if not (given.get("use_vllm", flag, False) and given.get("vllm_importance_sampling_correction", flag, True)):
        return
    mode = given.get("vllm_importance_sampling_mode", text, "sequence_mask")
    if mode not in CORRECTIONS:
        given.refuse("vllm_importance_sampling_mode", f"{mode}: choose algorithm.correction.mode")
        return
    given.put("algorithm.correction.mode", CORRECTIONS[mode])
    most = given.get(
        "vllm_importance_sampling_clip_max", number, given.get("vllm_importance_sampling_cap", number, 3.0)
    )
    given.put("algorithm.correction.max_ratio", most)
    if mode.endswith("mask"):
        given.put("algorithm.correction.min_ratio", given.get("vllm_importance_sampling_clip_min", number))


def put_run(given: Given) -> None:
    """Length, schedule, saving, evaluation, logging."""
    steps = given.get("max_steps", whole, -1)
    passes = given.ours.get("rollout.prompts_per_step", 1)
    if steps > 0:
        update = given.ours.get("algorithm.samples_per_update")
        per_step = (passes * given.ours["rollout.samples_per_prompt"] // update if update else 1) * given.get(
            "num_iterations", whole, 1
        )
        given.put("run.steps", max(1, steps // per_step))
    else:
        given.put("data.epochs", max(1, round(given.get("num_train_epochs", number, 3.0))))
        given.put("run.steps", 1_000_000)
    warmup = given.get("warmup_steps", number, 0.0)
    ratio = given.get("warmup_ratio", number, warmup if 0 < warmup < 1 else 0.0)
    put_warmup(given, ratio, whole(warmup) if warmup >= 1 else None, given.ours["run.steps"] if steps > 0 else None)
    given.put("train.optim.betas", [given.get("adam_beta1", number, 0.9), given.get("adam_beta2", number, 0.999)])
    if given.get("save_strategy", seconds_or_steps, "steps") == "steps":
        given.put("checkpoint.every_steps", given.get("save_steps", whole))
    if given.get("eval_strategy", seconds_or_steps, "no") == "steps":
        given.put("eval.every_steps", given.get("eval_steps", whole, given.get("logging_steps", whole)))
    loggers = given.get("report_to", report_to, [])
    if "wandb" in loggers:
        given.put("obs.wandb", given.get("project", text, "trl"))
    if "tensorboard" in loggers:
        given.put("obs.tensorboard", True)
    other = [word for word in loggers if word not in ("wandb", "tensorboard", "none")]
    if other:
        given.refuse("report_to", f"{', '.join(other)}: read metrics.jsonl of the run directory")


def put_rewards(given: Given) -> None:
    """Functions of the command line (`reward_funcs`), with their weights."""
    names = given.get("reward_funcs", report_to, [])
    weights = given.get("reward_weights", lambda value: [number(x) for x in value], [1.0] * len(names))
    if names and len(names) != len(weights):
        raise ConfigError(f"reward_weights: {len(weights)} weights for {len(names)} functions")
    known = {"accuracy_reward": "math_verify", "reasoning_accuracy_reward": "math_verify"}
    functions = []
    for name, weight in zip(names, weights):
        ours = known.get(name) or (":".join(name.rsplit(".", 1)) if "." in name and ":" not in name else name)
        if ours in known.values() or ":" in ours:
            functions.append({"name": ours, "weight": weight})
    if functions:
        given.put("reward.functions", functions)
    if len(functions) < len(names):
        given.refuse("reward_funcs", "name each as module:function or path/to/file.py:function in reward.functions")


MAPPED = (
    rule(
        "loss_type", "algorithm.name algorithm.aggregation", "grpo sequence_mean; bnpo, dapo token_mean; dr_grpo; cispo"
    ),
    rule("importance_sampling_level", "algorithm.name", "sequence is gspo"),
    rule("per_device_train_batch_size", "rollout.prompts_per_step algorithm.samples_per_update", "x num_processes"),
    rule("gradient_accumulation_steps", "algorithm.samples_per_update rollout.prompts_per_step", ""),
    rule("steps_per_generation", "rollout.prompts_per_step", ""),
    rule("generation_batch_size", "rollout.prompts_per_step", "divided by num_generations"),
    rule("num_generations", "rollout.samples_per_prompt", ""),
    rule("num_processes", "layout.dp layout.fsdp rollout.prompts_per_step", "accelerate's; write it into the file"),
    to("num_iterations", "algorithm.epochs_per_step", whole),
    to("max_prompt_length", "data.max_prompt_tokens", whole),
    to("max_completion_length", "rollout.max_response_tokens", whole),
    to("temperature", "rollout.temperature", number),
    rule("epsilon", "algorithm.clip_low algorithm.clip_high", ""),
    rule("epsilon_high", "algorithm.clip_high", "absent: epsilon"),
    to("delta", "algorithm.dual_clip", number),
    rule("beta", "algorithm.kl.coef algorithm.kl.estimator", "k3, in the loss"),
    to("entropy_coef", "algorithm.entropy_coef", number),
    rule("scale_rewards", "algorithm.normalize_std", "true, group; false, none"),
    rule("reward_weights", "reward.functions", ""),
    rule("reward_funcs", "reward.functions", "of the command line; a dotted path becomes module:function"),
    to("learning_rate", "train.optim.lr", number),
    to(
        "lr_scheduler_type",
        "train.optim.schedule",
        one_of({s: s for s in ("constant", "linear", "cosine")} | {"constant_with_warmup": "constant"}),
    ),
    rule("warmup_steps", "train.optim.warmup_updates", "below 1: a fraction of max_steps"),
    rule("warmup_ratio", "train.optim.warmup_updates", "of max_steps"),
    to("weight_decay", "train.optim.weight_decay", number, "ours decays matrices only"),
    rule("adam_beta1", "train.optim.betas", ""),
    rule("adam_beta2", "train.optim.betas", ""),
    to("adam_epsilon", "train.optim.eps", number),
    to("max_grad_norm", "train.optim.grad_clip", number),
    rule("max_steps", "run.steps", "it counts optimizer steps, ours counts generations"),
    rule("num_train_epochs", "data.epochs", "the end of the data ends the run"),
    to("seed", "run.seed", whole),
    to("output_dir", "run.dir", text),
    to("run_name", "run.name", text),
    rule("project", "obs.wandb", "with report_to wandb"),
    rule("report_to", "obs.wandb obs.tensorboard", ""),
    to("bf16", "train.dtype", one_of({True: "bfloat16", False: "float32"})),
    to("gradient_checkpointing", "train.recompute", one_of({True: "full", False: "none"})),
    to("use_cpu", "run.device", one_of({True: "cpu", False: "auto"})),
    rule("save_steps", "checkpoint.every_steps", "with save_strategy steps"),
    rule("save_strategy", "checkpoint.every_steps", ""),
    to("save_total_limit", "checkpoint.keep", whole),
    rule("eval_strategy", "eval.every_steps", "steps; set eval.prompts too"),
    rule("eval_steps", "eval.every_steps", "with eval_strategy steps"),
    to("eval_on_start", "eval.before", flag),
    to("num_generations_eval", "eval.samples_per_prompt", whole),
    to("shuffle_dataset", "data.shuffle", flag),
    to("model_name_or_path", "model.path", text),
    to("dataset_name", "data.source", text, "a directory or file: download it first"),
    to("vllm_tensor_parallel_size", "rollout.layout.tp", whole),
    to("router_aux_loss_coef", "train.router.aux_loss_coef", number),
    rule("vllm_importance_sampling_correction", "algorithm.correction.mode", "with use_vllm"),
    rule(
        "vllm_importance_sampling_mode",
        "algorithm.correction.mode",
        json.dumps(CORRECTIONS).strip("{}").replace('"', ""),
    ),
    rule("vllm_importance_sampling_clip_max", "algorithm.correction.max_ratio", ""),
    rule("vllm_importance_sampling_cap", "algorithm.correction.max_ratio", "the older name"),
    rule("vllm_importance_sampling_clip_min", "algorithm.correction.min_ratio", "of the masks"),
    rule("fsdp", "layout.fsdp", "num_processes shards"),
    rule("deepspeed", "layout.fsdp", "num_processes shards"),
)

UNNEEDED = (
    *drop(
        "generation is native; rollout.engine: vllm runs vLLM in the process, see docs/howto/vllm.md",
        "use_vllm use_transformers_*",
    ),
    *drop(
        "generation is native; rollout.engine: vllm runs vLLM in the process, see docs/howto/vllm.md",
        "vllm_mode vllm_server_* vllm_group_port vllm_model_impl",
    ),
    *drop("the engine sizes itself: rollout.max_batch", "vllm_gpu_memory_utilization vllm_max_model_len*"),
    *drop("`sync.swap` says what leaves the device", "vllm_enable_sleep_mode transformers_continuous_batching_config"),
    *drop("tensors are always packed", "pad_to_multiple_of average_tokens_across_devices train_sampling_strategy"),
    *drop("every column of a row reaches the reward", "remove_unused_columns label_names length_column_name"),
    *drop("weights go by the plan of sync", "ds3_gather_for_generation cache_implementation use_cache"),
    *drop("no dropout anywhere", "disable_dropout"),
    *drop("logits and log-probs are float32", "cast_lm_head_to_fp32 fp16_full_eval bf16_full_eval tf32"),
    *drop("the kernels floor picks fused kernels by device", "use_liger_kernel liger_kernel_config"),
    *drop("one optimizer: AdamW with float32 masters", "gradient_checkpointing_kwargs activation_checkpointing*"),
    *drop("every step is logged, in metrics.jsonl", "logging_* log_level* log_on_each_node disable_tqdm include_*"),
    *drop(
        "samples are in samples/ of the run directory", "log_completions log_unique_prompts num_completions_to_print"
    ),
    *drop(
        "evaluation samples with rollout's batches",
        "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches",
    ),
    *drop(
        "evaluation samples with rollout's batches", "eval_accumulation_steps eval_use_gather_object batch_eval_metrics"
    ),
    *drop("prompts are keyed by run.seed", "data_seed dataloader_* full_determinism ignore_data_skip"),
    *drop(
        "processes are layout's",
        "ddp_* fsdp_config accelerator_config parallelism_config local_rank auto_find_batch_size",
    ),
    *drop(
        "`docklands train --resume`",
        "resume_from_checkpoint save_only_model save_on_each_node do_train do_eval do_predict",
    ),
    *drop("`docklands train --resume`", "restore_callback_states_from_checkpoint enable_jit_checkpoint"),
    *drop("memory and time are always measured", "skip_memory_metrics debug torch_empty_cache_steps"),
    *drop("stays on this machine", "push_to_hub hub_* trackio_* log_completions_hub_repo log_multimodal"),
    *drop("no remote code is run", "trust_remote_code"),
    *drop("ours keeps the KL term unbiased by itself", "use_bias_correction_kl"),
    *drop("read from config.json", "dtype torch_dtype attn_implementation model_revision"),
    *drop(
        "the splits are data.source and eval.source",
        "dataset_train_split dataset_test_split dataset_config dataset_streaming",
    ),
)

UNSUPPORTED = (
    *lack("the trainer does not truncate, so samples may not", "top_p top_k min_p", 1, 0, -1),
    *lack("the trainer would not apply it", "repetition_penalty", 1),
    *lack("set what it says under rollout", "generation_kwargs vllm_structured_outputs_regex"),
    *lack("write the template into the tokenizer", "chat_template_kwargs chat_template_path"),
    *lack("set what it says under model", "model_init_kwargs"),
    *lack(
        "truncated samples are trained; algorithm.overlong_buffer_tokens penalises them",
        "mask_truncated_completions",
        False,
    ),
    *lack("the reference stays as it was", "sync_ref_model", False),
    *lack("the reference stays as it was", "ref_model_mixup_alpha ref_model_sync_steps", 0.6, 512),
    *lack("all tokens are trained", "top_entropy_quantile", 1.0),
    *lack("a fixed entropy bonus: algorithm.entropy_coef", "use_adaptive_entropy", False),
    *lack("with use_adaptive_entropy", "entropy_coef_* entropy_target", 0.0, 1.0, 0.005, 0.2),
    *lack("rewards are summed, then normalised", "multi_objective_aggregation", "sum_then_normalize"),
    *lack("algorithm.correction has masks", "off_policy_mask_threshold"),
    *lack("only with its loss", "sapo_* vespo_*", 1.05, 1.0, 2.0, 3.0),
    *lack("write an environment: env.max_turns", "max_tool_calling_iterations"),
    *lack("AdamW only", "optim optim_args optim_target_modules", "adamw_torch", "adamw_torch_fused"),
    *lack("bfloat16 or float32", "fp16", False),
    *lack("constant, linear or cosine to train.optim.min_lr_fraction", "lr_scheduler_kwargs"),
    *lack("nothing is compiled", "torch_compile torch_compile_backend torch_compile_mode", False),
    *lack("write lora.rank, alpha and targets: docs/howto/lora.md", "use_peft lora_* load_in_*", False),
    *lack("not there", "label_smoothing_factor neftune_noise_alpha load_best_model_at_end", 0, 0.0, False),
    *lack("best is what evals.jsonl says", "metric_for_best_model greater_is_better eval_delay"),
)

TRL = System(
    name="trl",
    title="TRL",
    source="GRPOConfig and TrainingArguments (trl 1.16, transformers 5)",
    keys=(*MAPPED, *UNNEEDED, *UNSUPPORTED),
    combine=combine,
    defaults={
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "max_completion_length": 512,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "learning_rate": 1e-6,
        "weight_decay": 0.0,
        "lr_scheduler_type": "linear",
        "save_steps": 500,
        "bf16": True,
        "gradient_checkpointing": True,
    },
)
