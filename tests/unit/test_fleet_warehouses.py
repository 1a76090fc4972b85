"""Where warehouses stand, and which groups go to which: the rules, without Ray and without processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docklands.dock.warehouse.store import WarehouseOptions
from docklands.fleet.warehouses import Placing, choose, places_of

HOME = "10.0.0.1"


class Started:
    """A child that ends when it is told to."""

    lost = ""

    def __init__(self, address: str, options: Any) -> None:
        self.pid, self.address, self.options, self.code = 1, address, options, None

    def announced(self, deadline_s: float) -> dict[str, Any]:
        return {"pid": self.pid}

    def wait(self, deadline_s: float | None = None) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.code = -9  # type: ignore[assignment]


class Cluster:
    """Nodes that are up or not, and what runs on them."""

    def __init__(self, *up: str) -> None:
        self.up, self.closed = set(up), False

    def living(self) -> set[str]:
        return self.up

    def start(self, address: str, module: str, options: Any, errors: Path) -> Started:
        assert address in self.up and address != HOME
        return Started(address, options)

    def close(self) -> None:
        self.closed = True


def here(module: str, options: Any, errors: Path) -> Started:
    return Started(HOME, options)


def warehouse(place: int, host: str = HOME, port: str = "*", **more: Any) -> WarehouseOptions:
    return WarehouseOptions(place=place, columns=[], endpoint=f"tcp://{host}:{port}", **more)


def starter(cluster: Cluster, *producers: str, others: tuple[str, ...] = ()) -> Callable[..., Started]:
    made = Placing((producers, others), HOME, here, lambda: cluster)
    return lambda options: made("docklands.dock.warehouse.server", options, Path("none"))  # type: ignore[return-value]


def test_warehouses_go_round_the_nodes_and_listen_at_their_addresses() -> None:
    start = starter(Cluster("10.0.0.2", "10.0.0.3"), "10.0.0.2", HOME, "10.0.0.2", others=("10.0.0.3",))
    stood = [start(warehouse(place)) for place in range(3)]
    assert [child.address for child in stood] == ["10.0.0.2", HOME, "10.0.0.2"]
    assert [child.options.endpoint for child in stood] == ["tcp://10.0.0.2:*", f"tcp://{HOME}:*", "tcp://10.0.0.2:*"]


def test_the_control_process_stays_with_the_driver_and_nobody_is_asked_for_it() -> None:
    def nobody() -> Cluster:
        raise AssertionError

    made = Placing((["10.0.0.2"], []), HOME, here, nobody)
    assert made("docklands.dock.control.server", object(), Path("none")).address == HOME  # type: ignore[attr-defined]
    made.close()


def test_one_that_dies_keeps_its_port_and_goes_elsewhere_when_its_node_is_gone() -> None:
    cluster = Cluster("10.0.0.2", "10.0.0.3")
    start = starter(cluster, "10.0.0.2", "10.0.0.3")
    first = start(warehouse(0))
    first.kill()
    again = start(warehouse(0, "10.0.0.2", "4000"))
    assert again.options.endpoint == "tcp://10.0.0.2:4000"
    again.kill()
    cluster.up.discard("10.0.0.2")
    moved = start(warehouse(0, "10.0.0.2", "4000"))
    assert moved.address == "10.0.0.3" and moved.options.endpoint == "tcp://10.0.0.3:*"
    cluster.up.clear()
    moved.kill()
    assert start(warehouse(0, "10.0.0.3", "5000")).address == HOME


@pytest.mark.parametrize("order", ["copy first", "copy last"])
def test_a_copy_stands_on_another_node(order: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("10.0.0.2", "10.0.0.3")
    start = starter(cluster, "10.0.0.2", others=("10.0.0.3",))
    both = [warehouse(0, second=True), warehouse(0)]
    stood = {child.options.second: child for child in map(start, both if order == "copy first" else both[::-1])}
    assert stood[False].address == "10.0.0.2" and stood[True].address == "10.0.0.3"
    stood[False].kill()  # the copy serves now, and gets a copy itself: not where it stands
    cluster.up.discard("10.0.0.2")
    assert start(warehouse(0, "10.0.0.3", second=True)).address == "10.0.0.3"
    assert "both on node 10.0.0.3" in caplog.text
    cluster.up.add("10.0.0.2")
    assert start(warehouse(0, "10.0.0.3", second=True)).address == "10.0.0.2"


def test_choose() -> None:
    assert choose(["a", "b", "c"], {"b", "c"}, (), "home") == "b"
    assert choose(["a", "b", "c"], {"b", "c"}, {"b"}, "home") == "c"
    assert choose(["a", "b"], {"a"}, {"a"}, "home") == "a"
    assert choose(["a"], (), (), "home") == "home"


def test_a_group_goes_to_its_generators_node() -> None:
    assert places_of(range(4), ["a", "b"], ["a", "b"]) == [0, 1, 0, 1]
    assert places_of(range(4), ["b", "a"], ["a", "b"]) == [1, 0, 1, 0]
    assert places_of(range(6), ["a", "b"], ["a", "b", "a"]) == [0, 1, 2, 1, 0, 1]
    assert places_of(range(3), ["a", "c"], ["a", "b"]) == [0, -1, 0]  # none there: in turn
    assert places_of([7], [], ["a", "b"]) == [-1]
