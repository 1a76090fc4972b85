"""Calls that wait in the control process: each sleeps under a key, and is tried again when that key is woken.

In order of arrival; readers that want the same are not all tried in vain. Nothing polls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from docklands.dock.warehouse.messages import Failure
from docklands.dock.wire.format import Buffer
from docklands.errors import DocklandsError

Reply = tuple[msgspec.Struct, list[Buffer]]
Attempt = Callable[[], "Reply | None"]


@dataclass(eq=False)
class Parked:
    """A call that waits.

    want     calls with equal wants are answered alike
    attempt  the reply, or None: not yet
    late     the answer at the deadline
    """

    client: bytes
    number: int
    want: Any
    attempt: Attempt
    deadline: float
    late: Attempt


class Parking:
    """All calls that wait. earliest: the first deadline among them, or sooner; infinite if there is none."""

    def __init__(self) -> None:
        self.earliest = math.inf
        self._parked: dict[str, list[Parked]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._parked

    def park(self, key: str, call: Parked) -> None:
        """The call waits. One that is said again waits once."""
        held = [
            other for other in self._parked.get(key, []) if (other.client, other.number) != (call.client, call.number)
        ]
        self._parked[key] = [*held, call]
        self.earliest = min(self.earliest, call.deadline)

    def wake(self, key: str) -> list[tuple[bytes, int, Reply]]:
        """Try those that wait for `key` again; (client, call number, reply) of those that are through."""
        found: list[tuple[bytes, int, Reply]] = []
        still: list[Parked] = []
        vain: set[Any] = set()
        for parked in self._parked.pop(key, []):
            reply = None if parked.want in vain else answered(parked.attempt)
            if reply is not None:
                found.append((parked.client, parked.number, reply))
                continue
            still.append(parked)
            if parked.want is not None:
                vain.add(parked.want)
        if still:
            self._parked[key] = still
        return found

    def overdue(self, now: float) -> list[tuple[bytes, int, Reply]]:
        """Calls whose deadline has passed get their last answer."""
        found: list[tuple[bytes, int, Reply]] = []
        if now < self.earliest:
            return found
        for key in list(self._parked):
            for parked in [parked for parked in self._parked[key] if parked.deadline <= now]:
                self._parked[key].remove(parked)
                reply = answered(parked.attempt) or answered(parked.late)
                assert reply is not None, "the last answer of a call is one"
                found.append((parked.client, parked.number, reply))
        self.earliest = min((p.deadline for held in self._parked.values() for p in held), default=math.inf)
        return found

    def forget(self, client: bytes) -> None:
        """A client has gone."""
        for key, held in self._parked.items():
            self._parked[key] = [parked for parked in held if parked.client != client]

    def counts(self) -> dict[str, int]:
        """Key -> calls that wait under it."""
        return {key: len(held) for key, held in self._parked.items() if held}


def answered(attempt: Attempt) -> Reply | None:
    """What an attempt gives; an error of the dock is a reply too."""
    try:
        return attempt()
    except DocklandsError as error:
        return failure(error)


def failure(error: DocklandsError) -> Reply:
    return Failure(type(error).__name__, error.message, error.hint), []
