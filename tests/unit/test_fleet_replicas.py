"""What the driver makes of generators that die, hang, cannot start, leave, or are being started: processes are stood in
for, whose deaths come when they are wanted; replicas, their pumps and the publishing are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from docklands.core.protocols import Outcome, Rows
from docklands.errors import ConfigError, DockClosed, DocklandsError, RolloutError, WorkerLost
from docklands.fleet.generation import Visit
from docklands.fleet.local_backend import Device
from docklands.fleet.publishing import PartySync
from docklands.fleet.replica_role import ReplicaRole
from docklands.fleet.replicas import Replicas
from docklands.fleet.supervise import Restarts

SOON = 20.0
"""Deadline of what takes milliseconds."""


class Processes:
    """Of one replica: Workers, without the processes. A visit lasts until `go`; after `more` others, it ends all that
    was given.
    """

    def __init__(self, scene: Scene | None, on_hang: Callable[[], None] = lambda: None) -> None:
        self.setup, self.carrier = SimpleNamespace(world_size=1), SimpleNamespace(home="127.0.0.1")
        self.lines = [SimpleNamespace(address="127.0.0.1")]
        self.scene, self.hangs = scene, on_hang
        self.go, self.over = threading.Event(), threading.Event()
        self.said, self.calls, self.rows, self.free = "", list[str](), list[int](), 1
        self.more, self.given = 0, list[list[int]]()

    @property
    def lost(self) -> WorkerLost | None:
        return WorkerLost(self.said) if self.said else None

    def die(self, heard: bool = False) -> None:
        """heard: by the missing sign of life; else with the next call."""
        self.over.set()
        self.go.set()
        if heard:
            self.said = "silent"
            self.hangs()

    def make(self, name: str, *_: Any) -> list[Any]:

        self.calls.append("make")
        error = self.scene and self.scene.no_start
        if self.scene and self.scene.no_room:
            assert self.over.wait(SOON)
            error = WorkerLost("given up")
        if error is not None:
            raise error
        return [None]

    def call(self, _: str, method: str, *arguments: Any) -> list[Any]:
        self.calls.append(method)
        if method == "visit":
            self.given.append(arguments[1].row_ids.tolist())
            self.rows += self.given[-1]
            assert self.go.wait(SOON)
            self.more -= 1
            ended, self.rows = (self.rows, []) if self.more < 0 else ([], self.rows)
        if self.over.is_set():
            self.said = self.said or "died"
            raise WorkerLost(self.said)
        return [Visit(ended, Outcome(), (), self.free)] if method == "visit" else [{}]

    def connect(self, _: Any) -> None: ...

    def urgent(self, *_: Any) -> None: ...

    def give_up(self) -> None:
        self.over.set()

    def close(self) -> None:
        self.said = self.said or "ended"


class Groups:
    """A dock with groups of one sample."""

    def __init__(self, number: int) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.finished, self.back, self.closed, self.leases = list[int](), list[int](), asyncio.Event(), 0
        for group in range(number):
            self.queue.put_nowait(group)

    def near_to(self, _: str) -> None: ...

    async def take(self, stage: Any, **_: Any) -> Rows:
        shut, got = asyncio.ensure_future(self.closed.wait()), asyncio.ensure_future(self.queue.get())
        await asyncio.wait([shut, got], return_when=asyncio.FIRST_COMPLETED)
        shut.cancel()
        if not got.done():
            got.cancel()
            raise DockClosed("closed")
        self.leases += 1
        row = np.array([got.result()])
        return Rows(row, row, np.ones(1, np.int64), np.zeros(1, np.int32), stage.name, self.leases)

    async def finish(self, rows: Rows, _: Outcome) -> None:
        self.finished += rows.row_ids.tolist()

    async def give_back(self, rows: Rows) -> None:
        if self.closed.is_set():
            raise DockClosed("closed")
        self.back += rows.row_ids.tolist()
        for group in rows.group_ids.tolist():
            self.queue.put_nowait(group)


class Trainers:
    """The actor's role."""

    def __init__(self) -> None:
        self.resource, self.device = SimpleNamespace(workers=Processes(None), changed=False), Device("actor")

    async def call(self, _: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self.device.call(function, *arguments)

    def note(self, _: Any) -> None: ...


class Scene:
    """A run with generators apart, that serves its stage."""

    stage: asyncio.Future[None]

    def __init__(self, folder: Path, number: int, groups: int, restarts: int = 1) -> None:
        self.no_start: DocklandsError | None = None
        self.no_room = False
        spec: Any = (SimpleNamespace(layout=SimpleNamespace(world_size=1)), SimpleNamespace())
        make: Any = lambda _, on_hang: Processes(self, on_hang)  # noqa: E731
        self.replicas = Replicas(make, spec, number, Restarts(restarts))
        self.replicas.wishes = folder / "fleet.json"
        self.dock: Any = Groups(groups)
        self.role = ReplicaRole(self.replicas, self.dock, Device("rollout"))
        self.trainers: Any = Trainers()
        self.sync = PartySync(self.replicas, self.trainers, SimpleNamespace())  # type: ignore[arg-type]
        self.sync._meet = lambda *_: None  # type: ignore[method-assign, assignment, return-value]

    def of(self, number: int) -> Any:
        return self.replicas.members[number].workers

    def scale(self, number: int) -> None:
        assert self.replicas.wishes is not None
        self.replicas.wishes.write_text(json.dumps({"generators": number}))
        self.role._seen = None

    async def publish(self, version: int) -> None:
        self.trainers.resource.changed = True
        await self.sync.publish(version)

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(SOON):
            while not true():
                if self.stage.done():
                    await self.stage
                await asyncio.sleep(0.005)


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr("docklands.fleet.replica_role.LOOK_S", 0.01)

    def play(play: Play, number: int = 1, groups: int = 0, **more: Any) -> None:
        async def whole() -> None:
            scene = Scene(tmp_path, number, groups, **more)
            stage: Any = SimpleNamespace(name="rollout", reads=())
            await scene.publish(0)
            scene.trainers.resource.changed = False
            scene.stage = asyncio.ensure_future(scene.role.serve(stage, None))
            try:
                async with asyncio.timeout(2 * SOON):
                    await play(scene)
            finally:
                for replica in scene.replicas.members.values():
                    replica.workers.die()  # type: ignore[attr-defined]
                scene.stage.cancel()
                await asyncio.gather(scene.stage, return_exceptions=True)
                scene.replicas.close()

        asyncio.run(whole())

    return play


@pytest.mark.parametrize("ends", ["normally", "dies", "leaves last", "dies as it leaves"])
def test_a_publish_that_drains_waits_for_what_was_begun_and_hears_how_it_ends(
    played: Callable[..., None], ends: str
) -> None:
    """And nothing joins meanwhile."""

    async def play(scene: Scene) -> None:
        scene.replicas.drains = True
        members = scene.replicas.members
        await scene.until(lambda: all(replica.hand for replica in members.values()))
        victim = scene.of(1)
        publish = asyncio.ensure_future(scene.publish(1))
        await asyncio.sleep(0.02)
        scene.of(0).go.set()
        await scene.until(lambda: not members[0].hand)
        for _ in range(2):
            scene.dock.queue.put_nowait(7)
        await asyncio.sleep(0.1)
        assert not publish.done() and victim.calls.count("visit") == 1 and scene.of(0).calls.count("visit") == 1
        if "leave" in ends:
            scene.scale(1)
            await scene.until(lambda: members[1].leaving)
        else:
            members[1].has_room(1)
            await scene.until(lambda: members[1].inbox)
        victim.more = 1  # it knows that it leaves, or has more, when its last visit begins
        victim.die() if "dies" in ends else victim.go.set()
        await asyncio.wait_for(publish, SOON)
        assert not any(victim.given[1:2]), "nothing joins what ends"
        assert (1 in scene.dock.finished or 0 in scene.dock.finished) and bool(scene.dock.back) == ("dies" in ends)
        if "leave" in ends:
            await scene.until(lambda: list(members) == [0])
        else:
            await scene.until(lambda: len(members) == 2 and all(r.holds.is_set() for r in members.values()))
        assert len(scene.replicas.restarts.steps) == (ends == "dies"), "one that leaves is not started again"

    played(play, number=2, groups=2)


@pytest.mark.parametrize("heard", [True, False])
def test_a_generator_that_dies_before_its_first_weights_is_started_again(
    played: Callable[..., None], heard: bool
) -> None:
    """It waits for the trainers' next version: trained weights are never given under the old one."""

    async def play(scene: Scene) -> None:
        replica, actor = scene.replicas.members[0], scene.trainers.resource

        async def lost(heard: bool) -> None:
            old = scene.of(0)
            old.die(heard)
            if not heard:
                await scene.publish(1)
            await scene.until(lambda: scene.of(0) is not old and replica.stands)

        actor.changed = True  # trained since the last version
        await lost(heard=True)
        await asyncio.sleep(0.05)
        assert not replica.holds.is_set() and "publish" not in scene.of(0).calls
        await lost(heard)
        await scene.publish(2)
        await scene.until(replica.holds.is_set)
        assert "publish" in scene.of(0).calls and scene.replicas.version == 2

    played(play, restarts=9)


def test_a_replica_takes_no_more_groups_than_it_has_room_for(played: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        replica = scene.replicas.members[0]
        await scene.until(lambda: replica.hand)
        await asyncio.sleep(0.05)
        assert scene.dock.leases == 1
        scene.of(0).free = 2
        scene.of(0).go.set()
        await scene.until(lambda: len(scene.dock.finished) == 6)

    played(play, groups=6)


def test_the_last_generator_without_room_ends_the_run_and_another_does_not(played: Callable[..., None]) -> None:
    async def alone(scene: Scene) -> None:
        scene.no_start = ConfigError("no room", "add nodes")
        scene.of(0).die(heard=True)
        with pytest.raises(ExceptionGroup) as caught:
            await scene.until(lambda: False)
        assert [str(error) for error in caught.value.exceptions] == [
            "no rollout replica is left: no room (hint: add nodes)"
        ]
        assert isinstance(caught.value.exceptions[0], WorkerLost)

    async def beside(scene: Scene) -> None:
        scene.no_start = ConfigError("no room")
        scene.of(1).die(heard=True)
        await scene.until(lambda: list(scene.replicas.members) == [0])

    played(alone)
    played(beside, number=2)


@pytest.mark.parametrize("kind", [WorkerLost, RolloutError, ConfigError])
def test_a_newcomer_that_cannot_start_is_left_out(
    played: Callable[..., None], kind: type[DocklandsError], caplog: pytest.LogCaptureFixture
) -> None:
    async def play(scene: Scene) -> None:
        scene.no_start = kind("does not start")
        scene.of(0).go.set()
        scene.scale(2)
        await scene.until(lambda: "cannot join, the others go on: does not start" in caplog.text)
        await scene.until(lambda: list(scene.replicas.members) == [0])
        scene.dock.queue.put_nowait(7)
        await scene.until(lambda: scene.dock.finished == [7])
        assert not scene.replicas.restarts.steps

    played(play, restarts=0)


@pytest.mark.parametrize("end", ["stop", "dock closed", "leave"])
def test_nobody_waits_for_a_newcomer_that_waits_for_room(played: Callable[..., None], end: str) -> None:
    """Processes in its place would wait for SOON seconds; then the test fails."""

    async def play(scene: Scene) -> None:
        scene.no_room = True
        scene.scale(2)
        await scene.until(lambda: 1 in scene.replicas.members and scene.of(1).calls)
        newcomer = scene.of(1)
        if end == "stop":
            scene.stage.cancel()
            await asyncio.wait([scene.stage], timeout=SOON / 2)
        elif end == "dock closed":
            scene.dock.closed.set()
            await asyncio.wait_for(scene.stage, SOON / 2)
        else:
            scene.scale(1)
            await scene.until(lambda: list(scene.replicas.members) == [0])
        assert newcomer.over.is_set() and scene.stage.done() == (end != "leave")

    played(play)


def test_rows_that_come_for_one_that_has_left_go_back_or_the_dock_is_closed(played: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        heard: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        stage: Any = SimpleNamespace(name="rollout")
        for group in range(2):
            scene.dock.queue.put_nowait(group)
        rows = [asyncio.ensure_future(scene.dock.take(stage)) for _ in range(2)]
        await asyncio.gather(*rows)
        scene.of(0).die(heard=False)
        for each in rows:
            scene.role._return(each)
        assert len(scene.role._returning) == 2, "each is kept until it is done"
        scene.dock.closed.set()
        await scene.until(lambda: not scene.role._returning)
        del rows
        assert not heard

    played(play)
