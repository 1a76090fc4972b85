"""MindSpeed RL's YAML (megatron_training, actor_config, critic_config, rl_config, generate_config) as ours."""

from __future__ import annotations

from typing import Any

from docklands.config.convert.base import (
    Given,
    Key,
    System,
    flag,
    keep_readable,
    number,
    one_of,
    put_budget,
    put_warmup,
    rule,
    text,
    to,
    whole,
)
from docklands.config.convert.mindspeed_rl_rest import UNNEEDED, UNSUPPORTED
from docklands.errors import ConfigError

STAGES = {"ray_grpo": "grpo", "ray_dapo": "dapo", "ray_ppo": "ppo"}
VERIFIERS = {
    "base_acc": "math_verify",
    "acc": "math_verify",
    "math_acc": "math_verify",
    "acc_for_dapo": "math_verify",
    "acc_for_ppo": "math_verify",
}
ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
DECAY = one_of({"constant": "constant", "linear": "linear", "cosine": "cosine"})
CONTEXT = one_of({"ulysses_cp_algo": "ulysses", "megatron_cp_algo": "ring"})
PLACES = "rl_config.actor_resource.num_npus"


def alias(name: str) -> str:
    """actor_config inherits megatron_training: one list of Megatron's keys serves both."""
    section, _, rest = name.partition(".")
    return f"actor_config.{rest}" if section == "megatron_training" and rest else name


def combine(given: Given) -> None:
    """What several keys say together."""
    stage = given.get("actor_config.stage", text, "ray_grpo")
    if stage not in STAGES:
        raise ConfigError(f"megatron_training.stage: {stage} has no counterpart", f"known: {', '.join(STAGES)}")
    algorithm = STAGES[stage]
    given.put("algorithm.name", algorithm)
    put_layout(given)
    put_rewards(given)
    put_updates(given, algorithm)
    put_clip(given)
    put_kl(given)
    put_filter(given)
    put_optimizer(given)
    rl = "rl_config."
    sizes = ("update_max_packing_token_size", "max_packing_token_size")
    put_budget(given, next((given.get(rl + n, whole) for n in sizes if given.has(rl + n)), None))
    put_partial(given)
    if any(given.get(f"generate_config.offload_train_{part}", flag, False) for part in ("optimizer", "grad", "param")):
        given.put("sync.swap", "host")
    if given.get("rl_config.use_wandb", flag, False):
        given.put("obs.wandb", given.get("rl_config.wandb_project", text, "mindspeed_rl"))
    keep_readable(given, algorithm)


