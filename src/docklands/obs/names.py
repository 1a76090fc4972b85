"""Every metric that Docklands writes: name, unit, reduction, meaning. docs/reference/metrics.md is made from this.

Names that users of the field already know keep their spelling. `{...}` parts are parameters.
"""

from __future__ import annotations

from docklands.obs.catalog import Catalog, Metric, Reduction

REDUCED: tuple[tuple[str, Reduction], ...] = (("mean", "mean"), ("max", "max"), ("min", "min"))


def spread(prefix: str, unit: str, doc: str) -> list[Metric]:
    """prefix/mean, prefix/max, prefix/min."""
    return [Metric(f"{prefix}/{name}", unit, how, f"{doc} ({name} over the step)") for name, how in REDUCED]


def learner(name: str) -> list[Metric]:
    """What an optimizer update reports, for one learner."""
    return [
        Metric(f"{name}/loss", "1", "mean", "the whole loss that was differentiated, per update"),
        Metric(f"{name}/grad_norm", "1", "mean", "global gradient norm before clipping, per update"),
        Metric(f"{name}/lr", "1", "last", "learning rate of the last update"),
        Metric(f"{name}/updates", "updates", "sum", "optimizer updates made"),
        Metric(f"{name}/skipped_updates", "updates", "sum", "updates skipped because no token was trained"),
        Metric(f"{name}/microbatches", "micro-batches", "sum", "forward/backward passes"),
        Metric(f"{name}/tokens", "tokens", "sum", "tokens under the loss mask"),
        Metric(f"{name}/packed_tokens", "tokens", "sum", "tokens that went through the model after prefix sharing"),
        Metric(f"{name}/recompute_saved_mib", "MiB", "max", "activations that selective recomputation did not keep"),
        Metric(f"{name}/activations_offloaded_mib", "MiB", "max", "activations in the lower tier, peak of an update"),
        Metric(f"{name}/optimizer_offloaded_mib", "MiB", "last", "optimizer state in the lower tier after an update"),
        Metric(f"{name}/router_load_max", "1", "mean", "most used expert / mean expert, by tokens; mean over layers"),
        Metric(f"{name}/router_idle", "fraction", "mean", "experts that no token of the update went to"),
        Metric(f"{name}/router_replayed", "fraction", "mean", "tokens that went to the experts the generator chose"),
        Metric(
            f"{name}/router_aux_loss",
            "1",
            "mean",
            "load-balancing loss before its coefficient; k when all are used alike",
        ),
    ]


ACTOR = [
    *learner("actor"),
    Metric("actor/pg_loss", "1", "mean", "policy-gradient term of the loss"),
    Metric("actor/kl_loss", "nats", "mean", "KL(pi || pi_ref) as estimated in the loss, before its coefficient"),
    Metric(
        "actor/kl_reward", "nats", "mean", "KL to the reference subtracted from rewards, per token, since the last step"
    ),
    Metric("actor/kl_coef", "1", "last", "KL coefficient (moves under an adaptive controller), since the last step"),
    Metric(
        "actor/entropy",
        "nats",
        "mean",
        "entropy of the policy per trained token; without entropy_coef estimated by -log p of the sampled",
    ),
    Metric("actor/pg_clipfrac", "fraction", "mean", "trained tokens (or sequences) whose ratio was clipped"),
    Metric("actor/pg_clipfrac_lower", "fraction", "mean", "trained tokens that met the dual clip"),
    Metric("actor/ppo_kl", "nats", "mean", "KL(pi_old || pi) per trained token, estimator k1"),
    Metric("actor/ratio_max", "1", "max", "largest ratio pi / pi_old"),
    Metric("actor/sft_loss", "nats", "mean", "negative log-likelihood per demonstrated token"),
    Metric("dpo/loss", "nats", "mean", "-log sigma of the margin, per pair, before the update"),
    Metric("dpo/margin", "nats", "mean", "implicit reward of the chosen less that of the rejected response"),
    Metric("dpo/accuracy", "fraction", "mean", "pairs whose chosen response has the higher implicit reward"),
    Metric("dpo/chosen_reward", "nats", "mean", "implicit reward of the chosen response: beta log (pi / pi_ref)"),
    Metric("dpo/rejected_reward", "nats", "mean", "implicit reward of the rejected response"),
    Metric("dpo/nll", "nats", "mean", "negative log-likelihood per token of the given responses, chosen and rejected"),
    Metric(
        "distill/reverse_kl",
        "nats",
        "mean",
        "KL(student || teacher) per sampled token, estimator k1, since the last step",
    ),
]

