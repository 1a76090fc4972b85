"""Where the warehouses of a run stand, and which of them a group's rows go to: a row lives where it is produced.

Producers are the workers that generate; where nothing is generated, all workers. Warehouse i stands on the i-th node
that has producers, going round, and a group is admitted to the warehouse on the node of the generator that will make
its rows. Nodes are named by their addresses. How a process gets to another node is up to a `Reach` (ray_programs.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from docklands.dock.hosted import HostedDock
from docklands.dock.start import Child, Spawn

if TYPE_CHECKING:
    from docklands.fleet.workers import Carrier

log = logging.getLogger("docklands.fleet")


class Reach(Protocol):
    """Starts programs on the nodes of a cluster."""

    def living(self) -> Collection[str]:
        """Addresses of the nodes that are up."""
        ...

    def start(self, address: str, module: str, options: msgspec.Struct, errors: Path) -> Child:
        """`python -m MODULE` there. A node that is not up: its child is lost at once."""
        ...

    def close(self) -> None:
        """End what is left of them."""
        ...


@dataclass(frozen=True)
class WorkersOf:
    """Addresses of a run's workers. generators: now, in the order in which they get groups; trainers: all of them."""

    generators: Callable[[], list[str]]
    trainers: list[str]


def spread(dock: HostedDock, carrier: Carrier, workers: WorkersOf, wanted: int) -> None:
    """Before the dock opens: its warehouses beside the producers. wanted 0: one on each of their nodes."""
    home, reach = carrier.home, carrier.reach
    producers, others = in_order(workers.generators() or workers.trainers), in_order(workers.trainers)
    count = wanted or max(1, len(producers))
    if reach is None or {*producers, *others} <= {home}:
        return dock.spread(home, count)
    dock.spread(home, count, Placing((producers, others), home, dock.launcher.spawn, reach))
    dock.beside = lambda groups: places_of(groups, workers.generators(), dock.addresses())


def in_order(addresses: Sequence[str]) -> list[str]:
    """Each once, in the order in which they come."""
    return list(dict.fromkeys(addresses))


def choose(around: Sequence[str], living: Collection[str], taken: Collection[str], home: str) -> str:
    """The node for a process that holds the rows of a place.

    around  the run's nodes, the wanted one first
    taken   nodes where another process holds these rows: avoided if there is another one
    home    the driver's node, which lives as long as anybody asks
    """
    up = [node for node in around if node in living]
    return next(iter([node for node in up if node not in taken] or up), home)


def places_of(groups: Sequence[int], generators: Sequence[str], warehouses: Sequence[str]) -> list[int]:
    """The warehouse of each group; -1: in turn, there is none on its generator's node.

    generators  their addresses: generator g modulo their number makes the rows of group g
    warehouses  addresses by place; those on one node are used in turn
    """
    count = max(1, len(generators))
    on: dict[str, list[int]] = {}
    for place, address in enumerate(warehouses):
        on.setdefault(address, []).append(place)
    found = []
    for group in groups:
        here = on.get(generators[group % count], []) if generators else []
        found.append(here[group // count % len(here)] if here else -1)
    return found


class Placing:
    """A starter (dock/start.py): the warehouses over the run's nodes, all else here.

    A warehouse whose node has died is started on another one that lives. A copy stands on another node than what it is
    a copy of, if there is one.

    producers, others  nodes of the run, with producers and without: warehouses stand on the first, and on the others
                       what finds no place there
    here               starts processes on the driver's node `home`
    """

    def __init__(
        self, nodes: tuple[Sequence[str], Sequence[str]], home: str, here: Spawn, reach: Callable[[], Reach]
    ) -> None:
        self.producers, others = in_order(nodes[0]), in_order(nodes[1])
        self.nodes = in_order([*self.producers, *others])
        self._home, self._here, self._make = home, here, reach
        self._reach: Reach | None = None
        self._lock = threading.Lock()
        self._stand: dict[int, list[tuple[str, Child]]] = {}

    def __call__(self, module: str, options: Any, errors: Path) -> Child:
        place = getattr(options, "place", None)
        if place is None:
            return self._here(module, options, errors)
        with self._lock:
            self._reach = self._reach or self._make()
            held = [(node, child) for node, child in self._stand.get(place, []) if child.wait(0.0) is None]
            address = self._node(place, options.second, {node for node, _ in held})
            if options.endpoint.partition("://")[2].rpartition(":")[0] != address:
                options = msgspec.structs.replace(options, endpoint=f"tcp://{address}:*")
            if address == self._home:
                child = self._here(module, options, errors)
            else:
                child = self._reach.start(address, module, options, errors)
            self._stand[place] = [*held, (address, child)]
        return child

    def close(self) -> None:
        """The last process has ended."""
        if self._reach is not None:
            self._reach.close()

    def _node(self, place: int, second: bool, taken: Collection[str]) -> str:
        assert self._reach is not None
        first = place % len(self.producers)
        around = [*self.nodes[first:], *self.nodes[:first]]
        living = {*self._reach.living(), self._home}
        found = choose([*around[1:], around[0]] if second else around, living, taken, self._home)
        if found in taken and len(self.nodes) > 1:
            log.warning("dock: warehouse %d and its copy are both on node %s: no other one is up", place, found)
        return found
