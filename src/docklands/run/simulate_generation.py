"""Generators of the simulation: replicas with continuous batching over one queue of samples.

Every running sequence of a replica gains one token in a decode step, so a sequence that starts at tick t ends at tick
t + its length; between two ends the step time is that of the middle.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from docklands.run.simulate import Group, Simulation


class Decode(Protocol):
    """Seconds of a decode step of `rows` sequences with `context` tokens in all, and of a prompt's own pass."""

    def step(self, rows: float, context: float) -> float: ...
    def prefill(self, tokens: float) -> float: ...


class Replica:
    """Sequences that decode together.

    ticks    decode steps made (a fraction while one is under way); rate: seconds of a step, now
    context  sum over the running of (prompt - tick of its start): tokens cached are context + running x ticks
    stall    seconds of prefill before the next step
    """

    def __init__(self) -> None:
        self.running: list[tuple[float, int, Group, float]] = []
        self.ticks = self.context = self.rate = self.stall = 0.0
        self.since = 0.0
        self.version = 0
        self.prompts: set[int] = set()


class Generators:
    """All replicas. slots: sequences that a replica runs at once."""

    def __init__(self, replicas: int, slots: int, decode: Decode) -> None:
        self.replicas = [Replica() for _ in range(replicas)]
        self.slots, self.decode = slots, decode
        self._queue: deque[tuple[Group, float]] = deque()
        self._ids = itertools.count()
        self._finish: Callable[[], None] | None = None
        self._left = 0
        self._held = self._paused = False
        self._since = self._holding = self._decoding = 0.0
        self._wants = False

    def bind(self, simulation: Simulation) -> None:
        self._sim = simulation

    @property
    def active(self) -> float:
        """Share of the held time in which replicas decode, over all of them."""
        return self._decoding / self._holding if self._holding else 1.0

    def forget(self) -> None:
        """Measure from here."""
        self._holding = self._decoding = 0.0

    # --- a take at once ----------------------------------------------------------------------------------------

    def generate(self, groups: Sequence[Group], finish: Callable[[], None]) -> None:
        """Under the stage's lease: all samples of these groups (or a visit's tokens of each), then `finish`."""
        self._take(groups)
        self._finish = finish
        self._hold()

    # --- one stream --------------------------------------------------------------------------------------------

    def enqueue(self, groups: Sequence[Group]) -> None:
        """Samples join the queue; the lease is asked for when there was nothing to do."""
        self._take(groups)
        if self._held:
            self._fill()
        else:
            self.resume()

    def resume(self) -> None:
        """Ask for the devices if there is work."""
        if self._finish is None and self._left and not self._held and not self._wants:
            self._wants = True
            self._sim.acquire("rollout", self._hold)

    # --- both --------------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """New weights arrive: nothing decodes meanwhile."""
        if paused:
            self._stop()
        self._paused = paused
        if not paused and self._held:
            self._fill()

    def _take(self, groups: Sequence[Group]) -> None:
        visit = self._sim.flow.visit
        for group in groups:
            lengths = group.responses
            if visit:
                lengths = np.clip(lengths - group.visits * visit, 0, visit)
            samples = [float(length) for length in lengths if length > 0]
            group.left = len(samples)
            self._left += group.left
            self._queue.extend((group, length) for length in samples)

    def _hold(self) -> None:
        self._wants, self._held, self._since = False, True, self._sim.now
        self._fill()

    def _let_go(self) -> None:
        self._stop()
        held = self._sim.now - self._since
        self._held = False
        self._holding += held * len(self.replicas)
        self._sim.slept()
        self._sim.release("rollout", held)

    def _stop(self) -> None:
        for replica in self.replicas:
            self._advance(replica)
            replica.version += 1
            replica.rate = 0.0

    def _fill(self) -> None:
        """Waiting samples go to the replicas with the fewest running; each that changed is planned anew."""
        if self._paused:
            return
        for replica in self.replicas:
            self._advance(replica)
        order = [(len(replica.running), index) for index, replica in enumerate(self.replicas)]
        heapq.heapify(order)
        share = max(1, -(-len(self._queue) // len(self.replicas)))  # a group stays together, if that idles nobody
        while self._queue and order[0][0] < self.slots:
            count, index = order[0]
            group, most = self._queue[0][0], min(share, self.slots - count)
            placed = 0
            while self._queue and self._queue[0][0] is group and placed < most:
                self._start(self.replicas[index], *self._queue.popleft())
                placed += 1
            heapq.heapreplace(order, (count + placed, index))
        for replica in self.replicas:
            self._plan(replica)

    def _cached(self, group: Group) -> float:
        """Tokens that a sample begins with: its prompt, and what earlier visits sampled."""
        return group.prompt + group.visits * self._sim.flow.visit

    def _start(self, replica: Replica, group: Group, length: float) -> None:
        if group.visits or group.order not in replica.prompts:  # what a sample has said is its own
            replica.prompts.add(group.order)
            replica.stall += self.decode.prefill(self._cached(group))
        heapq.heappush(replica.running, (replica.ticks + length, next(self._ids), group, replica.ticks))
        replica.context += self._cached(group) - replica.ticks

    def _advance(self, replica: Replica) -> None:
        """Bring a replica's ticks up to now."""
        passed, replica.since = self._sim.now - replica.since, self._sim.now
        if not replica.running or not replica.rate:
            return
        self._decoding += passed
        stalled = min(replica.stall, passed)
        replica.stall -= stalled
        replica.ticks = min(replica.ticks + (passed - stalled) / replica.rate, replica.running[0][0])

    def _plan(self, replica: Replica) -> None:
        replica.version += 1
        if not replica.running:
            replica.rate = 0.0
            return
        rows = len(replica.running)
        steps = max(0.0, replica.running[0][0] - replica.ticks)
        replica.rate = self.decode.step(rows, replica.context + rows * (replica.ticks + steps / 2))
        version = replica.version
        self._sim.at(replica.stall + steps * replica.rate, lambda: self._ended(replica, version))

    def _ended(self, replica: Replica, version: int) -> None:
        """The next sequence of a replica is complete, and all that end with it."""
        if version != replica.version:
            return
        self._advance(replica)
        replica.ticks = replica.running[0][0]
        complete = []
        while replica.running and replica.running[0][0] <= replica.ticks + 1e-9:
            _, _, group, start = heapq.heappop(replica.running)
            replica.context -= self._cached(group) - start
            group.left -= 1
            self._left -= 1
            if not group.left:
                complete.append(group)
        while self._queue and len(replica.running) < self.slots:
            self._start(replica, *self._queue.popleft())
        self._plan(replica)
        self._handed_over(complete)

    def _handed_over(self, complete: list[Group]) -> None:
        if self._finish is not None:
            if not self._left:
                finish, self._finish = self._finish, None
                self._let_go()
                finish()
            return
        if complete:
            self._sim.rolled(complete)
        if self._held and not self._left:
            self._let_go()
