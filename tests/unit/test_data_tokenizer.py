"""Tokenizers: characters, and a Hugging Face directory built here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docklands.data.tokenizer import CharTokenizer, load_tokenizer
from docklands.errors import ConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def hf_directory(path: Path, template: str | None = TEMPLATE) -> Path:
    """A byte-level tokenizer without merges: small, real, and able to write any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    hf.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    if template:
        hf.chat_template = template
    hf.save_pretrained(path)
    ids = hf.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


def test_characters_round_trip_and_file(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("0123456789=")
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode("483=") == tokenizer.encode("483=") == [6, 10, 5, 12]
    assert again.decode([6, 10, 5, 12]) == "483="
    assert (again.vocab_size, again.eos_ids, again.eos_id, again.has_chat) == (13, frozenset({1}), 1, False)
    assert again.render_chat([{"role": "user", "content": "12="}]) == again.encode("12=")
    assert again.decode([6, 1]) == "4" and again.decode([6, 1], skip_special_tokens=False) == "4<eos>"
    assert again.decode([99]) == "\ufffd"


def test_character_unknown_or_file_malformed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'x' at position 2"):
        CharTokenizer("0123").encode("01x")
    with pytest.raises(DataError, match="distinct"):
        CharTokenizer("0010")
    (tmp_path / "char_tokenizer.json").write_text('{"letters": []}')
    with pytest.raises(DataError, match="no list 'characters'"):
        load_tokenizer(tmp_path)
    (tmp_path / "char_tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="not readable as JSON"):
        load_tokenizer(tmp_path)


def test_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")


def test_tiny_runs_need_no_transformers(tmp_path: Path) -> None:
    CharTokenizer("01").save(tmp_path)
    code = (
        "import sys; from docklands.data.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(tmp_path)!r}).encode('01'); print('transformers' in sys.modules)"
    )
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(src)}, timeout=180
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_directory(tmp_path_factory.mktemp("hf"))


def test_hf_chat_and_eos(hf: Path) -> None:
    tokenizer = load_tokenizer(hf)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.eos_ids) == 2 and tokenizer.eos_id in tokenizer.eos_ids
    assert tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False) == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("a  b .c")) == "a  b .c"


def test_pitfall_20_observation_is_only_the_new_text(hf: Path) -> None:
    """Prompt + sampled turn + observation equals the template's own rendering, with no sampled token touched."""
    tokenizer = load_tokenizer(hf)
    prompt = tokenizer.render_chat([{"role": "user", "content": "q"}])
    sampled = [*tokenizer.encode("he"), *tokenizer.encode("llo"), tokenizer.eos_id]
    observation = tokenizer.render_observation("<result>4</result>")
    whole = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "<result>4</result>"},
    ]
    assert prompt + sampled + observation == tokenizer.render_chat(whole)
    cut = tokenizer.render_observation("x", ended=False)
    assert cut[0] == tokenizer.eos_id and cut[1:] == tokenizer.render_observation("x", ended=True)


def test_no_chat_template_says_what_to_set(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(hf_directory(tmp_path, template=None))
    with pytest.raises(ConfigError, match="data.chat: false"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.render_observation("abc") == tokenizer.encode("abc")
