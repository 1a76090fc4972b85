"""A discrete-event simulation of the loop: the recipe's own graph, leases, admission window, and sampled lengths.

    admit -> pump(stage) ... -> update -> publish -> retire -> admit

Time is simulated, everything else is what run/loop.py does: one pump per stage that takes groups as the dock would hand
them out, a lease per set of devices, at most (max_staleness + 1) steps' groups in flight, slots freed after publishing.

Legend: G groups, n samples of a group.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from docklands.core.graph import UPDATE, Graph
from docklands.core.stage import Stage
from docklands.errors import DocklandsError
from docklands.run.simulate_generation import Generators

DEVICES, TRAINERS, GENERATORS = "devices", "trainers", "generators"
ON_DEVICE = ("rollout", "actor", "reference", "critic")
FILTERS = "filter_groups"


@dataclass(eq=False)
class Group:
    """The samples of a prompt.

    waits   stages whose columns each stage still lacks of it
    left    samples that are being generated; visits: of the rollout stage, before this one
    """

    order: int
    prompt: float
    responses: np.ndarray
    waits: dict[str, set[str]]
    left: int = 0
    visits: int = 0
    dropped: bool = False


@dataclass(frozen=True)
class Flow:
    """How the loop runs.

    window      groups in flight at most; take: groups handed to a stage at once
    fixed       the dock hands out exactly `take` groups, in the order of admission (dock.deterministic)
    apart       generators have devices of their own
    visit       tokens of a response that one visit to the rollout stage samples at most (rollout.partial_tokens)
    dropped     share of groups that the filter drops
    """

    graph: Graph
    prompts_per_step: int
    window: int
    take: int
    fixed: bool = True
    apart: bool = False
    visit: int = 0
    dropped: float = 0.0

    @property
    def streams(self) -> bool:
        """Generators begin the next group as soon as there is room, and hand groups over one by one."""
        return not self.fixed and not self.visit


class Costs(Protocol):
    """Seconds of everything but decoding."""

    def stage(self, name: str, groups: Sequence[Group]) -> float: ...
    def update(self, learner: str, groups: Sequence[Group]) -> float: ...
    @property
    def publish(self) -> float: ...
    @property
    def swap_in(self) -> float: ...


@dataclass
class Lease:
    """Devices that one role at a time works on. busy: stage -> seconds held; asked: stage -> seconds waited for it."""

    name: str
    held: bool = False
    queue: deque[tuple[float, str, Callable[[], None]]] = field(default_factory=deque)
    busy: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One step as it was simulated."""

    seconds: float
    tokens: float
    samples: int


@dataclass(frozen=True)
class Simulated:
    """The steps after the warm-up, and where their time went.

    busy    resource -> stage -> seconds a step; waits: stage -> seconds a step that it waited for its lease
    active  share of the generators' held time in which a replica decodes (the rest is the long tail)
    """

    steps: tuple[Step, ...]
    busy: Mapping[str, Mapping[str, float]]
    waits: Mapping[str, float]
    active: float

    @property
    def seconds(self) -> float:
        """Mean step time."""
        return float(np.mean([step.seconds for step in self.steps]))

    @property
    def tokens(self) -> float:
        """Mean tokens (prompts and responses of all samples) a step."""
        return float(np.mean([step.tokens for step in self.steps]))

    def share(self, resource: str) -> float:
        """Part of the time in which a resource is held."""
        return sum(self.busy.get(resource, {}).values()) / self.seconds

    def total(self, stage: str) -> float:
        """Seconds a step of one stage, on whatever resource."""
        return sum(stages.get(stage, 0.0) for stages in self.busy.values())


