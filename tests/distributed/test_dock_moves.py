"""Warehouses that leave, snapshots that go on elsewhere, what is brought to disk and what spills there."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docklands.core.protocols import Outcome
from docklands.dock import Dock
from docklands.dock.hosted import HostedDock
from docklands.dock.launch import Launcher
from docklands.errors import CheckpointError, ConfigError, DockError
from docklands.fleet.warehouses import Placing, places_of
from tests.dock_parts import GROUP, PLAIN, REF, REWARD_STAGE, ROLLOUT, group, options, run, written
from tests.dock_parts import flow as local_flow
from tests.dock_processes import Event, Forked, client, flow, launcher, stats_at_rest, warm_up

GROUPS = 48


@pytest.mark.parametrize("durability", ["none", "wal", "replica"])
def test_the_rows_of_a_warehouse_that_leaves_are_moved_while_the_flow_goes_on(tmp_path: Path, durability: Any) -> None:
    """No row is done twice. With a log, the warehouse that has taken them over dies afterwards and comes back."""
    done: list[str] = []

    async def main(made: Launcher) -> list[Event]:
        events: list[Event] = []

        async def leave() -> None:
            while len(events) < 40:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(made.drain, 0, 1)
            done.append("moved")
            if durability == "wal":
                aim = len(events) + 20
                while len(events) < aim:
                    await asyncio.sleep(0.005)
                made.kill("warehouse 1")
                done.append("killed")

        async with client(made, "driver") as driver, client(made, "worker") as worker:
            leaving = asyncio.ensure_future(leave())
            await asyncio.wait_for(flow([driver, worker], GROUPS, seen=events), 240.0)
            await leaving
            stats = await stats_at_rest(driver)
        assert stats["dock/bytes"] == stats["dock/in_flight"] == 0
        return events

    warm_up()
    made_options = options(2, warehouses=2, max_staleness=2, groups_per_take=1, deterministic=False)
    with launcher(PLAIN, made_options, tmp_path, durability=durability) as made:
        pid = made.parts["warehouse 0"].child.pid
        events = run(main(made))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(DockError, match="one process already"):
            made.drain(0, 1)
        assert len(set(made.address.warehouses)) == 1
        assert len(made.deaths) == (durability == "wal")
    assert done == (["moved", "killed"] if durability == "wal" else ["moved"])
    for stage in PLAIN.stages:
        rows = Counter(row for name, ids in events if name == stage.name for row in ids)
        assert rows == Counter(range(GROUPS * GROUP)), stage.name


class Loopback:
    """Nodes of a cluster, as addresses of this machine."""

    def __init__(self, *up: str) -> None:
        self.up = set(up)
        self.stood: list[tuple[str, Forked]] = []

    def living(self) -> set[str]:
        return self.up

    def start(self, address: str, module: str, options: Any, errors: Path) -> Forked:
        assert f"//{address}:" in options.endpoint and address in self.up
        self.stood.append((address, Forked(module, options, errors)))
        return self.stood[-1][1]

    def die(self, address: str) -> None:
        self.up.discard(address)
        for at, child in self.stood:
            if at == address:
                child.kill()

    def close(self) -> None:
        self.up.clear()


@pytest.mark.parametrize("durability", ["none", "wal", "replica"])
def test_the_warehouse_of_a_node_that_dies_goes_on_on_another(tmp_path: Path, durability: Any) -> None:
    """Its rows are made anew, replayed, or served by the copy on another node; everybody finds it there."""
    cluster, driver_at, (here, there) = Loopback("127.0.0.2", "127.0.0.3"), "127.0.0.1", ("127.0.0.2", "127.0.0.3")
    placing = Placing(([here, there], []), driver_at, Forked, lambda: cluster)

    async def main(made: Launcher) -> list[Event]:
        events: list[Event] = []

        async def power_cut() -> None:
            while len(events) < 40:
                await asyncio.sleep(0.005)
            cluster.die(there)

        async with client(made, "driver") as driver, client(made, "worker") as worker:
            driver.beside = lambda groups: places_of(groups, [there, here], driver.addresses())
            assert driver.addresses() == [here, there] and driver.near_to(there) == [1]
            cutting = asyncio.ensure_future(power_cut())
            await asyncio.wait_for(flow([driver, worker], GROUPS, seen=events), 240.0)
            await cutting
            assert driver.addresses() == worker.addresses() == [here, here]
            assert driver.near_to(here) == []  # all are: nothing to prefer
            stats = await stats_at_rest(driver)
        assert stats["dock/bytes"] == stats["dock/in_flight"] == 0
        return events

    warm_up()
    made_options = options(2, warehouses=1, max_staleness=2, groups_per_take=1, deterministic=False)
    made = launcher(PLAIN, made_options, tmp_path, durability=durability)
    made.spread(driver_at, 2, placing)
    with made:
        first = [at for at, _ in cluster.stood]
        assert first == ([there, here, here, there] if durability == "replica" else [here, there])
        events = run(main(made))
        assert len(made.deaths) == (2 if durability == "replica" else 1)
    for stage in PLAIN.stages if durability != "none" else [PLAIN["update"]]:
        rows = Counter(row for name, ids in events if name == stage.name for row in ids)
        assert rows == Counter(range(GROUPS * GROUP)), stage.name


def test_a_client_that_is_sent_to_where_it_is_already_leases_a_new_slab(tmp_path: Path) -> None:
    """Its line had found the new process before it heard of the move; the slab is of the old line's identity."""

    async def main(made: Launcher) -> list[int]:
        async with client(made) as dock:
            await dock.admit(group(0))
            dock.warehouses.redirect(0, dock._peers[0])
            await dock.admit(group(1))
            return (await dock.take(ROLLOUT, groups=2)).group_ids.tolist()

    with launcher(PLAIN, options(2, max_staleness=1), tmp_path) as made:
        assert run(main(made)) == [0] * GROUP + [1] * GROUP


