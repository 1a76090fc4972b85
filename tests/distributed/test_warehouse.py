"""Warehouses as real processes: over TCP with keys and over shared memory, through kills, restarts and full ones."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from docklands.core.batch import Batch
from docklands.core.fields import PROMPT, REWARD, TOKEN_IDS
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.arena import SHM, sweep
from docklands.dock.warehouse.client import AsyncWarehouseClient, ClientOptions, WarehouseClient
from docklands.dock.warehouse.server import Server
from docklands.dock.wire.format import CALL, REPLY
from docklands.dock.wire.net import Keys, Listener, Peer, make_keys
from docklands.errors import RowGone, TakeTimeout, UnknownField, WarehouseLost
from tests.property.test_wire import mutated
from tests.warehouse_parts import BIRTH, CLIENT, FIELDS, Process, make_batch, options, same, start_warehouse, warehouse

KEYS = make_keys()
FAST = replace(CLIENT, lost_s=0.3)


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[int, Process]]:
    """Two warehouses that all tests share which kill none: place 0 and 1."""
    running = {place: start_warehouse(KEYS, place=place) for place in (0, 1)}
    yield running
    codes = [process.stop() for process in running.values()]
    assert codes == [0, 0]
    assert [name for process in running.values() for name in arenas_of(process.pid)] == []


def peers(pair: dict[int, Process]) -> dict[int, Peer]:
    return {place: process.peer for place, process in pair.items()}


def arenas_of(pid: int) -> list[str]:
    return [path.name for path in SHM.glob(f"docklands-*-{pid}-*")]


@pytest.mark.parametrize("share", [True, False], ids=["shared memory", "tcp"])
def test_rows_of_two_warehouses_come_back_in_order(pair: dict[int, Process], share: bool) -> None:
    with WarehouseClient(peers(pair), KEYS, replace(CLIENT, share=share)) as client:
        batch = make_batch([3, 0, 5, 2, 900, 1], first=100)
        places = np.array([0, 1, 0, 1, 1, 0], np.int32)
        put = client.put(batch, places, BIRTH, "rollout")
        assert sorted(put.seqs) == [0, 1] and put.ignored == 0 and not len(put.gone)
        assert [session.local for session in client.sessions.values()] == [share, share]
        order = np.array([4, 1, 0, 5, 2, 3])
        assert same(client.get(batch.row_ids[order], places[order], FIELDS, "ref"), batch.select(order))
        borrowed = client.borrow(batch.row_ids[[0, 2]], 0, FIELDS)
        assert same(borrowed.batch, batch.select([0, 2]))
        borrowed.check()
        with pytest.raises(RowGone, match="rows are not in warehouse 1: 100"):
            client.get(batch.row_ids[:1], 1, FIELDS)
        assert client.free(batch.row_ids, places) == 6
        with pytest.raises(RowGone):
            client.get(batch.row_ids, places, FIELDS)


def test_a_reader_sees_that_what_it_borrowed_was_recycled(pair: dict[int, Process]) -> None:
    with WarehouseClient(peers(pair), KEYS, CLIENT) as client:
        client.put(make_batch([500], (TOKEN_IDS,), first=200), 0, BIRTH)
        borrowed = client.borrow(np.array([200]), 0, (TOKEN_IDS,))
        client.free(np.array([200]), 0)
        borrowed.check()
        writer = client.sessions[0].writer
        assert writer is not None
        client.ask(0, m.Lease(1, [writer.generation]))
        with pytest.raises(RowGone, match="freed while they were read"):
            borrowed.check()


def test_an_inventory_says_what_is_where(pair: dict[int, Process]) -> None:
    with WarehouseClient(peers(pair), KEYS, CLIENT) as client:
        client.put(make_batch([2, 3], (PROMPT,), first=300), 1, m.Birth(6, 60, 1))
        client.put(make_batch([2, 3], (TOKEN_IDS,), first=300).select([1]), 1)
        found = client.inventory(1)
        assert found.row_ids.tolist() == [300, 301]
        assert {name: values.tolist() for name, values in found.births.items()} == {
            "order": [6, 6], "group_id": [60, 60], "place": [1, 1], "sample": [0, 1], "length": [-1, 3],
            "life": [0, 0],
        }  # fmt: skip
        assert found.have["prompt"].tolist() == [True, True] and found.have["token_ids"].tolist() == [False, True]
        with pytest.raises(UnknownField, match="row 300 has no token_ids yet"):
            client.get(np.array([300]), 1, (TOKEN_IDS,))
        client.free(found.row_ids, 1)


def test_notices_carry_the_number_that_the_put_was_answered_with(pair: dict[int, Process]) -> None:
    async def run() -> None:
        seen: list[tuple[int, int, int, Any]] = []
        watcher = AsyncWarehouseClient(peers(pair), KEYS, CLIENT, lambda *push: seen.append(push))
        writer = AsyncWarehouseClient(peers(pair), KEYS, CLIENT)
        await watcher.ask(0, m.Subscribe(["update"]))
        batches = [make_batch([1, 2], (TOKEN_IDS, REWARD), first=400 + 2 * i) for i in range(20)]
        puts = await asyncio.gather(*(writer.put(b, 0, m.Birth(i, i, 0)) for i, b in enumerate(batches)))
        last = max(put.seqs[0] for put in puts)
        await watcher.ask(0, m.Stats())  # answered after the pushes of every earlier turn
        assert seen[-1][2] == last and len({put.seqs[0] for put in puts}) == 20
        assert all(a[2] + 1 == b[1] for a, b in zip(seen, seen[1:])), "no number is missing"
        notices = [notice for push in seen for notice in push[3]]
        assert {notice.stage for notice in notices} == {"update"} and {n.columns for n in notices} == {("reward",)}
        assert sorted(np.concatenate([n.row_ids for n in notices]).tolist()) == list(range(400, 440))
        await writer.free(np.arange(400, 440), 0)
        await watcher.close()
        await writer.close()

    asyncio.run(run())


def test_who_has_no_key_on_the_list_gets_nothing(pair: dict[int, Process]) -> None:
    with WarehouseClient(peers(pair), make_keys(), CLIENT) as stranger:
        with pytest.raises(WarehouseLost, match="does not let this process in"):
            stranger.ask(0, m.Stats())
    context = zmq.Context()
    bare = context.socket(zmq.DEALER)
    bare.setsockopt(zmq.LINGER, 0)
    bare.connect(pair[0].peer.endpoint)
    bare.send_multipart([m.CALLS.pack(CALL, 1, m.Hello("bare", 1, 1))])
    assert not bare.poll(300)
    context.destroy(linger=0)
    friend = make_keys()
    with WarehouseClient(peers(pair), KEYS, CLIENT) as client:
        assert client.ask(0, m.Stats()).values["denied"] >= 1
        client.ask(0, m.Allow([friend.public]))
    with WarehouseClient(peers(pair), friend, CLIENT) as client:
        assert client.ask(0, m.Stats()).values["rows"] == 0


def test_2000_fuzzed_messages_through_a_real_socket(pair: dict[int, Process]) -> None:
    rng = np.random.default_rng(5)
    batch = make_batch([3, 1], first=500)
    with WarehouseClient(peers(pair), KEYS, CLIENT) as client:
        client.put(batch, 0, BIRTH)
        before = client.ask(0, m.Stats()).values
        line = client.connections[0]
        ids = batch.row_ids.tobytes()
        valid = [[m.CALLS.pack(CALL, 0, m.Get(["token_ids"])), ids], [m.CALLS.pack(CALL, 0, m.Inventory())]]
        for i in range(2000):
            bad = mutated(valid[i % 2], rng) if i % 4 else [rng.bytes(int(rng.integers(40)))]
            line.send(bad or [b""])
            if i % 100 == 99:
                client.ask(0, m.Stats())
        after = client.ask(0, m.Stats()).values
        assert after["bad_messages"] - before.get("bad_messages", 0) > 1000
        assert same(client.get(batch.row_ids, 0, FIELDS), batch)
        client.free(batch.row_ids, 0)


def test_an_idle_warehouse_takes_no_turn(pair: dict[int, Process]) -> None:
    with WarehouseClient(peers(pair), KEYS, CLIENT) as client:
        before = client.ask(0, m.Stats()).values["turns"]
        threading.Event().wait(0.5)
        assert client.ask(0, m.Stats()).values["turns"] - before <= 2


def test_a_full_warehouse_makes_its_producers_wait_and_wakes_them() -> None:
    first, second = make_batch([200], (TOKEN_IDS,)), make_batch([200], (TOKEN_IDS,), first=1)
    with warehouse(KEYS, capacity=1000) as process, WarehouseClient({0: process.peer}, KEYS, CLIENT) as client:
        client.put(first, 0, BIRTH)
        with pytest.raises(TakeTimeout, match=r"within 0.2 s from warehouse 0 .*it is full"):
            client.put(second, 0, m.Birth(1, 1, 0), deadline_s=0.2)
        turns = client.ask(0, m.Stats()).values["turns"]
        done: list[Any] = []

        def produce() -> None:
            with WarehouseClient({0: process.peer}, KEYS, CLIENT) as other:
                done.append(other.put(second, 0, m.Birth(1, 1, 0)))

        thread = threading.Thread(target=produce)
        thread.start()
        while client.ask(0, m.Stats()).values["full"] < 2:
            threading.Event().wait(0.02)
        threading.Event().wait(0.2)
        assert not done and client.ask(0, m.Stats()).values["turns"] - turns < 60, "nobody polls"
        client.free(first.row_ids, 0)
        thread.join(20)
        assert len(done) == 1 and same(client.get(second.row_ids, 0, (TOKEN_IDS,)), second)


def test_a_killed_warehouse_is_named_and_leaves_no_memory_behind() -> None:
    process = start_warehouse(KEYS)
    with WarehouseClient({0: process.peer}, KEYS, FAST) as client:
        client.put(make_batch([3], (TOKEN_IDS,)), 0, BIRTH)
        assert len(arenas_of(process.pid)) == 1
        process.kill()
        with pytest.raises(
            WarehouseLost, match=rf"warehouse 0 at {process.peer.endpoint} \(pid {process.pid}\) has gone"
        ):
            client.get(np.array([0]), 0, (TOKEN_IDS,))
    sweep()
    assert arenas_of(process.pid) == []


def test_an_absent_warehouse_is_an_error_in_time() -> None:
    with WarehouseClient({3: Peer("tcp://127.0.0.1:9", make_keys().public)}, KEYS, FAST) as client:
        with pytest.raises(WarehouseLost, match="warehouse 3 at .*: nothing has answered for 0.3 s"):
            client.ask(3, m.Stats())

    async def run() -> None:
        client = AsyncWarehouseClient({3: Peer("tcp://127.0.0.1:9", make_keys().public)}, KEYS, FAST)
        with pytest.raises(WarehouseLost, match="nothing has answered"):
            await client.ask(3, m.Stats())
        patient = AsyncWarehouseClient({3: Peer("tcp://127.0.0.1:9", make_keys().public)}, KEYS, CLIENT)
        with pytest.raises(TakeTimeout):
            await patient.ask(3, m.Stats(), deadline_s=0.05)
        await patient.close()
        await client.close()

    asyncio.run(run())


def restart(process: Process, server: Keys) -> Process:
    """A new process on the same address and with the same keys and log."""
    port = process.peer.endpoint
    return start_warehouse(KEYS, server, endpoint=port, log=process.options.log, folder=process.options.folder)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_warehouse_with_a_log_comes_back_under_its_clients(tmp_path: Path, kind: str) -> None:
    """kill -9 and restart: the client's next calls find every acknowledged row, and no arena is left."""
    server = make_keys()
    process = start_warehouse(KEYS, server, log=str(tmp_path / "log"), folder=str(tmp_path))
    one, two = make_batch([3, 0, 70]), make_batch([5], first=9)
    running = [process]

    def blocking() -> None:
        with WarehouseClient({0: process.peer}, KEYS, CLIENT) as client:
            client.put(one, 0, BIRTH)
            process.kill()
            running.append(restart(process, server))
            client.put(two, 0, m.Birth(1, 8, 0))
            assert client.sessions[0].local
            assert same(client.get(np.array([2, 9, 0]), 0, FIELDS), Batch.concat([one, two]).by_id([2, 9, 0]))

    async def other() -> None:
        client = AsyncWarehouseClient({0: process.peer}, KEYS, CLIENT)
        await client.put(one, 0, BIRTH)
        os.kill(process.pid, signal.SIGSTOP)  # the calls are on their way when it dies
        waiting = [
            asyncio.create_task(client.get(one.row_ids, 0, FIELDS)),
            asyncio.create_task(client.put(two, 0, BIRTH)),
        ]
        await asyncio.sleep(0.1)
        process.kill()
        running.append(await asyncio.to_thread(restart, process, server))
        found, _ = await asyncio.gather(*waiting)
        assert same(found, one)
        assert same(await client.get(two.row_ids, 0, FIELDS), two)
        await client.close()

    try:
        blocking() if kind == "blocking" else asyncio.run(other())
        assert arenas_of(process.pid) == [], "the new process swept it"
    finally:
        codes = [each.stop() for each in running]
    assert codes == [-signal.SIGKILL, 0]


