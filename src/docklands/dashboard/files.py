"""Reading files that somebody else writes, cuts and fills: a bounded part at a time, and never through a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO, Any

from docklands.obs.files import parse_line

PART = 8 << 20
"""Bytes that one read takes at most."""
LONGEST = 4 << 20
"""Bytes of the longest line that is still read; longer ones are passed over."""
MARK = 64


def open_plain(path: Path) -> IO[bytes] | None:
    """A regular file, opened to be read; None for anything else (missing, a pipe, a link to another place)."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return os.fdopen(handle, "rb")


def read_text(path: Path, most: int = 1 << 20) -> str:
    """The first `most` bytes of a file as text; empty when there is none."""
    file = open_plain(path)
    if file is None:
        return ""
    with file:
        return file.read(most).decode("utf-8", "replace")


def read_end(path: Path, most: int = 1 << 14) -> str:
    """The last `most` bytes of a file as text, from a line's start on; empty when there is none."""
    file = open_plain(path)
    if file is None:
        return ""
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        text = file.read(most).decode("utf-8", "replace")
    return text if size <= most else text.partition("\n")[2]


def file_size(path: Path) -> int:
    """Bytes of a file; 0 when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class Tail:
    """What was appended to a file of JSON lines since the last call, at most `part` bytes of it.

    A torn last line waits for its rest. A file that was cut or replaced (a resumed run) is read anew: the bytes before
    the place where reading stopped must still be there.
    """

    def __init__(self, path: Path, part: int = PART, longest: int = LONGEST) -> None:
        self.path = path
        self._part, self._longest = max(part, longest), longest
        self._offset = 0
        self._mark = b""
        self._passing_over = False
        self.left = file_size(path)

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether everything before was forgotten, the new rows). `left`: bytes that wait for the next call."""
        file = open_plain(self.path)
        if file is None:
            again = self._offset > 0
            self._restart()
            self.left = 0
            return again, []
        with file:
            size = os.fstat(file.fileno()).st_size
            again = self._was_changed(file, size)
            if again:
                self._restart()
            file.seek(self._offset)
            data = file.read(min(self._part, size - self._offset))
        whole = self._offset + len(data) >= size
        rows = self._rows(data)
        self.left = 0 if whole else size - self._offset  # a torn end is nothing that could be read
        return again, rows

    def _rows(self, data: bytes) -> list[dict[str, Any]]:
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) >= self._longest:
                self._passing_over = True
                self._go_on(data)
            return []
        body = data[:end]
        self._go_on(body)
        lines = body.split(b"\n")
        if self._passing_over:
            self._passing_over, lines = False, lines[1:]
        found = (parse_line(line) for line in lines if line and len(line) <= self._longest)
        return [row for row in found if row is not None]

    def _go_on(self, data: bytes) -> None:
        self._offset += len(data)
        self._mark = (self._mark + data)[-MARK:]

    def _restart(self) -> None:
        self._offset, self._mark, self._passing_over = 0, b"", False

    def _was_changed(self, file: IO[bytes], size: int) -> bool:
        if size < self._offset:
            return True
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) != self._mark


def number(value: Any) -> float | int | None:
    """A number that JSON can carry; None for anything else."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if plain and abs(value) < 1e300 else None
