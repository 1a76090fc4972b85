"""The critical path of a run's steps, computed from its spans: how long they would last if nothing lay idle on it.

Work is what spans say of it: a stage's run on some groups, an update, a publish, each as long as its slowest worker was
busy with it (without workers: as long as its span, without its wait for the device). Work waits for other work:

    rows     it reads a column that the other wrote for one of its groups (the graph says which stage writes what)
    device   both ran on one device, in this order
    weights  a publish follows the updates before it
    slot     the groups of step b enter when those of step b - 1 - staleness have left, which the publish after it ends

The path's length up to some work is the longest chain of work that ends with it (Kelley and Walker 1959). What a
publish adds to that since the one before is the critical path of a step; the time between the ends of both publishes is
the step's time. Their ratio is 1 when at every moment some work of the chain was under way: what is above it are
messages, hand-outs, and what the driver does between two pieces of work.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

UPDATE, PUBLISH, WORKER = "update", "publish", "worker"
CLOCKS_S = 0.005
"""How far clocks of two processes of one machine may be apart."""
MOST = 1 << 20
"""Groups of one range that are believed."""


@dataclass(frozen=True)
class Places:
    """What the configuration knows of a run.

    prompts    groups that enter for a step
    staleness  dock.max_staleness less dock.overtake: steps that a group enters ahead of its own
    on_device  roles whose work shares the trainers' device
    apart      generators are on devices of their own, one for each rank of their spans
    """

    prompts: int = 1
    staleness: int = 0
    on_device: tuple[str, ...] = ("rollout", "actor", "reference", "critic")
    apart: bool = False

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> Places:
        """Out of config.yaml, read; what is missing there has its default."""
        sections = {name: config.get(name) for name in ("rollout", "dock", "fleet")}
        given = {name: section if isinstance(section, dict) else {} for name, section in sections.items()}
        prompts = given["rollout"].get("prompts_per_step")
        most, overtake = (given["dock"].get(key) for key in ("max_staleness", "overtake"))
        ahead = (most if isinstance(most, int) else 0) - (overtake if isinstance(overtake, int) else 0)
        return Places(
            max(1, prompts) if isinstance(prompts, int) else 1,
            max(0, ahead),
            apart=given["fleet"].get("placement") == "disaggregated",
        )

    def of(self, work: Work, generators: Iterable[str]) -> set[str]:
        """Devices that a piece of work holds."""
        generates = self.apart and work.role == "rollout"
        own = f"rollout {work.rank}" if generates else "device" if work.role in self.on_device else work.role
        return {own, *generators} if self.apart and work.stage == PUBLISH else {own}


@dataclass(frozen=True)
class Work:
    """A run of a stage on some groups, an update or a publish.

    begin, end  Unix seconds; seconds: of those, work of its slowest worker
    step        whose span it lies in; None: before the first
    """

    stage: str
    role: str
    rank: int
    begin: float
    end: float
    seconds: float
    groups: frozenset[int]
    step: int | None


@dataclass(frozen=True)
class StepPath:
    """One step: its time, and its critical path. Of the chain that the run's last publish ends, by stage: the path's
    seconds, and those in which it stood still before a stage's work or around it.
    """

    step: int
    seconds: float
    path_s: float
    by_stage: Mapping[str, float]
    idle: Mapping[str, float]


def critical_path(spans: Sequence[Row], stages: Sequence[Row], places: Places) -> list[StepPath]:
    """Steps between the publishes of a run, in order; those of spans without groups (older runs): none.

    spans   as `read_spans` gives them
    stages  of graph.json: name, reads, writes
    """
    work = work_of(spans)
    if not any(w.stage == PUBLISH for w in work) or not any(w.groups for w in work):
        return []
    until, before = chains(work, stages, places)
    ends = [i for i, w in enumerate(work) if w.stage == PUBLISH]
    chain: list[int] = []
    at: int | None = ends[-1]
    while at is not None:
        chain.append(at)
        at = before[at]
    found = []
    for first, last in zip(ends, ends[1:]):
        by_stage, idle = dict[str, float](), dict[str, float]()
        for i in reversed(chain):
            mine, j = work[i], before[i]
            if j is None or not work[first].end < mine.end <= work[last].end:
                continue
            by_stage[mine.stage] = by_stage.get(mine.stage, 0.0) + until[i] - until[j]
            still = max(0.0, mine.begin - work[j].end) + mine.end - mine.begin - mine.seconds
            idle[mine.stage] = idle.get(mine.stage, 0.0) + still
        step = work[last].step
        if step is not None:  # else a run that was resumed begins here
            taken = work[last].end - work[first].end
            found.append(StepPath(step + 1, taken, until[last] - until[first], by_stage, idle))
    return found


def chains(work: Sequence[Work], stages: Sequence[Row], places: Places) -> tuple[list[float], list[int | None]]:
    """Of each piece of work: seconds of the longest chain that ends with it, and the piece before it there."""
    makers, lookup = makers_of(stages), Before(work)
    generators = {f"rollout {w.rank}" for w in work if w.role == "rollout"}
    until: list[float] = []
    before: list[int | None] = []
    for i, mine in enumerate(work):
        held = places.of(mine, generators)
        found = lookup.on(held) | lookup.made(makers.get(mine.stage, ()), mine.groups)
        if mine.stage == PUBLISH:
            found |= lookup.updates()
        elif mine.groups and not makers.get(mine.stage):
            found |= lookup.slot(max(mine.groups) // places.prompts - places.staleness)
        longest, last = 0.0, None
        for j in found:  # one that still ran when this began (its rows were there already) counts up to then
            reached = until[j] - max(0.0, work[j].end - mine.begin)
            if reached > longest:
                longest, last = reached, j
        until.append(longest + mine.seconds)
        before.append(last)
        lookup.add(i, held)
    return until, before


class Before:
    """Which work came before: by device, by stage and group, publishes and updates."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = work
        self._on: dict[str, int] = {}
        self._made: dict[tuple[str, int], int] = {}
        self._updates: dict[str, int] = {}
        self._published: list[tuple[int, int]] = []

    def on(self, devices: Iterable[str]) -> set[int]:
        """The last on each device."""
        return {self._on[name] for name in devices if name in self._on}

    def made(self, makers: Iterable[str], groups: Iterable[int]) -> set[int]:
        """The last runs of these stages on these groups."""
        keys = ((maker, group) for group in groups for maker in makers)
        return {self._made[key] for key in keys if key in self._made}

    def updates(self) -> set[int]:
        """The last of each learner."""
        return set(self._updates.values())

    def slot(self, version: int) -> set[int]:
        """The publish of a version, or the last one if it was not yet (groups that left early have made room)."""
        at = bisect.bisect_right(self._published, (max(0, version), len(self._work)))
        return {self._published[max(0, at - 1)][1]} if self._published else set()

    def add(self, index: int, devices: Iterable[str]) -> None:
        """This work has begun; later work may wait for it."""
        mine = self._work[index]
        self._on |= dict.fromkeys(devices, index)
        self._made |= dict.fromkeys(((mine.stage, group) for group in mine.groups), index)
        if mine.stage == UPDATE:
            self._updates[mine.role] = index
        elif mine.stage == PUBLISH:
            bisect.insort(self._published, (0 if mine.step is None else mine.step + 1, index))


