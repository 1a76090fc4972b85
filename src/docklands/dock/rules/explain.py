"""Words for people: what a wait waits for, and the state of the whole dock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from docklands.core.stage import Stage
from docklands.dock.rules.control import Control
from docklands.dock.rules.flow import verdict
from docklands.dock.rules.messages import Want


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def why_take(control: Control, stage: Stage, want: Want, now: float) -> str:
    """What stands between `stage` and its next rows: columns, rows, and the stages that hold them."""
    census = control.controller(stage).census(now)
    unit = "step" if stage.by == "step" else "take"
    parts = [f"a {unit} is {want.groups} groups, {census.groups} groups are pending, {census.whole} of them ready"]
    parts += [holders(control, column, census.missing[column], now) for column in census.missing]
    if census.groups < want.groups:
        parts.append(why_few(control))
    if census.leased:
        parts.append(f"{census.leased} rows are leased by {stage.name} itself since {seconds(census.oldest_s)}")
    return "; ".join(parts)


def holders(control: Control, column: str, row_ids: np.ndarray, now: float) -> str:
    """`reward is missing on 12 rows: 12 leased by reward since 31 s`."""
    writer = control.flow.writer.get(column)
    if column in map(verdict, control.flow.filters):
        text = f"the verdict of {writer} is missing on {len(row_ids)} rows"
    else:
        text = f"{column} is missing on {len(row_ids)} rows"
    if writer is None:
        return text
    controller = control.controller(writer)
    leased, ready, waiting = controller.split(row_ids)
    facts = []
    if leased:
        facts.append(f"{leased} leased by {writer} since {seconds(controller.census(now).oldest_s)}")
    if ready:
        facts.append(f"{ready} ready for {writer} and not taken")
    if waiting:
        facts.append(f"{waiting} not yet ready for {writer}")
    return f"{text}: {', '.join(facts)}" if facts else text


def why_few(control: Control) -> str:
    """Why no further group is in flight."""
    ledger = control.ledger
    if ledger.exhausted:
        return "the prompts have ended"
    if control.has_slot:
        return f"{ledger.in_flight} of {ledger.options.window} groups are in flight: the prompt source is late"
    return f"{ledger.in_flight} of {ledger.options.window} groups are in flight: none enters before one leaves"


def why_slot(control: Control, mute: Collection[int], now: float) -> str:
    """Where the groups in flight stand. mute: warehouses that have not been heard of yet."""
    held = [line.strip() for line in stage_lines(control, now)]
    silent = f"warehouses {sorted(mute)} have not said what they hold; " if mute else ""
    return f"{silent}{control.ledger.in_flight} of {control.options.window} groups are in flight; " + "; ".join(held)


def why_room(warehouses: Sequence[tuple[int, int, int]]) -> str:
    """How full the warehouses are: (place, bytes held, capacity) of each."""
    full = ", ".join(f"warehouse {place} holds {held} of {capacity} bytes" for place, held, capacity in warehouses)
    return f"{full}; rows are freed when they are retired or dropped (raise dock.capacity_mib)"


def stage_lines(control: Control, now: float) -> list[str]:
    """One line per stage."""
    lines = []
    for name, controller in control.controllers.items():
        c = controller.census(now)
        lease = f" (oldest lease {seconds(c.oldest_s)})" if c.leased else ""
        missing = ", ".join(f"{column} {len(rows)}" for column, rows in c.missing.items())
        lines.append(
            f"  {name}: {c.ready} ready, {c.leased} leased{lease}, {c.done} done, {c.waiting} waiting"
            + (f" for {missing}" if missing else "")
        )
    return lines


def describe(control: Control, now: float, nbytes: int | None) -> list[str]:
    """Several lines for the watchdog and for people. nbytes: in all warehouses; None: they are asked themselves."""
    ledger = control.ledger
    head = (
        f"dock: {ledger.in_flight} of {control.options.window} groups in flight, {ledger.admitted} admitted, "
        f"{ledger.retired} retired, {ledger.dropped_groups} dropped"
        + (f", {nbytes} bytes" if nbytes is not None else "")
        + (", prompts have ended" if ledger.ended else "")
    )
    lines = [head, *stage_lines(control, now)]
    if ledger.dropped:
        lines.append("  dropped rows: " + ", ".join(f"{reason} {n}" for reason, n in sorted(ledger.dropped.items())))
    return lines


def statistics(control: Control, now: float, nbytes: int) -> dict[str, float]:
    """Every dock metric by its declared name."""
    counters, ledger = control.counters, control.ledger
    found: dict[str, float] = {
        "dock/in_flight": ledger.in_flight,
        "dock/bytes": nbytes,
        "dock/metadata_bytes": counters.metadata_bytes,
        "dock/ignored_puts": counters.ignored_puts,
        "dock/expired_leases": counters.expired_leases,
        **{f"dock/{name}": value for name, value in vars(counters.total).items()},
        **{f"dock/dropped/{reason}": n for reason, n in ledger.dropped.items()},
    }
    for name, controller in control.controllers.items():
        census = controller.census(now)
        found |= {f"dock/{name}/{what}": getattr(census, what) for what in ("ready", "leased", "done")}
        found |= {f"dock/{name}/{what}": value for what, value in vars(counters.stages[name]).items()}
    return {name: float(value) for name, value in found.items()}
