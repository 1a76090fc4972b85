"""The whole dock as plain data, also in the middle of a step, and back.

A snapshot holds tensors, lists, numbers and strings only, so `torch.save` and a weights-only `torch.load` carry it.
Leases are not saved: rows in a reader's hands at that moment are free again in the restored dock, and acknowledgements
under old leases do not count there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from docklands.core.batch import Batch, Jagged, offsets_of
from docklands.dock.exchange import Exchange
from docklands.errors import CheckpointError

FORMAT = 1


def save(exchange: Exchange) -> dict[str, Any]:
    """Everything that decides how the flow goes on."""
    return {
        "format": FORMAT,
        "shape": shape_of(exchange),
        "ledger": exchange.ledger.state_dict(),
        "controllers": {name: c.state_dict() for name, c in exchange.transport.controllers.items()},
        "columns": columns_of(exchange),
        "counters": exchange.counters.state_dict(),
    }


def load(exchange: Exchange, state: dict[str, Any]) -> None:
    """Into a dock that has admitted nothing. Raises CheckpointError when the snapshot is of another graph."""
    if state.get("format") != FORMAT:
        raise CheckpointError(f"dock snapshot has format {state.get('format')!r}, this version reads {FORMAT}")
    mine = shape_of(exchange)
    for name, value in state["shape"].items():
        if mine.get(name) != value:
            raise CheckpointError(
                f"dock snapshot was made with another {name}: {value} there, {mine.get(name)} here",
                "resume with the algorithm and group size that the run was started with",
            )
    admissions = exchange.ledger.load_state_dict(state["ledger"])
    for admission in admissions:
        exchange.transport.announce(admission)
    for saved in state["columns"]:
        field = exchange.flow.fields[saved["name"]]
        batch = Batch(saved["row_ids"].numpy(), {field: column_from(saved)})
        exchange.transport.write(exchange.transport.plan(batch, exchange.ledger.places(batch.row_ids)))
    for name, controller in exchange.transport.controllers.items():
        controller.load_state_dict(state["controllers"][name])
    exchange.counters.load_state_dict(state["counters"])
    exchange.settle()


def shape_of(exchange: Exchange) -> dict[str, Any]:
    """What must be the same for a snapshot to mean anything."""
    flow = exchange.flow
    return {
        "group_size": exchange.options.group_size,
        "stages": [f"{name}({', '.join(reads)})" for name, reads in flow.reads.items()],
        "columns": [repr(field) for field in flow.fields.values()],
    }


def columns_of(exchange: Exchange) -> list[dict[str, Any]]:
    """Every column's rows and values, per warehouse; ragged ones end to end, with their lengths."""
    found = []
    for warehouse in exchange.transport.warehouses:
        for name, row_ids in warehouse.inventory().items():
            if not len(row_ids):
                continue
            field = exchange.flow.fields[name]
            column = warehouse.get(row_ids, [field])[0][field]
            saved: dict[str, Any] = {"name": name, "row_ids": torch.from_numpy(row_ids)}
            if isinstance(column, Jagged):
                saved |= {"values": column.values.clone(), "lengths": torch.from_numpy(column.lengths)}
            else:
                saved["values"] = list(column) if field.is_json else column.clone()
            found.append(saved)
    return found


def column_from(saved: dict[str, Any]) -> Any:
    """A column as `columns_of` saved it."""
    if "lengths" in saved:
        return Jagged(saved["values"], offsets_of(np.asarray(saved["lengths"])))
    return saved["values"]
