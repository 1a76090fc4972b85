"""Loading: strict keys with did-you-mean, values with sources, overrides, extends, and errors of one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docklands.config.explain import ELSEWHERE
from docklands.config.load import diff_configs, load_config, make_config, resolved_yaml
from docklands.config.schema import Config
from docklands.config.summary import arithmetic
from docklands.config.tree import schema_leaves, schema_sections
from docklands.errors import ConfigError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "c.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def fault(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value


def test_an_empty_file_is_the_defaults(write: Write) -> None:
    for text in ("", "# nothing\n", "---\n", "run:\n", "train: {optim: }\n"):
        config, sources = load_config(write(text))
        assert config == Config() and set(sources.values()) == {"default"}


def test_values_and_their_sources(write: Write) -> None:
    path = write(
        "run: {steps: 7}\n\ntrain:\n  optim:\n    lr: 1e-5\n    betas: [0.9, 0.95]\n"
        "reward:\n  functions:\n    - name: number\n    - {name: format, weight: 0.5, args: {regex: 'a: b'}}\n"
    )
    config, sources = load_config(path, ["algorithm.kl.coef=1e-3", "run.name=a-b", "reward.functions.1.weight=2"])
    assert (config.run.steps, config.train.optim.lr, config.train.optim.betas) == (7, 1e-5, (0.9, 0.95))
    assert config.algorithm.kl.coef == 1e-3 and config.run.name == "a-b"
    assert [(f.name, f.weight, f.args) for f in config.reward.functions] == [
        ("number", 1.0, {}),
        ("format", 2.0, {"regex": "a: b"}),
    ]
    expected = {
        "run.steps": f"{path}:1",
        "run.seed": "default",
        "train.optim.lr": f"{path}:5",
        "train.optim.betas": f"{path}:6",
        "reward.functions.0.name": f"{path}:9",
        "reward.functions.0.weight": "default",
        "reward.functions.1.weight": "command line",
        "reward.functions.1.args": f"{path}:10",
        "algorithm.kl.coef": "command line",
        "run.name": "command line",
    }
    assert {key: sources[key] for key in expected} == expected


def test_every_leaf_has_a_source(write: Write) -> None:
    _, sources = load_config(write("run: {steps: 7}\n"))
    assert set(sources) == {key for key, _ in schema_leaves() if "[]" not in key} | {"reward.functions"}


def test_clip_high_at_the_top(write: Write) -> None:
    path = write("run: {steps: 1}\nclip_high: 0.28\n")
    error = fault(path)
    assert error.message == f"unknown key clip_high ({path}:2)"
    assert error.hint == "did you mean algorithm.clip_high?"
    assert fault(write(""), "clip_high=0.28").hint == "did you mean algorithm.clip_high?"


NEAR = {
    "algorithm: {clip_hihg: 1}": "algorithm.clip_high",
    "tempurature: 1": "rollout.temperature",
    "train: {lr: 1}": "train.optim.lr",
    "algorithm: {estimator: k1}": "algorithm.kl.estimator",
    "rollout: {lr: 4}": "train.optim.lr",
    "rollout: {group_size: 4}": "rollout.samples_per_prompt",
    "learning_rate: 1e-6": "train.optim.lr",
    "optim: {}": "train.optim",
    "algoritm: {}": "algorithm",
    "max_tokens: 3": "rollout.max_response_tokens",
    "reward: {functions: [{nmae: x}]}": "reward.functions[].name",
    "samples-per-prompt: 4": "rollout.samples_per_prompt",
}


def test_names_of_other_systems_lead_to_keys_that_exist() -> None:
    known = {key for key, _ in schema_leaves()}
    assert set(ELSEWHERE.values()) <= known and not set(ELSEWHERE) & {key.split(".")[-1] for key in known}


def test_a_key_that_is_near_nothing(write: Write) -> None:
    assert fault(write("zzzzzz: 1")).hint == "`docklands config show` lists every key"


@pytest.mark.parametrize("text", NEAR)
def test_did_you_mean(write: Write, text: str) -> None:
    error, near = fault(write(text)), NEAR[text]
    assert error.message.startswith("unknown key ") and "\n" not in error.message
    assert re.search(rf"(mean|or) {re.escape(near)}( or|\?)", error.hint), error.hint


def misspelt(word: str) -> str:
    """The word with its last two different neighbours exchanged, or a letter more; a short one has many neighbours."""
    if len(word) < 4:
        return word + word[-1]
    for i in range(len(word) - 1, 0, -1):
        if word[i] != word[i - 1]:
            return word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :]
    return word + "x"


@pytest.mark.parametrize("section", [path for path, _ in schema_sections() if "[]" not in path])
def test_a_misspelt_key_in_each_section(write: Write, section: str) -> None:
    kind = dict(schema_sections())[section]
    key = max(kind.model_fields, key=len)
    words = [*section.split("."), misspelt(key)]
    text = "".join("  " * depth + word + ":\n" for depth, word in enumerate(words[:-1])) + "  " * (len(words) - 1)
    path = write(text + words[-1] + ": 1\n")
    for error, source in (
        (fault(path), f"{path}:{len(words)}"),
        (fault(write("", "e.yaml"), ".".join(words) + "=1"), "command line"),
    ):
        assert error.message == f"unknown key {'.'.join(words)} ({source})"
        assert error.hint.startswith(f"did you mean {section}.{key}")


TYPES = {
    "algorithm: {gamma: high}": "algorithm.gamma: got 'high', expected a number (FILE:1)",
    "algorithm:\n  gamma: 1.5": "algorithm.gamma: got 1.5, expected a value <= 1 (FILE:2)",
    "run: {steps: 0}": "run.steps: got 0, expected a value > 0 (FILE:1)",
    "run: {steps: 2.5}": "run.steps: got 2.5, expected a whole number (FILE:1)",
    "run: {steps: '3'}": "run.steps: got '3', expected a whole number (FILE:1)",
    "run: {steps: true}": "run.steps: got true, expected a whole number (FILE:1)",
    "run: {steps: }": "run.steps: got null, expected a whole number (FILE:1)",
    "run: {name: 3}": "run.name: got 3, expected text (FILE:1)",
    "data: {shuffle: yes}": "data.shuffle: got 'yes', expected true or false (FILE:1)",
    "run: {device: tpu}": "run.device: got 'tpu', expected auto, cpu, cuda or npu (FILE:1)",
    "rollout: {stop: a}": "rollout.stop: got 'a', expected a list (FILE:1)",
    "data: {args: [1]}": "data.args: got [1], expected a mapping (FILE:1)",
    "train: 3": "train: got 3, expected a section (a mapping of keys) (FILE:1)",
    "reward: {functions: [{weight: 1}]}": "reward.functions.0.name: is required (FILE:1)",
    "train: {optim: {betas: [0.9, 0.9, 0.9]}}": "train.optim.betas: got [0.9, 0.9, 0.9], expected 2 values (FILE:1)",
}


@pytest.mark.parametrize("text", TYPES)
def test_a_wrong_value_is_one_line(write: Write, text: str) -> None:
    path = write(text)
    assert fault(path).message == TYPES[text].replace("FILE", str(path))


def test_several_wrong_values_are_one_line_each(write: Write) -> None:
    path = write("algorithm:\n  gamma: high\n  lam: -1\n")
    lines = fault(path, "run.steps=x").message.splitlines()
    assert [line.split(":")[0] for line in lines] == ["run.steps", "algorithm.gamma", "algorithm.lam"]
    assert lines[0].endswith("(command line)") and lines[2].endswith(f"({path}:3)")


def test_pitfall_32_sizes_that_do_not_divide_show_the_arithmetic(write: Write) -> None:
    path = write("algorithm:\n  samples_per_update: 48\n")
    error = fault(path)
    assert error.message == (
        "algorithm.samples_per_update: 16 prompts x 8 = 128 samples do not divide into updates of 48 " + f"({path}:2)"
    )
    long = fault(write("rollout: {max_response_tokens: 8000}"))
    assert "1024 prompt + 8000 response = 9024 tokens do not fit into 8192" in long.message


def test_pitfall_36_units_in_words() -> None:
    config, _ = make_config({"algorithm": {"samples_per_update": 64}})
    assert arithmetic(config) == "16 prompts x 8 = 128 samples -> 2 updates x 64"
    assert arithmetic(Config()) == "16 prompts x 8 = 128 samples -> 1 update x 128"
    twice, _ = make_config({"algorithm": {"samples_per_update": 64, "epochs_per_step": 2}})
    assert arithmetic(twice) == "16 prompts x 8 = 128 samples -> 4 updates x 64 in 2 passes"


def test_keys_of_counts_name_their_unit() -> None:
    keys = {key.split(".")[-1] for key, _ in schema_leaves()}
    assert {"prompts_per_step", "samples_per_prompt", "samples_per_update", "tokens_per_microbatch"} <= keys


BROKEN = {
    "a: [1": "FILE:1: not valid YAML",
    "a: 1\n\tb: 2": "FILE:2: not valid YAML",
    "- 1": "FILE:1: expected `key: value` lines at the top",
    "run: {steps: 1}\nrun: {seed: 2}": "FILE:2: key 'run' is given twice, first in line 1",
    "run:\n  seed: 1\n  steps: 2\n  seed: 3": "FILE:4: key 'run.seed' is given twice, first in line 2",
    "data: {args: {a: 1, a: 2}}": "FILE:1: key 'data.args.a' is given twice",
    "data: &x {args: *x}": "FILE:1: an alias that contains itself",
    "run: {name: !!python/name:os.system }": "FILE:1: tag tag:yaml.org,2002:python/name:os.system is not allowed",
    "train: {optim: {lr: .nan}}": "FILE:1: .nan is not a finite number",
    "train: {optim: {lr: 1e999}}": "FILE:1: 1e999 is not a finite number",
    "? [a]\n: 1": "FILE:1: a key must be a plain word",
    "algorithm.clip_high: 1": "unknown key 'algorithm.clip_high' (FILE:1)",
    "extends: 3": "FILE:1: extends: expected a file name or a list of them, got 3",
    "extends: [x.yaml, 3]": "FILE:1: extends: no file",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_is_no_config(write: Write, text: str) -> None:
    path = write(text)
    error = fault(path)
    assert error.message.startswith(BROKEN[text].replace("FILE", str(path))) and "\n" not in error.message


def test_a_file_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    here = write("")
    missing = fault(tmp_path / "d.yaml")
    assert missing.message == f"no file {tmp_path / 'd.yaml'}" and here.name in missing.hint
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    assert fault(tmp_path / "latin.yaml").message.endswith("not UTF-8 text")
    assert "cannot read" in fault(tmp_path).message


def test_numbers_and_words_mean_what_they_say(write: Write) -> None:
    """YAML 1.1 reads 1e-5 as text, yes as true, 1:30 as 90, 010 as 8, 2024-01-01 as a date."""
    text = (
        "data: {args: {a: 1e-5, b: yes, c: 1:30, d: 010, e: 2024-01-01, f: 1_000, g: '1', h: .5, i: 1., j: -3e4, k: ~}}"
    )
    args = load_config(write(text))[0].data.args
    assert args == {
        "a": 1e-5,
        "b": "yes",
        "c": "1:30",
        "d": 10,
        "e": "2024-01-01",
        "f": 1000,
        "g": "1",
        "h": 0.5,
        "i": 1.0,
        "j": -3e4,
        "k": None,
    }
    assert [type(v) for v in args.values()] == [float, str, str, int, str, int, str, float, float, float, type(None)]


OVERRIDES = {
    "algorithm.clip_high": "override 'algorithm.clip_high' is not of the form key=value",
    "=3": "override '=3' is not of the form key=value",
    "algorithm.clip_hgih=1": "unknown key algorithm.clip_hgih (command line)",
    "reward.functions.0.weight=1": "unknown key reward.functions.0.weight (command line)",
    "model.path.x=1": "unknown key model.path.x (command line)",
    "train.optim.lr=[1": "override train.optim.lr:1: not valid YAML",
    "train.optim=3": "train.optim: got 3, expected a section (a mapping of keys) (command line)",
    "run.name=": "run.name: got null, expected text (command line)",
    "train.optim={lrr: 1}": "unknown key train.optim.lrr (command line)",
}


@pytest.mark.parametrize("text", OVERRIDES)
def test_a_wrong_override(write: Write, text: str) -> None:
    assert fault(write(""), text).message.startswith(OVERRIDES[text])


def test_overrides_are_yaml(write: Write) -> None:
    path = write("data: {args: {digits: 4, size: 9}}\nalgorithm: {clip_high: 0.3}\n")
    config, sources = load_config(
        path,
        [
            "rollout.stop=[a, 'b c']",
            "algorithm.clip_high=null",
            "data.args.digits=6",
            "env.args={x: {y: [1, 2]}}",
            "train.optim={lr: 2e-4, eps: 1e-9}",
            "data.source=task:larger_number",
            "data.system_prompt=''",
            "reward.functions=[{name: number}]",
        ],
    )
    assert config.rollout.stop == ["a", "b c"] and config.algorithm.clip_high is None
    assert config.data.args == {"digits": 6, "size": 9} and sources["data.args"] == f"{path}:1 + command line"
    assert config.env.args == {"x": {"y": [1, 2]}} and config.data.system_prompt == ""
    assert (config.train.optim.lr, config.train.optim.eps, config.train.optim.weight_decay) == (2e-4, 1e-9, 0.01)
    assert sources["train.optim.lr"] == "command line" and sources["train.optim.weight_decay"] == "default"
    assert config.data.source == "task:larger_number" and config.reward.functions[0].name == "number"


def test_later_overrides_win(write: Write) -> None:
    assert load_config(write(""), ["run.seed=1", "run.seed=2"])[0].run.seed == 2


def test_extends_merges_sections_and_replaces_values(write: Write) -> None:
    base = write(
        "run: {steps: 5, seed: 1}\ndata: {source: 'task:a', args: {x: 1, y: 2}}\nrollout: {stop: [a, b]}\n",
        "base/b.yaml",
    )
    path = write("extends: base/b.yaml\nrun: {seed: 2}\ndata: {args: {x: 3}}\nrollout:\n  stop: [c]\n")
    config, sources = load_config(path)
    assert (config.run.steps, config.run.seed, config.data.source) == (5, 2, "task:a")
    assert config.data.args == {"x": 3} and config.rollout.stop == ["c"]
    assert sources["run.steps"] == f"extends {base}:1" and sources["run.seed"] == f"{path}:2"
    assert sources["data.source"] == f"extends {base}:2" and sources["data.args"] == f"{path}:3"


def test_extends_in_a_chain_and_from_several(write: Write) -> None:
    write("run: {steps: 1, seed: 1, name: a}\n", "a.yaml")
    write("extends: a.yaml\nrun: {seed: 2}\n", "b.yaml")
    write("run: {threads: 3, seed: 4}\n", "c0.yaml")
    config, _ = load_config(write("extends: [b.yaml, c0.yaml]\n"))
    assert (config.run.steps, config.run.seed, config.run.name, config.run.threads) == (1, 4, "a", 3)


def test_extends_in_a_circle_is_refused(write: Write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    b = write("extends: a.yaml\n", "b.yaml")
    assert "extends itself" in fault(b).message
    assert "extends itself" in fault(write("extends: c.yaml\n")).message


def test_an_error_in_an_extended_file_names_that_file(write: Write) -> None:
    base = write("\nrun: {stepss: 1}\n", "base.yaml")
    assert f"(extends {base}:2)" in fault(write("extends: base.yaml\n")).message
    assert "no file" in fault(write("extends: nowhere.yaml\n")).message


def test_the_environment_changes_nothing(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("run: {name: $HOME}\n")
    before = load_config(path)
    for name in ("SEED", "RUN__SEED", "DOCKLANDS_RUN__SEED", "run.seed"):
        monkeypatch.setenv(name, "7")
    assert load_config(path) == before and before[0].run.name == "$HOME"


def test_a_config_never_changes() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().run.seed = 3  # type: ignore[misc]


def test_resolved_yaml_shows_sources_and_reads_back(write: Write, tmp_path: Path) -> None:
    path = write(
        "reward:\n  functions:\n    - {name: number, args: {a: 1e-5}}\n    - name: format\nrun: {name: 'yes'}\n"
    )
    config, sources = load_config(path, ["train.optim.lr=3e-7"])
    text = resolved_yaml(config, sources)
    lines = {line.split("#")[0].strip(): line.split("# ")[1] for line in text.splitlines() if "# " in line}
    assert lines["lr: 3.0e-07"] == "command line"
    assert lines["- name: number"] == f"{path}:3" and lines["args: {a: 1.0e-05}"] == f"{path}:3"
    assert lines['name: "yes"'] == f"{path}:5" and lines["seed: 42"] == "default"
    again, _ = load_config(write(text, "out.yaml"))
    assert again == config and diff_configs(config, again) == []
    import yaml

    loose = Config.model_validate(yaml.safe_load(text))
    assert loose == config, "a YAML 1.1 reader understands the file too"


def test_diff() -> None:
    a, _ = make_config({"run": {"seed": 1}, "reward": {"functions": [{"name": "x"}]}})
    b, _ = make_config({"train": {"optim": {"lr": 1e-5}}, "reward": {"functions": [{"name": "x"}, {"name": "y"}]}})
    rows = diff_configs(a, b)
    assert ("run.seed", 1, 42) in rows and ("train.optim.lr", 1e-6, 1e-5) in rows
    assert ("reward.functions.1.name", None, "y") in rows and len(rows) == 5
    assert diff_configs(a, a) == []


def test_python_values_are_checked_like_a_file() -> None:
    assert make_config({"run": {"seed": 3}})[1]["run.seed"] == "python"
    with pytest.raises(ConfigError, match=r"unknown key run.sede \(python\)"):
        make_config({"run": {"sede": 3}})
