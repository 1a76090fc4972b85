"""The routers of a model in training: choices replayed, load counted, experts kept in use.

Legend: S tokens through the model (this rank's), L layers with experts, E experts, k experts of a token.

A token that stands for several rows (a shared prompt) counts that often, padding not at all: load and loss are those
of the rows one by one, however they are packed, split into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from docklands.config.schema import TrainSection
from docklands.core.batch import Batch
from docklands.errors import TrainError
from docklands.models.config import ModelConfig
from docklands.models.moe import balance
from docklands.models.routing import Routes, balance_loss, weighted_load
from docklands.train.microbatch import Layout, lay_out

if TYPE_CHECKING:
    from docklands.train.engine import TrainEngine

Passes = Iterable[tuple[Tensor, "Tensor | None"]]
"""(rows_S, routes_SLk) of micro-batches."""

Reduce = Callable[[Tensor], Tensor]
"""Sum over the ranks that hold other tokens or other layers, each token and layer once; the same on every rank."""


class Routers:
    """One engine's. Between `begin` and `metrics` the forward passes of one update; `settle` after the optimizer.

    load_LE  int64, of the update under way, and of this rank until `metrics` has reduced it
    """

    def __init__(self, config: ModelConfig, section: TrainSection, reduce: Reduce = lambda x: x) -> None:
        self.config, self.section, self._reduce = config, section, reduce
        self.shape = config.routed
        self._pending: Tensor | None = None  # load since the last optimizer step
        self._reset()

    def _reset(self) -> None:
        experts = self.config.moe.experts if self.config.moe else 0
        self.load_LE = torch.zeros(self.shape[0] if self.shape else 0, experts, dtype=torch.int64)
        self._counts = torch.zeros(2, dtype=torch.int64)  # tokens, replayed ones
        self._aux = torch.zeros(())
        self._whole: tuple[Tensor, int] | None = None

    # --- a forward pass ---------------------------------------------------------------------------------------

    def open(self, routes_SLk: Tensor | None, device: torch.device) -> Routes | None:
        """What a forward pass takes; None for a model without experts. TrainError: choices of another model."""
        if self.shape is None:
            return None
        if routes_SLk is None or not self.section.replay_routes:
            return Routes()
        if tuple(routes_SLk.shape[1:]) != self.shape:
            raise TrainError(
                f"router choices [tokens, {', '.join(map(str, routes_SLk.shape[1:]))}] do not fit this model: "
                f"{self.shape[0]} layers with experts, {self.shape[1]} experts of a token",
                "were they recorded by a generator of the same model?",
            )
        return Routes(routes_SLk.to(device))

    def attach(self, out: Tensor, routes: Routes | None, rows_S: Tensor, last: bool = True) -> Tensor:
        """Counts what the pass chose; -> `out`, through whose backward the balance loss gets its gradient too.

        last  whether this pass counts the tokens too (a pipeline has several passes for one micro-batch)
        """
        if routes is None:
            return out
        aux = None
        rows = rows_S.to(out.device)
        self.load_LE, self._counts = self.load_LE.to(out.device), self._counts.to(out.device)
        for index, routing in routes.kept():
            self.load_LE[index] += weighted_load(routing.choice_Tk, rows, routing.score_TE.shape[1])
            if self._whole is not None and torch.is_grad_enabled():
                load_LE, tokens = self._whole
                term = balance_loss(routing.score_TE, load_LE[index].to(out.device), tokens, rows) / len(load_LE)
                aux = term if aux is None else aux + term
        if last:
            given = routes.given(0)
            replayed = torch.zeros_like(rows) if given is None else rows * (given[:, 0] >= 0)
            self._counts += torch.stack([rows.sum(), replayed.sum()])
        if aux is None:
            return out
        self._aux = self._aux.to(out.device) + aux.detach()
        return _Attach.apply(out, self.section.router.aux_loss_coef * aux)  # type: ignore[return-value]

    # --- an update --------------------------------------------------------------------------------------------

    def begin(self, passes: Passes, run: Callable[[], None]) -> None:
        """Before the first pass of an update. The balance loss needs the load of all of it: from the recorded choices
        where every token has some, else from a forward pass over everything (`run`), which costs a third more.
        """
        self._reset()
        if self.shape is None or not self.section.router.aux_loss_coef:
            return
        found = [self._recorded(rows_S, routes_SLk) for rows_S, routes_SLk in passes]
        missing = self._reduce(torch.tensor([sum(each is None for each in found)]))
        if int(missing):
            with torch.no_grad():
                run()
        else:
            for load_LE, tokens in (each for each in found if each is not None):
                self.load_LE += load_LE
                self._counts[0] += tokens
        whole = self._reduce(self.load_LE).cpu(), int(self._reduce(self._counts)[0])
        self._reset()
        self._whole = whole if whole[1] else None

    def _recorded(self, rows_S: Tensor, routes_SLk: Tensor | None) -> tuple[Tensor, int] | None:
        """(load [L, E], tokens) by the recorded choices; None when one is missing; an idle pass has none."""
        if not bool((rows_S > 0).any()):
            return torch.zeros_like(self.load_LE), 0
        if routes_SLk is None or not self.section.replay_routes or bool((routes_SLk[rows_S > 0] < 0).any()):
            return None
        counted = rows_S > 0
        rows_S, routes_SLk = rows_S[counted], routes_SLk[counted]
        experts = self.load_LE.shape[1]
        load = [weighted_load(routes_SLk[:, index], rows_S, experts) for index in range(routes_SLk.shape[1])]
        return torch.stack(load), int(rows_S.sum())

    def metrics(self, name: str) -> dict[str, float]:
        """After the last pass: the load of all ranks, and what it looks like."""
        if self.shape is None:
            return {}
        self.load_LE, (tokens, replayed) = self._reduce(self.load_LE).cpu(), self._reduce(self._counts).tolist()
        self._pending = self.load_LE if self._pending is None else self._pending + self.load_LE
        if not tokens:
            return {}
        load_LE = self.load_LE.double()
        found = {
            "router_load_max": float((load_LE.amax(1) / load_LE.mean(1)).mean()),
            "router_idle": float((load_LE == 0).double().mean()),
            "router_replayed": replayed / tokens,
        }
        if self._whole is not None:
            found["router_aux_loss"] = float(self._reduce(self._aux))
        return {f"{name}/{what}": value for what, value in found.items()}

    def settle(self, models: Iterable[nn.Module]) -> None:
        """After an optimizer update: move the bias of every router of these, in place, by the load since the last."""
        load_LE, self._pending = self._pending, None
        rate = self.section.router.bias_update_rate
        if load_LE is not None and rate:
            for model in models:
                balance(model, load_LE, rate)

    def forget(self) -> None:
        """The update's gradients are forgotten: its load too."""
        self._pending = None


def begin_alone(engine: TrainEngine, batch: Batch, plans: list[Any]) -> None:
    """`begin` for the micro-batches of an engine in one process. `plans`: the rows of each."""

    def layouts() -> Iterator[Layout]:
        found = (lay_out(batch.select(rows), engine.section.share_prefix) for rows in plans)
        return (layout for layout in found if layout.num_tokens)

    def run() -> None:
        for layout in layouts():
            engine.states(layout)

    engine.routers.begin(((layout.rows_S, layout.routes_SLk) for layout in layouts()), run)


class _Attach(torch.autograd.Function):
    """A loss that depends on what lies before `out` and is not part of what is computed from it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones((), dtype=torch.float32)
