"""The train engine, in one process: log-probs and values, forward_backward, optim_step, save and load.

Legend: T tokens of a micro-batch end to end, S tokens through the model, M trained tokens, D model, V vocabulary.

A loss always sees the plain layout: every row whole, one entry per token. What goes through the model is smaller (see
microbatch.py), and the head runs on the states that predict a trained token only, so neither [T, D] nor [T, V] is made.
The same batch gives the same micro-batches in every verb, so log-probs taken before an update equal those inside it
bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from docklands import kernels
from docklands.config.schema import OptimSection, TrainSection
from docklands.core.batch import Batch, Jagged
from docklands.core.fields import LOSS_MASK
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Learner
from docklands.errors import NonFinite, TrainError
from docklands.kernels.logprob import CHUNK_ELEMENTS, KEPT_BYTES, Held
from docklands.kernels.prefix_attention import PrefixAttention
from docklands.models import CausalLM, ValueModel
from docklands.models.lora import adapters_of, freeze_base, merged
from docklands.obs.metrics import Metrics
from docklands.train.microbatch import Layout, check_ids, lay_out, plan_microbatches
from docklands.train.offload import install, reset, saver_metrics, update_metrics
from docklands.train.optim import Optimizer, copy_named
from docklands.train.routers import Routers, begin_alone

log = logging.getLogger("docklands.train")

SumCount = dict[str, tuple[float, float]]


class TrainEngine:
    """A policy or a value model and its optimizer.

    optim          None: the weights are frozen (a reference policy); only the forward verbs work
    temperature    the rollout's: log-probs are of softmax(logits / temperature)
    max_tokens     the response limit, for losses that divide by it
    total_updates  optimizer updates of the whole run: the schedule's horizon

    version        of the weights, as published; the owner sets it, and it is saved and restored
    notes          after load_state_dict: settings that differ from the saved ones, a line each
    """

    def __init__(
        self,
        model: CausalLM | ValueModel,
        section: TrainSection,
        optim: OptimSection | None,
        *,
        temperature: float = 1.0,
        max_tokens: int = 0,
        total_updates: int = 1,
    ) -> None:
        self.model = model
        self.section = section
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.version = 0
        self.notes: list[str] = []
        self._learner = "actor"
        self.routers = Routers(model.config, section)
        self.saver = install([model], section, next(model.parameters()).device)
        dtype = getattr(torch, section.dtype)
        named = dict(model.named_parameters())
        if optim is None:
            self.optimizer = None
            for parameter in named.values():
                parameter.requires_grad_(False)
                if parameter.dim() >= 2:
                    parameter.data = parameter.data.to(dtype)
        else:
            model.float()
            self.optimizer = Optimizer(freeze_base(named, dtype), optim, total_updates)
            self.optimizer.compute_in(dtype)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def updates(self) -> int:
        """Optimizer updates made."""
        return self.optimizer.updates if self.optimizer else 0

    # --- forward ----------------------------------------------------------------------------------------------

    def logprobs(self, batch: Batch) -> Jagged:
        """fp32 log p(token_t | token_<t) of every token under the loss mask, 0 elsewhere; aligned with TOKEN_IDS."""
        return self._per_token(batch, "logprobs_T")

    def values(self, batch: Batch) -> Jagged:
        """fp32 value of the state before each token under the loss mask is sampled, 0 elsewhere."""
        return self._per_token(batch, "values_T")

    @torch.no_grad()
    def _per_token(self, batch: Batch, what: str) -> Jagged:
        whole = Jagged(torch.zeros(batch.num_tokens), batch[LOSS_MASK].offsets)
        for rows in self._plan(batch):
            micro = batch.select(rows)
            value_T = getattr(self._forward(lay_out(micro, self.section.share_prefix), micro.num_tokens), what)
            if value_T is None:
                raise TrainError(f"a {type(self.model).__name__} gives no {what.removesuffix('_T')}")
            for row, piece_T in zip(rows, micro.pack().unpack(value_T)):
                whole[int(row)].copy_(piece_T)
        return whole

    def _plan(self, batch: Batch) -> list[Any]:
        check_ids(batch, self.model.config.vocab_size)
        return plan_microbatches(batch, self.section.tokens_per_microbatch, self.section.share_prefix)

    def _forward(self, layout: Layout, tokens: int, entropy: bool = False) -> ModelOutput:
        """Through the model, then back into the plain layout of `tokens` entries."""
        if not layout.num_tokens:
            empty_T = torch.zeros(tokens)
            return ModelOutput(empty_T, empty_T if entropy else None, empty_T)
        out, device = self.states(layout), self.device
        source = layout.source.to(device)
        if isinstance(self.model, ValueModel):
            return ModelOutput(values_T=spread(out[source], layout, tokens))
        found = kernels.sampled_logprob(
            out[source],
            self.model.head_weight,
            layout.target.to(device),
            temperature=self.temperature,
            entropy=entropy,
            held=self._logits(len(source)),
        )
        logprobs, entropies = found if isinstance(found, tuple) else (found, None)
        entropy_T = None if entropies is None else spread(entropies, layout, tokens)
        return ModelOutput(spread(logprobs, layout, tokens), entropy_T)

    def states(self, layout: Layout) -> Tensor:
        """What the trunk makes of a micro-batch: hidden_SD, or values_S."""
        device = self.device
        attend, routes = PrefixAttention(layout.groups, device), self.routers.open(layout.routes_SLk, device)
        out = self.model(layout.token_ids_S.to(device), layout.positions_S.to(device), attend, routes=routes)
        return self.routers.attach(out, routes, layout.rows_S)

    def _logits(self, states: int) -> Held:
        """Never more logits at once than logprob_chunk_tokens tokens have."""
        most = self.section.logprob_chunk_tokens * self.model.config.vocab_size
        chunk = max(1, min(CHUNK_ELEMENTS, most) // max(1, states))
        itemsize = getattr(torch, self.section.dtype).itemsize
        return Held(chunk, min(KEPT_BYTES, max(0, most - chunk * states) * itemsize))

    # --- training ---------------------------------------------------------------------------------------------

    def update(self, batch: Batch, learner: Learner) -> SumCount:
        """forward_backward, then optim_step."""
        return {**self.forward_backward(batch, learner), **self.optim_step()}

    def forward_backward(self, batch: Batch, learner: Learner) -> SumCount:
        """Gradients of the learner's loss over the whole batch, in micro-batches, divided by one global denominator.

        Returns metrics (sum, count) of the update. Without a trained token nothing is computed. Raises NonFinite, with
        all gradients forgotten.
        """
        optimizer = self._trainable()
        self._learner = name = learner.name
        reset(self.saver)
        denominators = self._denominators(batch)
        metrics = Metrics()
        total, passes, packed = 0.0, 0, 0
        plans = self._plan(batch) if denominators.tokens else []
        try:
            begin_alone(self, batch, plans)
            for rows in plans:
                micro = batch.select(rows)
                layout = lay_out(micro, self.section.share_prefix)
                if not layout.num_tokens:
                    continue
                result = self._backward(micro, layout, learner, denominators)
                optimizer.gather()
                metrics.merge({k: (float(s), float(c)) for k, (s, c) in result.metrics.items()})
                total, passes, packed = total + float(result.loss.detach()), passes + 1, packed + layout.num_tokens
        except BaseException:
            self._forget(optimizer)
            raise
        metrics.add_values(self.routers.metrics(name))
        if denominators.tokens:
            metrics.add(f"{name}/loss", total)
        counts = {"tokens": denominators.tokens, "packed_tokens": packed, "microbatches": passes}
        metrics.add_values({f"{name}/{what}": count for what, count in counts.items()})
        metrics.merge(saver_metrics(name, self.saver))
        return metrics.pairs()

    def _forget(self, optimizer: Optimizer) -> None:
        optimizer.clear()
        self.routers.forget()

    def _backward(self, micro: Batch, layout: Layout, learner: Learner, denominators: Denominators) -> LossResult:
        out = self._forward(layout, micro.num_tokens, learner.entropy)
        result = learner.loss(micro.pack(), out, denominators)
        if not torch.isfinite(result.loss):
            raise NonFinite(self._why_not_finite(micro, out, learner, result.loss), "the weights are as before")
        if result.loss.requires_grad:
            result.loss.backward()
        return result

    def _why_not_finite(self, micro: Batch, out: ModelOutput, learner: Learner, loss: Tensor) -> str:
        packed = micro.pack()
        where = f"at update {self.updates + 1}"
        for what in ("logprobs_T", "entropy_T", "values_T"):
            value_T = getattr(out, what)
            if value_T is not None and not torch.isfinite(value_T).all():
                at = int(torch.nonzero(~torch.isfinite(value_T))[0])
                row = int(micro.row_ids[int(packed.row_T[at])])
                return f"{learner.name} {what.removesuffix('_T')} of row {row} is {float(value_T.detach()[at])} {where}"
        return f"the loss of {learner.name} is {float(loss.detach())} {where} (its inputs from the model are finite)"

    def _denominators(self, batch: Batch) -> Denominators:
        """Global counts over the whole update, whatever its micro-batches are."""
        trained = batch[LOSS_MASK]
        per_row = [bool(mask.any()) for mask in trained]
        return Denominators(int(trained.values.sum()), sum(per_row), self.max_tokens)

    def optim_step(self) -> SumCount:
        """One AdamW update; skipped and counted when no gradient was made. Raises NonFinite, weights unchanged."""
        optimizer, name = self._trainable(), self._learner
        if not optimizer.gradients():
            return {f"{name}/skipped_updates": (1.0, 1.0)}
        try:
            norm, lr = optimizer.step()
        except NonFinite:
            self._forget(optimizer)
            raise
        self.routers.settle([self.model])
        return update_metrics(name, norm, lr, optimizer.resting)

    def _trainable(self) -> Optimizer:
        if self.optimizer is None:
            raise TrainError("these weights are frozen", "a reference policy is not updated")
        return self.optimizer

    # --- weights and state ------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every parameter as the forward pass uses it; tied ones once. The tensors are live."""
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `parts`; adapters are merged into new tensors, one at a time."""
        lora = self.model.config.lora
        return self.parts() if lora is None else merged(self.parts(), self.model.table, lora.scale)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Of `parts`, what is trained where there are adapters."""
        return adapters_of(self.parts())

    def masters(self) -> dict[str, Tensor]:
        """fp32 weights that are trained, by name (the live ones); of a frozen engine, what it computes with."""
        return dict(self.optimizer.masters) if self.optimizer else dict(self.parts())

    def state_dict(self) -> dict[str, Any]:
        """fp32 weights, optimizer, schedule, counts, version. The tensors are live: write them at once."""
        state: dict[str, Any] = {"version": self.version, "model": self.masters()}
        if self.optimizer:
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything that state_dict gave, in place. CheckpointError when a part is missing or of another model.

        A missing optimizer state is an error, never a fresh one; settings that differ are logged and kept in `notes`.
        """
        if self.optimizer is None:
            copy_named(state.get("model"), dict(self.parts()), "weights")
        else:
            self.optimizer.check_state(state.get("optimizer"))
            self.optimizer.load_masters(state.get("model"))  # checks too, before it copies
            self.notes = self.optimizer.load_state_dict(state["optimizer"])
            self._forget(self.optimizer)
        self.version = int(state.get("version", 0))
        for note in self.notes:
            log.warning("resumed with a changed setting: optim.%s", note)


def spread(value: Tensor, layout: Layout, tokens: int) -> Tensor:
    """Values of the distinct states -> fp32 [T] in the plain layout, on the CPU where losses run; 0 off the mask."""
    value_M = value.float().cpu()[layout.of_M]
    return torch.zeros(tokens).index_put((layout.trained,), value_M)
