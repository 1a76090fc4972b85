"""verl's hydra keys (actor_rollout_ref.*, data.*, algorithm.*, critic.*, trainer.*) as ours."""

from __future__ import annotations

from typing import Any

from docklands.config.convert.base import (
    Given,
    System,
    flag,
    keep_readable,
    number,
    one_of,
    put_budget,
    put_warmup,
    rule,
    same,
    text,
    to,
    whole,
)
from docklands.config.convert.verl_rest import UNNEEDED, UNSUPPORTED
from docklands.errors import ConfigError

ADVANTAGES = {
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
}
LOSSES = {"vanilla": "", "gspo": "gspo", "cispo": "cispo"}
AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
A, R, T = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"
SCHEDULE = one_of({"constant": "constant", "cosine": "cosine", "linear": "linear"})


def path(value: Any) -> str:
    """One file, also as a list of one. ValueError."""
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError("expected one file: join them, ours reads one source")
        value = value[0]
    return text(value)


def combine(given: Given) -> None:
    """What several keys say together."""
    estimator = given.get("algorithm.adv_estimator", text)
    if estimator not in ADVANTAGES:
        raise ConfigError(f"algorithm.adv_estimator: {estimator} has no counterpart", f"known: {', '.join(ADVANTAGES)}")
    loss = given.get(f"{A}.policy_loss.loss_mode", text, "vanilla")
    if loss not in LOSSES:
        raise ConfigError(f"{A}.policy_loss.loss_mode: {loss} has no counterpart", f"known: {', '.join(LOSSES)}")
    algorithm = LOSSES[loss] or ADVANTAGES[estimator]
    if algorithm == "grpo" and given.get("algorithm.filter_groups.enable", flag, False):
        algorithm = "dapo"
    given.put("algorithm.name", algorithm)
    put_batch(given)
    put_loss(given, algorithm)
    put_kl(given)
    put_layout(given)
    put_rewards(given)
    put_budget(given, given.get(f"{A}.ppo_max_token_len_per_gpu", whole))
    put_optimizers(given)
    put_run(given)
    keep_readable(given, algorithm)


def put_batch(given: Given) -> None:
    """train_batch_size and ppo_mini_batch_size both count prompts."""
    prompts, n = given.get("data.train_batch_size", whole), given.get(f"{R}.n", whole)
    given.put("rollout.prompts_per_step", prompts)
    given.put("rollout.samples_per_prompt", n)
    mini = given.get(f"{A}.ppo_mini_batch_size", whole)
    if mini < prompts:
        given.put("algorithm.samples_per_update", mini * n)
    rounds = given.get("algorithm.filter_groups.max_num_gen_batches", whole, 0)
    if given.ours["algorithm.name"] == "dapo" and rounds > 0:
        given.put("algorithm.max_dropped_groups", rounds * given.get("data.gen_batch_size", whole, prompts))


def put_loss(given: Given, algorithm: str) -> None:
    """Clip bounds, aggregation, the penalty of overlong responses."""
    both = given.get(f"{A}.clip_ratio", number, 0.2)
    given.put("algorithm.clip_low", given.get(f"{A}.clip_ratio_low", number, both))
    given.put("algorithm.clip_high", given.get(f"{A}.clip_ratio_high", number, both))
    if algorithm not in ("gspo", "cispo", "rloo"):
        given.put("algorithm.dual_clip", given.get(f"{A}.clip_ratio_c", number))
    mode = given.get(f"{A}.loss_agg_mode", text, "token-mean")
    if mode in AGGREGATION:
        given.put("algorithm.aggregation", AGGREGATION[mode])
    else:
        given.refuse(f"{A}.loss_agg_mode", f"{mode}: choose algorithm.aggregation")
    if given.get("reward_model.overlong_buffer.enable", flag, False):
        given.put("algorithm.overlong_buffer_tokens", given.get("reward_model.overlong_buffer.len", whole, 0))
        given.put("algorithm.overlong_penalty", given.get("reward_model.overlong_buffer.penalty_factor", number, 1.0))