class Simulation:
    """Runs a flow for some steps. `lengths(G)` -> (prompt tokens [G], response tokens [G, n])."""

    def __init__(
        self,
        flow: Flow,
        costs: Costs,
        lengths: Callable[[int], tuple[np.ndarray, np.ndarray]],
        generators: Generators,
        seed: int = 0,
    ) -> None:
        self.flow, self.costs, self.generators = flow, costs, generators
        self.now = 0.0
        self._lengths, self._random = lengths, np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids, self._orders = itertools.count(), itertools.count()
        self._pool: deque[tuple[float, np.ndarray]] = deque()
        self._pending: dict[str, list[Group]] = {stage.name: [] for stage in flow.graph.stages}
        self._running: set[str] = set()
        self._in_flight = self._admitted = self._trained = self._wanted = 0
        self._short = False
        self._generated, self._asleep = 0.0, False
        names = {stage.name: self._resource(stage) for stage in flow.graph.stages}
        self.leases = {name: Lease(name) for name in dict.fromkeys(names.values())}
        self._lease_of = {stage: self.leases[name] for stage, name in names.items()}
        self._writers = {stage.name: writers(flow.graph, stage) for stage in flow.graph.stages}
        self.steps: list[Step] = []
        self._began = 0.0
        generators.bind(self)

    def _resource(self, stage: Stage) -> str:
        if stage.role not in ON_DEVICE:
            return stage.role
        if not self.flow.apart:
            return DEVICES
        return GENERATORS if stage.role == "rollout" else TRAINERS

    # --- time --------------------------------------------------------------------------------------------------

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Call `what` so many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._ids), what))

    def run(self, steps: int, warm: int = 1) -> Simulated:
        """Simulate `warm` + `steps` steps; figures are of the last ones. DocklandsError when the flow stands still."""
        self._wanted = warm + steps
        self._admit()
        while len(self.steps) < self._wanted:
            if not self._events:
                if self._short:
                    raise DocklandsError(f"the simulated flow stands still after {len(self.steps)} steps")
                self._short = True  # the dock lets a stage that is at rest take less
                self._pump_all()
                continue
            self._short = False
            self.now, _, what = heapq.heappop(self._events)
            what()
            if len(self.steps) == warm and not self._trained:
                self._forget()
        count = max(1, len(self.steps) - warm)
        busy = {n: {k: v / count for k, v in lease.busy.items()} for n, lease in self.leases.items()}
        waits: dict[str, float] = {}
        for lease in self.leases.values():
            for stage, seconds in lease.asked.items():
                waits[stage] = waits.get(stage, 0.0) + seconds / count
        return Simulated(tuple(self.steps[warm:]), busy, waits, self.generators.active)

    def _forget(self) -> None:
        """The warm-up is over."""
        self._trained = 1
        self.generators.forget()
        for lease in self.leases.values():
            lease.busy.clear()
            lease.asked.clear()

    # --- leases ------------------------------------------------------------------------------------------------

    def acquire(self, stage: str, then: Callable[[], None]) -> None:
        """Call `then` once the stage's devices are free."""
        lease = self._lease_of[stage]
        lease.queue.append((self.now, stage, then))
        self._grant(lease)

    def release(self, stage: str, held: float) -> None:
        """The stage hands its devices over, after so many seconds."""
        lease = self._lease_of[stage]
        lease.busy[stage] = lease.busy.get(stage, 0.0) + held
        lease.held = False
        self._grant(lease)

    def _grant(self, lease: Lease) -> None:
        if lease.held or not lease.queue:
            return
        asked, stage, then = lease.queue.popleft()
        lease.held = True
        lease.asked[stage] = lease.asked.get(stage, 0.0) + self.now - asked
        self.at(0.0, then)

    # --- groups ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        flow = self.flow
        while self._in_flight < flow.window and self._admitted < self._wanted * flow.prompts_per_step + flow.window:
            if not self._pool:
                prompts, responses = self._lengths(max(64, flow.prompts_per_step))
                self._pool.extend(zip(prompts.tolist(), responses, strict=True))
            prompt, responses = self._pool.popleft()
            waits = {name: set(found) for name, found in self._writers.items()}
            group = Group(next(self._orders), prompt, responses, waits)
            self._in_flight += 1
            self._admitted += 1
            for pending in self._pending.values():
                pending.append(group)
        self._pump_all()

    def written(self, stage: str, groups: Sequence[Group]) -> None:
        """The stage's columns of these groups are there."""
        for group in groups:
            if stage == FILTERS and self._random.random() < self.flow.dropped:
                group.dropped = True
                self._in_flight -= 1
                self._admitted -= 1
            for lacking in group.waits.values():
                lacking.discard(stage)
        if any(group.dropped for group in groups):
            for name, pending in self._pending.items():
                self._pending[name] = [group for group in pending if not group.dropped]
            self._admit()
        self._pump_all()

    # --- pumps -------------------------------------------------------------------------------------------------

    def _pump_all(self) -> None:
        for stage in self.flow.graph.stages:
            if stage.name not in self._running:
                self._pump(stage)

    def _pump(self, stage: Stage) -> None:
        streams = stage.role == "rollout" and self.flow.streams
        groups = self._choose(stage, streams)
        if not groups:
            return
        if streams:
            return self.generators.enqueue(groups)
        self._running.add(stage.name)
        if stage.name == UPDATE:
            self._update(groups)
        elif stage.role == "rollout":
            self.acquire(stage.name, lambda: self.generators.generate(groups, lambda: self._visited(stage, groups)))
        else:
            self.acquire(stage.name, lambda: self._run(stage, groups))

    def _choose(self, stage: Stage, everything: bool) -> list[Group]:
        """What the dock would hand out now; nothing: not yet. everything: all that is ready, at once."""
        pending = self._pending[stage.name]
        whole = stage.by == "step" or stage.name == UPDATE
        need = self.flow.prompts_per_step if whole else self.flow.take
        if everything:
            ready = [group for group in pending if not group.waits[stage.name]]
        elif self.flow.fixed:
            head = pending[:need]
            ready = head if all(not g.waits[stage.name] for g in head) else []
        else:
            ready = [group for group in pending if not group.waits[stage.name]][:need]
        exact = (whole or self.flow.fixed) and not everything
        if not ready or (exact and len(ready) < need and not (self._short and stage.name != UPDATE)):
            return []
        taken = set(map(id, ready))
        self._pending[stage.name] = [group for group in pending if id(group) not in taken]
        return ready

    def _run(self, stage: Stage, groups: list[Group]) -> None:
        seconds = self.costs.stage(stage.name, groups) + (self._wake() if stage.role in ON_DEVICE else 0.0)

        def done() -> None:
            self.release(stage.name, seconds)
            self._done(stage, groups)()

        self.at(seconds, done)

    def _done(self, stage: Stage, groups: list[Group]) -> Callable[[], None]:
        def done() -> None:
            self._running.discard(stage.name)
            self.written(stage.name, groups)

        return done

    def rolled(self, groups: Sequence[Group]) -> None:
        """Groups whose samples are complete, one by one."""
        self.written("rollout", groups)

    def _visited(self, stage: Stage, groups: list[Group]) -> None:
        """A visit has ended: groups that are not complete are the oldest of the next one."""
        complete = [g for g in groups if not self.flow.visit or g.responses.max() <= (g.visits + 1) * self.flow.visit]
        for group in groups:
            if group not in complete:
                group.visits += 1
                self._pending[stage.name].append(group)
        self._pending[stage.name].sort(key=lambda group: group.order)
        self._done(stage, complete)()

    def slept(self) -> None:
        """Generation has ended: training state comes back from now on."""
        self._generated = self.now
        self._asleep = True

    def _wake(self) -> float:
        """Seconds that the first stage on the trainer still waits for its state."""
        if not self._asleep:
            return 0.0
        self._asleep = False
        return max(0.0, self.costs.swap_in - (self.now - self._generated))

    # --- the end of a step -------------------------------------------------------------------------------------

    def _update(self, groups: list[Group]) -> None:
        learners = [learner.name for learner in self.flow.graph.learners]

        def start() -> None:
            seconds = self._wake() + sum(self.costs.update(name, groups) for name in learners)
            self.at(seconds, lambda: publish(seconds))

        def publish(seconds: float) -> None:
            took = self.costs.publish
            lease = self._lease_of[UPDATE]
            lease.busy["publish"] = lease.busy.get("publish", 0.0) + took
            if self.flow.apart:
                self.generators.pause(True)
            self.at(took, lambda: retire(seconds))

        def retire(seconds: float) -> None:
            self.release(UPDATE, seconds)
            tokens = sum(len(g.responses) * g.prompt + float(g.responses.sum()) for g in groups)
            self.steps.append(Step(self.now - self._began, tokens, sum(len(g.responses) for g in groups)))
            self._began = self.now
            self._in_flight -= len(groups)
            self._running.discard(UPDATE)
            if self.flow.apart:
                self.generators.pause(False)
            self._admit()
            self.generators.resume()

        self.acquire(UPDATE, start)


def writers(graph: Graph, stage: Stage) -> set[str]:
    """Stages that make what a stage reads."""
    found = (graph.writer_of(column) for column in stage.reads)
    return {writer.name for writer in found if writer is not None}
