"""Expert parallelism: rows travel to the ranks that hold their experts, and back. Nothing is dropped.

Legend: T tokens of this rank, k experts of a token, D model, M rows that arrive here.

Sizes are exchanged first, then rows, sorted by expert (GShard, arXiv 2006.16668). With tensor-parallel experts (etp)
the ranks of a tensor group first gather their tokens, and each computes its columns of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from docklands.parallel.collectives import all_gather, all_to_all, exchange, gather_rows, scatter_rows
from docklands.parallel.mesh import Group


@dataclass(frozen=True)
class Way:
    """How rows went out: how many to and from each rank, and where each (token, choice) stands among them."""

    sent: list[int]
    received: list[int]
    row_Tk: Tensor


class ExpertParallel:
    """group: ranks that hold `experts` experts each (None: all are here). columns: ranks that split one expert."""

    def __init__(self, group: Group | None, experts: int, columns: Group | None = None) -> None:
        self.group, self.experts, self.columns = group, experts, columns

    def enter(self, x_TD: Tensor, choice_Tk: Tensor, weight_Tk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, choices and weights of all ranks that split an expert."""
        if self.columns is None:
            return x_TD, choice_Tk, weight_Tk
        gathered = all_gather(choice_Tk, self.columns)
        return gather_rows(x_TD, self.columns), gathered, gather_rows(weight_Tk, self.columns)

    def send(self, x_TD: Tensor, choice_Tk: Tensor) -> tuple[Tensor, Tensor, Way]:
        """-> (rows x_MD for the experts here, the expert of each row counted from this rank's first, the way back)."""
        flat = choice_Tk.flatten()
        order = torch.argsort(flat, stable=True)
        row_Tk = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        row_Tk = row_Tk.view_as(choice_Tk)
        rows, expert = x_TD[order // choice_Tk.shape[1]], flat[order]
        if self.group is None:
            return rows, expert, Way([], [], row_Tk)
        ranks = self.group.size
        sizes = torch.bincount(expert // self.experts, minlength=ranks)
        sent, received = torch.stack([sizes, exchange(sizes, [1] * ranks, [1] * ranks, self.group)]).tolist()
        expert_M = exchange(expert % self.experts, sent, received, self.group)
        return all_to_all(rows, sent, received, self.group), expert_M, Way(sent, received, row_Tk)

    def back(self, y_MD: Tensor, way: Way) -> Tensor:
        """The experts' outputs, to where their rows came from: y in the order that `way.row_Tk` indexes."""
        return y_MD if self.group is None else all_to_all(y_MD, way.received, way.sent, self.group)

    def leave(self, y_TD: Tensor) -> Tensor:
        """The sum over the ranks that split an expert, and of it this rank's tokens."""
        return y_TD if self.columns is None else scatter_rows(y_TD, self.columns)
