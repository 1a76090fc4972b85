"""Values where they cannot stand, and what is said of a key that is not there."""

from __future__ import annotations

import pytest

from docklands.config.load import make_config
from docklands.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run=3", "run.threads=1"], "run: got 3, expected a section"),
        (["train=[1]", "train.optim.lr=1"], "train: got [1], expected a section"),
        (["data.args=x", "data.args.size=1"], "data.args: got 'x', expected a section"),
        (["data.args={a: [1]}", "data.args.a.b=1"], "data.args.a: got [1], expected a section"),
        (["run.name=../out"], "run.name: ../out leads out of run.dir"),
        (["run.name=/out"], "run.name: /out leads out of run.dir"),
    ],
)
def test_a_value_where_it_cannot_stand(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(None, overrides)
    assert message in caught.value.message and "command line" in caught.value.message


def test_an_empty_section_is_the_default_one() -> None:
    assert make_config(None, ["run=null", "run.threads=1"])[0].run.threads == 1


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("rollout.temp=1", "did you mean rollout.temperature?"),
        ("dock.x=1", "dock has max_staleness, "),
        ("data.zzz=1", "data has source, "),
        ("train.optim.q=1", "train.optim has lr, "),
        ("zzz=1", "`docklands config show` lists every key"),
    ],
)
def test_the_hint_for_an_unknown_key(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(None, [override])
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.name=''", "run.name: '' names no directory below run.dir"),
        ("run.name=./", "run.name: './' names no directory below run.dir"),
        ('data.system_prompt="\\ud800"', "a text is no Unicode (half of a surrogate pair)"),
        ("data.args={a: " + "[" * 100 + "]" * 100 + "}", "override data.args:1: values are nested more than 64 deep"),
        ("data.args={a: " + "[" * 3000 + "]" * 3000 + "}", "override data.args: values are nested more than 64 deep"),
        ("run.seed=" + "9" * 5000, "override run.seed:1: a number of 5000 digits"),
        ("run.seed=-1", "run.seed: got -1, expected a value >= 0"),
        ("run.seed=99999999999999999999999999", "run.seed: got 99999999999999999999999999, expected a value < "),
        ("train.optim.betas=[1.5, 0.9]", "train.optim.betas.0: got 1.5, expected a value < 1"),
        ("critic.optim.betas=[0.9, -1]", "critic.optim.betas.1: got -1"),
        ("algorithm.clip_low=2", "algorithm.clip_low: got 2, expected a value <= 1"),
        ("rollout.temperature=1e-30", "rollout.temperature: 1e-30 (greedy)"),
        ("eval.temperature=1e-30", "eval.temperature: 1e-30 is below 0.01; 0 is greedy"),
    ],
)
def test_a_value_out_of_its_bounds(override: str, message: str) -> None:
    """Each of these was taken, or ended in a traceback."""
    with pytest.raises(ConfigError) as caught:
        make_config(None, [override])
    assert message in caught.value.message and "\n" not in caught.value.message


def test_settings_that_leave_nothing_to_learn_or_to_compare() -> None:
    zero = ["reward.functions=[{name: sorted_digits, weight: 0}]"]
    with pytest.raises(ConfigError, match=r"reward.functions: every weight is 0"):
        make_config(None, zero)
    watched = "reward.functions=[{name: sorted_digits, weight: 1}, {name: length, weight: 0}]"
    assert make_config(None, [watched])[0].reward.functions[1].weight == 0
    greedy = ["eval.prompts=8", "eval.samples_per_prompt=3"]
    with pytest.raises(ConfigError, match=r"eval.temperature: 0 \(greedy\) makes 3 equal samples"):
        make_config(None, greedy)
    assert make_config(None, [*greedy, "eval.temperature=1"])[0].eval.samples_per_prompt == 3
