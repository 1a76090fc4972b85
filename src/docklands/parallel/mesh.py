"""The process groups of a layout. A group of one rank is None, so that code without parallelism has nothing to call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from docklands.errors import LayoutError
from docklands.parallel.layout import Layout

_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate. `rank` is this process's place among `ranks` (global ranks, in order)."""

    name: str
    pg: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The same ranks for torch's own parallel containers.

        Its name is new each time: torch caches decisions per mesh by value, and would else find, after the process
        group has been destroyed and made again, a mesh whose groups are gone.
        """
        return DeviceMesh.from_group(self.pg, device_type, mesh_dim_names=(f"{self.name}_{next(_serial)}",))


class Mesh:
    """This process's groups in a layout.

    tp, cp, pp, ep   as the layout says
    etp              columns of one expert: the tensor group, or None
    data             ranks with other rows (dp x fsdp)
    shard            ranks over which FSDP shards dense parameters (fsdp x cp); None without fsdp
    replicate        ranks that hold the same dense parameters and see other tokens; gradients are summed over it
    expert_shard, expert_replicate   the same for experts
    kv               ranks that hold the same kv heads, or None: see kv_group
    ends             first and last stage, which hold one tied embedding; None for stages in between
    world            all ranks of the layout; None if there is one
    replica          ranks that work on the same rows (pp x cp x tp); None if there is one
    """

    def __init__(self, layout: Layout, *, timeout_s: float = 600.0, first: int | None = None) -> None:
        """Call on every rank, after torch.distributed.init_process_group. Every wait in a group ends at `timeout_s`.

        first  the layout's ranks are first, first + 1, ... of a larger world, whose other ranks make no call; None:
               they are the world
        LayoutError when the number of processes is another than the layout's.
        """
        if not dist.is_initialized():
            raise LayoutError(f"layout {layout}: no process group", "start one process per rank (torch.distributed)")
        if first is None:
            layout.check_world(dist.get_world_size())
        self.layout = layout
        self.first, self._apart = first or 0, first is not None
        self.rank = dist.get_rank() - self.first
        self.coords = layout.coords(self.rank)
        self._timeout = timedelta(seconds=timeout_s)
        self._made: dict[tuple[int, ...], Any] = {}
        self._background: Any = None
        self.tp, self.cp, self.pp = self._axis("tp"), self._axis("cp"), self._axis("pp")
        self.ep = self._axis("ep")
        self.etp = self.tp if layout.etp > 1 else None
        self.data = self._axis("dp", "fsdp")
        expert = self._axis("edp")
        sharded = layout.fsdp > 1
        self.shard = self._axis("fsdp", "cp") if sharded else None
        self.replicate = self._axis("dp") if sharded else self._axis("dp", "cp")
        self.expert_shard, self.expert_replicate = (expert, None) if sharded else (None, expert)
        self.world = self._axis("pp", "dp", "fsdp", "cp", "tp")
        self.replica = self._axis("pp", "cp", "tp")
        self.ends = self._among("ends", [(g[0], g[-1]) for g in layout.groups("pp")]) if layout.pp > 1 else None

    def _axis(self, *axes: str) -> Group | None:
        return self._among("_".join(axes), self.layout.groups(*axes))

    def _among(self, name: str, groups: list[tuple[int, ...]]) -> Group | None:
        """Make all of these groups (every rank takes part in making each) and give this rank's."""
        mine = None
        for members in groups:
            ranks = tuple(self.first + rank for rank in members)
            if len(ranks) > 1 and ranks not in self._made:
                self._made[ranks] = self._new_group(ranks)
            if self.first + self.rank in ranks and len(ranks) > 1:
                mine = ranks
        pg = None if mine is None else self._made[mine]
        return None if mine is None or pg is None else Group(name, pg, mine, mine.index(self.first + self.rank))

    def _new_group(self, ranks: tuple[int, ...], **more: Any) -> Any:
        return dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=self._apart, **more)

    def kv_group(self, kv_heads: int) -> Group | None:
        """Ranks of the tensor group that hold the same kv head; None when each has its own. Call on every rank."""
        shared = self.layout.tp // kv_heads
        if shared <= 1:
            return None
        parts = [g[i : i + shared] for g in self.layout.groups("tp") for i in range(0, self.layout.tp, shared)]
        return self._among("kv", parts)

    def block(self, size: int) -> Group | None:
        """This rank's among consecutive blocks of `size` ranks. Call on every rank."""
        world = self.layout.world_size
        return self._among("block", [tuple(range(i, i + size)) for i in range(0, world, size)])

    def background(self) -> dist.ProcessGroup | None:
        """All ranks once more, over gloo: for a thread that communicates beside the training. Call on every rank."""
        if self.world is not None and self._background is None:
            self._background = self._new_group(self.world.ranks, backend="gloo")
        return self._background

    @property
    def is_first_stage(self) -> bool:
        return self.coords["pp"] == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coords["pp"] == self.layout.pp - 1
