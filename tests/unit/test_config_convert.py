"""`docklands config convert`: no key of another system disappears without a word, and the result is a sound config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from docklands.cli.main import run
from docklands.config.convert.base import KINDS, Key, System, convert, flag, flatten, is_neutral, number, text, whole
from docklands.config.convert.files import SYSTEMS, convert_file, from_python, from_shell
from docklands.config.convert.page import with_table
from docklands.config.load import load_config
from docklands.config.tree import schema_leaves, schema_sections
from docklands.errors import ConfigError

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
OURS = {name for name, _ in schema_leaves()} | {name for name, _ in schema_sections()} | {"reward.functions"}

MINDSPEED = """
defaults: [{model: [small]}]
megatron_training: {stage: ray_dapo, global_batch_size: 128, train_iters: 40, bf16: true,
  use_distributed_optimizer: true, tokenizer_name_or_path: some/model, data_path: rows.jsonl,
  dataset_additional_keys: [labels],
  seq_length: 2048, lr: 5e-6}
actor_config: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, expert_model_parallel_size: 2,
  moe_tp_extend_ep: true, num_layer_list: "9,10", lr: 1e-6, lr_decay_style: cosine, min_lr: 1e-7,
  lr_warmup_fraction: 0.1,
  adam_beta1: 0.9, adam_beta2: 0.95, recompute_granularity: full, attention_dropout: 0.0}
rl_config: {mini_batch_size: 256, n_samples_per_prompt: 8, max_prompt_length: 100, clip_higher_enable: true,
  clip_ratio_low: 0.2, clip_ratio_high: 0.28, filter_groups_enable: true, filter_groups_train_batch_size: 64,
  filter_groups_max_batches: 3, verifier_function: [acc, secret_format], verifier_weight: [1.0, 0.5], gamma: 1.0,
  use_integrated_worker: true, actor_resource: {num_npus: 16}, overlong_buffer_enable: true, overlong_buffer: 50,
  entropy_coeff: 0, partial_rollout_max_split: 3, max_packing_token_size: 100, key_of_tomorrow: 1}
generate_config: {infer_tensor_parallel_size: 2, infer_pipeline_parallel_size: 1, offload_train_param: true,
  sampling_config: {max_tokens: 200, temperature: 1.0, top_p: 0.9, top_k: -1}}
