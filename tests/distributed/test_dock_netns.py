"""The dock across four nodes: network namespaces with addresses of their own; one is cut off and healed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from docklands.core.graph import Graph
from docklands.dock.distributed import DistributedDock, DockAddress
from docklands.dock.launch import Launcher, Where, placed
from docklands.dock.rules.options import DockOptions
from tests.dock_parts import FILTERED, GROUP, PLAIN, admit_all, options, run
from tests.dock_processes import CONTEXT, Event, Forked, Nodes, NoNodes, client, enter, flow, run_stage

pytestmark = pytest.mark.slow
CONTROL, WORKER = 0, 3
HEARTBEATS_S = 8.0


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    try:
        with Nodes(4) as made:
            yield made
    except NoNodes as error:
        pytest.skip(f"no network namespaces here: {error}")


def forked(nodes: Nodes) -> Any:
    """Starts the control on node 0, warehouses on 1 and 2, each listening on its node's address, memory not shared."""

    def spawn(module: str, made: Any, errors: Path) -> Forked:
        node = CONTROL if module.endswith("control.server") else 1 + made.place
        if made.endpoint.endswith(":*"):
            made = msgspec.structs.replace(made, endpoint=f"tcp://{nodes.address(node)}:*")
        if node != CONTROL:
            made = msgspec.structs.replace(made, shared_bytes=0)
        return Forked(module, made, errors, nodes.path(node))

    return spawn


def work(graph: Graph, made: DockOptions, address: DockAddress, node: str) -> None:
    """Every stage but the update, in a process on a node of its own."""
    enter(node)

    async def pump(dock: DistributedDock, name: str) -> None:
        async for rows in dock.stream(graph[name]):
            await run_stage(dock, graph[name], rows, {})

    async def main() -> None:
        async with DistributedDock(graph, made, address, "worker", 60.0) as dock, asyncio.TaskGroup() as tasks:
            for stage in graph.upstream_of("update"):
                tasks.create_task(pump(dock, stage.name))

    asyncio.run(main())


async def train(made: Launcher, groups: int, trained: list[int], cut: Any) -> None:
    """The driver: admits, takes steps, and calls `cut` after the third."""
    async with client(made, "driver", 60.0) as driver:
        admitting = asyncio.ensure_future(admit_all(driver, groups))  # type: ignore[arg-type]
        async for rows in driver.stream(made.graph["update"]):
            assert await run_stage(driver, made.graph["update"], rows, {})
            trained += rows.row_ids.tolist()
            if len(trained) == 3 * len(rows):
                await cut()
        await admitting
        await driver.close()


def test_a_flow_across_four_nodes_of_which_one_is_cut_off_and_healed(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    healing: list[asyncio.Task[None]] = []

    async def cut() -> None:
        nodes.cut(2)

        async def heal() -> None:
            await asyncio.sleep(1.5 * HEARTBEATS_S)
            nodes.heal(2)

        healing.append(asyncio.ensure_future(heal()))

    made_options = options(2, warehouses=2, max_staleness=1, wait_s=60.0)
    trained: list[int] = []
    with caplog.at_level(logging.WARNING), Launcher(FILTERED, made_options, tmp_path, spawn=forked(nodes)) as made:
        hosts = [p.endpoint.split("//")[1].split(":")[0] for p in (made.address.control, *made.address.warehouses)]
        assert hosts == [nodes.address(i) for i in range(3)]
        worker = CONTEXT.Process(
            target=work, args=(FILTERED, made_options, made.address, nodes.path(WORKER)), daemon=True
        )
        worker.start()
        run(asyncio.wait_for(train(made, 24, trained, cut), 240.0))
        worker.join(30.0)
        said = (made.folder / "control.log").read_text()
    assert worker.exitcode == 0 and made.deaths == [] and healing[0].done()
    assert Counter(trained) == Counter(range(24 * GROUP))
    assert "the line to warehouse 1" in said
    assert all(nodes.carried(i) > 5_000 for i in range(4))


def test_a_starter_puts_a_warehouse_on_another_node(nodes: Nodes, tmp_path: Path) -> None:
    """By its command: options by argument, key by environment; it ends when whoever started it lets go of its input."""
    name = Path(nodes.path(0)).name
    there = Where(nodes.address(0), ("ip", "netns", "exec", name), folder=str(tmp_path / "node"), apart=True)
    (tmp_path / "node").mkdir()

    async def main(made: Launcher) -> list[Event]:
        async with client(made) as dock:
            return await flow([dock], 4)

    made_options = options(2, warehouses=2)
    with Launcher(
        PLAIN, made_options, tmp_path, "wal", spawn=placed(Where(nodes.here), [there, Where(nodes.here)])
    ) as made:
        part = made.parts["warehouse 0"]
        assert part.options.endpoint.startswith(f"tcp://{nodes.address(0)}:")
        words = Path(f"/proc/{part.child.pid}/cmdline").read_bytes()
        assert b'"endpoint"' in words and part.options.secret_key.encode() not in words
        events = run(main(made))
        assert (tmp_path / "node" / f"wal-{made.run}.0").exists() and (made.folder / "wal.1").exists()
        part.leaving = True
        part.child._process.stdin.close()  # type: ignore[attr-defined]
        assert part.child.wait(20.0) == 0
    assert Counter(r for stage, ids in events if stage == "update" for r in ids) == Counter(range(4 * GROUP))
