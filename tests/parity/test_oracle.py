"""Our GRPO against examples/grpo_single_file.py, which imports nothing of ours: same model, samples and settings.

Legend: T packed tokens of one update.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from docklands import models
from docklands.algorithms import PolicyAlgorithm, build_algorithm
from docklands.config.schema import Config
from docklands.core.batch import Batch
from docklands.core.fields import (
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    REWARD,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
)
from docklands.core.loss import Denominators, ModelOutput
from docklands.core.stage import Learner
from docklands.models.hf_io import hf_parts
from docklands.train.engine import TrainEngine

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_single_file.py"
PROMPTS, GROUP, STEPS = 3, 4, 5


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_single_file", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracle = load_example()


@dataclass(frozen=True)
class Setting:
    """What is varied. updates: optimizer updates per step. clips: so large ones that ratios leave the clip range."""

    updates: int = 1
    kl_coef: float = 0.0
    temperature: float = 1.0
    clips: bool = False

    @property
    def lr(self) -> float:
        return 3e-3 if self.clips else 1e-3


SETTINGS = [
    Setting(),
    Setting(updates=2),
    Setting(updates=2, kl_coef=0.1),
    Setting(updates=2, kl_coef=0.1, temperature=0.7),
    Setting(updates=3, clips=True),
]
DECAY = 0.1


def recorded(seed: int = 5) -> list[list[list[Any]]]:
    """Samples of the starting model with drawn rewards: steps of groups, one sample without a response token."""
    rng = random.Random(seed)
    model = oracle.tiny_model(seed)
    steps = []
    for _ in range(STEPS):
        prompts = [[rng.randrange(10) for _ in range(rng.randint(0, 4))] + [oracle.START] for _ in range(PROMPTS)]
        steps.append(oracle.record(model, prompts, GROUP, lambda prompt, response: rng.choice([0.0, 0.2, 1.0])))
    steps[1][0][2].response, steps[1][0][2].logprobs = [], []
    return steps


def oracle_losses(steps: list[Any], setting: Setting, model: torch.nn.Module) -> list[float]:
    settings = oracle.Settings(
        lr=setting.lr,
        weight_decay=DECAY,
        kl_coef=setting.kl_coef,
        temperature=setting.temperature,
        samples_per_update=PROMPTS * GROUP // setting.updates,
    )
    return oracle.train_on(steps, model, settings)


def our_config(setting: Setting) -> Config:
    return Config.model_validate(
        {
            "algorithm": {
                "name": "grpo",
                "samples_per_update": PROMPTS * GROUP // setting.updates,
                "kl": {"coef": setting.kl_coef},
            },
            "rollout": {
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": GROUP,
                "temperature": setting.temperature,
                "max_response_tokens": 4,
            },
            "data": {"max_prompt_tokens": 8},
            "train": {"tokens_per_microbatch": 24, "optim": {"lr": setting.lr, "weight_decay": DECAY}},
        }
    )


def batch_of(groups: list[Any]) -> Batch:
    """A step's groups as rows."""
    samples = [(g, sample) for g, group in enumerate(groups) for sample in group]
    columns = {
        GROUP_ID: [g for g, _ in samples],
        TOKEN_IDS: [s.prompt + s.response for _, s in samples],
        LOSS_MASK: [[False] * len(s.prompt) + [True] * len(s.response) for _, s in samples],
        ROLLOUT_LOGPROBS: [[0.0] * len(s.prompt) + s.logprobs for _, s in samples],
        REWARD: [s.reward for _, s in samples],
    }
    return Batch(range(len(samples)), columns)


def our_losses(steps: list[Any], setting: Setting, trainer: Any, reference: Any) -> list[float]:
    """The loop's stages in their order, in one line each; `trainer.update` gives the loss of one optimizer update."""
    config = our_config(setting)
    algorithm = build_algorithm(config)
    assert isinstance(algorithm, PolicyAlgorithm)
    graph = algorithm.graph()
    losses = []
    for groups in steps:
        batch = batch_of(groups)
        if algorithm.old == "recompute":
            batch = batch.with_({OLD_LOGPROBS: trainer.logprobs(batch)})
        if algorithm.kl_in_loss:
            batch = batch.with_({REF_LOGPROBS: reference.logprobs(batch)})
        written = algorithm.advantage(batch).batch
        assert written is not None
        batch = batch.with_({field: written[field] for field in written.fields})
        for minibatch in batch.minibatches(samples=config.samples_per_update):
            losses.append(trainer.loss_of_update(minibatch.only(graph.learners[0].reads), graph.learners[0]))
    return losses


