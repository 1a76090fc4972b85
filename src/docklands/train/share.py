"""A micro-batch on the ranks of one pipeline stage: padded until it divides, and which tokens each rank sees.

Legend: S tokens through the model, padding included; M (state, target) pairs; U this rank's of them.

Padding is at most cp * tp - 1 tokens, a sequence of its own at the end: no token attends to it and no loss reads it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from docklands.kernels import block_attention
from docklands.kernels.prefix_attention import Group, PrefixAttention
from docklands.models import AttentionContext
from docklands.parallel.collectives import collect
from docklands.parallel.context import Ring, Ulysses, zigzag
from docklands.parallel.mesh import Mesh
from docklands.train.microbatch import Layout

EVEN = 1.01
"""Tokens of the heaviest replica, by the mean, at which groups that follow one another are even enough."""


@dataclass(frozen=True)
class Share:
    """What this rank computes of a micro-batch.

    token_ids_S, positions_S   of this context rank
    attend                     over them
    source_U, target_U         states of this rank that predict a trained token, and those tokens
    counts                     U of each context rank; order_M puts all of them, end to end, into the layout's order
    rows_S, routes_SLk         see Layout; of the tokens whose routers run here: under sequence parallelism fewer
    """

    token_ids_S: Tensor
    positions_S: Tensor
    attend: AttentionContext
    source_U: Tensor
    target_U: Tensor
    counts: list[int]
    order_M: Tensor | None
    rows_S: Tensor
    routes_SLk: Tensor | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_S)


def share_of(layout: Layout, mesh: Mesh, device: torch.device) -> Share:
    """The share of this rank. Deterministic, so that every rank knows every other's."""
    cp, tp = mesh.cp, mesh.layout.tp if mesh.layout.sp else 1
    if cp is None:
        padding = -layout.num_tokens % tp
        source, target = layout.source.to(device), layout.target.to(device)
        ids_S, positions_S = padded(layout.token_ids_S, layout.positions_S, padding, device)
        attend = PrefixAttention(with_padding(layout.groups, padding), device)
        routers = router_part(layout, torch.arange(layout.num_tokens), padding, mesh)
        return Share(ids_S, positions_S, attend, source, target, [len(source)], None, *routers)
    if mesh.layout.context == "ring":
        lengths = [length for _, lengths in layout.groups for length in lengths]
        held = [zigzag_index(lengths, cp.size, rank) for rank in range(cp.size)]
        padding = [-len(index) % tp for index in held]
        attend: AttentionContext = Ring(cp, lengths, padding, block_attention)  # type: ignore[arg-type]
    else:
        padding = -layout.num_tokens % (cp.size * tp)
        each = (layout.num_tokens + padding) // cp.size
        everything = torch.arange(layout.num_tokens)
        held = [everything[each * rank : each * (rank + 1)] for rank in range(cp.size)]
        padding = [each - len(index) for index in held]
        attend = Ulysses(cp, PrefixAttention(with_padding(layout.groups, sum(padding)), device))
    own = held[cp.rank]
    owner_S, local_S = torch.empty(2, layout.num_tokens, dtype=torch.long)
    for rank, index in enumerate(held):
        owner_S[index], local_S[index] = rank, torch.arange(len(index))
    owner_M = owner_S[layout.source]
    mine = owner_M == cp.rank
    return Share(
        *padded(layout.token_ids_S[own], layout.positions_S[own], padding[cp.rank], device),
        attend,
        local_S[layout.source[mine]].to(device),
        layout.target[mine].to(device),
        torch.bincount(owner_M, minlength=cp.size).tolist(),
        torch.argsort(torch.argsort(owner_M, stable=True)).to(device),
        *router_part(layout, own, padding[cp.rank], mesh),
    )


