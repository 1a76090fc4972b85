"""The driver's ear for signs of life: when it ends, and whom it misses."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from docklands.fleet import pulse as pulses
from docklands.fleet.pulse import Pulse


def test_an_ear_that_is_closed_stops_listening_at_once() -> None:
    pulse = Pulse(6000.0, lambda rank, words: None)  # its waits are 1,000 s
    pulse.close()
    assert not pulse._thread.is_alive()


def test_a_driver_that_was_stopped_itself_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps is what such a driver sees; a worker that is silent while it listens is missed."""
    now, missed = [1000.0], list[tuple[int, str]]()
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = Pulse(600.0, lambda rank, words: missed.append((rank, words)))
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def until(true: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not true():
            assert time.monotonic() < end
            time.sleep(0.002)

    def sign(rank: int, words: str) -> None:
        port, token = pulse.address
        sender.sendto(f"{token} {rank} {words}".encode(), ("127.0.0.1", port))
        until(lambda: bool(missed) or pulse._heard.get(rank, (0, ""))[1] == words)

    try:
        sign(0, "publish")
        now[0] += 5000
        for step in range(5):
            sign(1, f"update {step}")
            sign(1, f"update {step} goes on")  # what was done about the sign before is over
            assert not missed or step == 4
            now[0] += 200
        until(lambda: bool(missed))
        assert missed == [(0, "publish")]
    finally:
        pulse.close()
        sender.close()