CRITIC = [
    *learner("critic"),
    *spread("critic/score", "1", "task reward of a sample, before any penalty"),
    *spread("critic/rewards", "1", "reward of a sample as trained on: after overlong penalty and KL in the reward"),
    *spread("critic/advantages", "1", "advantage of a sample; of a trained token where each has its own"),
    *spread("critic/returns", "1", "value target per trained token"),
    *spread("critic/values", "1", "critic's value per trained token"),
    Metric("critic/vf_loss", "1", "mean", "value loss per trained token"),
    Metric("critic/vf_clipfrac", "fraction", "mean", "trained tokens whose value was clipped"),
    Metric(
        "critic/vf_explained_var",
        "1",
        "mean",
        "1 - var(returns - values) / var(returns), before the updates, since the last step",
    ),
]

SAMPLES = [
    *spread("response_length", "tokens", "response tokens of a sample, over all turns"),
    Metric("response_length/clip_ratio", "fraction", "mean", "samples that ended at the length limit"),
    *spread("prompt_length", "tokens", "prompt tokens of a sample"),
    Metric("completions/clipped_ratio", "fraction", "mean", "samples that ended at the length limit (finish reason)"),
    Metric("completions/aborted_ratio", "fraction", "mean", "samples that were aborted"),
    Metric("completions/empty_ratio", "fraction", "mean", "samples without a single response token"),
    Metric("frac_reward_zero_std", "fraction", "mean", "groups whose rewards are all equal"),
    Metric(
        "reward/{component}/mean",
        "1",
        "mean",
        "one component of the reward, before its weight; NAME.REMARK: share of samples with a remark "
        "(cot6.worked), since the last step",
    ),
    Metric("reward/scored", "samples", "sum", "samples that got a reward, since the last step"),
    Metric(
        "reward/errors",
        "samples",
        "sum",
        "samples dropped because the reward raised or gave no number, since the last step",
    ),
    Metric(
        "reward/timeouts", "samples", "sum", "samples dropped because the reward met its deadline, since the last step"
    ),
    Metric(
        "reward/error_fraction",
        "fraction",
        "mean",
        "samples whose reward failed (error or timeout), since the last step",
    ),
    Metric("env/errors", "samples", "sum", "episodes dropped because the environment failed, since the last step"),
    Metric(
        "env/timeouts",
        "samples",
        "sum",
        "episodes dropped because the environment met its deadline, since the last step",
    ),
    *spread("env/turns", "turns", "model turns of an episode, since the last step"),
    Metric("env/observation_tokens", "tokens", "sum", "observation tokens (never trained), since the last step"),
    Metric("dynamic_sampling/groups", "groups", "sum", "groups that the filter saw, since the last step"),
    Metric("dynamic_sampling/kept", "groups", "sum", "groups that went on to training, since the last step"),
    Metric("dynamic_sampling/all_0", "groups", "sum", "groups dropped: every reward is 0, since the last step"),
    Metric("dynamic_sampling/all_1", "groups", "sum", "groups dropped: every reward is 1, since the last step"),
    Metric(
        "dynamic_sampling/equal",
        "groups",
        "sum",
        "groups dropped: equal rewards that are neither 0 nor 1, since the last step",
    ),
    Metric("data/overlong_dropped", "prompts", "last", "prompts dropped for their length, since the start"),
    Metric("data/overlong_truncated", "prompts", "last", "prompts cut for their length, since the start"),
]

CORRECTION = [
    Metric("rollout_corr/kl", "nats", "mean", "KL(mu || pi_old) per token, estimator k1"),
    Metric("rollout_corr/k3_kl", "nats", "mean", "KL(mu || pi_old) per token, estimator k3"),
    *spread("rollout_corr/ratio", "1", "importance ratio pi_old / mu before truncation"),
    *spread("rollout_corr/weight", "1", "importance weight as applied, after truncation or masking"),
    Metric("rollout_corr/truncated_fraction", "fraction", "mean", "tokens (or sequences) whose ratio was truncated"),
    Metric("rollout_corr/masked_fraction", "fraction", "mean", "tokens (or sequences) masked for their ratio"),
]

