"""Text to token ids and back: a thin wrapper over a Hugging Face tokenizer, and a character tokenizer for tiny models.

The character tokenizer exists so that tiny runs need no `transformers` import (seconds of start-up).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from docklands.errors import ConfigError, DataError

CHAR_FILE = "char_tokenizer.json"
MARK = "\u2402observation\u2403"
REPLACEMENT = "\ufffd"
Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """What the project needs of a tokenizer. Ids are plain lists of int; nothing is ever padded.

    eos_ids         every id that ends a response: the tokenizer's own and generation_config.json's
    eos_id          the one that closes a demonstration: the tokenizer's own
    vocab_size      one more than the largest id that plain text can give; a model's embedding may be larger
    has_chat        whether `render_chat` has a template
    """

    eos_ids: frozenset[int]
    eos_id: int
    vocab_size: int
    has_chat: bool

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]: ...

    def render_observation(self, text: str, role: str = "user", ended: bool = True) -> list[int]: ...


class CharTokenizer:
    """One token per character. Ids: the special tokens first, then the characters, in file order.

    The file `char_tokenizer.json` holds {"characters": [...], "specials": {"pad": "<pad>", "eos": "<eos>"}}; only
    "eos" is required. There is no chat template: `render_chat` joins the messages' text.
    """

    has_chat = False

    def __init__(self, characters: Sequence[str], specials: Mapping[str, str] | None = None) -> None:
        names = dict(specials) if specials is not None else {"pad": "<pad>", "eos": "<eos>"}
        if "eos" not in names:
            raise DataError("character tokenizer: specials lack 'eos'", 'e.g. {"pad": "<pad>", "eos": "<eos>"}')
        wrong = [c for c in characters if not isinstance(c, str) or len(c) != 1]
        if wrong or len(set(characters)) != len(characters):
            raise DataError(
                f"character tokenizer: not single, distinct characters: {wrong or 'a character occurs twice'}"
            )
        self.characters = tuple(characters)
        self.specials = names
        tokens = list(dict.fromkeys(names.values()))
        self._first = len(tokens)
        self._special_ids = {token: i for i, token in enumerate(tokens)}
        self._ids = {c: self._first + i for i, c in enumerate(self.characters)}
        self._texts = [*tokens, *self.characters]
        self.eos_id = self._special_ids[names["eos"]]
        self.eos_ids = frozenset({self.eos_id})
        self.vocab_size = len(self._texts)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of the characters. `add_special_tokens` puts the bos token in front where there is one.

        Raises DataError naming the first unknown character.
        """
        try:
            ids = [self._ids[c] for c in text]
        except KeyError as unknown:
            character = str(unknown.args[0])
            raise DataError(
                f"character {character!r} at position {text.index(character)} is not in the character tokenizer",
                f"it knows {''.join(self.characters)!r}",
            ) from None
        bos = self.specials.get("bos")
        return [self._special_ids[bos], *ids] if add_special_tokens and bos else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids beyond the vocabulary (padded embeddings) become U+FFFD."""
        parts = []
        for token in ids:
            if token < self._first and skip_special_tokens:
                continue
            parts.append(self._texts[token] if 0 <= token < self.vocab_size else REPLACEMENT)
        return "".join(parts)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The messages' contents, one after the other: a completion-style prompt."""
        if tools:
            raise DataError("the character tokenizer cannot render tools", "remove the row's 'tools' column")
        return self.encode("".join(str(message["content"]) for message in messages))

    def render_observation(self, text: str, role: str = "user", ended: bool = True) -> list[int]:
        """Ids of an observation that follows a model turn: the plain text."""
        return self.encode(text)

    def save(self, directory: str | Path) -> Path:
        """Write the file into a model directory."""
        path = Path(directory) / CHAR_FILE
        text = json.dumps({"characters": list(self.characters), "specials": self.specials}, ensure_ascii=True)
        path.write_text(text + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, directory: str | Path) -> CharTokenizer:
        """Read the file from a model directory; DataError when it is malformed."""
        path = Path(directory) / CHAR_FILE
        content = _read_json(path)
        if not isinstance(content.get("characters"), list):
            raise DataError(f"{path}: no list 'characters'", f"keys present: {', '.join(content) or 'none'}")
        return cls(content["characters"], content.get("specials"))


