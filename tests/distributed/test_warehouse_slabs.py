"""Slabs of a warehouse process: how a producer comes by them, and that they are given back."""

from __future__ import annotations

import numpy as np
import pytest

from docklands.core.fields import TOKEN_IDS
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.client import WarehouseClient
from docklands.dock.wire.net import make_keys
from tests.warehouse_parts import CLIENT, make_batch, same, warehouse

KEYS = make_keys()


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
