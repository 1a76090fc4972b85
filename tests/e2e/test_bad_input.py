"""Bad input ends with exit code 2, one clear line and a hint; a bad reward costs its samples, not the run."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from docklands.cli.main import run as cli
from docklands.config.schema import Config
from docklands.envs import StepResult
from docklands.obs.log import log_path
from docklands.obs.rundir import RunDir
from docklands.train import checkpoint
from tests.e2e.runs import ROOT, overrides, run_here

RECIPE = str(ROOT / "configs/mix6_grpo.yaml")
WARM = ROOT / "assets/mix6-warm"


def refused(capsys: pytest.CaptureFixture[str], directory: Path, *more: str, recipe: str = RECIPE) -> str:
    """Run `docklands train`; it must be refused with exit code 2 and one error line. Returns what it said."""
    code = cli(["train", recipe, *overrides(directory, *more)])
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.count("error:") == 1, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("section", sorted(Config.model_fields))
def test_misspelt_key_in_each_section(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = next(iter(Config.model_fields[section].annotation.model_fields))  # type: ignore[union-attr]
    path = tmp_path / "bad.yaml"
    path.write_text(f"extends: {RECIPE}\n{section}: {{{key}x: 1}}\n")
    said = refused(capsys, tmp_path / "run", recipe=str(path))
    assert f"{section}.{key}x" in said
    assert "did you mean" in said and key in said


def test_key_of_another_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"extends: {RECIPE}\nclip_high: 0.3\n")
    assert "algorithm.clip_high" in refused(capsys, tmp_path / "run", recipe=str(path))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("rollout.samples_per_prompt=1",), ("grpo", "samples_per_prompt")),
        (("algorithm.samples_per_update=6",), ("16 samples", "6")),
        (("algorithm.name=grpp",), ("grpo",)),
        (("model.path=/nowhere",), ("/nowhere",)),
        (("data.source=/nowhere.jsonl",), ("/nowhere.jsonl",)),
        (("data.max_prompt_tokens=3",), ("7 tokens", "max_prompt_tokens")),
        (("rollout.temperature=0",), ("temperature",)),
        (("rollout.top_p=0.9",), ("top_p",)),
        (("rollout.min_response_tokens=4",), ("min_response_tokens",)),
        (("reward.functions=[{name: sorted_digit}]",), ("sorted_digits",)),
        (("algorithm.name=rloo", "algorithm.clip_high=0.3"), ("clip_high",)),
        (("algorithm.kl.target=0.1",), ("kl",)),
        (("run.steps=many",), ("run.steps",)),
        (("train.tokens_per_microbatch=20",), ("tokens_per_microbatch",)),
        (("rollout.max_response_tokens=500",), ("16", "500", "516", "512 positions")),
        (("rollout.kv_cache_tokens=32",), ("kv_cache_tokens", "64 tokens")),
    ],
)
def test_contradictions(
    more: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pitfalls 12, 15, 32: refused at the start, with the arithmetic or the nearest name."""
    said = refused(capsys, tmp_path / "run", *more)
    assert all(word in said for word in words), said


def broken_model(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(WARM, target)
    return target


def test_missing_model_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = broken_model(tmp_path)
    (model / "model.safetensors").unlink()
    assert "safetensors" in refused(capsys, tmp_path / "run", f"model.path={model}")


def test_truncated_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = broken_model(tmp_path)
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors" in refused(capsys, tmp_path / "run", f"model.path={model}")


def test_wrong_tensor_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = broken_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    said = refused(capsys, tmp_path / "run", f"model.path={model}")
    assert "256" in said and "512" in said


def test_vocabulary_smaller_than_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = broken_model(tmp_path)
    known = json.loads((tokenizer / "char_tokenizer.json").read_text())
    known["characters"] += [chr(0x4E00 + i) for i in range(40)]
    (tokenizer / "char_tokenizer.json").write_text(json.dumps(known))
    said = refused(capsys, tmp_path / "run", f"model.tokenizer={tokenizer}")
    assert "knows 57 ids" in said and "32" in said


def test_row_without_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "12="}\n{"question": "34="}\n')
    said = refused(capsys, tmp_path / "run", f"data.source={rows}")
    assert "rows.jsonl" in said and "question" in said and "2" in said


def test_run_directory_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert "not empty" in refused(capsys, tmp_path / "run")


REWARDS = """
import time


def raises(data_source, solution_str, ground_truth, extra_info):
    if int(extra_info["index"]) % 4 == 0:
        raise RuntimeError("sandbox down")
    return float(len(solution_str))


def hangs(data_source, solution_str, ground_truth, extra_info):
    if int(extra_info["index"]) % 4 == 0:
        time.sleep(600)
    return float(len(solution_str))


def odd(data_source, solution_str, ground_truth, extra_info):
    kind = int(extra_info["index"]) % 8
    return {0: float("nan"), 1: "good", 2: None}.get(kind, float(len(solution_str)))


def always_raises(data_source, solution_str, ground_truth, extra_info):
    raise RuntimeError("sandbox down")
"""