def put_kl(given: Given) -> None:
    """In the loss or in the reward, with its own names there."""
    in_loss = given.get(f"{A}.use_kl_loss", flag, False)
    in_reward = given.get("algorithm.use_kl_in_reward", flag, False)
    if in_loss and in_reward:
        given.refuse("algorithm.use_kl_in_reward", "KL is in the loss already; ours has it in one place")
    if in_loss:
        coef, kind = f"{A}.kl_loss_coef", f"{A}.kl_loss_type"
    elif in_reward:
        coef, kind = "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
    else:
        return
    given.put("algorithm.kl.coef", given.get(coef, number, 0.001))
    given.put("algorithm.kl.where", "loss" if in_loss else "reward")
    estimator = given.get(kind, text, "low_var_kl" if in_loss else "kl").rstrip("+")
    if estimator in ESTIMATORS:
        given.put("algorithm.kl.estimator", ESTIMATORS[estimator])
    else:
        given.refuse(kind, f"{estimator}: choose algorithm.kl.estimator k1, k2 or k3; k3 is taken")
    if in_reward and not in_loss and given.get("algorithm.kl_ctrl.type", text, "fixed") == "adaptive":
        given.put("algorithm.kl.target", given.get("algorithm.kl_ctrl.target_kl", number, 0.1))
        given.put("algorithm.kl.horizon", given.get("algorithm.kl_ctrl.horizon", whole, 10000))


