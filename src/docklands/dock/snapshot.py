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
from docklands.dock.flow import Flow
from docklands.dock.options import DockOptions
from docklands.errors import CheckpointError

FORMAT = 2


def save(exchange: Exchange) -> dict[str, Any]:
    """Everything that decides how the flow goes on."""
    return {
        "format": FORMAT,
        "shape": shape_of(exchange.flow, exchange.options),
        **exchange.control.state_dict(),
        "columns": columns_of(exchange),
    }


def load(exchange: Exchange, state: dict[str, Any]) -> None:
    """Into a dock that has admitted nothing. Raises CheckpointError when the snapshot is of another graph."""
    if "control" in state:
        raise CheckpointError(
            "the checkpoint's dock was in processes of its own", "resume with dock.transport=processes"
        )
    check_shape(exchange.flow, exchange.options, state)
    exchange.control.load_state_dict(state)
    ledger = exchange.control.ledger
    rows = exchange.control.roster
    slots = rows.used
    for warehouse in exchange.stores.warehouses:
        warehouse.add(rows.row_id[slots[rows.place[slots // rows.size] == warehouse.place]])
    counted = exchange.counters.state_dict()
    for saved in state["columns"]:
        field = exchange.flow.fields[saved["name"]]
        batch = Batch(saved["row_ids"].numpy(), {field: column_from(saved)})
        exchange.stores.write(exchange.stores.plan(batch, ledger.places(batch.row_ids)))  # the controllers know
    exchange.counters.load_state_dict(counted)
    exchange.settle()


def check_shape(flow: Flow, options: DockOptions, state: dict[str, Any]) -> None:
    """CheckpointError when the snapshot is of another format, graph or group size."""
    if state.get("format") != FORMAT:
        raise CheckpointError(f"dock snapshot has format {state.get('format')!r}, this version reads {FORMAT}")
    mine = shape_of(flow, options)
    for name, value in state["shape"].items():
        if mine.get(name) != value:
            raise CheckpointError(
                f"dock snapshot was made with another {name}: {value} there, {mine.get(name)} here",
                "resume with the algorithm and group size that the run was started with",
            )


def shape_of(flow: Flow, options: DockOptions) -> dict[str, Any]:
    """What must be the same for a snapshot to mean anything."""
    return {
        "group_size": options.group_size,
        "stages": [f"{name}({', '.join(reads)})" for name, reads in flow.reads.items()],
        "columns": [repr(field) for field in flow.fields.values()],
    }


def columns_of(exchange: Exchange) -> list[dict[str, Any]]:
    """Every column's rows and values, per warehouse; ragged ones end to end, with their lengths."""
    found = []
    for warehouse in exchange.stores.warehouses:
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
