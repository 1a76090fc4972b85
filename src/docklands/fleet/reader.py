"""How the ranks of a role read their rows: one rank of a replica fetches them from the dock, and shares them.

A replica is a group of ranks that work on the same rows (its tensor, context and pipeline ranks). So a byte leaves the
dock once for each replica, however many ranks there are, and the driver sees none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from docklands.core.batch import Batch
from docklands.core.fields import Field
from docklands.core.protocols import Rows
from docklands.dock.wire.format import batch_of, decode_parts, encode_batch
from docklands.errors import DocklandsError
from docklands.fleet.host import Context
from docklands.parallel.mesh import Group, Mesh
from docklands.train.share import rows_of_replicas


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

    @property
    def leads(self) -> bool:
        """This rank speaks to the dock for its replica."""
        return self.replica is None or self.replica.rank == 0

    def mine(self, rows: Rows) -> Rows:
        """The rows of this replica: token counts are balanced, groups whole where that costs no balance."""
        return rows.select(rows_of_replicas(rows.lengths, rows.group_ids, self.number)[self.index])

    def fetch(self, rows: Rows, fields: Sequence[Field[Any]]) -> Batch:
        """Columns of this replica's rows, on each of its ranks. What the dock raises on one rank is raised on all."""
        batch, error = None, None
        if self.leads:
            try:
                batch = self.context.dock.fetch(rows, fields)
            except DocklandsError as failure:
                error = failure
        agree(self.everyone, error)
        return batch if self.replica is None else shared(batch, fields, self.replica)  # type: ignore[return-value]

    def put(self, batch: Batch | None) -> None:
        """Write this replica's columns; None: it has none. What the dock raises on one rank is raised on all."""
        error = None
        if self.leads and batch is not None and len(batch):
            try:
                self.context.dock.put(batch)
            except DocklandsError as failure:
                error = failure
        agree(self.everyone, error)


def reader_of(context: Context, mesh: Mesh) -> Reader:
    """For the ranks of a mesh: replicas are its data-parallel ranks."""
    layout = mesh.layout
    index = mesh.coords["dp"] * layout.fsdp + mesh.coords["fsdp"]
    return Reader(context, mesh.world, mesh.replica, index, layout.data)


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


def shared(batch: Batch | None, fields: Sequence[Field[Any]], group: Group) -> Batch:
    """The batch of the group's first rank, on all of its ranks; values travel as one tensor of bytes."""
    head: list[Any] = [None]
    payload = torch.empty(0, dtype=torch.uint8)
    if batch is not None:
        meta, frames = encode_batch(batch)
        pieces = [torch.frombuffer(frame, dtype=torch.uint8) for frame in frames if memoryview(frame).nbytes]
        head = [(meta, [memoryview(frame).nbytes for frame in frames])]
        payload = torch.cat([payload, *pieces])
    dist.broadcast_object_list(head, src=group.ranks[0], group=group.pg)
    if batch is not None:
        dist.broadcast(payload, group.ranks[0], group=group.pg)
        return batch
    meta, sizes = head[0]
    payload = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(payload, group.ranks[0], group=group.pg)
    frames = [piece.clone().numpy().data for piece in payload.split(sizes)]  # each aligned for its dtype
    row_ids, parts = decode_parts(meta, frames)
    return batch_of(row_ids, parts, {field.name: field for field in fields})
