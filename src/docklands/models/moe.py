"""The expert layer: router, experts, and the expert that every token goes through.

Legend: T packed tokens, D model, F feed-forward of an expert, E experts, k experts of a token, M rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from docklands import kernels
from docklands.kernels.grouped_mm import ExpertRows
from docklands.models.blocks import Block, FeedForward
from docklands.models.config import ModelConfig, MoeConfig
from docklands.models.routing import Routes, Routing, route, update_bias
from docklands.models.savers import again
from docklands.parallel.expert import ExpertParallel

if TYPE_CHECKING:
    from docklands.models.lora import Adapters


class Router(nn.Module):
    """weight [E, D]; bias [E] corrects the choice only, is not trained by gradient and stays fp32 in every model."""

    def __init__(self, config: MoeConfig, size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, size))
        bias = nn.Parameter(torch.empty(config.experts), requires_grad=False) if config.biased else None
        self.bias = bias

    def forward(self, x_TD: Tensor, given_Tk: Tensor | None = None) -> Routing:
        """Logits in fp32: two engines that round differently would else choose differently."""
        weight_ED = self.weight.to(x_TD.dtype).float()
        return route(kernels.linear(x_TD.float(), weight_ED), self.config, self.bias, given_Tk)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves as all modules do; a change of dtype passes the bias by (its steps of 0.001 are below bf16's)."""
        bias = self.bias
        if bias is None:
            return super()._apply(fn, recurse)
        self.bias = None
        super()._apply(fn, recurse)
        moved = fn(bias.data.view(torch.int32)).view(torch.float32)  # integers change device, never dtype
        if moved.device == bias.device:
            bias.data = moved
        else:
            bias = nn.Parameter(moved, requires_grad=False)
        self.bias = bias
        return self


class Experts(nn.Module):
    """gate_up [E, 2F, D] and down [E, D, F]: one grouped product each."""

    def __init__(self, config: MoeConfig, size: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.expert_size, size))
        self.down = nn.Parameter(torch.empty(config.experts, size, config.expert_size))
        self.lora: Adapters | None = None

    def forward(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Rows sorted by expert, `ends_E` int32 one past the last row of each -> y_MD."""
        gate_up_M = kernels.grouped_linear(x_MD, self.gate_up, ends_E)
        if self.lora is not None:
            gate_up_M = self.lora(x_MD, gate_up_M, "gate_up", ends_E)
        hidden_MF = again(kernels.swiglu_fused, gate_up_M)
        y_MD = kernels.grouped_linear(hidden_MF, self.down, ends_E)
        return y_MD if self.lora is None else self.lora(hidden_MF, y_MD, "down", ends_E)


class Moe(nn.Module):
    """sum over the chosen experts of weight * expert(x), and the shared expert's output.

    parallel: None: all experts are here
    """

    parallel: ExpertParallel | None = None

    def __init__(self, config: MoeConfig, size: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.router = Router(config, size)
        self.experts = Experts(config, size)
        self.shared = FeedForward(size, config.shared_size) if config.shared_size else None

    def forward(self, x_TD: Tensor, routes: Routes | None = None) -> Tensor:
        """-> y_TD. `routes`: keeps what the router chose, and says what it has to choose."""
        routing = self.router(x_TD, None if routes is None else routes.given(self.index))
        if routes is not None:
            routes.keep(self.index, routing)
        if self.parallel is None:
            rows = self._rows(routing.choice_Tk, x_TD)
            y_TD = kernels.unpermute(self.experts(kernels.permute(x_TD, rows), rows.ends_E), rows, routing.weight_Tk)
        else:
            y_TD = self._elsewhere(x_TD, routing, self.parallel)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def _rows(self, choice_Tk: Tensor, x: Tensor) -> ExpertRows:
        more = () if self.experts.lora is None else self.experts.lora.parameters()
        return ExpertRows(choice_Tk, self.experts.gate_up, self.experts.down, x.dtype, more)

    def _elsewhere(self, x_TD: Tensor, routing: Routing, parallel: ExpertParallel) -> Tensor:
        """Rows travel to the ranks that hold their experts, and back. -> y_TD"""
        x_TD, choice_Tk, weight_Tk = parallel.enter(x_TD, routing.choice_Tk, routing.weight_Tk)
        x_MD, expert_M, way = parallel.send(x_TD, choice_Tk)
        rows = self._rows(expert_M[:, None], x_MD)
        y_MD = self.experts(kernels.permute(x_MD, rows), rows.ends_E)[rows.row_Tk[:, 0]]
        y_TkD = parallel.back(y_MD, way)[way.row_Tk].float()
        return parallel.leave((y_TkD * weight_Tk[..., None]).sum(1).to(x_TD.dtype))


def balance(model: nn.Module, load_LE: Tensor, speed: float) -> None:
    """`update_bias` of every router that is here, by the load of a whole update in all layers with experts [L, E]."""
    for module in model.modules():
        if isinstance(module, Moe) and module.router.bias is not None:
            update_bias(module.router.bias, load_LE[module.index].to(module.router.bias.device), speed)


class MoeBlock(Block):
    """A block whose feed-forward part is a mixture of experts."""

    def add_feed_forward(self, config: ModelConfig) -> None:
        assert config.moe is not None
        self.moe = Moe(config.moe, config.hidden_size, config.sparse_layers.index(self.layer))

    def feed_forward(self, x_TD: Tensor, routes: Routes | None) -> Tensor:
        return self.moe(x_TD, routes)
