"""Built-in tasks and their demonstrations."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from docklands.core.batch import Batch
from docklands.core.fields import LOSS_MASK, PROMPT, PROMPT_ID, PROMPT_TOKENS, TOKEN_IDS
from docklands.data.demonstrations import Demonstrator
from docklands.data.stream import open_source
from docklands.data.tasks import BEHAVIOURS, TASKS, open_demonstrations, open_task, working
from docklands.data.tokenizer import CharTokenizer
from docklands.errors import ConfigError, DataError


def rows(source: object) -> list[dict]:
    return [source[i] for i in range(len(source))]  # type: ignore[index, arg-type]


def test_larger_number_is_the_quick_start_and_keeps_its_pairs_apart() -> None:
    train, held = rows(open_task("larger_number")), rows(open_task("larger_number", held_out=True))
    pattern = re.compile(r"Which number is larger, (\d\d) or (\d\d)\? Reply with the number only\.")

    def pairs(found: list[dict]) -> list[frozenset[int]]:
        result = []
        for row in found:
            match = pattern.fullmatch(row["prompt"])
            assert match is not None
            a, b = int(match[1]), int(match[2])
            assert a != b and row["answer"] == str(max(a, b))
            result.append(frozenset((a, b)))
        return result

    assert len(held) == 200 and len(set(pairs(held))) == 200 and len(train) == 2 * (4005 - 200)
    assert not set(pairs(train)) & set(pairs(held))
    first = [int(row["prompt"].split()[4].rstrip(",")) == int(row["answer"]) for row in held]
    assert 0.35 < np.mean(first) < 0.65


def test_mix6_and_cot6_answers() -> None:
    for row in rows(open_task("mix6", {"size": 50})):
        assert re.fullmatch(r"\d{6}=", row["prompt"]) and row["answer"] == "".join(sorted(row["prompt"][:-1]))
    for row in rows(open_task("cot6", {"size": 50})):
        assert re.fullmatch(r"(\d\+){5}\d=", row["prompt"])
        assert int(row["answer"]) == sum(int(c) for c in row["prompt"] if c.isdigit())


@pytest.mark.parametrize("name", ["larger_number", "mix6", "cot6", "calculator"])
def test_held_out_is_fixed_whatever_the_seed(name: str) -> None:
    held = [rows(open_task(name, {"seed": seed, "size": 300}, held_out=True)) for seed in (0, 5)]
    assert held[0] == held[1] and len(held[0]) == 200
    prompts = {row["prompt"] for row in held[0]}
    for seed in (0, 5):
        source = open_task(name, {"seed": seed, "size": 300})
        assert len(source) == 300 and not prompts & {row["prompt"] for row in rows(source)}
    CharTokenizer(TASKS.get(name).characters).encode("".join(prompts))


def test_working_is_as_described() -> None:
    assert working("3+5+2=") == "<3+5=8,8+2=10>"


def test_cot6_demonstrations_have_the_constructed_mix() -> None:
    found = rows(open_demonstrations("cot6", {"size": 4000}))
    share = {k: v / len(found) for k, v in Counter(row["behaviour"] for row in found).items()}
    assert share["working"] == pytest.approx(0.30, abs=0.03)
    assert share["direct wrong"] == pytest.approx(0.70 * 0.85, abs=0.03)
    for row in found:
        if row["behaviour"] == "working":
            assert row["response"] == working(row["prompt"]) + row["answer"]
        else:
            assert (row["response"] == row["answer"]) == (row["behaviour"] == "direct right")
            assert int(row["response"]) >= 0
    assert rows(open_demonstrations("cot6", {"size": 50})) == rows(open_demonstrations("cot6", {"size": 50}))
    assert rows(open_source("demonstrations:cot6", {"size": 50})) == rows(open_demonstrations("cot6", {"size": 50}))
    none_direct = rows(open_demonstrations("cot6", {"size": 50, "direct": 0}))
    assert {row["behaviour"] for row in none_direct} == {"working"}


def test_mix6_demonstrations_are_four_behaviours() -> None:
    found = rows(open_demonstrations("mix6", {"size": 4000}))
    counts = Counter(row["behaviour"] for row in found)
    assert set(counts) == set(BEHAVIOURS) and all(abs(n / 4000 - 0.25) < 0.03 for n in counts.values())
    assert all(row["response"] == BEHAVIOURS[row["behaviour"]](row["prompt"][:-1]) for row in found)
    only = rows(open_demonstrations("mix6", {"size": 20, "weights": [0, 0, 0, 1]}))
    assert all(row["response"] == row["prompt"][:-1] for row in only)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mix6", {"weights": [1, 1]}),
        ("mix6", {"weights": "copy"}),
        ("cot6", {"wrong": 2}),
        ("cot6", {"wron": 0.5}),
        ("cot6", {"terms": 9}),
        ("mix6", {"size": 1_000_000}),
        ("larger_number", {"size": 8000}),
        ("calculator", {"style": "prose"}),
    ],
)
def test_wrong_arguments_are_the_users_mistake(name: str, args: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        open_demonstrations(name, args)
    assert "\n" not in str(caught.value)


def test_tool_demonstrations_mask_the_observation() -> None:
    row = open_demonstrations("calculator", {"size": 1, "style": "completion"})[0]
    tokenizer = CharTokenizer(TASKS.get("calculator").characters)
    prompt = tokenizer.encode(row["prompt"])
    batch = Batch([0], {PROMPT_ID: [0], PROMPT_TOKENS: [prompt], PROMPT: [row]})
    made = Demonstrator(tokenizer, 200).demonstrate(batch)
    ids, mask = made[TOKEN_IDS][0].tolist(), made[LOSS_MASK][0].tolist()
    call, seen, answer = (turn["content"] for turn in row["response"])
    assert tokenizer.decode(ids) == row["prompt"] + call + seen + answer
    trained = tokenizer.decode([i for i, m in zip(ids, mask) if m], skip_special_tokens=False)
    assert trained == call + "<eos>" + answer + "<eos>"
    with pytest.raises(DataError, match="the limit is 3"):
        Demonstrator(tokenizer, 3).demonstrate(batch)


def test_a_task_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task_module.py").write_text(
        "from docklands.data.tasks import Task\n"
        "def rows(size=2):\n"
        "    return [{'prompt': str(i)} for i in range(size)], [{'prompt': 'held'}]\n"
        "MINE = Task('mine', rows, None, '0123456789')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_source("task:own_task_module:MINE", {"size": 3})[2] == {"prompt": "2"}
    with pytest.raises(ConfigError, match="no demonstrations"):
        open_source("demonstrations:own_task_module:MINE")
    with pytest.raises(ConfigError, match=r"must be a docklands.data.tasks.Task"):
        open_source("task:json:dumps")
