"""The other side of `sandbox.py`: a process that loads rewards and scores samples until its input ends.

Run as `python -m docklands.rewards.worker PARENT_PID`. Frames on stdin and stdout: 4 bytes of length, then JSON. The
code that it runs cannot reach the protocol: its stdout is sent to stderr, its stdin is empty.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve. Ends when the parent closes the pipe, and is killed by the kernel when the parent dies mid-call."""
    _die_with_parent(int(sys.argv[1]))
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(requests, replies)
    os._exit(0)  # threads that a reward started must not keep the process


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """{"load": target, "path": sys.path} and then {"run": samples, "each": bool, "deadline_s": s} -> outcomes."""
    from docklands.rewards.base import RewardSample
    from docklands.rewards.scoring import Scoring, Target, load, text_of

    loaded: dict[str, Scoring] = {}
    current: Scoring | None = None
    while (request := read_frame(requests)) is not None:
        if "load" in request:
            key = json.dumps(request["load"], sort_keys=True)
            sys.path[:] = request["path"]
            try:
                if key not in loaded:
                    loaded[key] = load(Target(**request["load"]))
                    loaded[key].warm()
                current = loaded[key]
                write_frame(replies, {"ready": True})
            except (Exception, SystemExit) as error:
                write_frame(replies, {"failed": f"{type(error).__name__}: {text_of(error)}"})
            continue
        samples = [RewardSample(**sample) for sample in request["run"]]
        assert current is not None, "a run before any load"
        for part in [[s] for s in samples] if request["each"] else [samples]:
            outcomes = current.run(part, request["deadline_s"])
            write_frame(replies, {"outcomes": [outcome.to_json() for outcome in outcomes]})


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """One message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body = stream.read(HEADER.unpack(header)[0])
    return json.loads(body)


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    """One message, flushed."""
    stream.write(frame(message))
    stream.flush()


def frame(message: dict[str, Any]) -> bytes:
    """A message as bytes. Values that are no JSON were made text before."""
    body = json.dumps(message, default=repr).encode()
    return HEADER.pack(len(body)) + body


def _die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends; elsewhere than on Linux the end of stdin must do."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
