"""Config checks: what contradicts the algorithm, or asks for something that nothing would read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from docklands.config.schema import AlgorithmSection, Config
from docklands.errors import ConfigError

if TYPE_CHECKING:
    from docklands.algorithms.base import Algorithm

DEFAULT = Config.model_validate({})

ALWAYS = frozenset({"name", "samples_per_update", "epochs_per_step", "max_dropped_groups"})
CLIP = frozenset({"clip_low", "clip_high", "dual_clip"})
POLICY = frozenset(
    {"old_logprobs", "aggregation", "entropy_coef", "filter_groups", "overlong_buffer_tokens", "overlong_penalty"}
) | {"kl", "correction"}


def check_config(algorithm: Algorithm) -> None:
    """Raise ConfigError for the first contradiction, with the key and what to change."""
    check_unread(algorithm)
    check_groups(algorithm)
    check_updates(algorithm)
    check_kl(algorithm)
    check_correction(algorithm)
    check_numbers(algorithm)
    check_other_sections(algorithm)


def check_unread(algorithm: Algorithm) -> None:
    """A key that the algorithm does not read must keep its default (pitfalls 5, 15)."""
    default = DEFAULT.algorithm
    known = ALWAYS | algorithm.reads
    for key in AlgorithmSection.model_fields:
        value = getattr(algorithm.section, key)
        if key not in known and value != getattr(default, key):
            shown = f" = {value}" if isinstance(value, (int, float, str)) else ""
            raise ConfigError(
                f"algorithm.{key}{shown} is set, but algorithm {algorithm.name!r} does not read it",
                f"remove it; {algorithm.name} reads: {', '.join(sorted(algorithm.reads)) or 'nothing of the kind'}",
            )


def check_groups(algorithm: Algorithm) -> None:
    """Group estimators and the group filter need something to compare (pitfall 12)."""
    if algorithm.config.rollout.samples_per_prompt > 1:
        return
    if algorithm.needs_group:
        raise ConfigError(
            f"algorithm {algorithm.name!r} compares the samples of a prompt, and rollout.samples_per_prompt is 1: "
            "every advantage would be 0",
            "set rollout.samples_per_prompt to 2 or more, or use ppo or reinforce_pp",
        )
    if algorithm.pick("filter_groups"):
        raise ConfigError(
            "algorithm.filter_groups drops groups of equal rewards, and rollout.samples_per_prompt is 1: "
            "every group would be dropped",
            "set rollout.samples_per_prompt to 2 or more",
        )


def check_updates(algorithm: Algorithm) -> None:
    """pi_old must exist where more than one update uses the same samples."""
    config, section = algorithm.config, algorithm.section
    updates = config.updates_per_step
    sum_of = (
        f"{config.samples_per_step} samples x {section.epochs_per_step} epochs / {config.samples_per_update} samples "
        f"per update = {updates} updates per step"
    )
    if updates > 1 and algorithm.single_update:
        raise ConfigError(
            f"algorithm {algorithm.name!r} has no importance ratio and is right for one update per step; {sum_of}",
            "set algorithm.samples_per_update to 0 and algorithm.epochs_per_step to 1",
        )
    if updates > 1 and section.old_logprobs == "current":
        raise ConfigError(
            f"algorithm.old_logprobs: 'current' makes every ratio 1, but {sum_of}",
            "use 'recompute' (or 'auto'), or one update per step",
        )
    if section.old_logprobs == "current" and config.dock.max_staleness:
        raise ConfigError(
            f"algorithm.old_logprobs: 'current' makes every ratio 1, but with dock.max_staleness "
            f"{config.dock.max_staleness} samples may be older than the policy",
            "use 'recompute' (or 'auto')",
        )
    if section.old_logprobs == "current" and section.kl.coef > 0 and section.kl.where == "reward":
        raise ConfigError(
            "algorithm.old_logprobs: 'current' gives no log-probs to the advantage stage, which kl.where: reward needs",
            "use 'recompute' (or 'auto')",
        )


def check_kl(algorithm: Algorithm) -> None:
    """Numbers of a KL term that is off; an adaptive coefficient where nothing measures KL."""
    kl, default = algorithm.section.kl, DEFAULT.algorithm.kl
    if kl.coef == 0:
        for key in ("estimator", "where", "target", "horizon"):
            if getattr(kl, key) != getattr(default, key):
                raise ConfigError(
                    f"algorithm.kl.{key} is set, but algorithm.kl.coef is 0: no KL term reads it",
                    "set algorithm.kl.coef (0.001 is usual), or remove the key",
                )
        if algorithm.config.reference.path and not algorithm.reads_reference:
            raise ConfigError(
                "reference.path is set, but algorithm.kl.coef is 0: nothing would read the reference",
                "set algorithm.kl.coef, or remove reference.path",
            )
    elif kl.target and kl.where == "loss":
        raise ConfigError(
            "algorithm.kl.target: the adaptive controller measures KL where it is subtracted from rewards",
            "set algorithm.kl.where to reward, or remove the target",
        )
    elif not kl.target and kl.horizon != default.horizon:
        raise ConfigError("algorithm.kl.horizon is set, but algorithm.kl.target is 0: the coefficient is fixed")


def check_correction(algorithm: Algorithm) -> None:
    """Bounds that the chosen mode does not read; a correction of a policy by itself."""
    section, default = algorithm.section.correction, DEFAULT.algorithm.correction
    if section.mode == "off":
        unread = [key for key in ("max_ratio", "min_ratio") if getattr(section, key) != getattr(default, key)]
    else:
        unread = ["min_ratio"] if section.mode.endswith("tis") and section.min_ratio else []
    if unread:
        raise ConfigError(f"algorithm.correction.{unread[0]} is set, but mode {section.mode!r} does not read it")
    if section.mode != "off" and algorithm.section.old_logprobs == "rollout":
        raise ConfigError(
            "algorithm.correction weighs pi_old / mu, and old_logprobs: rollout makes the two the same",
            "use old_logprobs: recompute, or correction.mode: off",
        )
    if section.min_ratio >= section.max_ratio:
        raise ConfigError(
            f"algorithm.correction: min_ratio {section.min_ratio} is not below max_ratio {section.max_ratio}"
        )


def check_numbers(algorithm: Algorithm) -> None:
    """Values that are legal one by one and make no sense together."""
    section, limit = algorithm.section, algorithm.config.rollout.max_response_tokens
    if section.dual_clip and section.dual_clip <= 1:
        raise ConfigError(f"algorithm.dual_clip must be above 1 (3.0 is usual), or 0 for off; got {section.dual_clip}")
    if section.overlong_buffer_tokens > limit:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens {section.overlong_buffer_tokens} is more than "
            f"rollout.max_response_tokens {limit}"
        )
    if section.overlong_penalty != DEFAULT.algorithm.overlong_penalty and not section.overlong_buffer_tokens:
        raise ConfigError("algorithm.overlong_penalty is set, but overlong_buffer_tokens is 0: nothing reads it")


def check_other_sections(algorithm: Algorithm) -> None:
    """Sections that only some algorithms read."""
    config = algorithm.config
    if not algorithm.has_critic and config.critic != DEFAULT.critic:
        raise ConfigError(
            f"the critic section is set, but algorithm {algorithm.name!r} has no critic", "remove it, or use ppo"
        )
    if algorithm.learns_from == "samples":
        return
    if config.reward.functions:
        raise ConfigError(f"reward.functions is set, but algorithm {algorithm.name!r} scores nothing", "remove it")
    if algorithm.learns_from == "preferences" and config.rollout.samples_per_prompt != 2:
        raise ConfigError(
            f"algorithm {algorithm.name!r} compares a chosen and a rejected response; rollout.samples_per_prompt is "
            f"{config.rollout.samples_per_prompt}",
            "set rollout.samples_per_prompt to 2",
        )
    if algorithm.learns_from == "demonstrations" and config.rollout.samples_per_prompt != 1:
        raise ConfigError(
            f"algorithm {algorithm.name!r} would train each demonstration {config.rollout.samples_per_prompt} times a "
            "step",
            "set rollout.samples_per_prompt to 1",
        )
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"algorithm {algorithm.name!r} fits the model's own probabilities; rollout.temperature is "
            f"{config.rollout.temperature}",
            "set rollout.temperature to 1",
        )
