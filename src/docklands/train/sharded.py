"""The train engine over the ranks of a layout: the same verbs, called on every rank with the rows of its replica.

Legend: T tokens of a micro-batch end to end, S tokens through the model, U pairs (state, target) of this rank, D model.

Every rank of one data-parallel replica gets the same rows, and each computes the same loss from the same log-probs,
which are the only thing gathered. Counts are summed over replicas before the first micro-batch, metrics after the last.
Replicas make equally many passes, because their collectives (FSDP, experts) must match: one that has fewer
micro-batches runs a token whose loss is multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from docklands.config.schema import OptimSection, TrainSection
from docklands.core.batch import Batch, Jagged
from docklands.core.fields import LOSS_MASK
from docklands.core.loss import Denominators, ModelOutput
from docklands.core.stage import Learner
from docklands.errors import NonFinite, TrainError
from docklands.kernels import sampled_logprob
from docklands.kernels.deferred import Store
from docklands.kernels.logprob_parallel import VocabularyPart, sampled_logprob_parallel
from docklands.models import CausalLM, ValueModel
from docklands.models.lora import freeze_base
from docklands.models.sharded import ShardedModel
from docklands.obs.metrics import Metrics
from docklands.parallel import fsdp
from docklands.parallel.collectives import all_gather, all_reduce
from docklands.parallel.mesh import Mesh
from docklands.parallel.pipeline import Pipeline
from docklands.train.engine import SumCount, TrainEngine, spread
from docklands.train.microbatch import Layout, check_ids, lay_out, plan_microbatches
from docklands.train.offload import install, reset, saver_metrics, update_metrics
from docklands.train.routers import Routers
from docklands.train.sharded_optim import ShardedOptimizer
from docklands.train.share import Share, gathered, share_of

IDLE = Layout(
    torch.zeros(1, dtype=torch.long),
    torch.zeros(1, dtype=torch.long),
    [(0, [1])],
    torch.zeros(1, dtype=torch.long),
    torch.zeros(1, dtype=torch.long),
    torch.zeros(1, dtype=torch.long),
    torch.zeros(1, dtype=torch.long),
    torch.zeros(1, dtype=torch.long),
)
"""One token that predicts another: what a replica without work computes, and multiplies by 0."""


@dataclass
class Work:
    """One micro-batch of this replica; rows None: an idle pass."""

    layout: Layout
    share: Share
    batch: Batch | None = None
    rows: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """T of the plain layout."""
        return 1 if self.batch is None else self.batch.num_tokens


@dataclass
class Report:
    """What the last stage knows of an update; the same on every rank once merged."""

    metrics: Metrics = field(default_factory=Metrics)
    loss: float = 0.0
    packed: int = 0
    error: str = ""


class ShardedEngine(TrainEngine):
    """A policy or value model over a mesh, and its optimizer. Arguments and verbs as TrainEngine's.

    Each call is collective: all ranks make it, ranks of one replica with the same rows. Metrics and per-token results
    are the same on all ranks of a replica, metrics on all ranks.
    """

    def __init__(
        self,
        model: ShardedModel,
        section: TrainSection,
        optim: OptimSection | None,
        *,
        temperature: float = 1.0,
        max_tokens: int = 0,
        total_updates: int = 1,
    ) -> None:
        self.sharded, self.mesh, self.section = model, model.mesh, section
        self.temperature, self.max_tokens = temperature, max_tokens
        self.version = 0
        self.notes: list[str] = []
        self._learner = "actor"
        self.routers = Routers(model.config, section, lambda count: over_tokens(count, model))
        self.model = model.chunks[-1]  # type: ignore[assignment]
        self.saver = install(model.chunks, section, model.device)
        dtype = getattr(torch, section.dtype)
        gathers = self.mesh.layout.fsdp > 1  # then forward gathers the parameters in `dtype`
        if optim is None:
            self.optimizer = None
            for parameter in model.parameters().values():
                parameter.requires_grad_(False)
                if parameter.dim() >= 2 and not gathers:
                    parameter.data = parameter.data.to(dtype)
        else:
            freeze_base(model.parameters(), None if gathers else dtype)
            self.optimizer = ShardedOptimizer(model, optim, total_updates)
            self.optimizer.compute_in(dtype)

    @property
    def device(self) -> torch.device:
        return self.sharded.device

    @property
    def replicas_meet(self) -> bool:
        """A forward pass exchanges something with the replicas that have other rows: shards of parameters, experts."""
        return self.mesh.layout.fsdp > 1 or (self.mesh.layout.data > 1 and self.sharded.config.moe is not None)

    @property
    def _share_prefix(self) -> bool:
        """Ring attention splits whole sequences."""
        return self.section.share_prefix and not (self.mesh.cp and self.mesh.layout.context == "ring")

    def _plan(self, batch: Batch) -> list[Any]:
        check_ids(batch, self.sharded.config.vocab_size)
        return plan_microbatches(batch, self.section.tokens_per_microbatch, self._share_prefix)

    # --- work -------------------------------------------------------------------------------------------------

    def _agree(self, *counts: int) -> list[list[int]]:
        """These counts of every replica."""
        own = torch.tensor([counts], dtype=torch.int64, device=self.device)
        return (own if self.mesh.data is None else all_gather(own, self.mesh.data)).tolist()

    def _work(self, batch: Batch, alike: bool = True) -> list[Work]:
        """The micro-batches of this replica, as many as any replica has; not alike: those that it needs."""
        work = []
        for rows in self._plan(batch):
            micro = batch.select(rows)
            layout = lay_out(micro, self._share_prefix)
            if layout.num_tokens:
                work.append(Work(layout, share_of(layout, self.mesh, self.device), micro, rows))
        most = max(count for (count,) in self._agree(len(work))) if alike else len(work)
        return work + [Work(IDLE, share_of(IDLE, self.mesh, self.device)) for _ in range(most - len(work))]

    def _through(self, chunk: int, work: Work, x_SD: Tensor | None) -> Tensor:
        """One model chunk."""
        share, routers = work.share, self.routers
        routes = routers.open(share.routes_SLk, self.device)
        out = self.sharded.chunks[chunk](share.token_ids_S, share.positions_S, share.attend, x_SD, routes)
        last = self.mesh.is_last_stage and chunk == len(self.sharded.chunks) - 1
        return routers.attach(out, routes, share.rows_S, last)

    def _output(self, out: Tensor, work: Work, entropy: bool = False) -> ModelOutput:
        """What the last chunk gave -> log-probs or values in the plain layout, the same on all ranks of the stage."""
        share = work.share
        if isinstance(self.model, ValueModel):
            values = gathered(out[share.source_U], share, self.mesh)
            return ModelOutput(values_T=spread(values, work.layout, work.tokens))
        found = self._logprobs(out[share.source_U], share, entropy)
        pair = [gathered(value, share, self.mesh) for value in (found if isinstance(found, tuple) else (found,))]
        spreads = [spread(value, work.layout, work.tokens) for value in pair]
        return ModelOutput(spreads[0], spreads[1] if entropy else None)

    def _logprobs(self, hidden_UD: Tensor, share: Share, entropy: bool) -> Any:
        assert isinstance(self.model, CausalLM)
        weight, held = self.model.head_weight, self._logits(len(hidden_UD))
        if self.mesh.tp is None:
            return sampled_logprob(
                hidden_UD, weight, share.target_U, temperature=self.temperature, entropy=entropy, held=held
            )
        name = "embed.weight" if self.model.head is None else "head.weight"
        first_row = self.sharded.slots[name].cuts[0].pieces(self.mesh.tp.rank)[0].start
        part = VocabularyPart(self.mesh.tp.pg, first_row, held)
        return sampled_logprob_parallel(
            hidden_UD, weight, share.target_U, part, temperature=self.temperature, entropy=entropy
        )

    # --- forward ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _per_token(self, batch: Batch, what: str) -> Jagged:
        if what != ("values_T" if self.sharded.kind is ValueModel else "logprobs_T"):
            raise TrainError(f"a {self.sharded.kind.__name__} gives no {what.removesuffix('_T')}")
        work = self._work(batch, alike=self.replicas_meet)
        found = [torch.zeros(micro.tokens) for micro in work]

        def keep(out: Tensor, index: int) -> Tensor:
            found[index] = getattr(self._output(out, work[index]), what)
            return out

        self.run(work, keep, training=False)
        self.sharded.reshard()
        value = torch.cat([*found, torch.zeros(0)])
        if self.mesh.pp is not None:  # the last stage knows
            value = value.to(self.device)
            dist.broadcast(value, self.mesh.pp.ranks[-1], group=self.mesh.pp.pg)
        whole = Jagged(torch.zeros(batch.num_tokens), batch[LOSS_MASK].offsets)
        for micro, value_T in zip(work, value.cpu().split([micro.tokens for micro in work])):
            if micro.batch is None or micro.rows is None:
                continue
            for row, piece_T in zip(micro.rows, micro.batch.pack().unpack(value_T)):
                whole[int(row)].copy_(piece_T)
        return whole

    def run(self, work: list[Work], last: Callable[[Tensor, int], Tensor], training: bool) -> None:
        """All micro-batches through all stages. `last`: (what the last stage gave, index) -> what to differentiate."""
        mesh, optimizer = self.mesh, self.optimizer
        chunks = len(self.sharded.chunks)

        def forward(chunk: int, index: int, x_SD: Tensor | None) -> Tensor:
            out = self._through(chunk, work[index], x_SD)
            return last(out, index) if mesh.is_last_stage and chunk == chunks - 1 else out

        def after() -> None:
            if optimizer is not None:
                optimizer.gather()

        if mesh.pp is None:
            for index in range(len(work)):
                out = forward(0, index, None)
                if training:
                    out.backward()
                    after()
            return
        ranks = mesh.layout.tp if mesh.layout.sp else 1
        width, dtype = self.sharded.config.hidden_size, self.sharded.chunks[0].compute_dtype()
        later = Store if mesh.layout.schedule == "zero_bubble" else None
        shapes = [(micro.share.num_tokens // ranks, width) for micro in work]
        pipeline = Pipeline(mesh.pp, chunks, forward, shapes.__getitem__, after, later)
        pipeline.run(len(work), training, dtype, self.device)

    # --- training ---------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, learner: Learner) -> SumCount:
        optimizer = self._trainable()
        self._learner = name = learner.name
        reset(self.saver)
        denominators = self._denominators(batch)
        work = self._work(batch) if denominators.tokens else []
        report = Report()
        try:
            begin_routers(self, work)
            self.run(work, lambda out, i: self._loss(out, work[i], learner, denominators, report), training=True)
            report = merged(report, self.mesh)
            if report.error:
                raise NonFinite(report.error, "the weights are as before")
            report.metrics.add_values(self.routers.metrics(name))
        except BaseException:
            self._forget(optimizer)
            raise
        metrics = report.metrics
        if denominators.tokens:
            metrics.add(f"{name}/loss", report.loss)
            optimizer.made = True
        counts = {"tokens": denominators.tokens, "packed_tokens": report.packed, "microbatches": len(work)}
        metrics.add_values({f"{name}/{what}": count for what, count in counts.items()})
        metrics.merge(saver_metrics(name, self.saver))
        return metrics.pairs()

    def _loss(self, out: Tensor, work: Work, learner: Learner, denominators: Denominators, report: Report) -> Tensor:
        """The loss of one micro-batch, for backward; its figures go into the report."""
        output = self._output(out, work, learner.entropy)
        given = output.values_T if output.logprobs_T is None else output.logprobs_T
        assert given is not None
        if work.batch is None:
            return 0.0 * given.sum()
        result = learner.loss(work.batch.pack(), output, denominators)
        loss = float(result.loss.detach())
        if not np.isfinite(loss):  # the other ranks are on their way: all raise together, after the last pass
            report.error = report.error or self._why_not_finite(work.batch, output, learner, result.loss)
        else:
            report.metrics.merge({k: (float(s), float(c)) for k, (s, c) in result.metrics.items()})
            report.loss += loss
            report.packed += work.layout.num_tokens
        return result.loss if result.loss.requires_grad else 0.0 * given.sum()

    def _denominators(self, batch: Batch) -> Denominators:
        own = super()._denominators(batch)
        counts = self._agree(own.tokens, own.sequences)
        return Denominators(sum(t for t, _ in counts), sum(s for _, s in counts), self.max_tokens)

    def optim_step(self) -> SumCount:
        optimizer, name = self._trainable(), self._learner
        if not optimizer.made:
            return {f"{name}/skipped_updates": (1.0, 1.0)}
        try:
            norm, lr = optimizer.step()
        except NonFinite:
            self._forget(optimizer)
            raise
        self.routers.settle(self.sharded.chunks)
        return update_metrics(name, norm, lr, optimizer.resting)

    def _trainable(self) -> ShardedOptimizer:
        if self.optimizer is None:
            raise TrainError("these weights are frozen", "a reference policy is not updated")
        assert isinstance(self.optimizer, ShardedOptimizer)
        return self.optimizer

    # --- weights and state ------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every parameter as the forward pass uses it, gathered one at a time on every rank."""
        own = {name: p.detach() for name, p in self.sharded.parameters().items()}
        if self.mesh.layout.fsdp > 1:  # all in fp32, not only what is sharded
            own |= {name: master for name, master in self.masters().items() if fsdp.window(own[name]) is None}
        return self.sharded.whole(own)

    def masters(self) -> dict[str, Tensor]:
        """fp32 shards of this rank's that are trained, by name (the live ones); of a frozen engine, all."""
        own = {name: p.detach() for name, p in self.sharded.parameters().items()}
        return dict(self.optimizer.masters) if self.optimizer else own

    def state_dict(self) -> dict[str, Any]:
        """TrainError: no process holds it; see sharded_checkpoint.py."""
        raise TrainError("one rank's state is not the model's", "sharded_checkpoint saves what all ranks hold")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """TrainError; see sharded_checkpoint.py."""
        raise TrainError("one rank's state is not the model's", "sharded_checkpoint loads what all ranks hold")


