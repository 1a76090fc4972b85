"""One data row: its prompt found and checked, its values made plain JSON, its tokens rendered."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from docklands.data.tokenizer import Tokenizer
from docklands.errors import ConfigError, DataError

Row = dict[str, Any]
DEEPEST = 64
"""Levels of lists and objects in a row's value: far more than data has, and far fewer than Python can recurse."""


def prompt_key_text(row: Mapping[str, Any], key: str, where: str) -> str | list[Any]:
    """The row's prompt: text or a list of messages.

    Raises DataError naming file, row number and the keys present when it is missing or of another type.
    """
    if key in row and row[key] is None:
        raise DataError(f"{where}: the prompt under {key!r} is null", "give the row a prompt, or leave it out")
    if key not in row:
        present = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}: no prompt key {key!r}", f"keys present: {present}; set data.prompt_key")
    prompt = row[key]
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list | tuple):
        for message in prompt:
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise DataError(f"{where}: {key!r} is a list, but not of messages with 'role' and 'content'")
        if prompt:
            return list(prompt)
    shown = "" if isinstance(prompt, Mapping) else f": {prompt!r:.60}"  # an object may be nested past what repr can do
    raise DataError(
        f"{where}: {key!r} must be text or a non-empty list of messages, found {type(prompt).__name__}{shown}"
    )


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value as JSON types: what every process, checkpoint and log can hold. DataError for anything else."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return text(value, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth == DEEPEST:
        raise DataError(f"{where}: lists or objects are nested more than {DEEPEST} deep", "keep such a value as text")
    if isinstance(value, Mapping):
        return {text(str(k), where): plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, where, depth + 1) for v in value]
    if isinstance(value, set | frozenset):
        return [plain(v, where, depth + 1) for v in sorted(value, key=repr)]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), where, depth)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise DataError(
        f"{where}: a value of type {type(value).__name__} cannot be carried", "rows hold text, numbers, lists, objects"
    )


def text(value: str, where: str) -> str:
    """The text. DataError when it holds half of a surrogate pair, which no tokenizer and no file takes."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = ord(value[error.start])
            raise DataError(
                f"{where}: text with a lone surrogate \\u{code:04x} at position {error.start} is no Unicode",
                "it is half of a pair that was cut: remove it, or write U+FFFD",
            ) from None
    return value


@contextmanager
def located(where: str) -> Iterator[None]:
    """A tokenizer knows no rows: its DataError gets the place of the row in front."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error.message}", error.hint) from error


def normal_row(row: Mapping[str, Any], key: str, where: str) -> Row:
    """The row in plain JSON with its prompt under 'prompt', whatever it was called in the file."""
    prompt = prompt_key_text(row, key, where)
    rest = {text(str(k), where): plain(v, f"{where}, column {k!r}") for k, v in row.items() if k not in (key, "prompt")}
    return {"prompt": plain(prompt, where), **rest}


def render_prompt(row: Mapping[str, Any], tokenizer: Tokenizer, chat: bool, system: str, where: str) -> list[int]:
    """Token ids of a normal row's prompt.

    chat    text becomes a user message, after the system message if there is one, in the chat template
    else    the text itself (after the system text), without special tokens
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not chat:
            with located(where):
                return tokenizer.encode(system + prompt)
        messages: list[Any] = [{"role": "user", "content": prompt}]
    elif not chat:
        raise ConfigError(f"{where}: the prompt is a list of messages, but data.chat is false", "set data.chat: true")
    else:
        messages = list(prompt)
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    with located(where):
        return tokenizer.render_chat(messages, row.get("tools") or None)


def render_response(
    row: Mapping[str, Any], tokenizer: Tokenizer, where: str, key: str = "response"
) -> tuple[list[int], list[bool]]:
    """(token ids, loss mask) of a given response, each model turn closed by the end-of-sequence id.

    What stands under `key` is text, or a list of turns {"role", "content"}: assistant turns are trained on, the others
    are observations and are masked. Raises DataError when there is no assistant turn: nothing would be trained.
    """
    response = row.get(key)
    turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: no text or turns under {key!r}", f"keys present: {', '.join(map(str, row))}")
    ids: list[int] = []
    mask: list[bool] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or "role" not in turn or not isinstance(turn.get("content"), str):
            raise DataError(f"{where}: a turn of {key!r} lacks 'role' or a text 'content'")
        with located(where):
            if turn["role"] == "assistant":
                new = [*tokenizer.encode(turn["content"]), tokenizer.eos_id]
            else:
                new = tokenizer.render_observation(turn["content"], turn["role"])
        ids += new
        mask += [turn["role"] == "assistant"] * len(new)
    if not any(mask):
        roles = ", ".join(dict.fromkeys(str(turn["role"]) for turn in turns))
        raise DataError(
            f"{where}: {key!r} has no assistant turn, so nothing of it is trained",
            f"its turns are of: {roles}; what the model should say has the role 'assistant'",
        )
    return ids, mask