def reward_run(tmp_path: Path, name: str) -> tuple[str, ...]:
    """Overrides of a run whose reward is `name`, over prompts that carry an index."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rows = tmp_path / "rows.jsonl"
    row = {"data_source": "own", "reward_model": {"ground_truth": "1"}}
    rows.write_text(
        "".join(json.dumps({**row, "prompt": f"{i:02d}3=", "extra_info": {"index": i}}) + "\n" for i in range(16))
    )
    function = f"{{name: '{tmp_path / 'my_rewards.py'}:{name}'}}"
    return (
        f"data.source={rows}",
        "data.shuffle=false",
        f"reward.functions=[{function}]",
        "reward.deadline_s=0.5",
        "reward.max_error_fraction=0.9",
        "run.steps=2",
        "checkpoint.at_end=false",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raises", "hangs", "odd"])
def test_pitfall_29_a_failing_reward_drops_its_samples(name: str, tmp_path: Path) -> None:
    run = run_here("mix6_grpo.yaml", tmp_path / "run", "obs.samples_per_step=99", *reward_run(tmp_path, name))
    trained = [sample for step in (1, 2) for sample in run.read_samples(step)]
    assert trained
    bad = {"raises": (0, 4), "hangs": (0, 4), "odd": (0, 1, 2, 8)}[name]
    assert not [s for s in trained if s["prompt_id"] in bad]
    metrics = [m for _, m in run.read_metrics()]
    assert sum(value for m in metrics for key, value in m.items() if "reward" in key and "error" in key) > 0


@pytest.mark.slow
def test_pitfall_29_the_rate_limit_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [*reward_run(tmp_path, "always_raises"), "reward.max_error_fraction=0.5"]
    code = cli(["train", RECIPE, *overrides(tmp_path / "run", *more)])
    said = capsys.readouterr().err
    assert code == 3, said
    assert "sandbox down" in said
    assert RunDir(tmp_path / "run").read_metrics() == []


class HalfDown:
    """An environment that is down for the completions that end in an odd digit; `always`: for all."""

    max_turns = 1

    def __init__(self, always: bool = False) -> None:
        self.always = always

    async def reset(self, row: dict) -> None:
        pass

    async def step(self, completion: str, finish: str) -> StepResult:
        if self.always or completion[-1:] in "13579":
            raise ConnectionError("sandbox unreachable")
        return StepResult(None, float(len(completion)), True)


class Sleeper(HalfDown):
    """Answers the completions that end in an odd digit after the deadline."""

    async def step(self, completion: str, finish: str) -> StepResult:
        await asyncio.sleep(30 if completion[-1:] in "13579" else 0)
        return StepResult(None, float(len(completion)), True)


@pytest.mark.parametrize(("kind", "metric"), [("HalfDown", "env/errors"), ("Sleeper", "env/timeouts")])
def test_pitfall_29_environment_failures_are_counted_and_said(kind: str, metric: str, tmp_path: Path) -> None:
    env = (f"env.name={__name__}:{kind}", "env.deadline_s=0.2", "reward.functions=[{name: env}]")
    run = run_here("mix6_grpo.yaml", tmp_path / "run", *env, "run.steps=1")
    ((_, metrics),) = run.read_metrics()
    assert metrics[metric] > 0 and metrics["env/errors"] + metrics["env/timeouts"] == metrics[metric]
    assert metrics[metric] + metrics["reward/scored"] == 16 and metrics["env/turns/max"] == 1
    log = log_path(run.path, "driver", 0).read_text()
    assert log.count("its sample is dropped") == 1 and f"environment '{__name__}:{kind}', step: " in log


def test_pitfall_29_the_rate_limit_of_environments_names_the_exception(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = (f"env.name={__name__}:HalfDown", "env.args={always: true}", "reward.functions=[{name: env}]")
    assert cli(["train", RECIPE, *overrides(tmp_path / "run", *env, "env.error_window=16")]) == 3
    said = capsys.readouterr().err
    assert "16 of the last 16 episodes failed" in said and "ConnectionError: sandbox unreachable" in said
    assert cli(["train", RECIPE, *overrides(tmp_path / "run2", *env, "algorithm.max_dropped_groups=4")]) == 3
    said = capsys.readouterr().err
    assert "env_error 8; the first failure: env_error: environment" in said and "sandbox unreachable" in said


class Tired(HalfDown):
    """Plays as many episodes as are left, then fails."""

    left = 0

    async def step(self, completion: str, finish: str) -> StepResult:
        type(self).left -= 1
        if type(self).left < 0:
            raise ConnectionError("out of credit")
        return StepResult(None, float(len(completion)), True)


def test_a_known_error_between_steps_keeps_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Tired.left = 32
    env = (f"env.name={__name__}:Tired", "env.error_window=16", "reward.functions=[{name: env}]", "run.steps=3")
    assert cli(["train", RECIPE, *overrides(tmp_path / "run", *env)]) == 3
    assert "out of credit" in capsys.readouterr().err
    run = RunDir(tmp_path / "run")
    found = checkpoint.latest(run.checkpoints)
    assert found is not None and checkpoint.step_of(found) == 2
    Tired.left = 99
    assert cli(["train", RECIPE, *overrides(tmp_path / "run", *env), "--resume"]) == 0
    assert [step for step, _ in run.read_metrics()] == [1, 2, 3]


def test_a_reward_from_no_environment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "run", "reward.functions=[{name: env}]")
    assert "env.name" in said and "single_turn" in said


def test_every_row_is_looked_at_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps({"prompt": f"{i % 1000:03d}="}) for i in range(1200)] + ['{"q": "1"}']))
    assert "line 1201" in refused(capsys, tmp_path / "run", f"data.source={rows}")
