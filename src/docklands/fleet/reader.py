"""How the ranks of a role read their rows: one rank of a replica fetches them from the dock, and shares them.

A replica is a group of ranks that work on the same rows (its tensor, context and pipeline ranks). So a byte leaves the
dock once for each replica, however many ranks there are, and the driver sees none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.core.batch import Batch, Jagged
from docklands.core.fields import Field
from docklands.core.protocols import Rows
from docklands.dock.warehouse.calls import Borrowed
from docklands.dock.wire.format import batch_of, decode_parts, encode_batch
from docklands.errors import DocklandsError, RowGone, WarehouseLost
from docklands.fleet.host import Context
from docklands.parallel.mesh import Group, Mesh
from docklands.train.share import rows_of_replicas

READ = "@read"
"""Among the metrics that a worker answers with: fetches, and bytes of them, that no warehouse has seen."""


class Reader:
    """Rows for one replica of several. All ranks call alike.

    everyone       ranks of all replicas; None: this rank alone
    replica        ranks that get the same rows; None: this rank alone
    index, number  of this replica, and of replicas
    """

    def __init__(
        self, context: Context, everyone: Group | None, replica: Group | None, index: int = 0, number: int = 1
    ) -> None:
        self.context, self.everyone, self.replica = context, everyone, replica
        self.index, self.number = index, number
        self._lent: Borrowed | None = None

    @property
    def leads(self) -> bool:
        """This rank speaks to the dock for its replica."""
        return self.replica is None or self.replica.rank == 0

    def mine(self, rows: Rows) -> Rows:
        """The rows of this replica: token counts are balanced, groups whole where that costs no balance."""
        self.begin(rows)
        return rows.select(rows_of_replicas(rows.lengths, rows.group_ids, self.number)[self.index])

    def begin(self, rows: Rows) -> None:
        """All rows of a hand-out, before any of them is read: where they lie may be known."""
        if self.leads and self.context.client is not None:
            self.context.client.lent(rows)

    def figures(self, rows: Rows) -> dict[str, tuple[float, float]]:
        """READ of this hand-out, for the driver, if there is anything to tell."""
        client = self.context.client
        read = client.read_here(rows) if self.leads and client is not None else (0, 0)
        return {READ: read} if read[0] else {}

    def fetch(self, rows: Rows, fields: Sequence[Field[Any]], lend: bool = False) -> Batch:
        """Columns of this replica's rows, on each of its ranks. What the dock raises on one rank is raised on all.

        lend  they may be views of the dock's memory (nobody writes to a batch): `check` comes after the last use
        """
        batch, error = self._ask(rows, fields, lend)
        agree(self.everyone, error)
        return batch if self.replica is None else shared(batch, fields, self.replica)  # type: ignore[return-value]

    def fetch_alone(self, rows: Rows, fields: Sequence[Field[Any]], lend: bool = False) -> Batch:
        """As `fetch`, for work in which replicas do not meet: what the dock raises is raised in this replica only."""
        batch, error = self._ask(rows, fields, lend)
        if self.replica is not None:
            return shared(batch, fields, self.replica, error)
        if batch is None:
            raise error  # type: ignore[misc]
        return batch

    def _ask(self, rows: Rows, fields: Sequence[Field[Any]], lend: bool) -> tuple[Batch | None, DocklandsError | None]:
        self._lent = None
        try:
            if self.leads and lend:
                self._lent = self.context.dock.borrow(rows, fields)
                return self._lent.batch, None
            return self.context.dock.fetch(rows, fields) if self.leads else None, None
        except DocklandsError as failure:
            return None, failure

    def check(self) -> None:
        """What was lent last has been there all the time. WarehouseLost if not: what was made of it is void."""
        lent, self._lent = self._lent, None
        try:
            if lent is not None:
                lent.check()
        except RowGone as error:
            raise WarehouseLost(error.message, "the lease has ended meanwhile: its rows are given back") from None

    def put(self, batch: Batch | None, rows: Rows | None = None) -> None:
        """Write this replica's columns; None: it has none. What the dock raises on one rank is raised on all.

        rows  the leased ones that they were made of
        """
        agree(self.everyone, self.put_alone(batch, rows))

    def put_alone(self, batch: Batch | None, rows: Rows | None = None) -> DocklandsError | None:
        """As `put`, where nothing follows that ranks do together: what the dock raises here, for the driver."""
        try:
            if self._lent is not None and batch is not None:
                batch = own(batch, self._lent.batch)
            self.check()
            if self.leads and batch is not None and len(batch):
                self.context.dock.put(batch, rows)
        except DocklandsError as failure:
            return failure
        return None


def own(batch: Batch, lent: Batch) -> Batch:
    """A batch of which nothing lies in what is lent: columns that were handed on are copied, before the loan ends."""
    held = [memory_of(lent[field]) for field in lent.fields]
    columns = {}
    for field in batch.fields:
        column, (first, last) = batch[field], memory_of(batch[field])
        if any(first < end and start < last for start, end in held):
            column = Jagged(column.values.clone(), column.offsets) if isinstance(column, Jagged) else column.clone()
            columns[field] = column
    return batch.with_(columns) if columns else batch


def memory_of(column: Any) -> tuple[int, int]:
    """Where the bytes of a column's values begin and end; nowhere for JSON."""
    values = column.values if isinstance(column, Jagged) else column
    if not isinstance(values, Tensor):
        return 0, 0
    storage = values.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def reader_of(context: Context, mesh: Mesh) -> Reader:
    """For the ranks of a mesh: replicas are its data-parallel ranks."""
    layout = mesh.layout
    index = mesh.coords["dp"] * layout.fsdp + mesh.coords["fsdp"]
    return Reader(context, mesh.world, mesh.replica, index, layout.data)


