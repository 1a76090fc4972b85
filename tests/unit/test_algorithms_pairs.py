"""DPO against its definition; distillation against the reverse KL that it estimates; what both refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import algorithm_cases as cases
from torch.nn import functional as F

from docklands.algorithms import build_algorithm
from docklands.config.schema import Config
from docklands.core.batch import Batch
from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    PROMPT,
    PROMPT_ID,
    PROMPT_TOKENS,
    REF_LOGPROBS,
    REWARD,
    SAMPLE_INDEX,
    SHAPED_REWARD,
    TOKEN_ADVANTAGES,
    TOKEN_IDS,
)
from docklands.core.loss import Denominators, ModelOutput
from docklands.core.stage import Result
from docklands.data.demonstrations import Demonstrator
from docklands.data.tasks import open_preferences
from docklands.data.tokenizer import CharTokenizer
from docklands.errors import ConfigError, DataError


def config(name: str, **sections: Any) -> Config:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 16, **sections.pop("rollout", {})}
    algorithm = {"name": name, **sections.pop("algorithm", {})}
    return Config.model_validate({"algorithm": algorithm, "rollout": rollout, "eval": {"prompts": 0}, **sections})


def pairs(seed: int = 0) -> Batch:
    """Four pairs of ragged rows, in mixed order within a pair."""
    batch = cases.random_batch(8, seed)
    index = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0], dtype=torch.int32)
    return batch.with_({GROUP_ID: torch.arange(8) // 2, SAMPLE_INDEX: index})


def test_dpo_has_the_gradient_and_the_loss_of_its_definition() -> None:
    """-log sigma(beta (chosen - rejected)) by autograd, pair by pair, against the advantage and a policy gradient."""
    beta = 0.3
    made = build_algorithm(config("dpo", algorithm={"dpo_beta": beta}))
    batch = pairs()
    mask, rows = batch[LOSS_MASK], len(batch)
    logprobs = [batch[OLD_LOGPROBS][i].clone().nan_to_num(0.0).requires_grad_() for i in range(rows)]
    reference = [batch[REF_LOGPROBS][i].nan_to_num(0.0) for i in range(rows)]
    losses = []
    for pair in range(4):
        gain = {}
        for i in (2 * pair, 2 * pair + 1):
            gain[int(batch[SAMPLE_INDEX][i])] = ((logprobs[i] - reference[i]) * mask[i]).sum()
        losses.append(-F.logsigmoid(beta * (gain[0] - gain[1])))
    torch.stack(losses).mean().backward()
    expected = torch.cat([p.grad * mask[i] for i, p in enumerate(logprobs) if p.grad is not None])

    result = made.graph()["advantage"].run(made, batch)
    assert isinstance(result, Result) and result.batch is not None
    total, count = result.metrics["dpo/loss"]
    assert (total, count) == (pytest.approx(sum(float(loss) for loss in losses), rel=1e-6), 4.0)
    whole = batch.with_({ADVANTAGE: result.batch[ADVANTAGE]})
    denominators = Denominators(tokens=int(mask.values.sum()), sequences=rows, max_tokens=16)
    found = []
    for half in (whole.select(range(3)), whole.select(range(3, rows))):  # a pair's samples in two micro-batches
        leaf = half[OLD_LOGPROBS].values.nan_to_num(0.0).clone().requires_grad_()
        told = made.loss(half.pack(), ModelOutput(logprobs_T=leaf), denominators)
        told.loss.backward()
        assert set(told.metrics) == {"dpo/nll"}  # of given responses: no entropy
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.allclose(torch.cat(found), expected, atol=1e-7)
    assert float(expected.abs().max()) > 1e-3


def test_distillation_is_the_gradient_of_the_reverse_kl() -> None:
    """Over all tokens of a small vocabulary, the expected policy gradient is that of KL(student || teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(7, generator=generator).requires_grad_()
    teacher_V = torch.log_softmax(torch.randn(7, generator=generator), 0)
    student_V = torch.log_softmax(logits_V, 0)
    (student_V.exp() * (student_V - teacher_V)).sum().backward()
    assert logits_V.grad is not None
    expected, logits_V.grad = logits_V.grad.clone(), None

    made = build_algorithm(config("distill", reference={"path": "teacher"}))
    ones = [torch.tensor([True])] * 7
    batch = Batch(
        range(7),
        {
            GROUP_ID: torch.arange(7),
            TOKEN_IDS: [torch.tensor([v]) for v in range(7)],
            LOSS_MASK: ones,
            OLD_LOGPROBS: list(student_V.detach()[:, None]),
            REF_LOGPROBS: list(teacher_V[:, None]),
        },
    )
    result = made.advantage(batch)
    assert isinstance(result, Result) and result.batch is not None
    ratio_V = (torch.log_softmax(logits_V, 0) - student_V.detach()).exp()
    (-(student_V.detach().exp() * ratio_V * result.batch[TOKEN_ADVANTAGES].values).sum()).backward()
    assert torch.allclose(logits_V.grad, expected, atol=1e-6)
    total, count = result.metrics["distill/reverse_kl"]
    assert (total, count) == (pytest.approx(float((student_V - teacher_V).sum()), rel=1e-5), 7.0)


def test_graphs() -> None:
    assert [s.name for s in build_algorithm(config("dpo")).graph().stages] == [
        "prefer", "old_logprobs", "ref_logprobs", "advantage", "update",
    ]  # fmt: skip
    plain = build_algorithm(config("distill", reference={"path": "t"})).graph()
    assert [s.name for s in plain.stages] == ["rollout", "old_logprobs", "ref_logprobs", "advantage", "update"]
    measured = config("distill", reference={"path": "t"}, reward={"functions": [{"name": "exact_match"}]})
    made = build_algorithm(measured)
    assert SHAPED_REWARD in made.graph()["advantage"].writes and SHAPED_REWARD not in plain["advantage"].writes
    assert "reward" in [s.name for s in made.graph().stages] and REWARD in made.graph()["advantage"].reads


@pytest.mark.parametrize(
    ("name", "sections", "said"),
    [
        ("dpo", {"rollout": {"samples_per_prompt": 4}}, "compares a chosen and a rejected response"),
        ("dpo", {"algorithm": {"samples_per_update": 4}}, "one update per step"),
        ("dpo", {"dock": {"max_staleness": 1}}, "max_staleness is 1"),
        ("dpo", {"reward": {"functions": [{"name": "exact_match"}]}}, "scores nothing"),
        ("grpo", {"algorithm": {"dpo_beta": 0.2}}, "dpo_beta = 0.2 is set"),
        ("distill", {}, "no teacher"),
        ("distill", {"reference": {"path": "t"}, "eval": {"prompts": 5}}, "no reward to score them"),
        ("distill", {"reference": {"path": "t"}, "algorithm": {"old_logprobs": "current"}}, "'current'"),
    ],
)
def test_what_they_refuse(name: str, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_algorithm(config(name, **{key: dict(value) for key, value in sections.items()}))


def test_sample_0_is_the_chosen_response() -> None:
    tokenizer = CharTokenizer("0123456789=")
    row = {"prompt": "21=", "chosen": "12", "rejected": "21"}
    batch = Batch(
        [5, 6],
        {
            PROMPT_ID: torch.tensor([0, 0]),
            SAMPLE_INDEX: torch.tensor([1, 0], dtype=torch.int32),
            PROMPT_TOKENS: [torch.tensor(tokenizer.encode("21="), dtype=torch.int32)] * 2,
            PROMPT: [row, row],
        },
    )
    written = Demonstrator(tokenizer, 8).prefer(batch)
    texts = [tokenizer.decode(ids[3:-1].tolist()) for ids in written[TOKEN_IDS]]
    assert texts == ["21", "12"]
    assert [mask.tolist() for mask in written[LOSS_MASK]] == [[False] * 3 + [True] * 3] * 2
    with pytest.raises(DataError, match="no text or turns under 'chosen'"):
        Demonstrator(tokenizer, 8).prefer(batch.select([1]).with_({PROMPT: [{"prompt": "21=", "rejected": "21"}]}))


def test_preferences_of_a_task_differ() -> None:
    source = open_preferences("mix6", {"size": 400})
    found = [source[i] for i in range(len(source))]
    assert 250 < len(found) < 350  # one behaviour of four is the answer
    assert all(row["chosen"] == "".join(sorted(row["prompt"][:-1])) != row["rejected"] for row in found)
