"""The driver's ear for signs of life ends when it is told to, not when its next wait is over."""

from __future__ import annotations

from docklands.fleet.pulse import Pulse


def test_an_ear_that_is_closed_stops_listening_at_once() -> None:
    pulse = Pulse(6000.0, lambda rank, words: None)  # its waits are 1,000 s
    pulse.close()
    assert not pulse._thread.is_alive()
