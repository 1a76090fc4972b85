"""Any value that a config can hold survives being written and read; any text gives a config or one clear error."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from docklands.config import yaml_io
from docklands.config.load import load_config, make_config, resolved_yaml
from docklands.errors import ConfigError

texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
names = texts.map(lambda text: "n" + text.replace("/", ""))
weights = st.floats(-5, 5).filter(bool)


@given(values)
@example("no")
@example("1e-5")
@example("# comment")
@example("a: b")
@example("")
@example("~")
@example("<<")
@example(["", "null", "0x1f", "1_0", ".5", "2024-01-01", "!tag", "*alias", "\x00", "\ufeff", "\U0001f600"])
@example(1e-300)
@example({"": 1})
def test_a_value_on_one_line_reads_back(value: Any) -> None:
    text = yaml_io.flow(value)
    assert "\n" not in text
    assert yaml_io.parse_value(text, "x") == value
    assert yaml.safe_load(text) == value


@settings(max_examples=50)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "run": st.fixed_dictionaries({"name": names, "seed": st.integers(0, 2**63 - 1)}),
            "data": st.fixed_dictionaries({"args": st.dictionaries(texts, values, max_size=3)}),
            "train": st.fixed_dictionaries({"optim": st.fixed_dictionaries({"lr": st.floats(0, 1)})}),
            "algorithm": st.fixed_dictionaries({"clip_high": st.none() | st.floats(0, 1e6)}),
            "rollout": st.fixed_dictionaries({"stop": st.lists(texts, max_size=3)}),
            "reward": st.fixed_dictionaries(
                {"functions": st.lists(st.fixed_dictionaries({"name": texts, "weight": weights}), max_size=3)}
            ),
        },
    )
)
def test_a_config_reads_back_equal(data: dict[str, Any]) -> None:
    config, sources = make_config(data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(resolved_yaml(config, sources), encoding="utf-8")
        assert load_config(path)[0] == config


@settings(max_examples=200)
@given(st.text(st.sampled_from("run:algoithmseed {}[],&*!|>-?'\"#\n\t 019.e~"), max_size=60))
def test_any_text_gives_a_config_or_one_clear_error(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path)
        except ConfigError as error:
            assert error.message and all(line.strip() for line in error.message.splitlines())
