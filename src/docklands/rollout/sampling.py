"""Random numbers keyed by (sample, position), and the choice of the next token.

A token depends on its sample's own logits and seed, never on the batch around it: row by row, by inverting the
cumulative distribution at one uniform number.

Legend: R rows (running sequences), V vocabulary, C chunks of CHUNK vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from docklands.errors import NonFinite
from docklands.kernels import compiled_step

CHUNK = 128
CANDIDATES = 1024
BLOCK_ELEMENTS = 524_288  # logits worked on at once: they stay in the cache
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def sample_seed(seed: int, visit: int, prompt_id: int, k: int) -> int:
    """64-bit key of one sample: a hash of the run's seed, the visit (step or purpose), the prompt and k.

    splitmix64's finaliser, folded over the four numbers (Steele, Lea, Flood 2014, "Fast splittable PRNGs").
    """
    state = 0
    for part in (seed, visit, prompt_id, k):
        state = _mix_int((state + 0x9E3779B97F4A7C15 + (int(part) & _MASK)) & _MASK)
    return state


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniforms(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, float64 with 53 bits: hash(seed, position). uint64 and int64 in."""
    with np.errstate(over="ignore"):
        z = seeds_R + GOLDEN * (positions_R.astype(np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Choice:
    """How each row samples; arrays of [R].

    temperature  0: greedy
    top_k        0: off;  top_p  1: off
    banned       [R, n] token ids that may not be sampled now (stop ids before min_tokens), -1: none; None: no row
    uniform      float64 in [0, 1)
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniform: np.ndarray
    banned: np.ndarray | None = None


class Sampler:
    """Draws tokens from logits; holds scratch memory, so it is used by one thread at a time."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def __call__(self, logits_RV: Tensor, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
        """-> (tokens int64 [R], logprobs float32 [R]).

        The log-probability is of softmax(logits / temperature) over the whole vocabulary in fp32 (temperature 1 where
        greedy), before top-k, top-p and bans. Rows are independent. logits_RV may have more rows than `choice`.
        NonFinite when a row's logits hold a NaN or an infinity: the weights do.
        """
        rows = len(choice.temperature)
        tokens_R, logprobs_R = np.empty(rows, np.int64), np.empty(rows, np.float32)
        whole = _whole(choice, logits_RV.shape[1])
        if not compiled_step.available(logits_RV.device, logits_RV.dtype):
            whole[:] = False
        for mine, draw in ((whole, _draw_compiled), (~whole, self._draw)):
            found = np.flatnonzero(mine)
            if len(found) == rows:
                tokens_R[:], logprobs_R[:] = draw(logits_RV[:rows], choice)
            elif len(found):
                some_RV = logits_RV[torch.from_numpy(found).to(logits_RV.device)]
                tokens_R[found], logprobs_R[found] = draw(some_RV, _take(choice, found))
        bad = int((~np.isfinite(logprobs_R)).sum())
        if bad:
            raise NonFinite(f"logits of {bad} of {rows} sequences hold a NaN or an infinity", "look at the weights")
        return tokens_R, logprobs_R

    def _draw(self, logits_RV: Tensor, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
        """By torch's operations, some rows at a time."""
        rows, size = len(choice.temperature), max(1, BLOCK_ELEMENTS // logits_RV.shape[1])
        parts = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
        found = [self._block(logits_RV[part], _take(choice, part)) for part in parts]
        return torch.cat([t for t, _ in found]).numpy(), torch.cat([p for _, p in found]).numpy()

    def _block(self, logits_RV: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        whole, vocabulary = self._buffer(logits_RV), logits_RV.shape[1]
        weight_RV = whole[:, :vocabulary]
        scale = np.where(choice.temperature == 0, 1.0, choice.temperature)
        _scaled(logits_RV, scale, out=weight_RV)
        most_R1 = weight_RV.amax(-1, keepdim=True)
        weight_RV.sub_(most_R1).exp_()
        sums_RC = _chunk_sums(whole)
        total_R = sums_RC.sum(-1)
        if _truncate(weight_RV, logits_RV, scale, choice):
            sums_RC = _chunk_sums(whole)
        greedy = choice.temperature == 0
        tokens_R = weight_RV.argmax(-1) if greedy.all() else _invert(whole, sums_RC, choice.uniform)
        if greedy.any() and not greedy.all():
            where = torch.from_numpy(greedy).to(tokens_R.device)
            tokens_R = torch.where(where, weight_RV.argmax(-1), tokens_R)
        tokens_R = tokens_R.clamp_(max=vocabulary - 1)  # as in _first_above
        z_R1 = logits_RV.gather(1, tokens_R[:, None]).float()  # not log(weight): that may have underflowed
        logprobs_R = _scaled(z_R1, scale, out=z_R1).sub_(most_R1).squeeze(1) - total_R.log().float()
        return tokens_R.cpu(), logprobs_R.cpu()

    def _buffer(self, logits_RV: Tensor) -> Tensor:
        """fp32 scratch [R, V padded to whole chunks]; the padding weighs nothing."""
        rows, vocabulary = logits_RV.shape
        padded = -(-vocabulary // CHUNK) * CHUNK
        if self._scratch.numel() < rows * padded or self._scratch.device != logits_RV.device:
            self._scratch = torch.empty(rows * padded, device=logits_RV.device)
        whole = self._scratch[: rows * padded].view(rows, padded)
        if padded != vocabulary:
            whole[:, vocabulary:] = 0.0
        return whole


def _scaled(logits: Tensor, scale_R: np.ndarray, out: Tensor) -> Tensor:
    """logits / temperature in fp32."""
    if out is not logits:
        out.copy_(logits)
    if (scale_R != 1.0).any():
        out.div_(torch.from_numpy(scale_R.astype(np.float32)).to(out.device)[:, None])
    return out


def _whole(choice: Choice, vocabulary: int) -> np.ndarray:
    """Which rows draw from the whole vocabulary."""
    top_k = choice.top_k
    whole = (choice.temperature == 0) | (((top_k <= 0) | (top_k >= vocabulary)) & (choice.top_p >= 1))
    return whole if choice.banned is None else whole & (choice.banned < 0).all(1)


def _draw_compiled(logits_RV: Tensor, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    return compiled_step.draw(logits_RV, choice.temperature, choice.uniform)


def _take(choice: Choice, part: slice | np.ndarray) -> Choice:
    banned = None if choice.banned is None else choice.banned[part]
    return Choice(choice.temperature[part], choice.top_k[part], choice.top_p[part], choice.uniform[part], banned)


def _chunk_sums(whole: Tensor) -> Tensor:
    """float64 [R, C]"""
    return whole.view(len(whole), -1, CHUNK).sum(-1).double()


def _invert(whole: Tensor, sums_RC: Tensor, uniform_R: np.ndarray) -> Tensor:
    """First index whose cumulative weight exceeds uniform * total: over chunks, then inside one. float64 sums."""
    rest_R1 = torch.from_numpy(uniform_R).to(whole.device)[:, None] * sums_RC.sum(-1, keepdim=True)
    if sums_RC.shape[1] == 1:
        return _first_above(whole.double().cumsum(-1), rest_R1)[0]
    chunk_R, rest_R1 = _first_above(sums_RC.cumsum(-1), rest_R1)
    inside = whole.view(len(whole), -1, CHUNK)[torch.arange(len(whole), device=whole.device), chunk_R]
    return chunk_R * CHUNK + _first_above(inside.double().cumsum(-1), rest_R1)[0]


def _first_above(cumulative: Tensor, target_R1: Tensor) -> tuple[Tensor, Tensor]:
    """(first index with cumulative > target, target minus the sum before it); never an entry without weight."""
    target_R1 = torch.minimum(target_R1, cumulative[:, -1:] * (1 - 2.0**-50))
    index_R1 = torch.searchsorted(cumulative, target_R1.contiguous(), right=True)
    index_R1.clamp_(max=cumulative.shape[1] - 1)  # beyond it: NaN, which the caller finds
    before_R1 = cumulative.gather(1, (index_R1 - 1).clamp_(min=0)) * (index_R1 > 0)
    return index_R1.squeeze(1), target_R1 - before_R1


def _truncate(weight_RV: Tensor, logits_RV: Tensor, scale_R: np.ndarray, choice: Choice) -> bool:
    """Set to 0, in place, what may not be sampled: bans, then all but the top k, then all but the top p of the rest.

    -> whether anything was."""
    banned = False
    if choice.banned is not None and (choice.banned >= 0).any():
        _ban(weight_RV, logits_RV, scale_R, choice.banned)
        banned = True
    vocabulary = weight_RV.shape[1]
    top_k = np.where(choice.top_k > 0, np.minimum(choice.top_k, vocabulary), vocabulary)
    rows = np.flatnonzero((choice.temperature > 0) & ((top_k < vocabulary) | (choice.top_p < 1)))
    if not len(rows):
        return banned
    index = torch.from_numpy(rows).to(weight_RV.device)
    top_k, top_p = (torch.from_numpy(x[rows]).to(index.device)[:, None] for x in (top_k, choice.top_p))
    some = weight_RV[index]
    kept = _keep(some, top_k, top_p, min(CANDIDATES, vocabulary)) or _keep(some, top_k, top_p, vocabulary)
    assert kept is not None  # the whole vocabulary holds every cut
    weight_RV[index] = torch.zeros_like(some).scatter_(1, kept[1], kept[0])
    return True


def _keep(weight_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """(weights, indices) of the `most` largest entries, zero where cut off; None when the cut lies beyond them."""
    vocabulary = weight_RV.shape[1]
    ordered, order = weight_RV.topk(most, dim=-1)
    ordered = ordered * (torch.arange(most, device=order.device) < top_k_R1)
    cumulative = ordered.double().cumsum(-1)
    whole = torch.where(top_k_R1 < vocabulary, cumulative[:, -1:], weight_RV.sum(-1, dtype=torch.float64)[:, None])
    limit = top_p_R1 * whole
    beyond_R1 = (top_k_R1 > most) & ((top_k_R1 < vocabulary) | (cumulative[:, -1:] < limit))
    if most < vocabulary and bool(beyond_R1.any()):
        return None
    return ordered * ((cumulative - ordered) < limit), order  # the entry that crosses the limit stays


def _ban(weight_RV: Tensor, logits_RV: Tensor, scale_R: np.ndarray, banned: np.ndarray) -> None:
    """Zero the banned entries; a row that has nothing left (the rest had underflowed) is weighed anew without them."""
    rows, columns = np.nonzero(banned >= 0)
    row, token = torch.from_numpy(rows), torch.from_numpy(banned[rows, columns])
    weight_RV[row, token] = 0.0
    bare = np.unique(rows)
    bare = bare[(weight_RV[torch.from_numpy(bare)].amax(-1) == 0).cpu().numpy()]
    for i in bare:
        z_V = logits_RV[i].float() / float(scale_R[i])
        z_V[torch.from_numpy(banned[i][banned[i] >= 0])] = -torch.inf
        weight_RV[i] = torch.softmax(z_V, -1)