def put_layout(given: Given) -> None:
    """FSDP over what tp, pp and cp leave; Megatron's degrees where they are given."""
    degrees = {
        "tp": given.get(f"{A}.megatron.tensor_model_parallel_size", whole, 1),
        "pp": given.get(f"{A}.megatron.pipeline_model_parallel_size", whole, 1),
        "cp": given.get(f"{A}.megatron.context_parallel_size", whole, 1)
        * given.get(f"{A}.ulysses_sequence_parallel_size", whole, 1),
    }
    experts = given.get(f"{A}.megatron.expert_model_parallel_size", whole, 1)
    tensor = given.get(f"{A}.megatron.expert_tensor_parallel_size", whole, degrees["tp"])
    devices = given.get(f"{T}.nnodes", whole, 1) * given.get(f"{T}.n_gpus_per_node", whole, 8)
    inner = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if devices % inner:
        raise ConfigError(f"{T}.nnodes x n_gpus_per_node: {devices} devices are no multiple of tp x pp x cp = {inner}")
    for name, value in degrees.items():
        if value > 1:
            given.put(f"layout.{name}", value)
    if experts > 1:
        given.put("layout.ep", experts)
        given.put("layout.etp", tensor)
    if devices > inner:
        replicas, group = devices // inner, given.get(f"{A}.fsdp_config.fsdp_size", whole, -1)
        sharded = group if 0 < group < replicas and replicas % group == 0 else replicas
        given.put("layout.fsdp", sharded)
        if sharded < replicas:
            given.put("layout.dp", replicas // sharded)
    for ours, theirs in (("tp", "tensor_model_parallel_size"), ("ep", "expert_parallel_size")):
        if given.get(f"{R}.{theirs}", whole, 1) > 1:
            given.put(f"rollout.layout.{ours}", given.get(f"{R}.{theirs}", whole))
    part = "fsdp_config" if not given.has(f"{A}.megatron.param_offload") else "megatron"
    if given.get(f"{A}.{part}.param_offload", flag, False) or given.get(f"{A}.{part}.optimizer_offload", flag, False):
        given.put("sync.swap", "host")


def put_rewards(given: Given) -> None:
    """A file and a function of theirs are a reward of ours as they are: compute_score is accepted."""
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        if given.has(f"{section}.path"):
            name = given.get(f"{section}.name", text, "compute_score")
            given.put("reward.functions", [{"name": f"{given.get(f'{section}.path', text)}:{name}"}])


def put_optimizers(given: Given) -> None:
    """Of the actor and of the critic."""
    for theirs, ours in ((f"{A}.optim", "train.optim"), ("critic.optim", "critic.optim")):
        schedule = given.get(f"{theirs}.lr_scheduler_type", SCHEDULE, given.get(f"{theirs}.warmup_style", SCHEDULE))
        schedule = given.get(f"{theirs}.lr_decay_style", SCHEDULE, schedule)
        given.put(f"{ours}.schedule", schedule)
        if schedule not in (None, "constant"):
            given.put(f"{ours}.min_lr_fraction", given.get(f"{theirs}.min_lr_ratio", number))
        weights = given.get(f"{theirs}.betas", same)
        given.put(f"{ours}.betas", weights)
    ratio, updates = (
        given.get(f"{A}.optim.lr_warmup_steps_ratio", number),
        given.get(f"{A}.optim.lr_warmup_steps", whole),
    )
    put_warmup(given, ratio, updates, given.get(f"{T}.total_training_steps", whole))


def put_run(given: Given) -> None:
    """Length, saving, evaluation, logging."""
    steps = given.get(f"{T}.total_training_steps", whole)
    if steps:
        given.put("run.steps", steps)
        epochs = f"{T}.total_epochs"
        if given.has(epochs):
            given.remarks[epochs] = ("not needed", "total_training_steps says where the run ends")
    else:
        given.put("data.epochs", given.get(f"{T}.total_epochs", whole))
        given.put("run.steps", 1_000_000)
    for name, ours in ((f"{T}.save_freq", "checkpoint.every_steps"), (f"{T}.test_freq", "eval.every_steps")):
        every = given.get(name, whole, -1)
        if every > 0:
            given.put(ours, every)
    loggers = given.get(f"{T}.logger", lambda v: v if isinstance(v, list) else [v], [])
    if "wandb" in loggers:
        given.put("obs.wandb", given.get(f"{T}.project_name", text, "verl"))
    if "tensorboard" in loggers:
        given.put("obs.tensorboard", True)
    other = [str(name) for name in loggers if name not in ("wandb", "tensorboard", "console")]
    if other:
        given.refuse(f"{T}.logger", f"{', '.join(other)}: read metrics.jsonl of the run directory")


MAPPED = (
    rule("algorithm.adv_estimator", "algorithm.name", "grpo, gae ppo, rloo, reinforce_plus_plus reinforce_pp"),
    rule(f"{A}.policy_loss.loss_mode", "algorithm.name", "vanilla, gspo, cispo"),
    rule("algorithm.filter_groups.enable", "algorithm.name", "grpo with the filter is dapo"),
    rule("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_dropped_groups", "times the batch; 0: ours"),
    rule("data.gen_batch_size", "algorithm.max_dropped_groups", "prompts come one by one as slots become free"),
    to("algorithm.gamma", "algorithm.gamma", number),
    to("algorithm.lam", "algorithm.lam", number),
    to("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_std", flag),
    rule("algorithm.use_kl_in_reward", "algorithm.kl.where", "reward"),
    rule("algorithm.kl_penalty", "algorithm.kl.estimator", "kl k1, mse k2, low_var_kl k3"),
    rule("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coef", "with use_kl_in_reward"),
    rule("algorithm.kl_ctrl.type", "algorithm.kl.target", "adaptive sets the target"),
    rule("algorithm.kl_ctrl.target_kl", "algorithm.kl.target", "with type adaptive"),
    rule("algorithm.kl_ctrl.horizon", "algorithm.kl.horizon", "with type adaptive"),
    to("data.train_files", "data.source", path),
    to("data.val_files", "eval.source", path, "set eval.prompts too: 0 evaluates nothing"),
    to("data.prompt_key", "data.prompt_key", text),
    to("data.max_prompt_length", "data.max_prompt_tokens", whole),
    to("data.max_response_length", "rollout.max_response_tokens", whole),
    rule("data.train_batch_size", "rollout.prompts_per_step", "it counts prompts"),
    to("data.shuffle", "data.shuffle", flag),
    to("data.seed", "run.seed", whole),
    to("data.filter_overlong_prompts", "data.overlong", one_of({True: "drop", False: "error"})),
    to("data.truncation", "data.overlong", one_of({"error": "error", "left": "truncate_left"}), "right, middle: no"),
    to("actor_rollout_ref.model.path", "model.path", text),
    to("actor_rollout_ref.model.tokenizer_path", "model.tokenizer", text),
    to("data.tokenizer", "model.tokenizer", text),
    to(
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "train.recompute",
        one_of({True: "full", False: "none"}),
    ),
    to("actor_rollout_ref.model.enable_activation_offload", "train.activation_offload", flag),
    rule(f"{A}.ppo_mini_batch_size", "algorithm.samples_per_update", "it counts prompts: times rollout.n"),
    to(f"{A}.ppo_epochs", "algorithm.epochs_per_step", whole),
    rule(f"{A}.ppo_max_token_len_per_gpu", "train.tokens_per_microbatch", "at least the longest sample"),
    rule(f"{A}.clip_ratio", "algorithm.clip_low algorithm.clip_high", ""),
    rule(f"{A}.clip_ratio_low", "algorithm.clip_low", ""),
    rule(f"{A}.clip_ratio_high", "algorithm.clip_high", ""),
    rule(f"{A}.clip_ratio_c", "algorithm.dual_clip", ""),
    rule(f"{A}.loss_agg_mode", "algorithm.aggregation", ", ".join(f"{k} {v}" for k, v in AGGREGATION.items())),
    to(f"{A}.entropy_coeff", "algorithm.entropy_coef", number),
    rule(f"{A}.use_kl_loss", "algorithm.kl.where", "loss"),
    rule(f"{A}.kl_loss_coef", "algorithm.kl.coef", "with use_kl_loss"),
    rule(f"{A}.kl_loss_type", "algorithm.kl.estimator", "with use_kl_loss"),
    to(f"{A}.grad_clip", "train.optim.grad_clip", number),
    to(f"{A}.optim.clip_grad", "train.optim.grad_clip", number),
    to(f"{A}.optim.lr", "train.optim.lr", number),
    to(f"{A}.optim.weight_decay", "train.optim.weight_decay", number, "ours decays matrices only"),
    rule(f"{A}.optim.betas", "train.optim.betas", ""),
    rule(f"{A}.optim.warmup_style", "train.optim.schedule", ""),
    rule(f"{A}.optim.lr_scheduler_type", "train.optim.schedule", ""),
    rule(f"{A}.optim.lr_decay_style", "train.optim.schedule", ""),
    rule(f"{A}.optim.min_lr_ratio", "train.optim.min_lr_fraction", "where the rate decays"),
    rule(f"{A}.optim.lr_warmup_steps", "train.optim.warmup_updates", "negative: by the ratio"),
    rule(f"{A}.optim.lr_warmup_steps_ratio", "train.optim.warmup_updates", "of total_training_steps"),
    rule(f"{A}.fsdp_config.param_offload", "sync.swap", "training state waits on the host while its device generates"),
    rule(f"{A}.fsdp_config.optimizer_offload", "sync.swap", "likewise"),
    rule(f"{A}.fsdp_config.fsdp_size", "layout.fsdp layout.dp", "smaller groups: dp above them"),
    rule(f"{A}.ulysses_sequence_parallel_size", "layout.cp", ""),
    rule(f"{A}.megatron.tensor_model_parallel_size", "layout.tp", ""),
    rule(f"{A}.megatron.pipeline_model_parallel_size", "layout.pp", ""),
    rule(f"{A}.megatron.context_parallel_size", "layout.cp", ""),
    rule(f"{A}.megatron.expert_model_parallel_size", "layout.ep", ""),
    rule(f"{A}.megatron.expert_tensor_parallel_size", "layout.etp", "1 or tp"),
    rule(f"{A}.megatron.param_offload", "sync.swap", ""),
    rule(f"{A}.megatron.optimizer_offload", "sync.swap", ""),
    rule(f"{R}.n", "rollout.samples_per_prompt", ""),
    to(f"{R}.temperature", "rollout.temperature", number),
    to(f"{R}.dtype", "rollout.dtype", one_of({"bfloat16": "bfloat16", "float32": "float32"})),
    to(f"{R}.max_num_seqs", "rollout.max_batch", whole),
    rule(f"{R}.tensor_model_parallel_size", "rollout.layout.tp", ""),
    rule(f"{R}.expert_parallel_size", "rollout.layout.ep", ""),
    to(f"{R}.update_weights_bucket_megabytes", "sync.bucket_mib", number),
    to(f"{R}.val_kwargs.temperature", "eval.temperature", number),
    to(f"{R}.val_kwargs.top_p", "eval.top_p", number),
    to(f"{R}.val_kwargs.n", "eval.samples_per_prompt", whole),
    to("critic.model.path", "critic.path", text),
    to("critic.optim.lr", "critic.optim.lr", number),
    to("critic.optim.weight_decay", "critic.optim.weight_decay", number),
    rule("critic.optim.betas", "critic.optim.betas", ""),
    rule("critic.optim.warmup_style", "critic.optim.schedule", ""),
    rule("critic.optim.lr_scheduler_type", "critic.optim.schedule", ""),
    rule("critic.optim.lr_decay_style", "critic.optim.schedule", ""),
    rule("critic.optim.min_lr_ratio", "critic.optim.min_lr_fraction", "where the rate decays"),
    to("critic.grad_clip", "critic.optim.grad_clip", number),
    to("critic.cliprange_value", "algorithm.value_clip", number),
    to(f"{T}.critic_warmup", "algorithm.critic_warmup_steps", whole),
    *(rule(f"{s}custom_reward_function.path", "reward.functions", "path/to/file.py:name") for s in ("", "reward.")),
    *(rule(f"{s}custom_reward_function.name", "reward.functions", "") for s in ("", "reward.")),
    rule("reward_model.overlong_buffer.enable", "algorithm.overlong_buffer_tokens", ""),
    rule("reward_model.overlong_buffer.len", "algorithm.overlong_buffer_tokens", ""),
    rule("reward_model.overlong_buffer.penalty_factor", "algorithm.overlong_penalty", ""),
    rule(f"{T}.total_training_steps", "run.steps", ""),
    rule(f"{T}.total_epochs", "data.epochs", "the end of the data ends the run"),
    rule(f"{T}.nnodes", "layout.fsdp", "devices = nnodes x n_gpus_per_node"),
    rule(f"{T}.n_gpus_per_node", "layout.fsdp", "devices = nnodes x n_gpus_per_node"),
    rule(f"{T}.save_freq", "checkpoint.every_steps", "-1: at the end only"),
    rule(f"{T}.test_freq", "eval.every_steps", ""),
    to(f"{T}.max_actor_ckpt_to_keep", "checkpoint.keep", whole),
    to(f"{T}.val_before_train", "eval.before", flag),
    to(f"{T}.experiment_name", "run.name", text),
    rule(f"{T}.project_name", "obs.wandb", "with the logger wandb"),
    rule(f"{T}.logger", "obs.wandb obs.tensorboard", ""),
    to(f"{T}.default_local_dir", "run.dir", text),
    to(f"{T}.device", "run.device", one_of({"cuda": "cuda", "npu": "npu", "cpu": "cpu"})),
)

VERL = System(
    name="verl",
    title="verl",
    source="verl/trainer/config/ of github.com/volcengine/verl (ppo_trainer.yaml, ppo_megatron_trainer.yaml)",
    keys=(*MAPPED, *UNNEEDED, *UNSUPPORTED),
    combine=combine,
    defaults={
        "algorithm.adv_estimator": "gae",
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{A}.ppo_mini_batch_size": 256,
        f"{A}.clip_ratio": 0.2,
        f"{A}.clip_ratio_c": 3.0,
        f"{R}.n": 1,
        f"{R}.max_num_seqs": 1024,
        f"{R}.dtype": "bfloat16",
        f"{R}.tensor_model_parallel_size": 2,
        f"{T}.total_epochs": 30,
        f"{T}.nnodes": 1,
        f"{T}.n_gpus_per_node": 8,
    },
)