class PlainTrainer:
    """Our loss on the oracle's own forward pass: tells an error of the algorithm from one of the engine."""

    def __init__(self, model: torch.nn.Module, setting: Setting) -> None:
        self.model, self.temperature = model, setting.temperature
        self.settings = oracle.Settings(lr=setting.lr, weight_decay=DECAY)
        self.optimizer = oracle.make_optimizer(model, self.settings)

    def forward(self, batch: Batch) -> Tensor:
        rows = []
        for ids_T, mask_T in zip(batch[TOKEN_IDS], batch[LOSS_MASK]):
            n = int(mask_T.sum())
            prompt, response = ids_T[: len(ids_T) - n].tolist(), ids_T[len(ids_T) - n :].tolist()
            rows.append(torch.full((len(prompt),), float("nan")))
            if response:
                rows.append(oracle.logprobs(self.model, oracle.Sample(prompt, response, 0.0), self.temperature))
        return torch.cat(rows)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Any:
        return batch.pack().unpack(self.forward(batch))

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def loss_of_update(self, batch: Batch, learner: Learner) -> float:
        tokens = [int(mask_T.sum()) for mask_T in batch[LOSS_MASK]]
        counts = Denominators(sum(tokens), sum(n > 0 for n in tokens), 4)
        self.optimizer.zero_grad()
        loss = learner.loss(batch.pack(), ModelOutput(self.forward(batch)), counts).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        return float(loss.detach())


class Engine:
    """Our train engine with our modules, packed, with shared prefixes, in several micro-batches."""

    def __init__(self, path: Path, setting: Setting, trainable: bool = True) -> None:
        config = our_config(setting)
        model = models.load(path)
        self.table = model.table
        self.engine = TrainEngine(
            model,
            config.train,
            config.train.optim if trainable else None,
            temperature=setting.temperature,
            max_tokens=4,
            total_updates=STEPS * setting.updates,
        )

    def logprobs(self, batch: Batch) -> Any:
        return self.engine.logprobs(batch)

    def weights(self) -> Mapping[str, Tensor]:
        return dict(hf_parts(self.table, self.engine.masters().items()))

    def loss_of_update(self, batch: Batch, learner: Learner) -> float:
        total, count = self.engine.update(batch, learner)["actor/loss"]
        return float(total) / float(count)


def check(ours: list[float], theirs: list[float], setting: Setting) -> None:
    assert len(ours) == len(theirs) == STEPS * setting.updates
    assert max(abs(loss) for loss in theirs) > 1e-3
    assert ours == pytest.approx(theirs, abs=1e-6, rel=0)


def check_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """After the last update, whose effect no loss shows; each against how far it moved. The bias of the keys shifts all
    scores alike, so its gradient is rounding only, which Adam blows up to its step: there they agree less.
    """
    start = oracle.tiny_model().state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        apart, moved = float((ours[name] - weight).norm()), float((weight - start[name]).norm())
        assert moved > 0 and apart < (1e-2 if name.endswith("k_proj.bias") else 1e-4) * moved, (name, apart, moved)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_our_loss_equals_the_oracle(setting: Setting) -> None:
    steps, model = recorded(), oracle.tiny_model()
    expected = oracle_losses(steps, setting, model)
    trainer = PlainTrainer(oracle.tiny_model(), setting)
    check(our_losses(steps, setting, trainer, PlainTrainer(oracle.tiny_model(), setting)), expected, setting)
    check_weights(trainer.weights(), model.state_dict())


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_our_engine_and_loss_equal_the_oracle(setting: Setting, tmp_path: Path) -> None:
    steps = recorded()
    model = oracle.tiny_model()
    model.save_pretrained(tmp_path)
    expected = oracle_losses(steps, setting, model)
    trainer = Engine(tmp_path, setting)
    check(our_losses(steps, setting, trainer, Engine(tmp_path, setting, trainable=False)), expected, setting)
    check_weights(trainer.weights(), model.state_dict())


def test_one_setting_depends_on_both_bounds_of_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would hold with other bounds."""
    [setting] = [setting for setting in SETTINGS if setting.clips]
    losses, bound = oracle.token_losses, {"low": 0, "high": 0}

    def counted(now_S: Tensor, old_S: Tensor, ref_S: Tensor | None, advantage: float, settings: Any) -> Tensor:
        ratio_S = (now_S - old_S).exp()
        bound["low"] += int((ratio_S < 1 - settings.clip_low).sum()) if advantage < 0 else 0
        bound["high"] += int((ratio_S > 1 + settings.clip_high).sum()) if advantage > 0 else 0
        return losses(now_S, old_S, ref_S, advantage, settings)

    monkeypatch.setattr(oracle, "token_losses", counted)
    oracle_losses(recorded(), setting, oracle.tiny_model())
    assert min(bound.values()) > 3, bound


def test_the_oracle_samples_at_its_temperature_and_takes_a_group_of_one() -> None:
    model = oracle.tiny_model()
    torch.manual_seed(0)
    for sample in oracle.sample_group(model, [3, oracle.START], 4, 4, oracle.STOP, temperature=0.7):
        expected = oracle.logprobs(model, sample, 0.7)
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert oracle.advantages([1.0]) == [0.0]


def test_the_oracle_imports_nothing_of_ours() -> None:
    source = EXAMPLE.read_text()
    assert "import docklands" not in source and "from docklands" not in source
    assert len(source.splitlines()) <= 300


@pytest.mark.slow
def test_the_oracle_learns_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    history = oracle.main(steps=20)
    assert sum(history[-5:]) / 5 > sum(history[:5]) / 5 + 0.3
    assert "reward" in capsys.readouterr().out