def test_a_producer_that_dies_gives_its_slab_back(pair: dict[int, Process]) -> None:
    with WarehouseClient(peers(pair), KEYS, CLIENT) as client:
        client.put(make_batch([3], (TOKEN_IDS,), first=700), 0, BIRTH)
        before = client.ask(0, m.Stats()).values["shared_bytes"]
        child = os.fork()
        if not child:
            doomed = WarehouseClient(peers(pair), KEYS, CLIENT)
            doomed.put(make_batch([3], (TOKEN_IDS,), first=800), 0, m.Birth(1, 1, 0))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert client.ask(0, m.Stats()).values["shared_bytes"] > before
        client.free(np.array([700, 800]), 0)
        with WarehouseClient(peers(pair), KEYS, ClientOptions()) as greets:
            assert greets.ask(0, m.Stats()).values["shared_bytes"] <= before


def test_replies_are_told_from_calls(pair: dict[int, Process]) -> None:
    """A reply that is sent to a warehouse is a malformed message there, and no answer in a client."""
    with WarehouseClient(peers(pair), KEYS, CLIENT) as client:
        bad = client.ask(0, m.Stats()).values.get("bad_messages", 0)
        client.connections[0].send([m.REPLIES.pack(REPLY, 1, m.Done(0, 0))])
        assert client.ask(0, m.Stats()).values["bad_messages"] == bad + 1


