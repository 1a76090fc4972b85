"""The samples of a step, by group, each text and list bounded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docklands.dashboard.files import number, open_plain
from docklands.obs.files import parse_line

MOST_BYTES = 16 << 20
MOST_ROWS = 512
MOST_TEXT = 20_000
MOST_TOKENS = 4096
MOST_FILES = 1_000_000
NAME = re.compile(r"step_(\d{1,12})\.jsonl")
NUMBERS = ("reward", "advantage", "response_tokens", "row_id", "prompt_id")
TOKEN_NUMBERS = ("rollout", "old", "ref", "advantage")


def steps_in(folder: Path) -> list[int]:
    """Steps of which samples were written, in order."""
    if folder.is_symlink():
        return []
    try:
        with os.scandir(folder) as entries:
            names = (NAME.fullmatch(entry.name) for _, entry in zip(range(MOST_FILES), entries))
            return sorted(int(match[1]) for match in names if match)
    except OSError:
        return []


def read_step(folder: Path, wanted: int | None) -> dict[str, Any]:
    """The step's samples; those of the nearest earlier step (else the first) when it has none, of the last for None.

    {step, previous, next, first, last, groups: [{id, prompt, rows}], cut: whether there were more}; without any
    samples {step: null}.
    """
    steps = steps_in(folder)
    if not steps:
        return {"step": None}
    earlier = [i for i, step in enumerate(steps) if wanted is None or step <= wanted]
    at = earlier[-1] if earlier else 0
    rows, cut = read_rows(folder / f"step_{steps[at]:06d}.jsonl")
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        prompt = text_of(row.get("prompt", ""))
        name = number(row.get("group_id"))
        key = f"?{prompt}" if name is None else str(name)
        group = groups.setdefault(key, {"id": name, "prompt": prompt, "rows": []})
        group["rows"].append(sample(row))
    return {
        "step": steps[at],
        "previous": steps[at - 1] if at else None,
        "next": steps[at + 1] if at + 1 < len(steps) else None,
        "first": steps[0],
        "last": steps[-1],
        "groups": list(groups.values()),
        "cut": cut,
    }


def read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The first rows of a file, and whether it holds more."""
    file = open_plain(path)
    if file is None:
        return [], False
    with file:
        data = file.read(MOST_BYTES + 1)
    cut = len(data) > MOST_BYTES
    lines = data[:MOST_BYTES].split(b"\n")
    rows = [row for line in lines[:MOST_ROWS] if line and (row := parse_line(line)) is not None]
    return rows, cut or len(lines) > MOST_ROWS + 1


def sample(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the page gets it: known keys, of known kinds."""
    found: dict[str, Any] = {name: number(row.get(name)) for name in NUMBERS if number(row.get(name)) is not None}
    found["completion"] = text_of(row.get("completion", ""))
    found["finish"] = str(row.get("finish", ""))[:40]
    versions = row.get("versions")
    if isinstance(versions, list) and len(versions) == 2 and all(isinstance(v, int) for v in versions):
        found["versions"] = versions
    tokens = row.get("tokens")
    if isinstance(tokens, dict) and isinstance(tokens.get("text"), list):
        found["tokens"] = token_columns(tokens)
    return found


def token_columns(tokens: dict[str, Any]) -> dict[str, Any]:
    """The columns of a response's tokens; a column of another length than the texts is left out."""
    texts = [str(text)[:200] for text in tokens["text"][:MOST_TOKENS]]
    found: dict[str, Any] = {"text": texts, "all": number(tokens.get("all")) or len(texts)}
    mask = tokens.get("mask")
    if isinstance(mask, str) and len(mask) >= len(texts):
        found["mask"] = mask[: len(texts)]
    for name in TOKEN_NUMBERS:
        values = tokens.get(name)
        if isinstance(values, list) and len(values) >= len(texts):
            found[name] = [number(value) for value in values[: len(texts)]]
    found["versions"] = spread(tokens.get("versions"), len(texts))
    return {name: values for name, values in found.items() if values != []}


def spread(runs: Any, length: int) -> list[int]:
    """[version, how many] pairs as one version a token; empty when they are something else."""
    found: list[int] = []
    for run in runs if isinstance(runs, list) else []:
        if not (isinstance(run, list) and len(run) == 2 and all(isinstance(v, int) for v in run)):
            return []
        found += [run[0]] * min(max(run[1], 0), length - len(found))
    return found if len(found) == length else []


def text_of(value: Any) -> str:
    """A text, or messages one after the other; cut when very long."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = "\n".join(f"[{item.get('role', '?')}] {item.get('content', '')}" for item in value)
    text = str(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text):,} characters)"
