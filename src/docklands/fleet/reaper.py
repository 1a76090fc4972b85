"""Processes that must not outlive the driver, and are known for certain: a number alone may be another's by then."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import psutil

SCRIPT = """read _
for each in $1; do
    born=$(sed "s/.*)//" "/proc/${each%:*}/stat" 2>/dev/null | cut -d" " -f21)
    [ "$born" = "${each#*:}" ] && theirs="$theirs ${each%:*}"
done
kill -9 $theirs; shift; rm -f -- "$@"
"""


def descendants() -> list[psutil.Process]:
    """Processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


def process_of(pid: int, began: float) -> psutil.Process | None:
    """The process of that number here, if that began then (seconds since 1970): a container has numbers of its own."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(pid)
        if abs(found.create_time() - began) < 1:
            return found
    return None


def reaper(processes: list[psutil.Process], files: list[str]) -> subprocess.Popen[bytes]:
    """Kills these processes and removes these files as soon as this one has gone, however it went: some of Ray's would
    stay for minutes, or for good. Another process that has one's number by then is spared.
    """
    known = " ".join(f"{process.pid}:{born(process.pid)}" for process in processes)
    words = ["sh", "-c", SCRIPT, "reaper", known, *files]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)


def born(pid: int) -> str:
    """When, in ticks of the kernel's clock; "" where there is no /proc, or no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