def router_part(layout: Layout, own: Tensor, padding: int, mesh: Mesh) -> tuple[Tensor, Tensor | None]:
    """(rows_S, routes_SLk) of this rank's routers, out of its context rank's tokens. Padding counts 0 and is free."""
    ranks, rank = (mesh.layout.tp, mesh.coords["tp"]) if mesh.layout.sp else (1, 0)
    size = (len(own) + padding) // ranks
    rows_S = torch.cat([layout.rows_S[own], layout.rows_S.new_zeros(padding)])[size * rank : size * (rank + 1)]
    if layout.routes_SLk is None:
        return rows_S, None
    found_SLk = layout.routes_SLk[own]
    free_SLk = found_SLk.new_full((padding, *found_SLk.shape[1:]), -1)
    return rows_S, torch.cat([found_SLk, free_SLk])[size * rank : size * (rank + 1)]


def padded(ids_S: Tensor, positions_S: Tensor, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """With `padding` tokens 0 at the end."""
    ids_S = torch.cat([ids_S, torch.zeros(padding, dtype=torch.long)])
    return ids_S.to(device), torch.cat([positions_S, torch.arange(padding)]).to(device)


def with_padding(groups: list[Group], padding: int) -> list[Group]:
    """The padding as a sequence of its own."""
    return [*groups, (0, [padding])] if padding else groups


def zigzag_index(lengths: list[int], ranks: int, rank: int) -> Tensor:
    """Which tokens of the pack a rank of a ring holds, int64."""
    starts = [0, *accumulate(lengths)]
    pieces = [
        torch.arange(start + first, start + last)
        for start, pair in zip(starts, zigzag(lengths, ranks, rank))
        for first, last in pair
    ]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)


def gathered(value_U: Tensor, share: Share, mesh: Mesh) -> Tensor:
    """Values of this rank's pairs -> of all, in the layout's order, the same on every context rank."""
    if mesh.cp is None or share.order_M is None:
        return value_U
    return collect(value_U, mesh.cp, share.counts)[share.order_M]


def rows_of_replicas(lengths: np.ndarray, groups: np.ndarray, replicas: int) -> list[np.ndarray]:
    """Rows of each data-parallel replica: token counts balanced, groups whole where that costs no balance.

    Groups that follow one another where that is as even as EVEN says: they lie together in memory, too. Else longest
    processing time first. Rows are in the given order within a replica. Deterministic.

    lengths, groups  int64 [B]: tokens and group id of each row; a row of unknown length (0) counts as one token
    """
    if replicas == 1:
        return [np.arange(len(lengths))]
    lengths = np.maximum(lengths.astype(np.int64), 1)
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(first)  # groups in the order in which they come
    tokens = np.bincount(group, lengths, len(first)).astype(np.int64)
    owner = np.empty(len(first), np.int64)
    mean = int(lengths.sum()) / replicas
    owner[order], heaviest = consecutive(tokens[order], replicas)
    if heaviest > EVEN * mean:
        owner[order], heaviest = balanced(tokens[order], replicas)
    owner_of_row = owner[group]
    if heaviest > 1.05 * mean:
        by_row, least = balanced(lengths, replicas)
        owner_of_row = owner_of_row if heaviest <= least else by_row
    return [np.flatnonzero(owner_of_row == replica) for replica in range(replicas)]


def consecutive(weights: np.ndarray, replicas: int) -> tuple[np.ndarray, int]:
    """As `balanced`, of pieces that follow one another: cut where that is nearest to equal shares."""
    ends = np.cumsum(weights)
    shares = int(ends[-1]) * np.arange(1, replicas) / replicas if len(ends) else np.zeros(0)
    owner = np.searchsorted(shares, ends - weights / 2, side="right")  # by the middle of each piece
    return owner, int(np.bincount(owner, weights, 1).max())


def balanced(weights: np.ndarray, replicas: int) -> tuple[np.ndarray, int]:
    """The replica of each piece, int64, and the weight of the heaviest replica."""
    loads = [(0, replica) for replica in range(replicas)]
    owner = np.empty(len(weights), np.int64)
    for piece in np.argsort(-weights, kind="stable").tolist():
        load, replica = loads[0]
        owner[piece] = replica
        heapq.heapreplace(loads, (load + int(weights[piece]), replica))
    return owner, max(load for load, _ in loads)