def test_a_warehouse_without_room_takes_nobody_in(tmp_path: Path) -> None:
    async def fill(made: Launcher) -> None:
        async with client(made) as dock:
            for index in range(2):
                await dock.admit(group(index))

    with launcher(PLAIN, options(2, warehouses=2, capacity_bytes=400), tmp_path) as made:
        run(fill(made))
        with pytest.raises(
            DockError, match=r"drain: \d+ bytes of warehouse 0 and \d+ of warehouse 1 are more than 400"
        ):
            made.drain(0, 1)
        with pytest.raises(DockError, match="there is no warehouse 7"):
            made.drain(7, 1)


# --- snapshots -----------------------------------------------------------------------------------------------------


def dock_of(kind: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """kind: number of warehouses; 0: the dock in this process."""
    if not kind:
        return Dock(PLAIN, options(2, max_staleness=1, warehouses=2))
    monkeypatch.setattr("docklands.dock.hosted.Launcher", lambda *given: Launcher(*given, spawn=Forked))
    return HostedDock(PLAIN, options(2, max_staleness=1, warehouses=kind), folder)


async def half_a_step(dock: Any) -> list[int]:
    """Four groups, two of them through rollout, one reader's rows in hand; those rows."""
    for index in range(4):
        await dock.admit(group(index))
    rows = await dock.take(ROLLOUT)
    await dock.put(written(ROLLOUT, rows.row_ids))
    await dock.finish(rows, Outcome())
    done = await dock.take(REF)
    await dock.put(written(REF, done.row_ids))
    await dock.finish(done, Outcome())
    return (await dock.take(REWARD_STAGE)).row_ids.tolist()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (2, 0), (0, 2)])