def begin_routers(engine: ShardedEngine, work: list[Work]) -> None:
    """`Routers.begin` on every rank of a layout."""

    def trial() -> None:
        engine.run(work, lambda out, _: out, training=False)
        engine.sharded.reshard()

    counted = work if engine.mesh.is_last_stage else []  # all stages have the same tokens
    engine.routers.begin(((micro.share.rows_S, micro.share.routes_SLk) for micro in counted), trial)


def over_tokens(count: Tensor, model: ShardedModel) -> Tensor:
    """Sum over all ranks of a count of a rank's own tokens and layers (a model with experts needs sequence parallelism,
    so no two tensor ranks have the same tokens). On the CPU.
    """
    world = model.mesh.world
    return count if world is None else all_reduce(count.to(model.device, copy=True), world).cpu()


def merged(report: Report, mesh: Mesh) -> Report:
    """One report from those of all replicas, the same on every rank."""
    if mesh.world is None:
        return report
    speaks = mesh.coords["tp"] == mesh.coords["cp"] == 0 and mesh.is_last_stage
    own = (report.metrics.to_dict(), report.loss, report.packed, report.error) if speaks else None
    found: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(found, own, group=mesh.world.pg)
    whole = Report()
    for said in found:
        if said is not None:
            whole.metrics.merge(Metrics.from_dict(said[0]))
            whole.loss, whole.packed = whole.loss + said[1], whole.packed + said[2]
            whole.error = whole.error or said[3]
    return whole
