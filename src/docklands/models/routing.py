"""Which experts a token goes to, and what is kept of that choice: for replay, for balance, for the auxiliary loss.

Legend: T packed tokens, E experts, k experts of a token, L layers with experts, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from docklands.errors import TrainError
from docklands.kernels.grouped_mm import count
from docklands.models.config import MoeConfig


@dataclass(frozen=True)
class Routing:
    """What a router decided.

    choice_Tk   int64, distinct experts of each token
    weight_Tk   fp32, what their outputs are multiplied by; carries the router's gradient
    score_TE    fp32, softmax or sigmoid of the logits, before any bias
    """

    choice_Tk: Tensor
    weight_Tk: Tensor
    score_TE: Tensor


def route(
    logits_TE: Tensor, config: MoeConfig, bias_E: Tensor | None = None, given_Tk: Tensor | None = None
) -> Routing:
    """Scores, choice and weights from fp32 logits.

    softmax: the k largest probabilities (arXiv 2505.09388). sigmoid: the k largest of score + bias inside the groups
    with the largest sum of their two best (arXiv 2412.19437, eq. 12 to 16); the bias never enters a weight.

    given_Tk  a choice to replay; -1 in the first place of a row: the router chooses for that token
    """
    score_TE = logits_TE.sigmoid() if config.scoring == "sigmoid" else logits_TE.softmax(-1)
    with torch.no_grad():
        choice_Tk = choose(score_TE if bias_E is None else score_TE + bias_E, config)
        if given_Tk is not None:
            if given_Tk.shape != choice_Tk.shape:
                raise TrainError(
                    f"router choices to replay have shape {tuple(given_Tk.shape)}, expected {tuple(choice_Tk.shape)}"
                )
            given_Tk = given_Tk.to(choice_Tk)
            choice_Tk = torch.where(given_Tk[:, :1] < 0, choice_Tk, given_Tk)
    weight_Tk = score_TE.gather(1, choice_Tk)
    if config.normalize:
        weight_Tk = weight_Tk / (weight_Tk.sum(-1, keepdim=True) + 1e-20)
    return Routing(choice_Tk, weight_Tk * config.scale, score_TE)


def choose(preference_TE: Tensor, config: MoeConfig) -> Tensor:
    """The k preferred experts of each token, int64, inside its preferred groups."""
    if config.groups > 1:
        by_group_TGE = preference_TE.unflatten(1, (config.groups, -1))
        best_TG = by_group_TGE.topk(2, -1).values.sum(-1).topk(config.top_groups, -1, sorted=False).indices
        allowed_TG = torch.zeros(by_group_TGE.shape[:2], dtype=torch.bool, device=best_TG.device)
        allowed_TG.scatter_(1, best_TG, True)
        preference_TE = by_group_TGE.masked_fill(~allowed_TG[..., None], -torch.inf).flatten(1)
    return preference_TE.topk(config.top_k, -1).indices


class Routes:
    """The router choices of one forward pass: kept, and replayed where they are given.

    Replay keeps a trainer on the experts that the generator used, so that a change of routing between engines cannot
    change a log-prob (arXiv 2510.11370); the router's gradient flows through the weights of the replayed experts.

    replay_TLk  int, L counts the layers with experts; -1: not recorded, the router chooses
    """

    def __init__(self, replay_TLk: Tensor | None = None) -> None:
        self._replay_TLk = replay_TLk
        self._found: dict[int, Routing] = {}

    def given(self, index: int) -> Tensor | None:
        """The choice [T, k] to replay in the `index`-th layer with experts."""
        return None if self._replay_TLk is None else self._replay_TLk[:, index]

    def keep(self, index: int, routing: Routing) -> None:
        """Remember a layer's routing. The first stays: recomputation in backward calls again."""
        self._found.setdefault(index, routing)

    def choices(self) -> Tensor:
        """int16 [T, L, k]: the column to store and to replay. TrainError when no layer has been kept."""
        return torch.stack([routing.choice_Tk.to(torch.int16) for routing in self._layers()], 1)

    def load(self) -> Tensor:
        """int64 [L, E]: how often each expert was chosen."""
        return torch.stack([count(routing.choice_Tk, routing.score_TE.shape[1]) for routing in self._layers()])

    def kept(self) -> Iterator[tuple[int, Routing]]:
        """(index among the layers with experts, routing) of every layer that has run; a pipeline stage has some."""
        return ((index, self._found[index]) for index in sorted(self._found))

    def balance_loss(self, load_LE: Tensor | None = None, tokens: int | None = None) -> Tensor:
        """Mean over layers of `balance_loss`. `load_LE` and `tokens`: of the whole update (default: of this pass)."""
        load_LE = self.load() if load_LE is None else load_LE
        layers = self._layers()
        tokens = len(layers[0].choice_Tk) if tokens is None else tokens
        terms = [balance_loss(routing.score_TE, load_E, tokens) for routing, load_E in zip(layers, load_LE)]
        return torch.stack(terms).mean()

    def _layers(self) -> list[Routing]:
        if not self._found:
            raise TrainError("no router has run", "the model has no layer with experts, or the forward pass is to come")
        return [self._found[index] for index in sorted(self._found)]


def weighted_load(choice_Tk: Tensor, weight_T: Tensor, experts: int) -> Tensor:
    """int64 [E]: how often each expert was chosen, a token counted `weight_T` times."""
    load_E = torch.zeros(experts, dtype=torch.int64, device=choice_Tk.device)
    return load_E.scatter_add_(0, choice_Tk.long().flatten(), weight_T[:, None].expand_as(choice_Tk).flatten())


def balance_loss(score_TE: Tensor, load_E: Tensor, tokens: int, weight_T: Tensor | None = None) -> Tensor:
    """E * sum_e f_e * P_e (Switch Transformer, arXiv 2101.03961, eq. 4 to 6): k when every expert is used alike.

    f_e = load_e / tokens and P_e = sum over tokens of the normalised score / tokens. With load and tokens of the whole
    update the losses of its micro-batches add up to that of the update, whatever the split (arXiv 2501.11873).

    weight_T  how often each token counts (a shared one stands for several); None: once
    """
    share_TE = score_TE / score_TE.sum(-1, keepdim=True)
    if weight_T is not None:
        share_TE = share_TE * weight_T[:, None]
    return score_TE.shape[1] * (load_E.to(share_TE.dtype) @ share_TE.sum(0)) / tokens**2


@torch.no_grad()
def update_bias(bias_E: Tensor, load_E: Tensor, speed: float) -> None:
    """Balance without a loss, in place: -speed for experts above the mean load, +speed below it.

    arXiv 2408.15664, algorithm 1; DeepSeek-V3 used 0.001 (arXiv 2412.19437, section 4.2). `load_E` is that of the whole
    update, over all micro-batches and data-parallel ranks.
    """
    load_E = load_E.to(bias_E.dtype)
    bias_E.add_(torch.sign(load_E.mean() - load_E), alpha=speed)