def test_a_replica_has_what_was_acknowledged_when_the_first_is_killed(tmp_path: Path) -> None:
    """Both take everything; after kill -9 of the first its clients are redirected and find every row."""
    second_keys, first_keys = make_keys(), make_keys()
    second = start_warehouse(KEYS, second_keys)
    with WarehouseClient({0: second.peer}, KEYS, CLIENT) as client:
        client.ask(0, m.Allow([first_keys.public]))
    first = start_warehouse(KEYS, first_keys, replica=second.peer.endpoint, replica_key=second.peer.public_key)
    try:
        with WarehouseClient({0: first.peer}, KEYS, CLIENT) as client:
            batches = [make_batch([i, 700], first=2 * i, seed=i) for i in range(10)]
            for i, batch in enumerate(batches):
                client.put(batch.only(FIELDS[:2]), 0, m.Birth(i, 10 * i, 0))
                client.put(batch.only(FIELDS[2:]), 0)
            client.free(np.array([3]), 0)
            assert client.ask(0, m.Stats()).values["replica_alone"] == 0
            first.kill()
            client.redirect(0, second.peer)
            everything = Batch.concat(batches)
            order = [i for i in range(19, -1, -1) if i != 3]
            assert same(client.get(np.array(order), 0, FIELDS), everything.by_id(order))
            held = client.inventory(0)
            assert (
                3 not in held.row_ids and dict(zip(held.row_ids.tolist(), held.births["group_id"].tolist()))[19] == 90
            )
    finally:
        assert [first.stop(), second.stop()] == [-signal.SIGKILL, 0]


