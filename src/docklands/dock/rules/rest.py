"""What follows from a change: rows that nobody needs are forgotten, and a flow at rest is set in motion again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from docklands.core.graph import UPDATE
from docklands.dock.rules.table import distinct

if TYPE_CHECKING:
    from docklands.dock.rules.control import Control


def free_dead(control: Control) -> list[tuple[int, np.ndarray]]:
    """Of the rows that left or that a stage has let go since the last time, those that nobody holds."""
    candidates, control.ledger.fresh = control.ledger.fresh, []
    control.gone = []
    for controller in control.controllers.values():
        candidates += controller.released
        controller.released = []
    if not control.ledger.dead or not candidates:
        return []
    slots = distinct(np.sort(np.concatenate(candidates)))
    slots = slots[control.roster.here[slots] & ~control.ledger.alive(slots)]
    for controller in control.controllers.values():
        slots = slots[~controller.holds(slots)]
    if not len(slots):
        return []
    places, row_ids = control.roster.place[slots // control.roster.size], control.roster.row_id[slots]
    for controller in control.controllers.values():
        controller.forget(slots)
        control.counters.metadata_bytes += 8 * len(slots)
    control.gone = control.ledger.remove(slots)
    return [(place, row_ids[places == place]) for place in np.unique(places).tolist()]


def look_for_rest(control: Control) -> None:
    """At rest nothing is leased, nothing can be admitted and no full take is possible: allow short takes.

    Where takes are not fixed, none needs to be allowed: but groups that were begun and put off, to go on beside the
    next prompts, go on without. An update is what makes room for those, so while one is possible they wait for it: a
    visit of the long tail alone would hold the device for a few rows.

    Every earlier event is over by then, so which groups are pending where does not depend on time, and neither do
    the short takes. They go to each stage that has all of its pending groups ready; the first stage in the graph
    with any pending group always has, so the flow moves again.
    """
    controllers = control.controllers.values()
    waiting = [c for c in controllers if c.waits_for_others(False)]
    if not (control.options.deterministic or waiting) or control.has_slot or any(c.leases for c in controllers):
        return
    others = [c for c in controllers if c not in waiting]
    if any(c.can_take(control.default_groups(c.by), control.ledger.exhausted) for c in others):
        return
    for controller in waiting:
        controller.go_on()
    if not control.options.deterministic:
        return
    for controller in controllers:
        if controller.stage != UPDATE or control.ledger.closing:
            controller.allow_short()