TRAINING = [
    Metric("training/rollout_probs_diff_mean", "probability", "mean", "|p_trainer - p_rollout| per sampled token"),
    Metric("training/rollout_probs_diff_max", "probability", "max", "|p_trainer - p_rollout|, largest"),
    Metric("training/rollout_logprobs_diff_max", "nats", "max", "|log p_trainer - log p_rollout|, largest"),
    Metric("training/global_step", "steps", "last", "the step, counted from 1"),
    Metric("training/epoch", "epochs", "last", "passes over the data, whole ones"),
    Metric("training/weight_version", "versions", "last", "version of the weights after the step"),
    Metric("training/samples", "samples", "sum", "samples trained in the step"),
    Metric("training/groups", "groups", "sum", "groups trained in the step"),
    *spread("training/staleness", "versions", "versions between a sample's oldest token and its update"),
]

FLEET = [
    Metric("fleet/replicas", "replicas", "last", "generators with processes of their own, at the end of the step"),
    Metric("fleet/restarts", "replicas", "sum", "generators that died or hung and were started again"),
]

ROLLOUT = [
    Metric(
        "rollout/prefill_tokens", "tokens", "sum", "prompt tokens computed, shared prompts once, since the last step"
    ),
    Metric("rollout/decode_tokens", "tokens", "sum", "tokens sampled, since the last step"),
    Metric("rollout/decode_steps", "steps", "sum", "batched decode steps, since the last step"),
    Metric("rollout/batch_size", "sequences", "mean", "sequences per decode step, since the last step"),
    Metric(
        "rollout/preemptions",
        "sequences",
        "sum",
        "sequences evicted and recomputed for want of cache pages, since the last step",
    ),
    Metric("rollout/aborted", "samples", "sum", "samples aborted, since the last step"),
    Metric(
        "rollout/unfinished",
        "samples",
        "max",
        "samples of groups that wait for another visit (partial rollout), since the last step",
    ),
    Metric("rollout/kv_blocks_peak", "pages", "max", "KV-cache pages in use, peak, since the last step"),
]

RESHARD = [
    Metric("reshard/bytes_received", "B", "sum", "weights that all devices together received from others"),
    Metric("reshard/peak_bytes", "B", "max", "weights of both sides and messages on the fullest device at once"),
    Metric("reshard/freed_bytes", "B", "max", "training state that left the fullest device for generation"),
    Metric("reshard/probe_diff", "nats", "max", "largest difference of a probe token's log-probs, trainer - generator"),
]

EVALUATION = [
    Metric("val-core/{source}/mean@{n}", "1", "mean", "held-out score, mean over n samples of a prompt"),
    Metric("val-core/{source}/best@{n}", "1", "mean", "held-out score, best of n samples"),
    Metric("val-core/{source}/maj@{n}", "1", "mean", "held-out score of the most common answer of n samples"),
    Metric(
        "val-core/{source}/pass@{n}", "fraction", "mean", "prompts solved (reward >= 1) within n samples (unbiased)"
    ),
    Metric("val-core/{source}/mean@{n}_low", "1", "last", "mean@n, lower end of its 95 % bootstrap interval"),
    Metric("val-core/{source}/mean@{n}_high", "1", "last", "mean@n, upper end of its 95 % bootstrap interval"),
    Metric("val-core/{source}/pass@{n}_low", "fraction", "last", "pass@n, lower end of its 95 % bootstrap interval"),
    Metric("val-core/{source}/pass@{n}_high", "fraction", "last", "pass@n, upper end of its 95 % bootstrap interval"),
    Metric("val-core/{source}/lost", "samples", "sum", "held-out samples without a score (dropped or failed)"),
    Metric("val-aux/{source}/response_length", "tokens", "mean", "response tokens in evaluation"),
    Metric("val-aux/{source}/clipped_ratio", "fraction", "mean", "evaluation samples that ended at the length limit"),
    Metric("val-aux/{source}/prompts", "prompts", "sum", "held-out prompts"),
    Metric("val-aux/{source}/pass@{n}_prompts", "prompts", "sum", "prompts with n scored samples: those of pass@n"),
]