def work_of(spans: Sequence[Row]) -> list[Work]:
    """The driver's spans of work, by begin, each with its slowest worker's seconds."""
    workers = sorted(
        ((s["start"], s["start"] + s["duration"], s["name"].partition("/")[0], s.get("rank") or 0)
         for s in spans if s["role"] == WORKER and s.get("parent") is None),
    )  # fmt: skip
    starts = [start for start, *_ in workers]
    found = []
    for span in spans:
        stage = stage_of(span["name"])
        if not stage or span["role"] == WORKER:
            continue
        given = span.get("attributes")
        attributes = given if isinstance(given, dict) else {}
        end = span["start"] + span["duration"]
        begin = span["start"] + min(span["duration"], seconds_in(attributes.get("after")))
        name = "sync" if stage == PUBLISH else span["role"]
        busy: dict[int, float] = {}
        for i in range(bisect.bisect_left(starts, begin - CLOCKS_S), bisect.bisect_right(starts, end)):
            _, last, who, rank = workers[i]
            if who == name and last <= end + CLOCKS_S:
                busy[rank] = busy.get(rank, 0.0) + last - workers[i][0]
        seconds = min(max(busy.values(), default=end - begin), end - begin)
        groups = parsed(str(attributes.get("groups", "")))
        found.append(Work(stage, span["role"], span.get("rank") or 0, begin, end, seconds, groups, span.get("step")))
    return sorted(found, key=lambda w: w.begin)


def seconds_in(value: Any) -> float:
    """A number of seconds; of anything else, none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0


def stage_of(name: str) -> str:
    """The stage whose run a span is; "update" for the learners', "publish" for new weights; else empty. What the driver
    measures of the rows is no stage of the graph.
    """
    head, _, rest = name.partition("/")
    if head == "stage":
        return "" if rest == "describe" else rest
    return head if head in (UPDATE, PUBLISH) else ""


def makers_of(stages: Sequence[Row]) -> dict[str, set[str]]:
    """Stage -> the stages that write what it reads."""
    writer = {column: stage["name"] for stage in stages for column in stage["writes"]}
    return {stage["name"]: {writer[c] for c in stage["reads"] if c in writer} for stage in stages}


# --- groups as an attribute of a span ---------------------------------------------------------------------------


def ranges(groups: Iterable[int]) -> str:
    """Group ids in few words: "0-7 12"."""
    runs: list[list[int]] = []
    for group in sorted(set(groups)):
        if runs and group == runs[-1][1] + 1:
            runs[-1][1] = group
        else:
            runs.append([group, group])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def parsed(text: str) -> frozenset[int]:
    """What `ranges` wrote; of anything else, nothing."""
    found: set[int] = set()
    for word in text.split():
        first, _, last = word.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or first) - int(first) > MOST:
            return frozenset()
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