def put_layout(given: Given) -> None:
    """Ranks of training, and of generation on the same devices."""
    size = {n: given.get(f"actor_config.{n}", whole, 1) for n in SIZES}
    tp, pp, cp, ep = (size[name] for name in SIZES)
    extend = given.get("actor_config.moe_tp_extend_ep", flag, False)
    for ours, value in {"tp": tp, "pp": pp, "cp": cp}.items():
        given.put(f"layout.{ours}", value)
    if ep > 1 or extend:
        given.put("layout.ep", ep * tp if extend else ep)
        given.put("layout.etp", 1 if extend else tp)
    devices = given.get(PLACES, whole)
    if devices:
        if devices % (tp * pp * cp):
            raise ConfigError(f"{PLACES}: {devices} devices are no multiple of tp {tp} x pp {pp} x cp {cp}")
        sharded = given.get("actor_config.use_distributed_optimizer", flag, False)
        given.put("layout.fsdp" if sharded else "layout.dp", devices // (tp * pp * cp))
    for ours, name in {"tp": "infer_tensor_parallel_size", "ep": "infer_expert_parallel_size"}.items():
        if given.has(f"generate_config.{name}"):
            given.put(f"rollout.layout.{ours}", given.get(f"generate_config.{name}", whole))
    if given.has("rl_config.use_integrated_worker"):
        together = given.get("rl_config.use_integrated_worker", flag)
        given.put("fleet.placement", "colocated" if together else "disaggregated")


SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def put_rewards(given: Given) -> None:
    """Rule rewards by name; the data column that holds the answer."""
    name = "rl_config.verifier_function"
    asked = given.get(name, listed, [])
    weights = given.get("rl_config.verifier_weight", listed, [1.0] * len(asked))
    if len(weights) != len(asked):
        raise ConfigError(f"{name}: {len(asked)} functions, {len(weights)} weights")
    columns = given.get("actor_config.dataset_additional_keys", listed, []) or ["labels"]
    functions = [
        {"name": VERIFIERS[function], "weight": float(number(weight)), "args": {"column": str(columns[0])}}
        for function, weight in zip(asked, weights)
        if function in VERIFIERS
    ]
    if functions:
        given.put("reward.functions", functions)
    unknown = [str(function) for function in asked if function not in VERIFIERS]
    if unknown:
        given.refuse(name, f"write {', '.join(unknown)} as a reward: path/to/file.py:name in reward.functions")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def put_updates(given: Given, algorithm: str) -> None:
    """Prompts of a step and samples of an update: global_batch_size counts prompts, mini_batch_size samples."""
    prompts = given.get("actor_config.global_batch_size", whole)
    if given.get("rl_config.filter_groups_enable", flag, False):
        prompts = given.get("rl_config.filter_groups_train_batch_size", whole, prompts)
    if prompts:
        given.put("rollout.prompts_per_step", prompts)
    given.put("rollout.samples_per_prompt", given.get("rl_config.n_samples_per_prompt", whole))
    samples = (prompts or 16) * given.ours["rollout.samples_per_prompt"]
    mini = given.get("rl_config.mini_batch_size", whole)
    if mini and mini < samples:
        given.put("algorithm.samples_per_update", mini)
    if given.has("rl_config.token_level_loss"):
        by_token = given.get("rl_config.token_level_loss", flag)
        given.put("algorithm.aggregation", "token_mean" if by_token else "sequence_mean")


def put_clip(given: Given) -> None:
    """Clip bounds, and the penalty of overlong responses."""
    low = high = given.get("rl_config.clip_ratio", number)
    if given.get("rl_config.clip_higher_enable", flag, False):
        low, high = (given.get(f"rl_config.clip_ratio_{side}", number, low) for side in ("low", "high"))
    given.put("algorithm.clip_low", low)
    given.put("algorithm.clip_high", high)
    if given.get("rl_config.overlong_buffer_enable", flag, False):
        given.put("algorithm.overlong_buffer_tokens", given.get("rl_config.overlong_buffer", whole, 0))
        given.put("algorithm.overlong_penalty", given.get("rl_config.overlong_buffer_penalty_factor", number, 1.0))


def put_kl(given: Given) -> None:
    """Coefficient, estimator, place, controller."""
    coef = given.get("rl_config.init_kl_coef", number, 0.0)
    if given.ours["algorithm.name"] == "dapo" and not given.has("rl_config.init_kl_coef"):
        coef = 0.0
    given.put("algorithm.kl.coef", coef)
    kind = given.get("rl_config.kl_penalty", text)
    if kind in ESTIMATORS:
        given.put("algorithm.kl.estimator", ESTIMATORS[kind])
    elif coef:
        given.refuse("rl_config.kl_penalty", f"{kind}: choose algorithm.kl.estimator k1, k2 or k3; k3 is taken")
    in_reward = given.get("rl_config.use_kl_in_reward", flag, False)
    given.put("algorithm.kl.where", "reward" if in_reward else "loss")
    if given.get("rl_config.kl_ctrl_type", text, "fixed") == "adaptive":
        if in_reward:
            given.put("algorithm.kl.target", given.get("rl_config.kl_target", number, 100.0))
            given.put("algorithm.kl.horizon", given.get("rl_config.kl_horizon", whole, 1000))
        else:
            given.refuse("rl_config.kl_ctrl_type", "adaptive: only with KL in the reward, where it is measured")


def put_filter(given: Given) -> None:
    """Dynamic sampling."""
    if not given.has("rl_config.filter_groups_enable"):
        return
    on = given.get("rl_config.filter_groups_enable", flag)
    given.put("algorithm.filter_groups", on)
    rounds, prompts = given.get("rl_config.filter_groups_max_batches", whole, -1), "actor_config.global_batch_size"
    if on and rounds > 0 and given.has(prompts):
        given.put("algorithm.max_dropped_groups", rounds * given.get(prompts, whole))


def put_partial(given: Given) -> None:
    """N rounds at most for the longest response: so many visits, and so many versions."""
    rounds = given.get("rl_config.partial_rollout_max_split", whole, 1)
    if rounds > 1:
        given.put("rollout.partial_tokens", -(-given.ours["rollout.max_response_tokens"] // rounds))
        given.put("dock.max_staleness", rounds - 1)


def put_optimizer(given: Given) -> None:
    """Of the actor and, for PPO, of the critic."""
    for theirs, ours in (("actor_config", "train.optim"), ("critic_config", "critic.optim")):
        betas = [given.get(f"{theirs}.adam_beta{n}", number, other) for n, other in ((1, 0.9), (2, 0.999))]
        given.put(f"{ours}.betas", betas)
        lr, least = given.get(f"{theirs}.lr", number), given.get(f"{theirs}.min_lr", number, 0.0)
        if lr and least and given.ours.get(f"{ours}.schedule", "constant") != "constant":
            given.put(f"{ours}.min_lr_fraction", least / lr)
    put_warmup(given, given.get("actor_config.lr_warmup_fraction", number), None, given.ours.get("run.steps"))


def optimizer(section: str, ours: str) -> list[Key]:
    """Rows of the optimizer, the same for actor and critic."""
    return [
        to(f"{section}.lr", f"{ours}.lr", number),
        to(f"{section}.lr_decay_style", f"{ours}.schedule", DECAY),
        rule(f"{section}.min_lr", f"{ours}.min_lr_fraction", "as a fraction of lr"),
        to(f"{section}.weight_decay", f"{ours}.weight_decay", number, "ours decays matrices only"),
        to(f"{section}.clip_grad", f"{ours}.grad_clip", number),
        rule(f"{section}.adam_beta1", f"{ours}.betas", "first of the two"),
        rule(f"{section}.adam_beta2", f"{ours}.betas", "second of the two"),
    ]


TRAINING = [
    rule("actor_config.stage", "algorithm.name", "ray_grpo, ray_dapo, ray_ppo"),
    rule("actor_config.global_batch_size", "rollout.prompts_per_step", "it counts prompts"),
    to("actor_config.train_iters", "run.steps", whole),
    to("actor_config.seed", "run.seed", whole),
    to("actor_config.data_path", "data.source", text, "point it at rows (jsonl, parquet): ours tokenises them itself"),
    rule("actor_config.dataset_additional_keys", "reward.functions", "the first is the column with the answer"),
    to("actor_config.no_shuffle", "data.shuffle", lambda value: not flag(value)),
    to("actor_config.tokenizer_name_or_path", "model.path", text, "the Hugging Face directory, weights included"),
    to("actor_config.bf16", "train.dtype", lambda value: "bfloat16" if flag(value) else "float32"),
    to("actor_config.save", "run.dir", text),
    to("actor_config.save_interval", "checkpoint.every_steps", whole),
    to("actor_config.sequence_parallel", "layout.sp", flag, "ours is true by default; models with experts need it"),
    rule("actor_config.use_distributed_optimizer", "layout.fsdp", "parameters are sharded too"),
    rule("actor_config.tensor_model_parallel_size", "layout.tp", ""),
    rule("actor_config.pipeline_model_parallel_size", "layout.pp", ""),
    rule("actor_config.context_parallel_size", "layout.cp", ""),
    to("actor_config.context_parallel_algo", "layout.context", CONTEXT),
    rule("actor_config.expert_model_parallel_size", "layout.ep layout.etp", "times tp with moe_tp_extend_ep"),
    rule("actor_config.moe_tp_extend_ep", "layout.ep layout.etp", "true: ep x tp ranks hold whole experts (etp 1)"),
    to("actor_config.recompute_granularity", "train.recompute", one_of({"full": "full", "selective": "selective"})),
    to("actor_config.recompute_activation_function", "train.recompute", one_of({True: "selective", False: "none"})),
    to("actor_config.swap_optimizer", "train.optim.offload", flag),
    to("actor_config.swap_attention", "train.activation_offload", flag),
    to("actor_config.moe_aux_loss_coeff", "train.router.aux_loss_coef", number),
    *optimizer("actor_config", "train.optim"),
    rule("actor_config.lr_warmup_fraction", "train.optim.warmup_updates", "times the updates of the run"),
    *optimizer("critic_config", "critic.optim"),
]

RL = [
    rule("rl_config.mini_batch_size", "algorithm.samples_per_update", "it counts samples"),
    rule("rl_config.n_samples_per_prompt", "rollout.samples_per_prompt", ""),
    to("rl_config.epochs", "algorithm.epochs_per_step", whole),
    to("rl_config.max_prompt_length", "data.max_prompt_tokens", whole, "longer prompts: data.overlong"),
    to("rl_config.gamma", "algorithm.gamma", number),
    to("rl_config.lam", "algorithm.lam", number),
    to("rl_config.cliprange_value", "algorithm.value_clip", number),
    to("rl_config.entropy_coeff", "algorithm.entropy_coef", number),
    rule("rl_config.clip_ratio", "algorithm.clip_low algorithm.clip_high", ""),
    *(rule(f"rl_config.clip_{n}", "algorithm.clip_low algorithm.clip_high", "") for n in ("higher_enable",)),
    rule("rl_config.clip_ratio_low", "algorithm.clip_low", "with clip_higher_enable"),
    rule("rl_config.clip_ratio_high", "algorithm.clip_high", "with clip_higher_enable"),
    rule("rl_config.init_kl_coef", "algorithm.kl.coef", ""),
    rule("rl_config.kl_penalty", "algorithm.kl.estimator", "kl k1, mse k2, low_var_kl k3"),
    rule("rl_config.kl_ctrl_type", "algorithm.kl.coef algorithm.kl.target", "adaptive: with KL in the reward"),
    rule("rl_config.kl_target", "algorithm.kl.target", ""),
    rule("rl_config.kl_horizon", "algorithm.kl.horizon", ""),
    rule("rl_config.use_kl_in_reward", "algorithm.kl.where", ""),
    rule("rl_config.token_level_loss", "algorithm.aggregation", "true token_mean, false sequence_mean"),
    rule("rl_config.overlong_buffer_enable", "algorithm.overlong_buffer_tokens", ""),
    rule("rl_config.overlong_buffer", "algorithm.overlong_buffer_tokens", ""),
    rule("rl_config.overlong_buffer_penalty_factor", "algorithm.overlong_penalty", ""),
    rule("rl_config.filter_groups_enable", "algorithm.filter_groups", ""),
    rule("rl_config.filter_groups_train_batch_size", "rollout.prompts_per_step", "with the filter on"),
    rule("rl_config.filter_groups_max_batches", "algorithm.max_dropped_groups", "times global_batch_size; -1: ours"),
    rule("rl_config.verifier_function", "reward.functions", "the names of accuracy are math_verify"),
    rule("rl_config.verifier_weight", "reward.functions", ""),
    to("rl_config.verifier_timeout", "reward.deadline_s", number),
    to("rl_config.verifier_parallel", "reward.workers", whole),
    rule("rl_config.update_max_packing_token_size", "train.tokens_per_microbatch", "at least the longest sample"),
    rule("rl_config.max_packing_token_size", "train.tokens_per_microbatch", "at least the longest sample"),
    rule(
        "rl_config.partial_rollout_max_split",
        "rollout.partial_tokens dock.max_staleness",
        "N: max_tokens / N a visit, N - 1 versions late at most",
    ),
    rule("rl_config.use_integrated_worker", "fleet.placement", "true colocated, false disaggregated"),
    rule("rl_config.actor_resource.num_npus", "layout.fsdp layout.dp", "divided by tp x pp x cp"),
    to("rl_config.guarantee_order", "dock.deterministic", flag),
    to("rl_config.use_tensorboard", "obs.tensorboard", flag),
    rule("rl_config.use_wandb", "obs.wandb", ""),
    rule("rl_config.wandb_project", "obs.wandb", "with use_wandb"),
    to("rl_config.wandb_exp_name", "run.name", text),
]

OFFLOAD = "any of the three: host"
GENERATION = [
    rule("generate_config.infer_tensor_parallel_size", "rollout.layout.tp", ""),
    rule("generate_config.infer_expert_parallel_size", "rollout.layout.ep", ""),
    *(rule(f"generate_config.offload_train_{n}", "sync.swap", OFFLOAD) for n in ("optimizer", "grad", "param")),
    to("generate_config.max_num_seqs", "rollout.max_batch", whole),
    to("generate_config.dtype", "rollout.dtype", one_of({"bfloat16": "bfloat16", "float32": "float32"})),
    to("generate_config.sampling_config.max_tokens", "rollout.max_response_tokens", whole),
    to("generate_config.sampling_config.temperature", "rollout.temperature", number),
]

MINDSPEED_RL = System(
    name="mindspeed_rl",
    title="MindSpeed RL",
    source="the files in configs/ and the classes in mindspeed_rl/config_cls of github.com/Ascend/MindSpeed-RL",
    keys=(*TRAINING, *RL, *GENERATION, *UNNEEDED, *UNSUPPORTED),
    combine=combine,
    defaults={
        "actor_config.weight_decay": 0.01,
        "rl_config.n_samples_per_prompt": 1,
        "rl_config.mini_batch_size": 1,
        "rl_config.clip_ratio": 0.2,
        "rl_config.entropy_coeff": 0.001,
        "rl_config.lam": 0.95,
        "rl_config.init_kl_coef": 0.01,
        "rl_config.kl_penalty": "kl",
        "rl_config.max_prompt_length": 512,
        "generate_config.sampling_config.max_tokens": 128,
        "generate_config.sampling_config.temperature": 0.2,
        "generate_config.dtype": "bfloat16",
    },
    alias=alias,
)