def with_read(metrics: Mapping[str, tuple[float, float]], parts: Iterable[Mapping[str, tuple[float, float]]]) -> Any:
    """Metrics with the READ of several workers together."""
    read = [part[READ] for part in parts if READ in part]
    sums = {READ: (sum(count for count, _ in read), sum(nbytes for _, nbytes in read))} if read else {}
    return {**metrics, **sums}


def agree(group: Group | None, error: DocklandsError | None) -> None:
    """Raise an error that any rank of the group has, on all of them: the first by rank. Call on every rank."""
    errors: list[Any] = [error]
    if group is not None:
        failed = torch.tensor([error is not None], dtype=torch.int32)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group.pg)  # mostly none has: objects take four times as long
        if not failed.item():
            return
        errors = [None] * group.size
        dist.all_gather_object(errors, error, group=group.pg)
    for found in errors:
        if found is not None:
            raise found


def shared(
    batch: Batch | None, fields: Sequence[Field[Any]], group: Group, error: DocklandsError | None = None
) -> Batch:
    """The batch of the group's first rank, on all of its ranks; values travel as one tensor of bytes. Or its error."""
    head: list[Any] = [error]
    payload = torch.empty(0, dtype=torch.uint8)
    if batch is not None:
        meta, frames = encode_batch(batch)
        pieces = [torch.frombuffer(frame, dtype=torch.uint8) for frame in frames if memoryview(frame).nbytes]
        head = [(meta, [memoryview(frame).nbytes for frame in frames])]
        payload = torch.cat([payload, *pieces])
    dist.broadcast_object_list(head, src=group.ranks[0], group=group.pg)
    if isinstance(head[0], DocklandsError):
        raise head[0]
    if batch is not None:
        dist.broadcast(payload, group.ranks[0], group=group.pg)
        return batch
    meta, sizes = head[0]
    payload = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(payload, group.ranks[0], group=group.pg)
    frames = [piece.clone().numpy().data for piece in payload.split(sizes)]  # each aligned for its dtype
    row_ids, parts = decode_parts(meta, frames)
    return batch_of(row_ids, parts, {field.name: field for field in fields})
