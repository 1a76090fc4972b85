"""Waiting without polling: named queues of futures, woken when something they may wait for has changed.

A waiter looks, joins the queue, and sleeps, the first two under the dock's lock, so no change can slip in between.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiter:
    """One sleeping call. `since` in seconds of the loop's clock."""

    future: asyncio.Future[None]
    since: float


class Waits:
    """Sleeping calls by what they wait for."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Waiter]] = {}

    def join(self, key: str, since: float) -> Waiter:
        """Enter the queue of `key`; to be called inside the loop that will sleep."""
        waiter = Waiter(asyncio.get_running_loop().create_future(), since)
        self._queues.setdefault(key, []).append(waiter)
        return waiter

    async def sleep(self, key: str, waiter: Waiter, deadline: float) -> None:
        """Until woken. Raises TimeoutError at `deadline`."""
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.future
        finally:
            queue = self._queues.get(key, [])
            if waiter in queue:
                queue.remove(waiter)

    def wake(self, key: str) -> None:
        """Everyone in the queue of `key` looks again. From any thread."""
        for waiter in self._queues.pop(key, ()):
            loop = waiter.future.get_loop()
            if running_loop() is loop:
                resolve(waiter.future)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(resolve, waiter.future)

    def wake_all(self) -> None:
        for key in list(self._queues):
            self.wake(key)

    def waiting(self, key: str) -> list[float]:
        """Since when each sleeper of `key` waits."""
        return [waiter.since for waiter in self._queues.get(key, ())]


def resolve(future: asyncio.Future[None]) -> None:
    """Wake a sleeper, unless it has given up."""
    if not future.done():
        future.set_result(None)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
