"""Looking into a running dock from outside: one question to the control process and one to each warehouse.

It takes no lease and joins nothing, so a run does not notice that it is watched.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from docklands.dock.control import messages as c
from docklands.dock.control.client import ask_once
from docklands.dock.distributed import DockAddress
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.client import ClientOptions, WarehouseClient
from docklands.errors import DockError

ANSWER_S = 3.0
TRAFFIC = ("puts", "gets", "bytes_in", "bytes_out")


@dataclass(frozen=True)
class Sight:
    """A dock at one moment.

    at          seconds of time.monotonic
    head        the control process's summary, in words
    stages      stage -> ready, leased, done (rows), puts, gets, bytes_in, bytes_out (since the start)
    warehouses  place -> rows, bytes, shared_bytes, spilled_bytes, log_bytes, ...; None: it does not answer
    """

    at: float
    head: str
    stages: dict[str, dict[str, float]]
    warehouses: list[dict[str, float] | None]


def look(address: DockAddress) -> Sight:
    """Ask everybody once. Raises ControlLost when the control process does not answer."""
    view: c.View = ask_once(address.control, address.keys, c.Look(), ANSWER_S)
    found = [figures(address, place) for place in range(len(address.warehouses))]
    names = [key.split("/")[1] for key in view.figures if key.endswith("/leased")]
    stages = {}
    for name in names:
        rows = {what: view.figures[f"dock/{name}/{what}"] for what in ("ready", "leased", "done")}
        moved = {what: sum((held or {}).get(f"{name}/{what}", 0) for held in found) for what in TRAFFIC}
        stages[name] = {**rows, **moved}
    return Sight(time.monotonic(), view.text.partition("\n")[0], stages, found)


def figures(address: DockAddress, place: int) -> dict[str, float] | None:
    """A warehouse's counters; None when it does not answer."""
    wanted = ClientOptions(name="top", deadline_s=ANSWER_S, lost_s=ANSWER_S, share=False)
    with (
        contextlib.suppress(DockError),
        WarehouseClient({place: address.warehouses[place]}, address.keys, wanted) as client,
    ):
        return dict(client.ask(place, m.Stats()).values)
    return None


def rates(now: Sight, before: Sight | None) -> dict[str, dict[str, float]]:
    """Stage -> per second since `before`: puts, gets, bytes_in, bytes_out; zeros for the first look."""
    if before is None or now.at <= before.at:
        return {name: dict.fromkeys(TRAFFIC, 0.0) for name in now.stages}
    seconds = now.at - before.at
    return {
        name: {what: max(0.0, held[what] - before.stages.get(name, held)[what]) / seconds for what in TRAFFIC}
        for name, held in now.stages.items()
    }
