"""A causal language model over packed tokens, and the same trunk with a value head.

Legend: T packed tokens, D model, V vocabulary, H head dim.

Precision: the trunk computes in the autocast dtype when autocast is on, else in the dtype of its weights. The residual
stream has that dtype too and statistics are fp32, so a trainer under bf16 autocast with fp32 masters and a generator
that holds bf16 copies of them compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from docklands import kernels
from docklands.models import lora
from docklands.models.adapters import is_adapter
from docklands.models.blocks import (
    AttentionContext,
    Block,
    Embedding,
    Linear,
    RmsNorm,
    inverse_frequencies,
    rotary_factor,
    rotary_tables,
)
from docklands.models.config import ModelConfig
from docklands.models.mla import MlaBlock
from docklands.models.moe import MoeBlock
from docklands.models.params import ParamTable, table_for
from docklands.models.routing import Routes
from docklands.models.savers import Saver
from docklands.parallel.collectives import collect
from docklands.parallel.tensor import TensorParallel


class MlaMoeBlock(MlaBlock, MoeBlock):
    """Latent attention and a mixture of experts."""


def block_for(config: ModelConfig, layer: int) -> Block:
    """The block of a layer, by what the config says of its attention and its experts."""
    sparse = config.moe is not None and config.moe.is_sparse(layer)
    if config.mla is None:
        return (MoeBlock if sparse else Block)(config, layer)
    return (MlaMoeBlock if sparse else MlaBlock)(config, layer)


class Trunk(nn.Module):
    """Embedding, blocks, final norm. `recompute`: keep only each block's input and compute it again in backward.
    `saver`: what the blocks keep for backward, and where; None: all of it, here.

    A pipeline stage holds some of these; what it lacks is None (see shard.py). `tp`: the tensor-parallel ranks.
    """

    tp: TensorParallel | None = None
    activation_dtype: torch.dtype | None = None
    saver: Saver | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block_for(config, layer) for layer in range(config.num_layers))
        self.final_norm = RmsNorm(config.hidden_size, config.rms_eps)
        self._inverse: Tensor | None = None

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        if self.activation_dtype is not None:
            return self.activation_dtype
        weight = next(p for p in self.parameters() if p.dim() > 1)
        device = weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype

    def rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos_TH and sin_TH, fp32, for these positions."""
        if self._inverse is None or self._inverse.device != positions_T.device:
            self._inverse = inverse_frequencies(self.config).to(positions_T.device)
        return rotary_tables(self._inverse, positions_T, rotary_factor(self.config))

    def hidden(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: AttentionContext,
        x_TD: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """-> hidden_TD after the final norm. A stage without embedding starts from `x_TD`; one without norm ends there.

        Under sequence parallelism the states are this rank's: [T / tp, D]. `routes` keeps and replays router choices.
        """
        dtype = self.compute_dtype()
        with torch.autocast(token_ids_T.device.type, enabled=False):
            if self.embed is not None:
                x_TD = self.embed(token_ids_T, dtype)
            assert x_TD is not None
            cos_TH, sin_TH = self.rotary(positions_T)
            training = torch.is_grad_enabled()
            recompute, saver = self.recompute and training, self.saver if training else None
            for layer in self.layers:
                if layer is None:
                    continue
                inputs = (x_TD, cos_TH, sin_TH, attend, routes)
                with nullcontext() if saver is None else saver.layer(layer):
                    if recompute:
                        x_TD = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
                    else:
                        x_TD = layer(*inputs)
            assert x_TD is not None
            return x_TD if self.final_norm is None else self.final_norm(x_TD)


class CausalLM(Trunk):
    """The language model. Calling it gives hidden states; the head's weight goes to kernels.sampled_logprob."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table: ParamTable = table_for(config)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        if config.lora is not None:
            lora.attach(self, self.table, config.lora.scale)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: AttentionContext,
        x_TD: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """-> hidden_TD, final norm applied, no head. From all but a last stage: what the next one starts from."""
        hidden_TD = self.hidden(token_ids_T, positions_T, attend, x_TD, routes)
        return hidden_TD if self.tp is None or self.final_norm is None else self.tp.enter(hidden_TD)

    @property
    def head_weight(self) -> Tensor:
        """[V, D] (tensor-parallel: this rank's rows); the embedding itself when tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """-> logits_TV in hidden's dtype: for generation and tests; training never holds [T, V]."""
        return kernels.linear(hidden_TD, self.head_weight)


class ValueModel(Trunk):
    """The same trunk with one number per token: the value of the state that the token leaves behind."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table: ParamTable = table_for(config, value_head=True)
        self.value_head = Linear(config.hidden_size, 1, bias=True)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: AttentionContext,
        x_TD: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """-> values_T, fp32. From all but a last stage: the states that the next one starts from."""
        hidden_TD = self.hidden(token_ids_T, positions_T, attend, x_TD, routes)
        if self.value_head is None:
            return hidden_TD
        with torch.autocast(token_ids_T.device.type, enabled=False):
            values_T = self.value_head(hidden_TD.float()).squeeze(-1)
        return collect(values_T, self.tp.group) if self.tp is not None and self.tp.sequence else values_T


@torch.no_grad()
def init_weights(model: Trunk, seed: int) -> None:
    """Normal matrices (config.init_std), unit norms, zero biases and value head; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.copy_(initial(name, parameter.shape, model.config, generator))
    if isinstance(model, CausalLM):
        lora.init_adapters(model, model.table, seed)


def initial(name: str, shape: Sequence[int], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """First values of one parameter, fp32 on the CPU; see `init_weights`."""
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    if name.endswith("bias") or name.startswith("value_head"):
        return torch.zeros(*shape)
    return torch.empty(*shape).normal_(0.0, config.init_std, generator=generator)