def test_the_first_goes_on_alone_and_a_new_replica_gets_everything() -> None:
    second_keys, first_keys = make_keys(), make_keys()
    second = start_warehouse(KEYS, second_keys)
    running = [second]
    with WarehouseClient({0: second.peer}, KEYS, CLIENT) as client:
        client.ask(0, m.Allow([first_keys.public]))
    named = {"replica": second.peer.endpoint, "replica_key": second.peer.public_key, "replica_lost_s": 0.3}
    first = start_warehouse(KEYS, first_keys, **named)
    running.append(first)
    one, two, three = (make_batch([3, 4], first=10 * i, seed=i) for i in range(3))
    try:
        with WarehouseClient({0: first.peer}, KEYS, CLIENT) as client:
            client.put(one, 0, m.Birth(0, 0, 0))
            second.kill()
            client.put(two, 0, m.Birth(1, 1, 0))
            assert client.ask(0, m.Stats()).values["replica_alone"] == 1
            again = start_warehouse(KEYS, second_keys, (first_keys.public,), endpoint=second.peer.endpoint)
            running.append(again)  # it knows the first one from the start: who is refused does not come again
            while client.ask(0, m.Stats()).values["replica_alone"]:
                threading.Event().wait(0.05)
            client.put(three, 0, m.Birth(2, 2, 0))
            os.kill(again.pid, signal.SIGSTOP)  # neither is one waited for that is there and says nothing
            client.put(make_batch([5], first=30), 0, m.Birth(3, 3, 0))
            client.free(np.array([11, 30]), 0)
            assert client.ask(0, m.Stats()).values["replica_alone"] == 1
            os.kill(again.pid, signal.SIGCONT)
            while client.ask(0, m.Stats()).values["replica_alone"]:
                threading.Event().wait(0.05)
            client.put(make_batch([6], first=40), 0, m.Birth(4, 4, 0))
            first.kill()
            client.redirect(0, again.peer)
            ids = np.array([20, 0, 10, 1])
            assert same(client.get(ids, 0, FIELDS), Batch.concat([one, two, three]).by_id(ids))
            assert sorted(client.inventory(0).row_ids) == [0, 1, 10, 20, 21, 40], "nor what was freed meanwhile"
    finally:
        for each in running:
            each.stop()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_greeting_that_is_lost_with_its_line_is_said_again(tmp_path: Path, kind: str) -> None:
    """Servers that die before they have answered, one after the other, and one that answers in the end."""
    peer = Peer(f"ipc://{tmp_path}/socket")
    found: list[Any] = []

    async def ask() -> None:
        client = AsyncWarehouseClient({0: peer}, None, CLIENT)
        found.append(await client.ask(0, m.Stats()))
        await client.close()

    def run() -> None:
        if kind == "asyncio":
            return asyncio.run(ask())
        with WarehouseClient({0: peer}, None, CLIENT) as client:
            found.append(client.ask(0, m.Stats()))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(3):
        mute = Listener(peer.endpoint, None)
        greetings: list[Any] = []
        for _ in range(100):
            greetings += [frames for _, frames in mute.receive(timeout_s=0.1)]
            if greetings:
                break
        mute.close()
        assert m.Hello in {type(m.CALLS.unpack(frames[0])[2]) for frames in greetings}
    server = Server(options(endpoint=peer.endpoint, shared_bytes=0))
    while thread.is_alive():
        for client, frames in server.listener.receive(timeout_s=0.1):
            server.listener.send(client, server.call(client, frames))
    server.close()
    assert len(found) == 1 and found[0].values["rows"] == 0
