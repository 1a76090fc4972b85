"""A dense causal language model over packed tokens, and the same trunk with a value head.

Legend: T packed tokens, D model, V vocabulary, H head dim.

Precision: the trunk computes in the autocast dtype when autocast is on, else in the dtype of its weights. The residual
stream has that dtype too and statistics are fp32, so a trainer under bf16 autocast with fp32 masters and a generator
that holds bf16 copies of them compute the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from docklands import kernels
from docklands.models.blocks import (
    AttentionContext,
    Block,
    Embedding,
    Linear,
    RmsNorm,
    inverse_frequencies,
    rotary_tables,
)
from docklands.models.config import ModelConfig
from docklands.models.params import ParamTable, table_for


class Trunk(nn.Module):
    """Embedding, blocks, final norm. `recompute`: keep only each block's input and compute it again in backward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = RmsNorm(config.hidden_size, config.rms_eps)
        self._inverse: Tensor | None = None

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        device = self.embed.weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.embed.weight.dtype

    def rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos_TH and sin_TH, fp32, for these positions."""
        if self._inverse is None or self._inverse.device != positions_T.device:
            self._inverse = inverse_frequencies(self.config).to(positions_T.device)
        return rotary_tables(self._inverse, positions_T)

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attend: AttentionContext) -> Tensor:
        """-> hidden_TD after the final norm."""
        dtype = self.compute_dtype()
        with torch.autocast(token_ids_T.device.type, enabled=False):
            x_TD = self.embed(token_ids_T, dtype)
            cos_TH, sin_TH = self.rotary(positions_T)
            recompute = self.recompute and torch.is_grad_enabled()
            for layer in self.layers:
                if recompute:
                    x_TD = checkpoint(
                        layer, x_TD, cos_TH, sin_TH, attend, use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    x_TD = layer(x_TD, cos_TH, sin_TH, attend)
            return self.final_norm(x_TD)


class CausalLM(Trunk):
    """The language model. Calling it gives hidden states; the head's weight goes to kernels.sampled_logprob."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table: ParamTable = table_for(config)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: AttentionContext) -> Tensor:
        """-> hidden_TD, final norm applied, no head."""
        return self.hidden(token_ids_T, positions_T, attend)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding itself when tied."""
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

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: AttentionContext) -> Tensor:
        """-> values_T, fp32."""
        hidden_TD = self.hidden(token_ids_T, positions_T, attend).float()
        with torch.autocast(token_ids_T.device.type, enabled=False):
            return self.value_head(hidden_TD).squeeze(-1)


@torch.no_grad()
def init_weights(model: Trunk, seed: int) -> None:
    """Normal matrices (config.init_std), unit norms, zero biases and value head; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias") or name.startswith("value_head"):
            parameter.zero_()
        else:
            draw = torch.empty(parameter.shape).normal_(0.0, model.config.init_std, generator=generator)
            parameter.copy_(draw)
