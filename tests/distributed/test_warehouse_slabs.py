"""Slabs of a warehouse process: how a producer comes by them, and that they are given back."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from docklands.core.fields import TOKEN_IDS
from docklands.dock.launch import Launcher
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.arena import SHM
from docklands.dock.warehouse.client import AsyncWarehouseClient, WarehouseClient
from docklands.dock.wire.net import Peer, make_keys
from tests.dock_parts import PLAIN
from tests.dock_parts import options as dock_options
from tests.warehouse_parts import CLIENT, make_batch, same, warehouse

KEYS = make_keys()
BATCH = make_batch([400_000], (TOKEN_IDS,), first=9)


def test_slabs_come_with_the_answers_of_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer asks for its first slab alone, and all of them are free again in the end."""
    said: list[str] = []
    pack = m.CALLS.pack
    monkeypatch.setattr(m.CALLS, "pack", lambda *a: said.append(type(a[-1]).__name__) or pack(*a))
    with warehouse(KEYS, shared_bytes=64 << 20) as process, WarehouseClient({0: process.peer}, KEYS, CLIENT) as client:
        for number in range(6):  # of 1.6 MB each, in slabs of 4 MiB
            batch = make_batch([400_000], (TOKEN_IDS,), first=number)
            client.put(batch, 0, m.Birth(number, number, 0))
            assert same(client.get(batch.row_ids, 0, (TOKEN_IDS,)), batch)
        assert said.count("Put") == 6 and said.count("Lease") == 1
        assert client.free(np.arange(6), 0) == 6
        session = client.sessions[0]
        assert session.writer is not None
        client.ask(0, m.Lease(1 << 20, [session.writer.generation, *session._done]))
        assert client.ask(0, m.Stats()).values["shared_bytes"] == 1 << 20, "what was asked for last"


def test_slabs_that_nobody_waits_for_are_given_back() -> None:
    """A put that brings a slab, and a lease, are given up before they are answered."""

    async def run(client: AsyncWarehouseClient) -> None:
        session = client.sessions[0]
        for number in range(3):
            await client.put(make_batch([400_000], (TOKEN_IDS,), first=number), 0, m.Birth(number, number, 0))
            asked = client.ask(0, m.Lease(4 << 20)) if number else client.put(BATCH, 0, m.Birth(9, 9, 0))
            given_up = asyncio.ensure_future(asked)
            await asyncio.sleep(0)
            assert number or session._asked is not None
            given_up.cancel()
            with suppress(asyncio.CancelledError):
                await given_up
            while number + len(session._done) == 0 or len(session._done) < number:
                await asyncio.sleep(0.001)
        await client.free(np.array([0, 1, 2, 9]), 0)
        assert session.writer is not None and session._asked is None
        done = [session.writer.generation, *session._done]
        session.writer = None
        await client.ask(0, m.Lease(1 << 20, done))
        assert (await client.ask(0, m.Stats())).values["shared_bytes"] == 1 << 20, "what was asked for last"
        await client.close()

    async def main(peer: Peer) -> None:
        await asyncio.wait_for(run(AsyncWarehouseClient({0: peer}, KEYS, CLIENT)), 60)

    with warehouse(KEYS, shared_bytes=64 << 20) as process:
        asyncio.run(main(process.peer))


def test_an_arena_goes_with_the_run_also_if_its_warehouse_was_killed_in_the_last_moment(tmp_path: Path) -> None:
    """Nobody starts it again, and so nobody sweeps up after it, but the launcher."""
    made = Launcher(PLAIN, dock_options(1), tmp_path / "dock")
    try:
        made.start()
        pid = made.parts["warehouse 0"].child.pid
        assert list(SHM.glob(f"docklands-*-{pid}-*"))
        made._stopping.set()  # as the run ends
        os.kill(pid, signal.SIGKILL)
    finally:
        made.stop()
    assert not list(SHM.glob(f"docklands-*-{pid}-*"))