"""


def lines(values: dict[str, Any], system: str) -> dict[str, Any]:
    return {line.name: line for line in convert(values, SYSTEMS[system]).lines if not line.default}


def test_mindspeed_rl_by_hand(tmp_path: Path) -> None:
    """The numbers worked out by hand: which batch counts prompts and which samples, who inherits, who decides."""
    file, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    file.write_text(MINDSPEED)
    assert run(["config", "convert", str(file), "--from", "mindspeed_rl", "--out", str(out)]) == 0
    ours, _ = load_config(out)
    assert (ours.algorithm.name, ours.rollout.prompts_per_step, ours.rollout.samples_per_prompt) == ("dapo", 64, 8)
    assert ours.algorithm.samples_per_update == 256 and ours.updates_per_step == 2
    assert ours.train.optim.warmup_updates == 8  # a tenth of 40 steps of two updates
    assert (ours.train.optim.lr, ours.train.optim.min_lr_fraction) == (1e-6, pytest.approx(0.1))
    assert ours.train.optim.betas == (0.9, 0.95) and ours.algorithm.max_dropped_groups == 3 * 128
    assert (ours.layout.tp, ours.layout.pp, ours.layout.fsdp, ours.layout.ep, ours.layout.etp) == (4, 2, 2, 8, 1)
    assert ours.rollout.layout.tp == 2 and ours.sync.swap == "host" and ours.fleet.placement == "colocated"
    assert ours.train.tokens_per_microbatch == 300  # never below the longest sample
    assert (ours.algorithm.kl.coef, ours.algorithm.overlong_buffer_tokens) == (0, 50)
    assert [f.name for f in ours.reward.functions] == ["math_verify"]
    assert (ours.rollout.partial_tokens, ours.dock.max_staleness) == (67, 2)
    said = out.read_text()
    for word in ("key_of_tomorrow", "num_layer_list", "secret_format", "top_p", "data_path"):
        assert word in said.split("# Not supported")[1]
    assert "megatron_training.lr: 5.0e-06: actor_config.lr says otherwise" in said
    assert "attention_dropout: 0.0: asks for nothing" in said
    assert run(["config", "check", str(out)]) == 0
    assert run(["config", "convert", str(file), "--from", "mindspeed_rl", "--out", str(out)]) == 2  # never overwritten


def test_a_verl_script(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        'n=4\nlen="$((1024 * 2))"\n# data.train_batch_size=7\npython -m verl.trainer.main_ppo \\\n'
        " algorithm.adv_estimator=grpo trainer.n_gpus_per_node=4 \\\n"
        " data.train_batch_size=64 actor_rollout_ref.rollout.n=$n actor_rollout_ref.actor.ppo_mini_batch_size=16 \\\n"
        " data.max_prompt_length=${len} actor_rollout_ref.actor.use_kl_loss=True ++algorithm.kl_ctrl.kl_coef=0.5 \\\n"
        ' actor_rollout_ref.actor.kl_loss_coef=1e-3 trainer.logger=\'["console","wandb"]\' \\\n'
        " custom_reward_function.path=rewards.py trainer.total_training_steps=9\n"
    )
    found = convert_file(file, "verl")
    ours, said = found.config, {line.name: line for line in found.lines if not line.default}
    assert (ours.rollout.prompts_per_step, ours.samples_per_update, ours.run.steps) == (64, 64, 9)
    assert (ours.algorithm.kl.coef, ours.algorithm.kl.estimator, ours.algorithm.kl.where) == (1e-3, "k3", "loss")
    assert ours.layout.fsdp == 4 and ours.obs.wandb == "verl"
    assert ours.reward.functions[0].name == "rewards.py:compute_score"
    assert said["data.max_prompt_length"].kind == "not supported"  # a shell's arithmetic is not run
    assert said["algorithm.kl_ctrl.kl_coef"].kind == "not needed" and ours.data.max_prompt_tokens == 512


def test_a_trl_script() -> None:
    code = (
        "def mine(completions): return [1.0]\n"
        "GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=8,\n"
        "  num_generations=8, max_steps=40, warmup_steps=5, learning_rate=rate, beta=0.0, loss_type='grpo')\n"
        "GRPOTrainer(model='m', reward_funcs=[mine, len], args=args)"
    )
    values = dict(from_python(code, Path("t.py")))
    found = convert(values, SYSTEMS["trl"])
    ours = found.config
    assert (ours.rollout.prompts_per_step, ours.samples_per_update, ours.run.steps) == (4, 8, 10)
    assert ours.algorithm.aggregation == "sequence_mean" and ours.train.optim.warmup_updates == 5
    assert [f.name for f in ours.reward.functions] == ["t.py:mine"]
    said = {line.name: line for line in found.lines if not line.default}
    assert said["learning_rate"].kind == said["reward_funcs"].kind == "not supported"
    assert found.to_yaml().count("learning_rate") == 2  # the expression, and the default that stands in for it


@pytest.mark.parametrize(
    ("system", "values", "message"),
    [
        ("mindspeed_rl", {"megatron_training.stage": "ray_dpo"}, "ray_dpo has no counterpart"),
        ("mindspeed_rl", {"actor_config.lr": "fast"}, "actor_config.lr: got 'fast': expected a number"),
        (
            "mindspeed_rl",
            {"actor_config.tensor_model_parallel_size": 3, "rl_config.actor_resource.num_npus": 8},
            "8 devices are no multiple of tp 3 x pp 1 x cp 1",
        ),
        ("verl", {"algorithm.adv_estimator": "opo"}, "opo has no counterpart"),
        ("verl", {"data.train_batch_size": 10.5}, "expected a whole number"),
        ("trl", {"per_device_train_batch_size": 3, "num_generations": 2}, "3 samples are no multiple"),
        ("trl", {"temperature": 0.0}, "rollout.temperature: 0"),
    ],
)
def test_what_cannot_be_read_is_one_line(system: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(values, SYSTEMS[system])


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.py"
    for content, message in (("def (", "x.py:1: not valid Python"), ("print(1)", "no key of TRL found")):
        file.write_text(content)
        assert run(["config", "convert", str(file), "--from", "trl"]) == 2
        assert message in capsys.readouterr().err
    assert run(["config", "convert", str(file), "--from", "nemo"]) == 2
    assert "known: mindspeed_rl, verl, trl" in capsys.readouterr().err
    assert dict(from_shell("a.b='x y' --top_k 3 c=1 path/to.file=2")) == {"a.b": "x y", "top_k": 3}


def test_a_name_of_theirs_is_never_a_line_of_ours(tmp_path: Path) -> None:
    file, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    key = r"x\nreward: {functions: [{name: 'evil.py:f'}]}\r\n\u2028\u0085reward: 1\n\x07#"
    file.write_text(f'model_name_or_path: some/model\nmax_steps: 1\n"{key}": 1\n')
    assert run(["config", "convert", str(file), "--from", "trl", "--out", str(out)]) == 0
    assert "reward" not in yaml.safe_load(out.read_text()) and load_config(out)[0].run.steps == 1
    assert all(line.isprintable() for line in out.read_text().split("\n"))


def test_a_result_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("max_steps: 1\n")
    assert run(["config", "convert", str(file), "--from", "trl", "--out", str(tmp_path / "no" / "x.yaml")]) == 2
    assert "x.yaml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script",
    [
        "v0=aaaaaaaaaa\n" + "".join(f'v{i}="{f"$v{i - 1}" * 10}"\n' for i in range(1, 12)),
        "v='$v$v$v'\n",
        f"v={'a' * 60_000}\n" + 'trainer.x="' + "$v" * 60_000 + '"\n',
        "\n" * 300_000 + f"v={'a' * 600_000}\nx a.b=$v c.d=$v",
    ],
)
def test_what_variables_of_a_script_become_is_bounded(script: str) -> None:
    with pytest.raises(ConfigError, match="variables"):
        list(from_shell(script))
    assert dict(from_shell("p=a\np=$p:b\nx c.d=${p}\n"))["c.d"].startswith("$p")  # as a shell that does not know it


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_pages_hold_the_tables(name: str) -> None:
    page = (HOWTO / f"migrate_from_{name}.md").read_text(encoding="utf-8")
    assert page == with_table(page, SYSTEMS[name]), "run `make docs`"
    assert all(f"`{key.name}`" in page for key in SYSTEMS[name].keys)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda s: s.name)
def test_the_tables_are_sound(system: System) -> None:
    """Each key once, each target a key of ours, each default a key of the table, a reason where nothing is mapped."""
    names = [key.name for key in system.keys]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
    for key in system.keys:
        assert key.kind in KINDS and bool(key.ours) == (key.kind == "mapped")
        assert not set(key.ours) - OURS, key
        assert key.note or key.kind == "mapped", key
    assert all(system.find(name) for name in system.defaults)


VALUES: dict[Any, st.SearchStrategy[Any]] = {
    whole: st.sampled_from([1, 2, 4, 16]),
    number: st.sampled_from([0.0, 0.25, 1, 1e-6]),
    flag: st.booleans(),
    text: st.sampled_from(["word", "two words", "a/path"]),
}
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(0, 9), st.floats(0, 2), st.text(max_size=5), st.lists(st.integers())
)


@st.composite
def written(draw: st.DrawFn, system: System) -> dict[str, Any]:
    """Some keys of a table, with values of the right kind where it says one, and with any elsewhere."""
    chosen = draw(st.lists(st.sampled_from(system.keys), max_size=12, unique_by=lambda key: key.name))
    found = {key.name.replace("*", "some"): draw(VALUES.get(key.change, ANYTHING)) for key in chosen}
    return found | ({"made.up": 1} if draw(st.booleans()) else {})


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda s: s.name)
@settings(max_examples=60)
@given(data=st.data())
def test_no_key_is_lost(system: System, data: st.DataObject) -> None:
    """One line for each key; what is said to be mapped is there; the text is YAML that gives the same config."""
    values = data.draw(written(system))
    try:
        found = convert(values, system)
    except ConfigError as error:
        assert error.message and "Traceback" not in error.message
        return
    own = [line for line in found.lines if not line.default]
    assert [line.name for line in own] == list(values)
    assert sum(found.count(kind) for kind in KINDS) == len(values)
    for line in found.lines:
        assert line.kind != "mapped" or any(name in found.ours for name in line.ours), line
        assert line.kind == "mapped" or line.note
    flat = dict(flatten(yaml.safe_load(found.to_yaml()) or {}))
    assert {k for k in found.ours if not isinstance(found.ours[k], dict)} == {k for k in flat if k in found.ours}
    if "made.up" in values:
        assert next(line for line in own if line.name == "made.up").kind == "not supported"


def test_neutral_values() -> None:
    assert is_neutral(0, (0.0,)) and is_neutral(None, (None,)) and not is_neutral(False, (0,))
    assert not is_neutral(0, (None, False)) and not is_neutral("", (None,))
    row = Key("x", "not supported", neutral=(None, 1))
    assert is_neutral(1.0, row.neutral)
    kinds = lines({"sapo_temperature_neg": 1.05, "top_p": 0.5, "use_peft": False}, "trl")
    assert [line.kind for line in kinds.values()] == ["not needed", "not supported", "not needed"]