class HFTokenizer:
    """A Hugging Face tokenizer directory, read by `transformers` (imported here, on first use)."""

    def __init__(self, directory: str | Path) -> None:
        from transformers import AutoTokenizer

        self.path = Path(directory)
        try:
            self._hf: Any = AutoTokenizer.from_pretrained(str(self.path), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.path}: the tokenizer cannot be read: {_one_line(error)}") from error
        special = set(self._hf.all_special_ids)  # some are added on loading and never used: a pad or an unknown token
        self.vocab_size = 1 + max((i for i in self._hf.get_vocab().values() if i not in special), default=-1)
        self.has_chat = bool(self._hf.chat_template)
        self.eos_ids = frozenset(_eos_ids(self._hf.eos_token_id, self.path))
        own = self._hf.eos_token_id
        self.eos_id = min(self.eos_ids) if own is None else int(own)
        self._frames: dict[tuple[str, bool], tuple[str, str]] = {}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of the text; special tokens written in the text are recognised."""
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids, without clean-up of spaces."""
        return self._hf.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Chat template applied, with the generation prompt at the end. DataError when it refuses the messages."""
        return self.encode(self._template(list(messages), generation=True, tools=tools))

    def render_observation(self, text: str, role: str = "user", ended: bool = True) -> list[int]:
        """Ids that stand between a model turn and the next one when `text` is said in between.

        ended  the model turn ended with an end-of-sequence token, which is then not repeated.
        Without a chat template: the plain text. Only new text is tokenised; sampled tokens are never seen here.
        """
        if not self.has_chat:
            return self.encode(text)
        if (role, ended) not in self._frames:
            self._frames[role, ended] = self._frame(role, ended)
        before, after = self._frames[role, ended]
        return self.encode(before + text + after)

    def _frame(self, role: str, ended: bool) -> tuple[str, str]:
        """Template text before and after an observation, found by rendering marked messages."""
        answer = MARK + "a"
        said = MARK + "o"
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
        text = self._template([*messages, {"role": role, "content": said}], generation=True)
        tail = text[text.rindex(answer) + len(answer) :]
        before, after = tail.split(said)
        if ended:
            for token in self._hf.convert_ids_to_tokens(sorted(self.eos_ids)):
                before = before.removeprefix(token)
        return before, after

    def _template(self, messages: list[Message], generation: bool, tools: Sequence[Any] | None = None) -> str:
        if not self.has_chat:
            raise ConfigError(f"{self.path}: the tokenizer has no chat template", "set data.chat: false")
        from jinja2 import TemplateError

        try:
            return self._hf.apply_chat_template(
                messages, tools=list(tools) if tools else None, add_generation_prompt=generation, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template refuses the messages: {_one_line(error)}") from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises DataError when the directory is missing or holds neither char_tokenizer.json nor tokenizer.json.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise DataError(f"tokenizer directory {str(path)!r} does not exist", "set model.path or model.tokenizer")
    if (directory / CHAR_FILE).is_file():
        return CharTokenizer.load(directory)
    if (directory / "tokenizer.json").is_file():
        return HFTokenizer(directory)
    raise DataError(f"{directory}: no tokenizer", f"expected tokenizer.json or {CHAR_FILE}")


def _eos_ids(own: int | None, directory: Path) -> set[int]:
    """The tokenizer's id and those of generation_config.json (a number or a list)."""
    found = set() if own is None else {int(own)}
    path = directory / "generation_config.json"
    if path.is_file():
        listed = _read_json(path).get("eos_token_id")
        ids = [i for i in (listed if isinstance(listed, list) else [listed]) if i is not None]
        if any(type(i) is not int or i < 0 for i in ids):
            raise DataError(f"{path}: eos_token_id is {listed!r}, expected the id of a token or a list of ids")
        found.update(ids)
    if not found:
        raise DataError(f"{directory}: no end-of-sequence token", "set eos_token in tokenizer_config.json")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
