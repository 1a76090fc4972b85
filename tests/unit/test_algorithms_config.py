"""What algorithms refuse, which graphs they build, and what they resolve; pitfalls 12, 15."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tests.algorithm_cases import POLICIES, algorithm

from docklands.algorithms import ALGORITHMS, Algorithm, PolicyAlgorithm, build_algorithm
from docklands.core.fields import GROUP_ID, OLD_LOGPROBS, REF_LOGPROBS, RETURNS, VALUES
from docklands.errors import CheckpointError, ConfigError, GraphError

KL = {"kl": {"coef": 0.1}}
KL_REWARD = {"kl": {"coef": 0.1, "where": "reward", "estimator": "k1"}}
BASE = ["rollout", "reward", "advantage", "update"]


def names(made: Algorithm) -> list[str]:
    return [stage.name for stage in made.graph().stages]


@pytest.mark.parametrize(
    ("name", "keys", "stages"),
    [
        ("grpo", {"samples_per_update": 16}, BASE),
        ("grpo", {}, ["rollout", "reward", "old_logprobs", "advantage", "update"]),
        ("grpo", {"old_logprobs": "rollout"}, BASE),
        ("grpo", {"samples_per_update": 16, **KL}, ["rollout", "reward", "ref_logprobs", "advantage", "update"]),
        ("grpo", KL_REWARD, ["rollout", "reward", "old_logprobs", "ref_logprobs", "advantage", "update"]),
        ("rloo", {}, BASE),
        ("rloo", KL_REWARD, ["rollout", "reward", "old_logprobs", "ref_logprobs", "advantage", "update"]),
        ("rloo", {"filter_groups": True}, ["rollout", "reward", "filter_groups", "advantage", "update"]),
        ("dapo", {}, ["rollout", "reward", "filter_groups", "old_logprobs", "advantage", "update"]),
        ("dapo", {"filter_groups": False}, ["rollout", "reward", "old_logprobs", "advantage", "update"]),
        ("ppo", {}, ["rollout", "reward", "old_logprobs", "values", "advantage", "update"]),
        (
            "ppo",
            {**KL, "samples_per_update": 16},
            ["rollout", "reward", "ref_logprobs", "values", "advantage", "update"],
        ),
        ("reinforce_pp", {"samples_per_update": 16}, BASE),
        ("sft", {}, ["demonstrate", "update"]),
    ],
)
def test_graphs(name: str, keys: dict[str, Any], stages: list[str]) -> None:
    made = algorithm(name, keys)
    graph = made.graph()
    assert names(made) == stages
    text, mermaid = graph.to_text(), graph.to_mermaid()
    assert all(stage in text and stage in mermaid for stage in stages)
    assert GROUP_ID in graph["update"].reads  # prefix sharing
    for learner in graph.learners:
        assert set(learner.reads) <= set(graph["update"].reads)


@pytest.mark.parametrize("name", [*POLICIES, "sft"])
def test_every_algorithm_survives_pickling(name: str) -> None:
    """Other processes run its functions."""
    made = pickle.loads(pickle.dumps(algorithm(name)))
    assert names(made) == names(algorithm(name))


def test_what_follows_the_filter_waits_for_it() -> None:
    """Every stage after the filter reads, directly or not, what the filter writes: no work for dropped groups."""
    graph = algorithm("dapo", KL).graph()
    kept = graph["filter_groups"].writes[0]
    behind = {kept}
    for stage in graph.stages[3:]:
        assert behind & set(stage.reads), stage
        behind |= set(stage.writes)
    assert all(kept in graph[name].reads for name in ("old_logprobs", "ref_logprobs", "advantage"))


def test_ppo_has_two_learners() -> None:
    graph = algorithm("ppo").graph()
    assert [learner.name for learner in graph.learners] == ["actor", "critic"]
    assert {VALUES, RETURNS} <= set(graph.learners[1].reads)
    assert graph["advantage"].by == "step"
    assert algorithm("grpo").graph()["advantage"].by == "group"


def test_names_and_users_own() -> None:
    assert ALGORITHMS.names() == sorted([*POLICIES, "sft", "dpo", "distill"])
    assert type(algorithm("docklands.algorithms.rloo:RLOO", {"samples_per_update": 0})).__name__ == "RLOO"
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        algorithm("grppo")
    with pytest.raises(ConfigError, match="not an algorithm"):
        algorithm("docklands.algorithms.kl:kl_loss")


def test_pitfall_12_a_group_of_one_is_refused() -> None:
    one = {"rollout": {"samples_per_prompt": 1, "prompts_per_step": 16}}
    for name in ("grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo"):
        with pytest.raises(ConfigError, match="samples_per_prompt is 1"):
            algorithm(name, **one)
    for name in ("ppo", "reinforce_pp"):
        algorithm(name, **one)
        with pytest.raises(ConfigError, match="filter_groups"):
            algorithm(name, {"filter_groups": True}, **one)


@pytest.mark.parametrize(
    ("name", "keys", "sections", "says"),
    [
        ("grpo", {"kl": {"estimator": "k1"}}, {}, "kl.estimator"),
        ("grpo", {"kl": {"where": "reward"}}, {}, "kl.where"),
        ("grpo", {"kl": {"target": 1.0}}, {}, "kl.target"),
        ("grpo", {"kl": {"coef": 0.1, "target": 1.0}}, {}, "kl.target"),
        ("grpo", {"kl": {"coef": 0.1, "horizon": 5}}, {}, "kl.horizon"),
        ("sft", {"kl": {"coef": 0.1}}, {}, "algorithm.kl is set"),
        ("sft", {"clip_high": 0.3}, {}, "clip_high"),
        ("sft", {"entropy_coef": 0.3}, {}, "entropy_coef"),
        ("rloo", {"clip_low": 0.1}, {}, "clip_low"),
        ("rloo", {"old_logprobs": "recompute"}, {}, "old_logprobs"),
        ("rloo", {"dual_clip": 3.0}, {}, "dual_clip"),
        ("cispo", {"dual_clip": 3.0}, {}, "dual_clip"),
        ("ppo", {"normalize_std": False}, {}, "normalize_std"),
        ("grpo", {"gamma": 0.9}, {}, "gamma"),
        ("grpo", {"lam": 0.9}, {}, "lam"),
        ("grpo", {"value_clip": 0.1}, {}, "value_clip"),
        ("grpo", {"critic_warmup_steps": 2}, {}, "critic_warmup_steps"),
        ("ppo", {"critic_warmup_steps": 5}, {"run": {"steps": 5}}, "the actor would never be trained"),
        ("reinforce_pp", {"lam": 0.9}, {}, "lam"),
        ("grpo", {"correction": {"max_ratio": 3.0}}, {}, "correction.max_ratio"),
        ("grpo", {"correction": {"mode": "token_tis", "min_ratio": 0.5}}, {}, "correction.min_ratio"),
        ("grpo", {"overlong_penalty": 0.5}, {}, "overlong_penalty"),
        ("grpo", {}, {"reference": {"path": "somewhere"}}, "reference.path"),
        ("grpo", {}, {"critic": {"path": "somewhere"}}, "critic"),
        ("grpo", {}, {"critic": {"optim": {"lr": 0.1}}}, "critic"),
        ("sft", {}, {"reward": {"functions": [{"name": "number"}]}}, "reward.functions"),
    ],
)
def test_pitfall_15_what_nothing_reads_is_refused(
    name: str, keys: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    """A key, a reference or a critic that nothing would use."""
    with pytest.raises(ConfigError, match=says):
        algorithm(name, keys, **sections)


def test_samples_may_be_older_than_the_policy_only_with_a_ratio() -> None:
    keys = {"samples_per_update": 16, "old_logprobs": "current"}
    assert algorithm("grpo", keys)
    with pytest.raises(ConfigError, match="with dock.max_staleness 1 samples may be older"):
        algorithm("grpo", keys, dock={"max_staleness": 1})


def test_pitfall_15_the_reference_exists_only_for_a_kl_term() -> None:
    for name in POLICIES:
        assert "reference" not in algorithm(name).graph().roles
        graph = algorithm(name, KL).graph()
        assert "reference" in graph.roles
        assert REF_LOGPROBS in graph.learners[0].reads
        graph = algorithm(name, KL_REWARD).graph()
        assert REF_LOGPROBS in graph["advantage"].reads and REF_LOGPROBS not in graph["update"].reads


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("grpo", {"old_logprobs": "current"}, "16 samples x 1 epochs / 8 samples per update = 2 updates"),
        ("rloo", {"samples_per_update": 8}, "= 2 updates per step"),
        ("rloo", {"epochs_per_step": 2}, "= 2 updates per step"),
        ("grpo", {"samples_per_update": 16, "old_logprobs": "current", **KL_REWARD}, "kl.where: reward"),
        ("grpo", {"old_logprobs": "rollout", "correction": {"mode": "token_tis"}}, "pi_old / mu"),
        ("grpo", {"correction": {"mode": "token_mask", "min_ratio": 2.0}}, "not below"),
        ("grpo", {"dual_clip": 0.5}, "above 1"),
        ("grpo", {"overlong_buffer_tokens": 17}, "max_response_tokens 16"),
        ("sft", {"samples_per_update": 3}, "divide"),
    ],
)
def test_contradictions_are_refused(name: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        algorithm(name, keys)


def test_sft_wants_each_demonstration_once_and_at_temperature_one() -> None:
    with pytest.raises(ConfigError, match="8 times"):
        algorithm("sft", rollout={"samples_per_prompt": 8})
    with pytest.raises(ConfigError, match="temperature"):
        algorithm("sft", rollout={"temperature": 0.7})


@pytest.mark.parametrize(
    ("keys", "staleness", "expected"),
    [
        ({"samples_per_update": 16}, 0, "current"),
        ({"samples_per_update": 16}, 1, "recompute"),
        ({"samples_per_update": 8}, 0, "recompute"),
        ({"samples_per_update": 16, "epochs_per_step": 2}, 0, "recompute"),
        ({"samples_per_update": 16, **KL_REWARD}, 0, "recompute"),
        ({"samples_per_update": 16, "old_logprobs": "recompute"}, 0, "recompute"),
        ({"old_logprobs": "rollout"}, 0, "rollout"),
    ],
)
def test_where_pi_old_comes_from(keys: dict[str, Any], staleness: int, expected: str) -> None:
    made = algorithm("grpo", keys, dock={"max_staleness": staleness})
    assert isinstance(made, PolicyAlgorithm) and made.old == expected
    assert (OLD_LOGPROBS in made.graph().fields) == (expected == "recompute")


def test_entropy_is_computed_only_when_asked_for() -> None:
    assert not algorithm("grpo").graph().learners[0].entropy
    assert algorithm("grpo", {"entropy_coef": 0.01}).graph().learners[0].entropy


def test_state_of_the_adaptive_coefficient() -> None:
    keys = {"kl": {"coef": 0.1, "where": "reward", "target": 0.5}}
    made, again = algorithm("ppo", keys), algorithm("ppo", keys)
    assert isinstance(made, PolicyAlgorithm) and isinstance(again, PolicyAlgorithm)
    made.controller.update(2.0, range(100))
    again.load_state_dict(made.state_dict())
    assert again.controller.coef == made.controller.coef != 0.1
    assert again.controller.update(2.0, range(100)) == 0.1  # the same rows once more
    again.load_state_dict({"kl_coef": 0.3})  # as written by earlier versions
    assert again.controller.coef == 0.3
    with pytest.raises(CheckpointError):
        again.load_state_dict({})
    algorithm("sft").load_state_dict(algorithm("sft").state_dict())
    with pytest.raises(CheckpointError):
        algorithm("sft").load_state_dict({"kl_coef": 0.1})


def test_stages_that_do_not_exist_say_so() -> None:
    with pytest.raises(ConfigError, match="no advantage stage"):
        algorithm("sft").advantage(None)  # type: ignore[arg-type]
    update = algorithm("grpo").graph()["update"]
    with pytest.raises(GraphError, match="update"):
        update.run(None, None)  # type: ignore[arg-type]


def test_a_users_algorithm_is_checked_like_ours() -> None:
    config = algorithm("grpo").config
    bad = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"name": "docklands.algorithms.rloo:RLOO"})}
    )
    with pytest.raises(ConfigError, match="one update per step"):
        build_algorithm(bad)
