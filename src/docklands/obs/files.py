"""Files that survive a crash: append-only lines, atomic small files, and readers that accept a torn end."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def clean(value: Any) -> Any:
    """`value` as finite JSON: NaN and infinities become null, numpy numbers and arrays plain, the unknown its text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(item) for item in value]
    if hasattr(value, "tolist"):
        return clean(value.tolist())
    return str(value)


def encode_line(row: dict[str, Any]) -> bytes:
    """One JSON line with sorted keys: equal rows give equal bytes. Lone surrogates are escaped."""
    text = json.dumps(clean(row), ensure_ascii=False, sort_keys=True, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


class LineFile:
    """Appends JSON lines, each with one write call: a killed process tears at most the last line.

    Raises OSError when the disk refuses. Safe to use from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()
        self._torn = False

    def append(self, row: dict[str, Any]) -> None:
        line = encode_line(row)
        with self._lock:
            if self._fd < 0:
                raise OSError(f"{self.path} is closed")
            data = b"\n" + line if self._torn else line
            written = os.write(self._fd, data)
            while written < len(data):  # a nearly full disk takes a part and then raises
                self._torn = True
                written += os.write(self._fd, data[written:])
            self._torn = False

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def drop_torn_line(path: Path) -> None:
    """Cut an unfinished last line off, so that appending goes on at a line start."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            cut = file.read(keep - start).rfind(b"\n")
            if cut >= 0:
                keep = start + cut + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def iter_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a file, in order. A missing file is empty; torn or foreign lines are passed over."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for raw in file:
            row = parse_line(raw)
            if row is not None:
                yield row


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None when it is torn or something else."""
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """`iter_jsonl` as a list."""
    return list(iter_jsonl(path))


def read_json(path: Path) -> Any:
    """A JSON file; None when it is missing or torn."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a small file: temporary file, fsync, rename, fsync of the directory. Old content stays until then."""
    raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented, finite JSON."""
    write_atomic(path, json.dumps(clean(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """`write_atomic` of JSON lines."""
    write_atomic(path, b"".join(encode_line(row) for row in rows))
