"""docklands dock top: the sample flow of a running job, live."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from docklands.cli.shared import RunDir, check_run_dir

if TYPE_CHECKING:
    from rich.console import RenderableType

    from docklands.dock.top import Sight

app = typer.Typer(help="Look into the sample flow of a running job.", no_args_is_help=True)

MIB = 2**20
WIDTH = 140
"""Columns where the output is not a terminal."""


@app.callback()
def group() -> None:
    """Look into the sample flow of a running job."""


@app.command("top")
def top(
    run_dir: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Print one table and stop.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show rows, messages and bytes by stage, and what each warehouse holds (a run with dock.transport=processes)."""
    check_run_dir(run_dir)
    from rich.console import Console
    from rich.live import Live

    from docklands.dock.hosted import read_address
    from docklands.dock.top import look
    from docklands.errors import ControlLost

    address = read_address(run_dir / "dock")
    sight = look(address)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    if once:
        console.print(table(sight, None))
        return
    with Live(table(sight, None), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                before, sight = sight, look(read_address(run_dir / "dock"))
            except ControlLost:
                break
            live.update(table(sight, before), refresh=True)
    console.print("the run has ended")


def table(now: Sight, before: Sight | None) -> RenderableType:
    """Stages and warehouses as rich tables."""
    from rich.console import Group
    from rich.table import Table

    from docklands.dock.top import rates

    names = ("ready", "leased", "done", "puts", "gets", "MiB in", "MiB out", "MiB/s in", "MiB/s out")
    stages = Table("stage", title=now.head, title_justify="left", expand=False)
    for name in names:
        stages.add_column(name, justify="right")
    speed = rates(now, before)
    for name, held in now.stages.items():
        counts = [f"{held[what]:.0f}" for what in ("ready", "leased", "done", "puts", "gets")]
        moved = [f"{held[what] / MIB:.1f}" for what in ("bytes_in", "bytes_out")]
        stages.add_row(name, *counts, *moved, *(f"{speed[name][w] / MIB:.1f}" for w in ("bytes_in", "bytes_out")))
    places = Table("warehouse", expand=False)
    for name in ("rows", "MiB", "MiB shared", "MiB spilled", "MiB log"):
        places.add_column(name, justify="right")
    for place, found in enumerate(now.warehouses):
        sizes = ("bytes", "shared_bytes", "spilled_bytes", "log_bytes")
        cells = (
            ["does not answer"] if found is None else [f"{found['rows']}", *(f"{found[w] / MIB:.1f}" for w in sizes)]
        )
        places.add_row(str(place), *cells)
    return Group(stages, places)