def test_a_snapshot_goes_on_with_other_warehouses_and_in_the_other_transport(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first() -> tuple[Any, list[int]]:
        dock = dock_of(before, tmp_path / "first", monkeypatch)
        await dock.open()
        try:
            held = await half_a_step(dock)
            state, files = await dock.save()
            (tmp_path / "saved").mkdir()
            for file in files:
                os.replace(file, tmp_path / "saved" / file.name)
        finally:
            await dock.leave()
        return state, held

    async def second(state: Any, held: list[int]) -> list[Event]:
        dock = dock_of(after, tmp_path / "second", monkeypatch)
        await dock.open()
        try:
            await dock.load(state, tmp_path / "saved")
            again = await dock.take(REWARD_STAGE)
            assert again.row_ids.tolist() == held
            await dock.give_back(again)
            events = await (flow([dock], 0) if after else local_flow(dock, 0))
            assert (await dock.counts() if not after else await stats_at_rest(dock))["dock/bytes"] == 0
        finally:
            await dock.leave()
        return events

    events = run(second(*run(first())))
    trained = Counter(row for stage, ids in events if stage == "update" for row in ids)
    assert trained == Counter(range(4 * GROUP))
    assert [ids for stage, ids in events if stage == "rollout"] == [list(range(2 * GROUP, 4 * GROUP))]
    assert Counter(row for stage, ids in events if stage == "ref" for row in ids) == Counter(
        range(2 * GROUP, 4 * GROUP)
    )


@pytest.mark.parametrize("closed", [False, True])
def test_a_snapshot_waits_until_what_died_meanwhile_is_whole_again(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could make rows anew whose prompts are neither in the snapshot nor with the client that restores it."""

    async def first() -> tuple[Any, bytes]:
        dock = dock_of(1, tmp_path / "first", monkeypatch)
        await dock.open()
        try:
            await half_a_step(dock)
            if closed:  # as by Ctrl-C, before its checkpoint
                await dock.close()
            for name in ("warehouse 0", "control"):
                dock.launcher.kill(name)
            state, (file,) = await dock.save()
            return state, file.read_bytes()
        finally:
            await dock.leave()

    async def second(state: Any, saved: bytes) -> list[Event]:
        (tmp_path / "dock.0").write_bytes(saved)
        dock = dock_of(1, tmp_path / "second", monkeypatch)
        await dock.open()
        try:
            await dock.load(state, tmp_path)
            return await flow([dock], 0)
        finally:
            await dock.leave()

    events = run(second(*run(first())))
    assert Counter(row for stage, ids in events if stage == "update" for row in ids) == Counter(range(4 * GROUP))


def test_rows_that_had_left_when_a_snapshot_was_taken_are_passed_over(tmp_path: Path) -> None:
    """A warehouse writes its file before it has heard that they are free."""
    made_options = options(2, groups_per_take=1)

    async def first(made: Launcher) -> Any:
        async with client(made) as dock:
            for index in range(2):
                await dock.admit(group(index))
            await dock.snapshot("early")
            await dock.drop(await dock.take(ROLLOUT), "bad luck")
            return await dock.snapshot("late")

    async def second(made: Launcher, state: Any) -> list[int]:
        async with client(made) as dock:
            await dock.restore({**state, "file": "early"})
            return list(dock._prompts)

    with launcher(PLAIN, made_options, tmp_path / "first") as made:
        state, saved = run(first(made)), (made.folder / "early.0").read_bytes()
    with launcher(PLAIN, made_options, tmp_path / "second") as made:
        (made.folder / "early.0").write_bytes(saved)
        assert run(second(made, state)) == [1]


def test_a_snapshot_whose_file_is_missing_is_refused(tmp_path: Path) -> None:
    state = {"file": "dock", "places": 2, "control": None}
    with pytest.raises(CheckpointError, match=r"dock\.0 of the dock's snapshot is missing"):
        run(Dock(PLAIN, options(2)).load(state, tmp_path))


# --- disks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fsync", "least", "most"), [("never", 0, 0), ("interval", 1, 8), ("always", 20, 10_000)])
def test_logs_are_brought_to_disk_as_the_policy_says(tmp_path: Path, fsync: Any, least: int, most: int) -> None:
    async def main(made: Launcher) -> float:
        async with client(made) as dock:
            await flow([dock], 16)
            await asyncio.sleep(1.2 if fsync == "interval" else 0.0)
            figures = (await dock.warehouses.ask(0, stats_message())).values
        assert figures["log_bytes"] > 0
        return figures["log_syncs"]

    with launcher(PLAIN, options(2, fsync=fsync), tmp_path, durability="wal") as made:
        assert least <= run(main(made)) <= most


def stats_message() -> Any:
    from docklands.dock.warehouse import messages as m

    return m.Stats()


def test_a_flow_that_does_not_fit_into_memory_goes_over_the_disk(tmp_path: Path) -> None:
    """A capacity that one step's rows exceed: with a spill file the flow goes through all the same."""

    async def main(made: Launcher) -> tuple[list[Event], float]:
        async with client(made) as dock:
            for index in range(4):
                await dock.admit(group(index))
            rows = await dock.take(ROLLOUT)
            await dock.put(written(ROLLOUT, rows.row_ids))
            await dock.finish(rows, Outcome())
            spilled = (await dock.warehouses.ask(0, stats_message())).values["spilled_bytes"]
            events = await flow([dock], 0)
            assert (await stats_at_rest(dock))["dock/bytes"] == 0
        return events, spilled

    made_options = options(4, capacity_bytes=1200, spill_bytes=8 << 20)
    with launcher(PLAIN, made_options, tmp_path) as made:
        events, spilled = run(main(made))
    assert spilled > 0
    assert Counter(r for stage, ids in events if stage == "update" for r in ids) == Counter(range(4 * GROUP))
    with pytest.raises(ConfigError, match="spill_bytes without capacity_bytes"):
        options(2, spill_bytes=1)
