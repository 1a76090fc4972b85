"""The prompt stream: order, ids, limits, position."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from docklands.config.schema import DataSection
from docklands.data.sources import ListSource, Subset
from docklands.data.stream import PromptStream
from docklands.data.tokenizer import CharTokenizer
from docklands.errors import CheckpointError, DataError

TOKENIZER = CharTokenizer("0123456789=")


def stream(rows: int = 6, seed: int = 1, lengths: list[int] | None = None, **config: object) -> PromptStream:
    texts = [str(i % 10) * (lengths[i] if lengths else 1) for i in range(len(lengths or range(rows)))]
    source = ListSource("rows", [{"prompt": text, "n": i} for i, text in enumerate(texts)])
    return PromptStream(source, TOKENIZER, DataSection(chat=False, **config), seed)  # type: ignore[arg-type]


def test_pitfall_23_save_at_the_epoch_boundary() -> None:
    """3 batches an epoch, 2 epochs, saved after 3: exactly 3 more, with the right samples."""
    whole = stream(epochs=2)
    expected = [[p.prompt_id for p in whole.take(2)] for _ in range(6)]
    assert whole.take(2) == []
    first = stream(epochs=2)
    for _ in range(3):
        first.take(2)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = stream(epochs=2)
    resumed.load_state_dict(state)
    after = []
    while batch := resumed.take(2):
        after.append([p.prompt_id for p in batch])
    assert after == expected[3:] and len(after) == 3
    assert sorted(i for ids in after for i in ids) == list(range(6, 12))


def test_resume_anywhere_gives_the_rest() -> None:
    everything = [p.prompt_id for p in stream(epochs=3).take(100)]
    for cut in range(19):
        first, second = stream(epochs=3), stream(epochs=3)
        first.take(cut)
        second.load_state_dict(first.state_dict())
        assert [p.prompt_id for p in second.take(100)] == everything[cut:]


def test_an_epoch_is_a_permutation_keyed_by_seed_and_epoch() -> None:
    a, b, other = (stream(rows=50, seed=s).take(100) for s in (1, 1, 2))
    ids = [p.prompt_id for p in a]
    assert ids == [p.prompt_id for p in b] != [p.prompt_id for p in other]
    assert sorted(ids) == list(range(100))
    assert [i % 50 for i in ids[:50]] != [i % 50 for i in ids[50:]]
    assert all(p.row["n"] == p.prompt_id % 50 for p in a)
    assert a[0].tokens.dtype == np.int32
    plain = stream(rows=4, shuffle=False).take(8)
    assert [p.row["n"] for p in plain] == [0, 1, 2, 3] * 2


def test_endless_without_epochs_and_iterable() -> None:
    endless = stream(rows=2)
    assert endless.rows_left is None and len(endless.take(7)) == 7 and endless.epoch == 3
    assert len(list(stream(rows=2, epochs=2))) == 4


def test_equal_prompts_keep_their_own_ids() -> None:
    source = ListSource("rows", [{"prompt": "1"}, {"prompt": "1"}])
    found = PromptStream(source, TOKENIZER, DataSection(chat=False), 0).take(2)
    assert {p.prompt_id for p in found} == {0, 1}


def test_overlong_prompts_error_drop_truncate() -> None:
    lengths = [2, 9, 3, 7]
    with pytest.raises(DataError, match="rows, row 2: the prompt has 9 tokens, the limit is 4"):
        stream(lengths=lengths, max_prompt_tokens=4, shuffle=False).take(4)
    with pytest.raises(DataError, match="row 2"):
        stream(lengths=lengths, max_prompt_tokens=4).check()
    dropping = stream(lengths=lengths, max_prompt_tokens=4, overlong="drop", epochs=2)
    assert [p.prompt_id % 4 in (0, 2) for p in dropping.take(9)] == [True] * 4 and dropping.dropped == 4
    source = ListSource("rows", [{"prompt": "123456="}])
    cutting = PromptStream(source, TOKENIZER, DataSection(chat=False, max_prompt_tokens=3, overlong="truncate_left"), 0)
    assert TOKENIZER.decode(cutting.take(1)[0].tokens.tolist()) == "56=" and cutting.truncated == 1
    cutting.check()
    cutting.by_id(0)
    assert cutting.truncated == 1


def test_nothing_short_enough_ends_instead_of_hanging() -> None:
    with pytest.raises(DataError, match="all 3 prompts exceed 2 tokens"):
        stream(lengths=[5, 6, 7], max_prompt_tokens=2, overlong="drop").take(1)


@pytest.mark.parametrize("lengths", [[40, 1], [40, 40, 1, 40, 40]])
def test_one_short_prompt_an_epoch_is_enough(lengths: list[int]) -> None:
    """The short row first in one epoch and last in the next: many dropped in between, and still no error."""
    found = stream(lengths=lengths, max_prompt_tokens=16, overlong="drop").take(50)
    assert [p.prompt_id // len(lengths) for p in found] == list(range(50))
    with pytest.raises(DataError, match="all 1 prompts exceed"):
        stream(lengths=[40], max_prompt_tokens=16, overlong="drop").take(1)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"question": "1"}, "rows, row 1101: no prompt key"),
        ({"prompt": None}, "rows, row 1101: the prompt under 'prompt' is null"),
        ({"prompt": "1" * 30}, "rows, row 1101: the prompt has 30 tokens, the limit is 16"),
        ({"prompt": ""}, "rows, row 1101: the prompt has no tokens"),
    ],
)
def test_a_bad_row_behind_the_first_thousand_is_refused_at_the_start(bad: dict, says: str) -> None:
    rows = [{"prompt": str(i)} for i in range(1100)] + [bad]
    for source in (ListSource("rows", rows), Subset(ListSource("rows", rows), range(1101), "train")):
        with pytest.raises(DataError, match=says):
            PromptStream(source, TOKENIZER, DataSection(chat=False, max_prompt_tokens=16), 0).check()


def test_nothing_short_enough_is_refused_at_the_start() -> None:
    with pytest.raises(DataError, match="all 3 prompts exceed 2 tokens"):
        stream(lengths=[5, 6, 7], max_prompt_tokens=2, overlong="drop").check()
    stream(lengths=[5, 6, 1], max_prompt_tokens=2, overlong="drop").check()


def test_by_id_gives_back_a_prompt_in_flight() -> None:
    prompts = stream().take(9)
    fresh = stream()
    for prompt in prompts:
        again = fresh.by_id(prompt.prompt_id)
        assert again.row == prompt.row and np.array_equal(again.tokens, prompt.tokens)
    assert fresh.position == 0


def test_resuming_on_other_data_is_refused() -> None:
    state = stream(rows=6).state_dict()
    for other in (stream(rows=5), stream(seed=2), stream(shuffle=False)):
        with pytest.raises(CheckpointError, match="when saved"):
            other.load_state_dict(state)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        PromptStream(ListSource("rows", [{"prompt": ""}]), TOKENIZER, DataSection(chat=False), 0).take(1)


def test_missing_prompt_key_while_streaming(tmp_path: Path) -> None:
    source = ListSource("rows.jsonl", [{"prompt": "1"}, {"text": "2"}])
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: no prompt key 'prompt'.*keys present: text"):
        PromptStream(source, TOKENIZER, DataSection(chat=False, shuffle=False), 0).take(2)


def test_resuming_with_other_rows_of_the_same_number_is_refused() -> None:
    """Pitfall 26's kind: prompt ids of the first run would silently mean other prompts."""
    rows = [{"prompt": f"{i}=", "n": i} for i in range(500)]

    def over(name: str, rows: list[dict], **config: object) -> PromptStream:
        return PromptStream(ListSource(name, rows), TOKENIZER, DataSection(chat=False, **config), 1)  # type: ignore[arg-type]

    first = over("a", rows)
    first.take(3)
    state = first.state_dict()
    with pytest.raises(CheckpointError, match="b: other rows than those of a when saved"):
        over("b", [{**row, "prompt": f"{row['n'] + 1}="} for row in rows]).load_state_dict(state)
    with pytest.raises(CheckpointError, match="other rows"):  # the answers count too
        over("a", [{**row, "n": 0} for row in rows]).load_state_dict(state)
    with pytest.raises(CheckpointError, match="other rows"):  # the last row alone
        over("a", [*rows[:-1], {"prompt": "0=", "n": 499}]).load_state_dict(state)
    moved = over("moved", [{"n": row["n"], "question": row["prompt"]} for row in rows], prompt_key="question")
    moved.load_state_dict(state)
    assert moved.position == 3
