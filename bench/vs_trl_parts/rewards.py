"""The rewards of both sides, as plain functions of the common signature: (prompts, completions, **columns) -> list."""

from __future__ import annotations

import re
from typing import Any

DIGITS = re.compile(r"\d+")


def text_of(completion: Any) -> str:
    """A completion is text, or a list of chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def first_number_right(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 when the first number in the reply is the answer."""
    found = (DIGITS.search(text_of(completion)) for completion in completions)
    return [float(match is not None and match.group() == right) for match, right in zip(found, answer)]


def digit_share(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Share of digits among the characters."""
    texts = [text_of(completion) for completion in completions]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]


# Both functions return at once, so neither side puts them into a process of its own.
first_number_right.isolate = False  # type: ignore[attr-defined]
digit_share.isolate = False  # type: ignore[attr-defined]
