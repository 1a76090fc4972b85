"""The whole dock as plain data, also in the middle of a step, and back.

A snapshot holds tensors, lists, numbers and strings only, so `torch.save` and a weights-only `torch.load` carry it.
Leases are not saved: rows in a reader's hands at that moment are free again in the restored dock, and acknowledgements
under old leases do not count there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from docklands.core.batch import Batch, Jagged, offsets_of
from docklands.dock.control.recover import align, packed, unpacked
from docklands.dock.exchange import Exchange
from docklands.dock.rules.flow import Flow
from docklands.dock.rules.options import DockOptions
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse import wal
from docklands.dock.wire.format import CALL, batch_of, decode_parts, encode_batch, encode_parts
from docklands.errors import CheckpointError, WireError

FORMAT = 3


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
    check_shape(exchange.flow, exchange.options, state)
    exchange.control.load_state_dict(state)
    ledger = exchange.control.ledger
    add_rows(exchange)
    counted = exchange.counters.state_dict()
    for saved in state["columns"]:
        field = exchange.flow.fields[saved["name"]]
        batch = Batch(saved["row_ids"].numpy(), {field: column_from(saved)})
        exchange.stores.write(exchange.stores.plan(batch, ledger.places(batch.row_ids)))  # the controllers know
    exchange.counters.load_state_dict(counted)
    exchange.settle()


def add_rows(exchange: Exchange) -> None:
    """Room in the warehouses for the rows that the control knows."""
    rows = exchange.control.roster
    slots = rows.used
    for warehouse in exchange.stores.warehouses:
        warehouse.add(rows.row_id[slots[rows.place[slots // rows.size] == warehouse.place]])


def check_shape(flow: Flow, options: DockOptions, state: dict[str, Any]) -> None:
    """CheckpointError when the snapshot is of another format, graph or group size."""
    if state.get("format") != FORMAT:
        raise CheckpointError(f"dock snapshot has format {state.get('format')!r}, this version reads {FORMAT}")
    mine = shape_of(flow, options)
    for name, value in state["shape"].items():
        if mine.get(name) != value:
            raise CheckpointError(
                f"dock snapshot was made with another {name}: {difference(value, mine.get(name))}",
                "resume with the algorithm, group size and dock.max_staleness that the run was started with",
            )


def difference(there: Any, here: Any) -> str:
    """How two entries of a shape differ, in a few words."""
    if not isinstance(there, list) or not isinstance(here, list):
        return f"{there} there, {here} here"
    sides = {"there": [x for x in there if x not in here], "here": [x for x in here if x not in there]}
    parts = [f"only {side} {name_some(items)}" for side, items in sides.items() if items]
    return "; ".join(parts) or "the same in another order"


def name_some(items: list[str], most: int = 3) -> str:
    """The first few, and how many more."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


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


# --- between the dock in one process and the one in several --------------------------------------------------------


def batches_of(file: Path, flow: Flow) -> Iterator[Batch]:
    """What a warehouse's snapshot holds. Raises CheckpointError."""
    for header, *frames in wal.read(file):
        try:
            message = m.CALLS.unpack(header)[2]
            if isinstance(message, m.Put) and message.batch.columns:
                yield batch_of(*decode_parts(message.batch, frames), flow.fields)
        except (WireError, KeyError) as error:
            raise CheckpointError(f"{file} does not fit this run: {error}") from None


def files_of(state: Mapping[str, Any], folder: Path) -> list[Path]:
    """The files of a snapshot, by warehouse. Raises CheckpointError when one is not there."""
    count = state.get("places") or len(list(folder.glob(f"{state['file']}.*")))
    files = [folder / f"{state['file']}.{number}" for number in range(count)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} of the dock's snapshot is missing", "use an older checkpoint")
    return files


def load_files(exchange: Exchange, state: Mapping[str, Any], files: Sequence[Path]) -> None:
    """A snapshot of a dock in processes into one in this process that has admitted nothing. Raises CheckpointError."""
    check_shape(exchange.flow, exchange.options, dict(state))
    control, stores = exchange.control, exchange.stores
    control.load_state_dict(unpacked(state["control"].numpy().data))
    counted = exchange.counters.state_dict()
    add_rows(exchange)
    for file in files:
        for batch in batches_of(file, exchange.flow):
            here = control.roster.find(batch.row_ids) >= 0
            known = batch if here.all() else batch.select(here)
            stores.write(stores.plan(known, control.ledger.places(known.row_ids)))
    for warehouse in stores.warehouses:  # columns may have come after the control was saved
        slots = warehouse.rows.slots
        row_ids = warehouse.rows["row_id"][slots]
        have = {name: np.isin(row_ids, ids) for name, ids in warehouse.inventory().items()}
        lost, vain = align(control, warehouse.place, (row_ids, have, warehouse.rows["length"][slots]), rebuilt=True)
        if len(lost):
            raise CheckpointError(f"the snapshot lacks the prompts of {len(lost)} rows", "use an older checkpoint")
        warehouse.free(vain)
    exchange.counters.load_state_dict(counted)
    exchange.settle()


def to_files(flow: Flow, state: Mapping[str, Any], folder: Path, name: str, places: int) -> dict[str, Any]:
    """A snapshot of the dock in one process as one of a dock with `places` warehouses: their files, and its state."""
    ledger = state["ledger"]
    groups = list(
        zip(
            ledger["orders"],
            ledger["group_ids"],
            [place % places for place in ledger["places"]],
            np.split(ledger["row_ids"].numpy(), np.cumsum(ledger["sizes"])[:-1]),
        )
    )
    columns = [Batch(s["row_ids"].numpy(), {flow.fields[s["name"]]: column_from(s)}) for s in state["columns"]]

    def records(place: int) -> Iterator[list[Any]]:
        mine = [group for group in groups if group[2] == place]
        for order, group_id, _, row_ids in mine:
            meta, frames = encode_parts(row_ids, [])
            yield [m.CALLS.pack(CALL, 1, m.Put(meta, m.Birth(order, group_id, place))), *frames]
        ids = np.concatenate([rows for *_, rows in mine]) if mine else np.zeros(0, np.int64)
        for batch in columns:
            here = np.isin(batch.row_ids, ids)
            if here.any():
                meta, frames = encode_batch(batch.select(here))
                yield [m.CALLS.pack(CALL, 1, m.Put(meta)), *frames]

    for place in range(places):
        wal.write_file(folder / f"{name}.{place}", records(place))
    control = packed({part: state[part] for part in ("ledger", "controllers", "counters")})
    saved = torch.frombuffer(bytearray(control), dtype=torch.uint8)
    return {"format": FORMAT, "shape": state["shape"], "file": name, "places": places, "control": saved}
