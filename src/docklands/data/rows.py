"""One data row: its prompt found and checked, its values made plain JSON, its tokens rendered."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from docklands.data.tokenizer import Tokenizer
from docklands.errors import ConfigError, DataError

Row = dict[str, Any]


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
    raise DataError(
        f"{where}: {key!r} must be text or a non-empty list of messages, found {type(prompt).__name__}: {prompt!r:.60}"
    )


def plain(value: Any, where: str) -> Any:
    """The value as JSON types: what every process, checkpoint and log can hold. DataError for anything else."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v, where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, where) for v in value]
    if isinstance(value, set | frozenset):
        return [plain(v, where) for v in sorted(value, key=repr)]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise DataError(
        f"{where}: a value of type {type(value).__name__} cannot be carried", "rows hold text, numbers, lists, objects"
    )


def normal_row(row: Mapping[str, Any], key: str, where: str) -> Row:
    """The row in plain JSON with its prompt under 'prompt', whatever it was called in the file."""
    prompt = prompt_key_text(row, key, where)
    rest = {str(k): plain(v, f"{where}, column {k!r}") for k, v in row.items() if k not in (key, "prompt")}
    return {"prompt": plain(prompt, where), **rest}


def render_prompt(row: Mapping[str, Any], tokenizer: Tokenizer, chat: bool, system: str, where: str) -> list[int]:
    """Token ids of a normal row's prompt.

    chat    text becomes a user message, after the system message if there is one, in the chat template
    else    the text itself (after the system text), without special tokens
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not chat:
            return tokenizer.encode(system + prompt)
        messages: list[Any] = [{"role": "user", "content": prompt}]
    elif not chat:
        raise ConfigError(f"{where}: the prompt is a list of messages, but data.chat is false", "set data.chat: true")
    else:
        messages = list(prompt)
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.render_chat(messages, row.get("tools") or None)


def render_response(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> tuple[list[int], list[bool]]:
    """(token ids, loss mask) of a demonstration's response, each model turn closed by the end-of-sequence id.

    'response' is text, or a list of turns {"role", "content"}: assistant turns are trained on, the others are
    observations and are masked.
    """
    response = row.get("response")
    turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: no text or turns under 'response'", f"keys present: {', '.join(map(str, row))}")
    ids: list[int] = []
    mask: list[bool] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or "role" not in turn or not isinstance(turn.get("content"), str):
            raise DataError(f"{where}: a turn of 'response' lacks 'role' or a text 'content'")
        if turn["role"] == "assistant":
            new = [*tokenizer.encode(turn["content"]), tokenizer.eos_id]
        else:
            new = tokenizer.render_observation(turn["content"], turn["role"])
        ids += new
        mask += [turn["role"] == "assistant"] * len(new)
    return ids, mask
