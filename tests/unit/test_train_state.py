"""The engine's state: resumed bit for bit, refused when a part is missing, changed settings reported."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.train_cases import ACTOR, CRITIC, engine, largest_difference, sampled

from docklands.config.schema import OptimSection
from docklands.core.stage import Learner
from docklands.errors import CheckpointError
from docklands.train import TrainEngine


def through_disk(state: Mapping[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [ACTOR, CRITIC], ids=["actor", "critic"])
def test_pitfall_24_train_4_equals_train_2_and_resume_2(case: Learner, dtype: str) -> None:
    schedule = OptimSection(lr=1e-2, schedule="cosine", warmup_updates=1)

    def make() -> TrainEngine:
        return engine(case is CRITIC, optim=schedule, total=4, dtype=dtype, tokens_per_microbatch=60)

    batches = [sampled(seed=20 + i) for i in range(4)]
    straight = make()
    expected = [straight.update(batch, case) for batch in batches]
    first = make()
    found = [first.update(batch, case) for batch in batches[:2]]
    first.version = 2
    state = through_disk(first.state_dict())
    second = make()
    second.load_state_dict(state)
    assert (second.version, second.updates, second.notes) == (2, 2, [])
    found += [second.update(batch, case) for batch in batches[2:]]
    assert found == expected
    assert largest_difference(straight.masters(), second.masters()) == 0.0
    assert largest_difference(dict(straight.weights()), dict(second.weights())) == 0.0
    assert expected[0][f"{case.name}/lr"] != expected[3][f"{case.name}/lr"]


def test_pitfall_26_a_missing_optimizer_state_is_an_error() -> None:
    trainer = engine()
    trainer.update(sampled(), ACTOR)
    state = through_disk(trainer.state_dict())
    for part in ("optimizer", "model"):
        broken = {k: v for k, v in state.items() if k != part}
        with pytest.raises(CheckpointError, match="optimizer state" if part == "optimizer" else "no weights"):
            engine().load_state_dict(broken)
    for moment in ("exp_avg", "exp_avg_sq"):
        broken = copy.deepcopy(state)
        del broken["optimizer"][moment]["final_norm.weight"]
        with pytest.raises(CheckpointError, match=rf"optimizer {moment}: 1 tensors missing \(first: final_norm.weight"):
            engine().load_state_dict(broken)
    broken = copy.deepcopy(state)
    broken["model"]["final_norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"weights final_norm.weight: shape \[3\] saved, \[40\] needed"):
        engine().load_state_dict(broken)


def test_pitfall_26_a_changed_learning_rate_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    trainer = engine(optim=OptimSection(lr=1e-2))
    trainer.update(sampled(), ACTOR)
    other = engine(optim=OptimSection(lr=5e-3))
    with caplog.at_level(logging.WARNING, "docklands.train"):
        other.load_state_dict(through_disk(trainer.state_dict()))
    assert other.notes == ["lr: 0.01 -> 0.005"]
    assert "lr: 0.01 -> 0.005" in caplog.text
    assert other.update(sampled(), ACTOR)["actor/lr"] == (5e-3, 1.0)


def test_a_failed_load_changes_nothing() -> None:
    trainer, other = engine(), engine()
    trainer.update(sampled(), ACTOR)
    state = through_disk(trainer.state_dict())
    del state["model"]["final_norm.weight"]
    before = other.logprobs(sampled()).values
    with pytest.raises(CheckpointError):
        other.load_state_dict(state)
    assert torch.equal(other.logprobs(sampled()).values, before) and other.updates == 0
