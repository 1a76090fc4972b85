"""kill -9 of warehouses, of the control process and of readers at random moments: every row is trained exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from docklands.dock.distributed import DistributedDock
from docklands.dock.launch import Launcher
from docklands.dock.wire.net import Peer
from tests.dock_parts import FILTERED, GROUP, options, run
from tests.dock_processes import Event, client, flow, launcher, stats_at_rest, take_and_die, warm_up

GROUPS = 128


def filtered(stage, rows):
    """Every seventh group is filtered, every thirteenth row fails in the reward: a function of ids alone."""
    if stage == "filter":
        return {int(r): "equal" for r, g in zip(rows.row_ids, rows.group_ids) if g % 7 == 0}
    return {int(r): "error" for r in rows.row_ids if stage == "reward" and r % 13 == 0}


def expected(groups: int) -> Counter[int]:
    rows = range(groups * GROUP)
    return Counter(r for r in rows if r // GROUP % 7 and r % 13)


async def disturbed(made: Launcher, seed: int, victims: list[str], kills: int) -> tuple[list[Event], list[str]]:
    """A flow during which parts are killed whenever some more rows have been acknowledged."""
    chance = random.Random(seed)
    events: list[Event] = []
    killed: list[str] = []

    async def kill() -> None:
        for _ in range(kills):
            aim = len(events) + chance.randrange(4, 40)
            while len(events) < aim:
                await asyncio.sleep(0.002)
            victim = chance.choice(victims)
            if victim == "reader":
                await take_and_die(made, chance.choice(["rollout", "reward", "ref"]), 1.0)
            elif victim not in made.parts:  # it has a copy that serves under its own name
                continue
            else:
                made.kill(victim)
            killed.append(victim)

    async with client(made, "driver") as driver, client(made, "worker") as worker:
        killer = asyncio.ensure_future(kill())
        await asyncio.wait_for(flow([driver, worker], GROUPS, filtered, events), 240.0)
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        stats = await stats_at_rest(driver)
    assert stats["dock/in_flight"] == stats["dock/bytes"] == 0
    return events, killed


VICTIMS = ["warehouse 0", "warehouse 1", "control", "reader"]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["none", "wal", "replica"])
@pytest.mark.parametrize("seed", range(1))
def test_everything_dies_at_random_moments(tmp_path: Path, durability, seed: int) -> None:
    made_options = options(8, warehouses=2, max_staleness=1, groups_per_take=2, deterministic=False)
    warm_up()
    with launcher(FILTERED, made_options, tmp_path, durability=durability) as made:
        events, killed = run(disturbed(made, seed, VICTIMS, 5))
    trained = Counter(row for stage, ids in events if stage == "update" for row in ids)
    assert trained == expected(GROUPS)
    assert killed  # five, unless a busy machine starts the readers too late
    named = [victim for victim in killed if victim != "reader"]
    assert [death.split(" (pid")[0] for death in made.deaths] == named
    assert all("was killed by SIGKILL" in death for death in made.deaths)


class Wire:
    """A TCP line that can be cut: what is under way is lost, and nobody gets through until it is healed."""

    def __init__(self, peer: Peer) -> None:
        self._host, port = peer.endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._port, self._key = int(port), peer.public_key
        self._open: set[asyncio.StreamWriter] = set()
        self.whole, self.cuts = True, 0

    async def start(self) -> Peer:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return Peer(f"tcp://127.0.0.1:{port}", self._key, near=False)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.whole:
            return writer.close()
        there, back = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()
        self._open.discard(writer)

    async def cut(self, seconds: float) -> None:
        self.whole, self.cuts = False, self.cuts + 1
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(seconds)
        self.whole = True


@pytest.mark.slow
def test_lines_that_are_cut_and_healed_lose_nothing(tmp_path: Path) -> None:
    """The worker's lines to the control process and to both warehouses break again and again; nobody dies."""

    async def main(made: Launcher) -> list[Event]:
        wires = [Wire(peer) for peer in (made.address.control, *made.address.warehouses)]
        control, *warehouses = [await wire.start() for wire in wires]
        address = replace(made.address, control=control, warehouses=tuple(warehouses))
        worker = DistributedDock(made.graph, made.options, address, "worker", 20.0)
        events: list[Event] = []

        async def cut() -> None:
            chance = random.Random(1)
            for _ in range(6):
                aim = len(events) + 20
                while len(events) < aim:
                    await asyncio.sleep(0.005)
                await chance.choice(wires).cut(chance.choice([0.0, 0.1, 0.3]))

        async with client(made, "driver") as driver, worker:
            cutter = asyncio.ensure_future(cut())
            await asyncio.wait_for(flow([driver, worker], GROUPS, filtered, events), 240.0)
            cutter.cancel()
            assert (await driver.stats())["dock/in_flight"] == 0
        assert sum(wire.cuts for wire in wires) >= 3
        return events

    made_options = options(8, warehouses=2, max_staleness=1, groups_per_take=2, deterministic=False)
    with launcher(FILTERED, made_options, tmp_path) as made:
        events = run(main(made))
        assert made.deaths == []
    assert Counter(row for stage, ids in events if stage == "update" for row in ids) == expected(GROUPS)
