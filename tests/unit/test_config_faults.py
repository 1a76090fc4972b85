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
