"""A distributed dock whose processes come from a forkserver with torch loaded, and a flow through it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from docklands.core.batch import Jagged
from docklands.core.graph import Graph
from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import Stage
from docklands.dock.distributed import DistributedDock, DockAddress
from docklands.dock.launch import Launcher
from docklands.dock.rules.options import DockOptions
from docklands.errors import RowGone, UnknownField, WarehouseLost, WorkerLost
from tests.dock_parts import admit_all, written
from tests.forks import CONTEXT

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from dock_scaling_parts.nodes import Nodes, NoNodes, enter  # noqa: E402, F401  (for the tests too)

LOST_S = 20.0


def body(module: str, options: Any, errors: str, ready: Any, node: str) -> None:
    """A process of the dock, in the network namespace `node` if that is given."""
    if node:
        enter(node)
    sys.stderr = open(errors, "a", buffering=1)  # noqa: SIM115
    Path("/proc/self/comm").write_text(module.split(".")[-2])  # for who looks at processes from outside
    from docklands.dock.control import server as control_server
    from docklands.dock.warehouse import server as warehouse_server

    serve = {
        "docklands.dock.control.server": control_server.serve,
        "docklands.dock.warehouse.server": warehouse_server.serve,
    }[module]
    serve(options, lambda server: ready.send({"endpoint": server.listener.endpoint, "pid": os.getpid()}))


class Forked:
    """A Child of launch.py without the seconds that importing torch takes."""

    lost = ""

    def __init__(self, module: str, options: Any, errors: Path, node: str = "") -> None:
        self._ready, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=body, args=(module, options, str(errors), theirs, node), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self._errors = errors

    def announced(self, deadline_s: float) -> dict[str, Any]:
        if not self._ready.poll(deadline_s):
            raise WorkerLost(f"pid {self.pid} did not start")
        try:
            return self._ready.recv()
        except EOFError:
            raise WorkerLost(f"pid {self.pid} did not start: {self._errors.read_text()[-2000:]}") from None

    def wait(self, deadline_s: float | None = None) -> int | None:
        self._process.join(deadline_s)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)


def launcher(graph: Graph, options: DockOptions, folder: Path, **more: Any) -> Launcher:
    return Launcher(graph, options, folder, spawn=Forked, **more)


def client(made: Launcher, name: str = "test", lost_s: float = LOST_S) -> DistributedDock:
    return DistributedDock(made.graph, made.options, made.address, name, lost_s)


def values_of(batch: Any, field: Any) -> list[Any]:
    """A column as plain lists, row by row."""
    column = batch[field]
    if isinstance(column, Jagged):
        return [row.tolist() for row in column]
    return list(column) if isinstance(column, tuple) else column.tolist()


Event = tuple[str, list[int]]
Pause = Callable[[], Awaitable[None]]
Drops = Callable[[str, Rows], dict[int, str]]


async def run_stage(dock: DistributedDock, stage: Stage, rows: Rows, dropped: dict[int, str]) -> bool:
    """Read, check, write, acknowledge; False when a warehouse's loss got in the way and the rows were given back."""
    try:
        batch = await dock.fetch(rows, stage.reads)
        for writer in dock.graph.upstream_of(stage.name):
            for field in set(stage.reads) & set(writer.writes):
                assert values_of(batch, field) == values_of(written(writer, rows.row_ids), field), (stage, field)
        if stage.name == "update":
            await dock.retire(rows)
            return True
        kept = rows.row_ids[~np.isin(rows.row_ids, list(dropped))]
        if stage.writes and len(kept):  # in up to three puts, which leave together
            parts = [part for part in np.array_split(kept, 3) if len(part)]
            puts = (dock.put(written(stage, part)) for part in parts)
            for failed in filter(None, await asyncio.gather(*puts, return_exceptions=True)):
                raise failed
        await dock.finish(rows, Outcome(dropped))
    except (WarehouseLost, RowGone, UnknownField):
        await dock.give_back(rows)
        return False
    return True


def no_drops(*_: Any) -> dict[int, str]:
    return {}


async def flow(
    docks: list[DistributedDock], groups: int, drops: Drops = no_drops, seen: list[Event] | None = None
) -> list[Event]:
    """Admit, pump every stage (spread over the clients), train; (stage, rows) of all that was acknowledged."""
    events: list[Event] = [] if seen is None else seen
    graph = docks[0].graph

    async def pump(dock: DistributedDock, stage: Stage) -> None:
        async for rows in dock.stream(stage):
            if await run_stage(dock, stage, rows, drops(stage.name, rows)):
                events.append((stage.name, rows.row_ids.tolist()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(admit_all(docks[0], groups))  # type: ignore[arg-type]
        for index, stage in enumerate(graph.upstream_of("update")):
            tasks.create_task(pump(docks[index % len(docks)], stage))
        await pump(docks[0], graph["update"])
        await docks[0].close()
    return events


def hold(graph: Graph, options: DockOptions, address: DockAddress, stage: str, ready: Any) -> None:
    """The body of a reader that takes rows and never gives an answer."""

    async def main() -> None:
        async with DistributedDock(graph, options, address, "doomed", LOST_S) as dock:
            rows = await dock.take(graph[stage])
            ready.send(rows.row_ids.tolist())
            await asyncio.sleep(600)

    asyncio.run(main())


def warm_up() -> None:
    """Start the server that forks readers: the first start takes seconds, in which a flow could end."""
    process = CONTEXT.Process(target=os.getpid, daemon=True)
    process.start()
    process.join(180)


async def stats_at_rest(dock: DistributedDock) -> dict[str, float]:
    """Statistics once no bytes are left: a retirement is acknowledged before the warehouses have freed its rows."""
    stats = await dock.stats()
    for _ in range(100):
        if not stats["dock/bytes"]:
            break
        await asyncio.sleep(0.1)
        stats = await dock.stats()
    return stats


async def take_and_die(made: Launcher, stage: str, within_s: float) -> list[int]:
    """A reader in a process of its own takes rows, and is killed; the rows (none if it did not get any in time)."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=hold, args=(made.graph, made.options, made.address, stage, theirs), daemon=True)
    process.start()
    theirs.close()
    got = await asyncio.to_thread(ours.poll, within_s)
    rows = ours.recv() if got else []
    process.kill()
    await asyncio.to_thread(process.join)
    return rows