DOCK = [
    Metric("dock/in_flight", "groups", "last", "groups admitted and not yet retired"),
    Metric("dock/bytes", "B", "last", "bytes held by all warehouses at that moment", volatile=True),
    Metric("dock/metadata_bytes", "B", "last", "metadata sent to controllers, since the start"),
    Metric("dock/puts", "messages", "last", "puts, since the start"),
    Metric("dock/fetches", "messages", "last", "fetches, since the start"),
    Metric("dock/bytes_in", "B", "last", "bytes put, since the start"),
    Metric("dock/bytes_out", "B", "last", "bytes fetched, since the start"),
    Metric("dock/bytes_near", "B", "last", "of bytes_in, those put into a warehouse of the producer's own node"),
    Metric(
        "dock/generated_near",
        "fraction",
        "last",
        "bytes of the rollouts that were put into a warehouse of the generator's own node, since the start",
        volatile=True,
    ),
    Metric("dock/ignored_puts", "cells", "last", "repeated writes that changed nothing, since the start"),
    Metric("dock/expired_leases", "leases", "last", "leases that passed their deadline, since the start"),
    Metric("dock/dropped/{reason}", "samples", "last", "rows dropped by reason, since the start"),
    Metric("dock/{stage}/ready", "samples", "last", "rows ready for the stage and free"),
    Metric("dock/{stage}/leased", "samples", "last", "rows leased by the stage"),
    Metric("dock/{stage}/done", "samples", "last", "live rows that the stage has finished"),
    Metric("dock/{stage}/bytes_in", "B", "last", "bytes the stage put, since the start"),
    Metric("dock/{stage}/bytes_out", "B", "last", "bytes the stage fetched, since the start"),
    Metric("dock/{stage}/bytes_near", "B", "last", "of the stage's bytes_in, those put on the producer's own node"),
    Metric("dock/{stage}/puts", "messages", "last", "puts of the stage, since the start"),
    Metric("dock/{stage}/fetches", "messages", "last", "fetches of the stage, since the start"),
]

MACHINE = [
    Metric("timing_s/gen", "s", "sum", "generation"),
    Metric("timing_s/reward", "s", "sum", "scoring"),
    Metric("timing_s/old_log_prob", "s", "sum", "the trainer's log-probs before the update"),
    Metric("timing_s/ref", "s", "sum", "the reference's log-probs"),
    Metric("timing_s/values", "s", "sum", "the critic's values"),
    Metric("timing_s/adv", "s", "sum", "advantages"),
    Metric("timing_s/update_actor", "s", "sum", "forward, backward and optimizer of the actor"),
    Metric("timing_s/update_critic", "s", "sum", "forward, backward and optimizer of the critic"),
    Metric("timing_s/reshard", "s", "sum", "weight publication"),
    Metric("timing_s/reshard/move", "s", "max", "of it, moving the weights by plan, on the slowest device"),
    Metric("timing_s/checkpoint", "s", "sum", "saving, as far as training waits for it"),
    Metric("timing_s/checkpoint_write", "s", "sum", "writing a checkpoint beside the training, told when it has ended"),
    Metric("checkpoint/failed", "checkpoints", "sum", "checkpoints that could not be written beside the training"),
    Metric("timing_s/eval", "s", "sum", "held-out evaluation"),
    Metric("timing_s/step", "s", "sum", "the whole step, wall clock"),
    Metric("timing_s/{stage}", "s", "sum", "any other stage, by its name"),
    Metric("timing_s/{stage}/wait", "s", "sum", "the stage's wait for its device"),
    Metric("perf/throughput", "tokens/s", "mean", "prompt and response tokens of the step / step seconds"),
    Metric("perf/total_num_tokens", "tokens", "sum", "prompt and response tokens of the step"),
    Metric("perf/time_per_step", "s", "mean", "wall clock per step"),
    Metric("perf/gen_tokens_per_s", "tokens/s", "mean", "sampled tokens / generation seconds"),
    Metric("perf/update_tokens_per_s", "tokens/s", "mean", "packed tokens / update seconds"),
    Metric("perf/samples_per_s", "samples/s", "mean", "samples trained / step seconds"),
    Metric("perf/cpu_s", "s", "sum", "processor seconds of the step, all threads"),
    Metric("memory/rss_mib", "MiB", "last", "resident memory of the process"),
    Metric("memory/peak_rss_mib", "MiB", "max", "resident memory of the process, peak since the start"),
    Metric("memory/device_mib", "MiB", "last", "accelerator memory in use"),
]

SECTIONS: dict[str, list[Metric]] = {
    "Actor": ACTOR,
    "Critic and rewards": CRITIC,
    "Samples": SAMPLES,
    "Rollout correction": CORRECTION,
    "Training": TRAINING,
    "Rollout": ROLLOUT,
    "Fleet": FLEET,
    "Resharding": RESHARD,
    "Evaluation": EVALUATION,
    "Dock": DOCK,
    "Time, speed, memory": MACHINE,
}

CATALOG = Catalog(*(metric for section in SECTIONS.values() for metric in section))
declare = CATALOG.declare
find = CATALOG.find
