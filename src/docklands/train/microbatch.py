"""Which rows go through the model together, and how they are laid out there.

Legend: T tokens of a batch end to end (what a loss sees), S tokens that go through the model, M trained tokens,
L layers with experts, k experts of a token.

Three things make S smaller than T, none of which changes a result: tokens that stand after the last one that predicts a
trained token are left out; rows of a group with equal inputs go through once; what is left of a group shares its
longest common prefix. (The hidden state of a shared token serves several rows; its gradient is the sum over them.)
Where router choices are given they are inputs too: what is shared agrees in them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, LOSS_MASK, TOKEN_IDS, routes_in
from docklands.errors import DataError, TrainError
from docklands.kernels.prefix_attention import Group


class Inputs:
    """What each row of a batch feeds to the model, and which of its tokens train.

    tokens   per row, token ids up to and without the last trained token; empty if nothing trains
    trained  positions in the packed batch [0, T) of the trained tokens, int64 [M]
    row_M    their rows
    routes_TLk  router choices of the packed batch, int16; None when the batch has none
    """

    def __init__(self, batch: Batch, share: bool) -> None:
        """TrainError when a row trains its first token: nothing precedes it, so it has no probability."""
        ids, mask = batch[TOKEN_IDS], batch[LOSS_MASK]
        self.offsets = ids.offsets
        self.values = ids.values.numpy()
        self.trained = np.flatnonzero(mask.values.numpy())
        self.row_M = np.searchsorted(self.offsets, self.trained, side="right") - 1
        self.at_M = self.trained - self.offsets[self.row_M]  # position in its row
        if len(self.at_M) and not self.at_M.min():
            row = int(batch.row_ids[self.row_M[int(self.at_M.argmin())]])
            raise TrainError(f"row {row}: the first token is under the loss mask", "nothing precedes it; mask it")
        self.lengths = np.zeros(len(batch), np.int64)
        np.maximum.at(self.lengths, self.row_M, self.at_M)
        self.tokens = [self.values[o : o + n] for o, n in zip(self.offsets, self.lengths)]
        column = routes_in(batch.fields)
        self.routes_TLk = None if column is None else batch[column].values.numpy()
        grouped = share and GROUP_ID in batch
        self.group = batch[GROUP_ID].numpy() if grouped else np.arange(len(batch))
        self.share = grouped

    def inputs(self, row: int) -> list[np.ndarray]:
        """What a row feeds to the model, each array [tokens] or [tokens, L, k]."""
        start, length = self.offsets[row], self.lengths[row]
        return [self.tokens[row], *([] if self.routes_TLk is None else [self.routes_TLk[start : start + length]])]


def check_ids(batch: Batch, vocabulary: int) -> None:
    """DataError when a token id is not among the model's: ranks that hold parts of the vocabulary would take it for one
    of another rank's, all of them.
    """
    ids = batch[TOKEN_IDS]
    values = ids.values.numpy()
    if not len(values) or (int(values.min()) >= 0 and int(values.max()) < vocabulary):
        return
    at = int(np.flatnonzero((values < 0) | (values >= vocabulary))[0])
    row = int(batch.row_ids[int(np.searchsorted(ids.offsets, at, side="right")) - 1])
    raise DataError(
        f"row {row}: token id {int(values[at])} is not among the model's {vocabulary}",
        "is the tokenizer this model's? see model.path and model.tokenizer",
    )


@dataclass(frozen=True)
class Family:
    """Rows of one group that go through the model together: a shared prefix, and the distinct suffixes.

    members  rows of each distinct input, in order of first appearance
    """

    prefix: int
    suffixes: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def cost(self) -> int:
        """Tokens through the model."""
        return self.prefix + sum(self.suffixes)

    @property
    def rows(self) -> list[int]:
        return [row for rows in self.members for row in rows]


def family_of(inputs: Inputs, rows: Sequence[int]) -> Family:
    """The family that these rows of one group make. Rows without trained tokens cost nothing and stay out."""
    distinct: dict[bytes, list[int]] = {}
    for row in rows:
        if inputs.lengths[row]:
            distinct.setdefault(b"".join(part.tobytes() for part in inputs.inputs(row)), []).append(row)
    members = tuple(tuple(same) for same in distinct.values())
    columns = zip(*(inputs.inputs(same[0]) for same in members))
    prefix = min((common_prefix(column) for column in columns), default=0)
    return Family(prefix, tuple(int(inputs.lengths[same[0]]) - prefix for same in members), members)


def common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """Length of the longest prefix that all share; 0 for none, everything for one."""
    if not sequences:
        return 0
    first = sequences[0]
    shared = min(map(len, sequences))
    for other in sequences[1:] if shared else ():
        differs = np.flatnonzero((first[:shared] != other[:shared]).reshape(shared, -1).any(1))
        shared = int(differs[0]) if len(differs) else shared
        if not shared:
            break
    return shared


def plan_microbatches(batch: Batch, cap: int, share: bool = True) -> list[np.ndarray]:
    """Rows of each micro-batch: at most `cap` tokens through the model, groups whole where they fit, sizes balanced.

    Every row is in exactly one, rows without trained tokens included; rows within one are in batch order. A group above
    the cap is split, and each part repeats the prefix. Deterministic. TrainError when one row alone is over the cap.
    """
    inputs = Inputs(batch, share)
    over = np.flatnonzero(inputs.lengths > cap)
    if len(over):
        row = int(over[0])
        raise TrainError(
            f"row {int(batch.row_ids[row])} has {int(inputs.lengths[row])} tokens, a micro-batch holds {cap}",
            "raise train.tokens_per_microbatch or lower the length limits",
        )
    members: dict[int, list[int]] = {}
    for row, group in enumerate(inputs.group.tolist()):
        members.setdefault(group, []).append(row)
    pieces: list[list[int]] = []
    costs: list[int] = []
    for rows in members.values():
        for piece, cost in split_group(inputs, rows, cap):
            pieces.append(piece)
            costs.append(cost)
    bins = balanced_bins(costs, cap)
    plans = [np.sort(np.concatenate([np.array(pieces[i], np.int64) for i in found])) for found in bins]
    return sorted(plans, key=lambda rows: int(rows[0]))


def split_group(inputs: Inputs, rows: list[int], cap: int) -> list[tuple[list[int], int]]:
    """(rows, cost) of the pieces of a group: one if it fits."""
    family = family_of(inputs, rows)
    idle = [row for row in rows if not inputs.lengths[row]]
    if family.cost <= cap:
        return [(family.rows + idle, family.cost)]
    pieces = []
    for found in balanced_bins(family.suffixes, cap - family.prefix):
        piece = [row for i in found for row in family.members[i]]
        pieces.append((piece, family.prefix + sum(family.suffixes[i] for i in found)))
    pieces[0][0].extend(idle)
    return pieces


def balanced_bins(costs: Sequence[int], cap: int) -> list[list[int]]:
    """Items in few bins of at most `cap` each, loads close to equal; no bin is empty.

    Longest processing time first (Graham 1969) over the fewest bins that the total allows; where an item then fits into
    no bin, one bin more. The least loaded bin has the most room, so the cap is checked against exactly that one.
    """
    if not costs:
        return []
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    count = max(1, -(-sum(costs) // cap)) if cap > 0 else len(costs)
    while True:
        loads = [(0, b) for b in range(count)]
        bins: list[list[int]] = [[] for _ in range(count)]
        for i in order:
            load, chosen = heapq.heappop(loads)
            if load + costs[i] > cap:
                break
            bins[chosen].append(i)
            heapq.heappush(loads, (load + costs[i], chosen))
        else:
            return [found for found in bins if found]
        if count >= len(costs):
            raise TrainError(f"an item of {max(costs)} tokens does not fit into {cap}")
        count += 1


@dataclass(frozen=True)
class Layout:
    """A micro-batch as the model sees it.

    token_ids_S, positions_S  int64, the families end to end
    groups                    (prefix length, suffix lengths) of each family, for the attention
    trained                   where the trained tokens stand in the packed batch, int64 [M]
    source                    which of the S hidden states predicts each distinct (state, target), int64
    target                    the token ids they predict, int64
    of_M                      which distinct pair serves each trained token, int64 [M]
    rows_S                    how many rows each of the S tokens stands for, int64
    routes_SLk                router choices to replay, int16, -1 unknown; None when the batch has none
    """

    token_ids_S: Tensor
    positions_S: Tensor
    groups: list[Group]
    trained: Tensor
    source: Tensor
    target: Tensor
    of_M: Tensor
    rows_S: Tensor
    routes_SLk: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_S)


def lay_out(batch: Batch, share: bool = True) -> Layout:
    """Pack a micro-batch for the model."""
    inputs = Inputs(batch, share)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(inputs.group.tolist()):
        members.setdefault(group, []).append(row)
    shift = np.zeros((2, len(batch)), np.int64)  # S index - position in the row: in the prefix, and after it
    prefix_of = np.zeros(len(batch), np.int64)
    taken, positions, counts, groups = [], [], [], []  # taken: where in the packed batch
    at = 0
    for rows in members.values():
        family = family_of(inputs, rows)
        if not family.members:
            continue
        if not inputs.share:  # a row of its own: one causal sequence
            family = Family(0, (family.cost,), family.members)
        groups.append((family.prefix, list(family.suffixes)))
        positions.append(np.arange(family.prefix))
        taken.append(inputs.offsets[family.members[0][0]] + positions[-1])
        counts.append(np.full(family.prefix, len(family.rows)))
        start = at
        at += family.prefix
        for length, same in zip(family.suffixes, family.members):
            positions.append(np.arange(family.prefix, family.prefix + length))
            taken.append(inputs.offsets[same[0]] + positions[-1])
            counts.append(np.full(length, len(same)))
            for row in same:
                shift[0, row], shift[1, row], prefix_of[row] = start, at - family.prefix, family.prefix
            at += length
    before_M = inputs.at_M - 1
    after_prefix_M = (before_M >= prefix_of[inputs.row_M]).astype(np.int64)
    source_M = before_M + shift[after_prefix_M, inputs.row_M]
    target_M = inputs.values[inputs.trained].astype(np.int64)
    pairs, of_M = np.unique(source_M << 32 | target_M, return_inverse=True)
    taken_S, positions_S, rows_S = (np.concatenate([*x, np.zeros(0, np.int64)]) for x in (taken, positions, counts))
    return Layout(
        torch.from_numpy(inputs.values[taken_S].astype(np.int64)),
        torch.from_numpy(positions_S),
        groups,
        torch.from_numpy(inputs.trained),
        torch.from_numpy(pairs >> 32),
        torch.from_numpy(pairs & 0xFFFFFFFF),
        torch.from_numpy(of_M.reshape(-1)),
        torch.from_numpy(rows_S),
        None if inputs.routes_TLk is None else torch.from_numpy(inputs.routes_TLk[taken_S]),
    )
