"""vLLM in worker processes: one engine in each generator process, weights published by plan.

Legend: T packed tokens.

A *lane* is a tensor group, as in rollout.mesh. Each of its ranks runs a whole vLLM engine with its own shards (vLLM's
"external launcher"): the leader tells the others the requests, all schedule and draw alike, and vLLM's layers
communicate among themselves. A lane of one rank needs nobody.

vLLM makes its groups out of all processes that torch.distributed knows. Here these are trainers and other generators
too; so vLLM is started in a process group of the lane's alone, which takes the place of the default one meanwhile.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from docklands.config.schema import RolloutSection
from docklands.core.protocols import Generation, Request
from docklands.errors import RolloutError, reason_of
from docklands.models import ModelConfig
from docklands.models.params import table_for
from docklands.parallel.mesh import Group, Mesh
from docklands.rollout.vllm_engine import VllmEngine
from docklands.rollout.vllm_start import LANE
from docklands.sync.boxes import blocks_of

T = TypeVar("T")
NAMES = 1 << 20
"""Groups that a run makes at most."""


class VllmReplica(VllmEngine):
    """This rank's part of a replica; see VllmEngine, and MeshEngine for what a publisher and a worker ask of it.

    mesh  of a layout of tp and dp; see rollout.engines.check_engine for what it cannot be

    vLLM keeps weights in memory of its own: `hold` copies, and the planned buffers may go afterwards (`copies`).
    """

    copies = True

    def __init__(
        self,
        config: ModelConfig,
        rollout: RolloutSection,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        longest: int = 0,
    ) -> None:
        self.mesh, self.lane = mesh, mesh.tp
        with _world_of(self.lane):
            super().__init__(config, rollout, dtype=dtype, device=device, longest=longest, tensor_ranks=mesh.layout.tp)
            if self.is_leader:  # all have opened the lane's shared memory: it goes with them, however they end
                for path in Path("/dev/shm").glob(f"{os.environ[LANE]}-*"):
                    path.unlink(missing_ok=True)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        layout, at = self.mesh.layout, self.mesh.coords
        return {spec.name: blocks_of(spec, layout, at)[1] for spec in table_for(self.config).stored()}

    @property
    def is_leader(self) -> bool:
        """Whether samples are asked for here."""
        return self.lane is None or self.lane.rank == 0

    def hold(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy these tensors, of this rank's shapes, unless vLLM has this version. MissingWeight, ShapeMismatch."""
        self.wake()
        if version != self.version or not self._complete:
            self.load_weights(weights.items(), version)

    def set_aside(self) -> None:
        """Nothing runs between two calls of `generate`."""

    def take_up(self, aside: None) -> None:
        """See `set_aside`."""

    # --- sessions ---------------------------------------------------------------------------------------------

    def together(self, work: Callable[[], T] | None = None) -> T | None:
        """On every rank at once: leaders do `work`, which may call `generate` any number of times, the others help."""
        if self.lane is None:
            return work() if work is not None else None
        if not self.is_leader:
            while (requests := self._tell(None)) is not None:
                super().generate(requests)
            return None
        assert work is not None
        try:
            return work()
        finally:
            self._tell(None)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See VllmEngine. On leaders, inside a session."""
        if self.lane is not None:
            self._tell(requests)
        return super().generate(requests)

    def _tell(self, requests: Sequence[Request] | None) -> Sequence[Request] | None:
        """The leader's requests, on every rank of the lane; None: there are no more."""
        assert self.lane is not None
        told: list[Any] = [None if requests is None else tuple(requests)]
        try:
            dist.broadcast_object_list(told, self.lane.ranks[0], group=self.lane.pg, device=torch.device("cpu"))
        except RuntimeError as error:
            raise self._lost(error) from error
        return told[0]

    def _lost(self, error: RuntimeError) -> RolloutError:
        members = list(self.lane.ranks) if self.lane else []
        return RolloutError(
            f"vLLM on rank {self.mesh.rank}, together with processes {members}, failed: {reason_of(error)}",
            "is one of them dead, or stuck elsewhere? its log says",
        )

    def _signal(self, deadline: float) -> int:
        """The leader's, so that the lane's ranks end a round after the same step."""
        if self.lane is None:
            return super()._signal(deadline)
        told = torch.tensor([super()._signal(deadline)])
        try:
            dist.broadcast(told, self.lane.ranks[0], group=self.lane.pg)
        except RuntimeError as error:
            raise self._lost(error) from error
        return int(told)

    # --- a probe ----------------------------------------------------------------------------------------------

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> Tensor | None:
        """fp32 [T]: log p(token | those before it) of all tokens but each sequence's first, which is 0; end to end.

        On every rank at once, with the same sequences; None where not a leader.
        """
        found_T = torch.tensor([number for ids in sequences for number in self.prompt_logprobs(ids, temperature)])
        return found_T if self.is_leader else None


@contextmanager
def _world_of(lane: Group | None) -> Iterator[None]:
    """For a while torch.distributed knows the lane's ranks alone (or this process); its groups live on."""
    rank, size = (lane.rank, len(lane.ranks)) if lane else (0, 1)
    members = "-".join(map(str, lane.ranks if lane else [dist.get_rank()]))
    ours, count = c10d._world.default_pg, c10d._world.group_count
    backend, store = c10d.get_backend_config(ours), c10d._get_default_store()
    launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    before = {name: os.environ.get(name) for name in launched}
    c10d._update_default_pg(None)
    c10d._world.group_count = count + NAMES  # groups are named by it, and ours by the same numbers on every rank
    try:
        os.environ.update(launched)
        store = c10d.PrefixStore(f"vllm/{members}", store)
        if rank == 0:
            store.set("word", uuid.uuid4().hex[:12])
        os.environ[LANE] = store.get("word").decode()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        yield
    finally:
        c10d._update_default_pg(ours)
        c10d._world.group_count = count
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
