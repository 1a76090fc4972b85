"""Files, directories, row formats, bad input, held-out parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docklands.config.schema import DataSection, EvalSection
from docklands.data.rows import normal_row, prompt_key_text, render_prompt, render_response
from docklands.data.sources import open_file, split_held_out
from docklands.data.stream import PromptStream, open_source, open_splits
from docklands.data.tokenizer import CharTokenizer
from docklands.errors import ConfigError, DataError, DocklandsError

ROWS = [{"prompt": f"{i}=", "answer": i} for i in range(6)]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_kinds_of_files_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c.json").write_text(json.dumps({"data": ROWS}))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.json", "c.json", "d.parquet"):
        source = open_source(str(tmp_path / name))
        assert [source[i] for i in range(len(source))] == ROWS, name


def test_datasets_directory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict({"a": table, "b": table}).save_to_disk(str(tmp_path / "odd"))
    assert open_file(str(tmp_path / "plain"))[5] == ROWS[5]
    assert len(open_file(str(tmp_path / "splits"))) == 6
    assert len(open_file(str(tmp_path / "splits" / "test"))) == 1
    with pytest.raises(DataError, match="no 'train' among its splits"):
        open_file(str(tmp_path / "odd"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", "\n[1]\n", "a.jsonl, line 2: expected a JSON object, found list"),
        ("a.jsonl", "\n\n", "no rows"),
        ("a.json", '{"x": 1}', "expected a list of objects"),
        ("a.json", "nonsense", "not readable as JSON"),
        ("a.jsonl", '{"prompt": ' + "[" * 100000 + "]" * 100000 + "}", "a.jsonl, line 1: JSON nested too deep"),
        ("a.json", '[{"prompt": ' + "[" * 100000 + "]" * 100000 + "}]", "not readable as JSON"),
        ("a.parquet", "nonsense", "not readable as parquet"),
        ("a.csv", "x", "unknown kind '.csv'"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        open_source(str(tmp_path / name))
    assert says in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_places_that_are_no_data(tmp_path: Path) -> None:
    cases = {
        "": "data.source is empty",
        str(tmp_path / "absent.jsonl"): "does not exist",
        str(tmp_path): "`datasets` did not write",
        "task:mix7": "did you mean 'mix6'",
        "demonstrations:mix7": "did you mean 'mix6'",
        "reasoning_gym:countdwn": "did you mean 'countdown'",
        "reasoning_gym:composite": "not supported",
    }
    for spec, says in cases.items():
        with pytest.raises(ConfigError) as caught:
            open_source(spec)
        assert says in str(caught.value) and "\n" not in str(caught.value), spec
    spec = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match="no meaning for the file"):
        open_source(spec, {"size": 3})
    with pytest.raises(ConfigError, match="unknown argument 'sizes'"):
        open_source("task:mix6", {"sizes": 3})
    with pytest.raises(ConfigError, match="whole number"):
        open_source("task:mix6", {"size": "3"})


def test_missing_prompt_names_file_row_and_keys(tmp_path: Path) -> None:
    spec = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"question": "2", "answer": 3}])
    source = open_source(spec)
    with pytest.raises(DataError) as caught:
        prompt_key_text(source[1], "prompt", source.where(1))
    message = str(caught.value)
    assert "a.jsonl, line 2" in message and "'prompt'" in message and "question, answer" in message


def test_a_null_prompt_is_called_null() -> None:
    with pytest.raises(DataError, match="row 1: the prompt under 'question' is null"):
        normal_row({"question": None}, "question", "row 1")


@pytest.mark.parametrize("prompt", [3, [], ["text"], [{"role": "user"}], {"a": 1}])
def test_prompts_of_a_wrong_type(prompt: object) -> None:
    with pytest.raises(DataError, match="row 1"):
        normal_row({"prompt": prompt}, "prompt", "row 1")


def test_both_row_formats_render_alike() -> None:
    tokenizer = CharTokenizer("0123456789=")
    flat = normal_row({"question": "12=", "answer": 3}, "question", "row 1")
    nested = normal_row(
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": "12="}],
            "reward_model": {"ground_truth": "3"},
            "extra_info": {"index": 1},
        },
        "prompt",
        "row 1",
    )
    assert flat == {"prompt": "12=", "answer": 3}
    assert nested["reward_model"] == {"ground_truth": "3"}
    assert render_prompt(flat, tokenizer, True, "", "r") == render_prompt(nested, tokenizer, True, "", "r")
    assert render_prompt(flat, tokenizer, True, "7", "r") == tokenizer.encode("712=")
    with pytest.raises(ConfigError, match="data.chat: true"):
        render_prompt(nested, tokenizer, False, "", "row 1")


def test_values_become_plain_json_or_are_refused() -> None:
    import datetime
    import decimal

    import numpy as np

    row = {
        "prompt": "x",
        "a": np.arange(2),
        "b": np.float32(0.5),
        "c": datetime.date(2026, 1, 2),
        "d": {1: (2, 3)},
        "e": decimal.Decimal("1.5"),
        "f": float("nan"),
        "g": True,
    }
    plain = normal_row(row, "prompt", "row 1")
    assert plain == json.loads(json.dumps(plain, allow_nan=False))
    assert (plain["a"], plain["b"], plain["d"], plain["f"], plain["g"]) == ([0, 1], 0.5, {"1": [2, 3]}, None, True)
    with pytest.raises(DataError, match="row 1, column 'picture'"):
        normal_row({"prompt": "x", "picture": b"\x00"}, "prompt", "row 1")


def test_held_out_shares_no_prompt_even_with_duplicates(tmp_path: Path) -> None:
    spec = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i % 7}", "n": i} for i in range(30)])
    train, held = split_held_out(open_source(spec), 3, seed=1)
    train_prompts = {train[i]["prompt"] for i in range(len(train))}
    held_prompts = [held[i]["prompt"] for i in range(len(held))]
    assert len(set(held_prompts)) == 3 and not train_prompts & set(held_prompts) and len(train_prompts) == 4
    again = split_held_out(open_source(spec), 3, seed=1)[1]
    assert [again[i] for i in range(3)] == [held[i] for i in range(3)]
    for count in (0, 7, 30):
        with pytest.raises(DataError, match="hold out"):
            split_held_out(open_source(spec), count, seed=1)


@pytest.mark.parametrize(
    ("data", "evaluation"),
    [
        ({"source": "task:larger_number"}, {"prompts": 200}),
        ({"source": "task:mix6", "args": {"size": 900}}, {"prompts": 500}),
        ({"source": "task:mix6", "args": {"size": 900}}, {"prompts": 9, "source": "task:mix6", "args": {"size": 5}}),
        (
            {"source": "task:cot6", "args": {"terms": 3, "size": 500}},
            {"prompts": 300, "source": "task:cot6", "args": {"held_out": 400}},
        ),
        ({"source": "reasoning_gym:chain_sum", "args": {"size": 60, "min_terms": 2, "max_terms": 2}}, {"prompts": 20}),
    ],
)
def test_splits_are_disjoint_by_prompt(data: dict, evaluation: dict) -> None:
    train, held = open_splits(DataSection(**data), EvalSection(**evaluation), seed=3)
    assert held is not None and len(held) == evaluation["prompts"]
    seen = {train[i]["prompt"] for i in range(len(train))}
    assert seen and not seen & {held[i]["prompt"] for i in range(len(held))}


def test_no_evaluation_no_split() -> None:
    train, held = open_splits(DataSection(source="task:mix6", args={"size": 10}), EvalSection(), seed=3)
    assert held is None and len(train) == 10


def test_reasoning_gym_rows_and_bad_config() -> None:
    source = open_source("reasoning_gym:countdown", {"size": 3, "seed": 7, "max_numbers": 4})
    row = normal_row(source[2], "prompt", source.where(2))
    assert row["reasoning_gym"] == {
        "name": "countdown",
        "seed": 7,
        "size": 3,
        "config": {"max_numbers": 4},
        "index": 2,
    }
    assert row["data_source"] == "reasoning_gym:countdown" and "metadata" in row and len(source) == 3
    for args in ({"max_numbrs": 4}, {"size": 0}, {"min_numbers": -4}):
        with pytest.raises(DocklandsError) as caught:
            open_source("reasoning_gym:countdown", args)
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x\\ud800y"}', r"a.jsonl, line 2: text with a lone surrogate \ud800 at position 1"),
        ('{"prompt": [{"role": "user", "content": "\\udc00"}]}', "a.jsonl, line 2: text with a lone surrogate"),
        ('{"prompt": "1", "\\ud800": 1}', "a.jsonl, line 2: text with a lone surrogate"),
        ('{"prompt": "1", "x": ["\\ud800"]}', "a.jsonl, line 2, column 'x': text with a lone surrogate"),
        ('{"prompt": "1", "x": ' + "[" * 900 + "]" * 900 + "}", "line 2, column 'x': lists or objects are nested more"),
        ('{"prompt": ' + '{"a": ' * 900 + "1" + "}" * 900 + "}", "line 2: 'prompt' must be text or a non-empty list"),
        ('{"prompt": "\u65e5"}', "a.jsonl, line 2: character '\u65e5' at position 0 is not in the character tokenizer"),
        ('{"prompt": "1", "tools": [1]}', "a.jsonl, line 2: the character tokenizer cannot render tools"),
    ],
)
def test_rows_that_no_tokenizer_takes_are_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "12="}\n' + line + "\n")
    stream = PromptStream(open_file(str(tmp_path / "a.jsonl")), CharTokenizer("0123456789="), DataSection(), seed=1)
    with pytest.raises(DataError) as caught:
        stream.check()
    assert says in str(caught.value) and "\n" not in str(caught.value) and type(caught.value) is DataError


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert normal_row(open_file(str(tmp_path / "a.jsonl"))[0], "prompt", "here") == {"prompt": "\U0001f600"}


def test_a_response_that_cannot_be_tokenised_is_named() -> None:
    with pytest.raises(DataError, match="prompt 7: character 'x' at position 1"):
        render_response({"response": "1x"}, CharTokenizer("0123456789="), "prompt 7")


@pytest.mark.parametrize("key", ["response", "chosen", "rejected"])
def test_a_response_without_a_turn_of_the_model_is_refused(key: str) -> None:
    tokenizer, turn = CharTokenizer("0123456789="), {"role": "user", "content": "12"}
    with pytest.raises(DataError, match=f"prompt 7: '{key}' has no assistant turn") as caught:
        render_response({key: [turn]}, tokenizer, "prompt 7", key)
    assert "its turns are of: user;" in caught.value.hint
    ids, mask = render_response({key: [turn, {"role": "assistant", "content": "3"}]}, tokenizer, "prompt 7", key)
    assert sum(mask) == 2 < len(ids)
