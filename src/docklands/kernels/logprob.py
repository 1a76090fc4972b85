"""Log-probability of sampled tokens, and entropy, straight from hidden states: [T, V] logits never exist.

Legend: T positions (only those that are wanted: callers select them first), D model, V vocabulary, C vocabulary chunk,
Q chunks.

logprob_t = z_t[target_t] - lse_t  with  z = hidden @ weight.T / temperature, lse = log sum exp z
entropy_t = -sum_v p_tv log p_tv, per chunk under the chunk's own softmax (lse_c), then over chunks with
            w_c = exp(lse_c - lse): sum_c w_c (entropy_c + lse - lse_c). No term is negative, so none cancels.

The pass is chunked over the vocabulary, not over tokens: each row block of the weight is then read once, and its
gradient is written once instead of being accumulated chunk by chunk. Backward makes a chunk's logits again, except for
the first chunks, up to a number of bytes, which are kept: a small batch then has three products instead of four.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1_048_576  # logits held at once: fp32 4 MiB, near a core's cache, measured up to 1.2x faster than 16
KEPT_BYTES = 201_326_592  # 192 MiB of logits, in the dtype of the product, that wait for backward
MIN_CHUNK = 256  # rows of the vocabulary: below, the products lose more than the cache gains


class Held(NamedTuple):
    """Logits that exist at once. chunk: rows of the vocabulary at a time; None: by CHUNK_ELEMENTS. keep: bytes that may
    wait for backward.
    """

    chunk: int | None = None
    keep: int = KEPT_BYTES


HELD = Held()


def logprob_of_logits(logits_TV: Tensor, targets_T: Tensor, temperature: float = 1.0) -> Tensor:
    """fp32 log-probability of each target under softmax(logits / temperature): the plain form, for logits at hand."""
    z_TV = logits_TV.float()
    if temperature != 1.0:
        z_TV = z_TV / temperature
    return z_TV.gather(-1, targets_T[..., None]).squeeze(-1) - torch.logsumexp(z_TV, -1)


def sampled_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    held: Held = HELD,
) -> tuple[Tensor, Tensor] | Tensor:
    """fp32 log-probability of each target under softmax(hidden @ weight.T / temperature); with `entropy`, that too.

    Both are differentiable in hidden and weight. The product runs in the activation dtype (the autocast dtype, where
    autocast is on), everything after it in fp32; the weight's gradient comes back in the weight's dtype.

    Returns logprobs_T, or (logprobs_T, entropy_T).
    IndexError for a target outside the vocabulary (checked on CPU only: elsewhere it would cost a synchronisation).
    """
    device = hidden_TD.device.type
    if device == "cpu" and len(targets_T) and not 0 <= int(targets_T.min()) <= int(targets_T.max()) < len(weight_VD):
        raise IndexError(f"targets {int(targets_T.min())}..{int(targets_T.max())}, vocabulary of {len(weight_VD)}")
    if torch.is_autocast_enabled(device):
        hidden_TD = hidden_TD.to(torch.get_autocast_dtype(device))
    how = How(temperature, *sizes(hidden_TD, held))
    with torch.autocast(device, enabled=False):
        logprobs_T, entropy_T = _SampledLogprob.apply(hidden_TD, weight_VD, targets_T, how, entropy)  # type: ignore[misc]
    return (logprobs_T, entropy_T) if entropy else logprobs_T


class How(NamedTuple):
    """rows: of the vocabulary at a time; kept: of these chunks, how many wait for backward."""

    temperature: float
    rows: int
    kept: int


def sizes(hidden_TD: Tensor, held: Held) -> tuple[int, int]:
    """(rows, kept) of `How`."""
    rows = held.chunk or max(MIN_CHUNK, CHUNK_ELEMENTS // max(1, len(hidden_TD)))
    each = max(1, len(hidden_TD) * rows * hidden_TD.itemsize)
    return rows, held.keep // each if torch.is_grad_enabled() else 0


class Chunks:
    """The logits of one vocabulary chunk after the other, in buffers that all of them share.

    Fresh tensors per chunk would fragment the heap: the process then grew by more than the full logits take.

    kept  the first chunks' products, one after the other; backward is given what forward made
    """

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, how: How, kept: Tensor | None = None) -> None:
        self.hidden_TD, self.weight_VD, self.temperature = hidden_TD, weight_VD, how.temperature
        self.rows = min(how.rows, len(weight_VD))
        size = len(hidden_TD) * self.rows
        self._product = torch.empty(size, dtype=hidden_TD.dtype, device=hidden_TD.device)
        self._wide = torch.empty(size, dtype=torch.float32, device=hidden_TD.device)
        self._scratch = torch.empty_like(self._wide)
        self._made = kept is not None
        columns = min(how.kept * self.rows, len(weight_VD))
        self.kept = self._product.new_empty(len(hidden_TD) * columns) if kept is None else kept

    @property
    def starts(self) -> range:
        return range(0, len(self.weight_VD), self.rows)

    def _view(self, buffer: Tensor, columns: int) -> Tensor:
        tokens = len(self.hidden_TD)
        return buffer[: tokens * columns].view(tokens, columns)

    def logits(self, start: int) -> Tensor:
        """fp32 logits_TC from vocabulary row `start` on; valid until the next call."""
        weight_CD = self.weight_VD[start : start + self.rows]
        columns, at = len(weight_CD), len(self.hidden_TD) * start
        waits = at < len(self.kept)
        product_TC = self._view(self.kept[at:] if waits else self._product, columns)
        if not (waits and self._made):
            torch.mm(self.hidden_TD, weight_CD.t(), out=product_TC)
        z_TC = product_TC
        if waits or product_TC.dtype != torch.float32:
            z_TC = self.scratch(columns, 0).copy_(product_TC)
        return z_TC if self.temperature == 1.0 else z_TC.div_(self.temperature)

    def scratch(self, columns: int, which: int = 1) -> Tensor:
        """An fp32 [T, columns] buffer of undefined content."""
        return self._view(self._scratch if which else self._wide, columns)

    def narrow(self, z_TC: Tensor) -> Tensor:
        """z_TC in the activation dtype; overwrites the product's buffer."""
        return z_TC if z_TC.dtype == self._product.dtype else self._view(self._product, z_TC.shape[1]).copy_(z_TC)

    @staticmethod
    def columns(targets_T: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
        """(is the target in the chunk, its column there) per token."""
        inside_T = (targets_T >= start) & (targets_T < start + width)
        return inside_T, (targets_T - start).clamp_(0, width - 1)


class _SampledLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, how: How, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        cast_VD = weight_VD.to(hidden_TD.dtype)
        chunks = Chunks(hidden_TD, cast_VD, how)
        target_T, lse_T, entropy_T = scan(chunks, targets_T, entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in backward
        ctx.save_for_backward(hidden_TD, cast_VD, targets_T, lse_T, entropy_T, chunks.kept)
        ctx.settings = how, weight_VD.dtype
        return target_T - lse_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, cast_VD, targets_T, lse_T, entropy_T, kept = ctx.saved_tensors
        how, weight_dtype = ctx.settings
        grad_T = (grads[0] if grads[0] is not None else torch.zeros_like(lse_T)) / how.temperature
        grad_entropy_T = None if grads[1] is None else grads[1] / how.temperature
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=torch.float32) if need_hidden else None
        grad_weight_VD = torch.empty_like(cast_VD, dtype=weight_dtype) if need_weight else None
        chunks = Chunks(hidden_TD, cast_VD, how, kept)
        for start in chunks.starts:
            weight_CD = cast_VD[start : start + how.rows]
            logp_TC = chunks.logits(start).sub_(lse_T[:, None])
            if grad_entropy_T is None:
                grad_z_TC = logp_TC.exp_().mul_(-grad_T[:, None])
            else:  # dH/dz = -p (log p + H)
                factor_TC = torch.add(logp_TC, entropy_T[:, None], out=chunks.scratch(len(weight_CD)))
                factor_TC.mul_(-grad_entropy_T[:, None]).sub_(grad_T[:, None])
                grad_z_TC = logp_TC.exp_().mul_(factor_TC)
            inside_T, column_T = chunks.columns(targets_T, start, len(weight_CD))
            grad_z_TC.scatter_add_(1, column_T[:, None], (grad_T * inside_T)[:, None])
            narrow_TC = chunks.narrow(grad_z_TC)
            if grad_hidden_TD is not None:
                add_product(grad_hidden_TD, narrow_TC, weight_CD)
            if grad_weight_VD is not None:
                write_product(grad_weight_VD[start : start + how.rows], narrow_TC.t(), hidden_TD)
        if grad_hidden_TD is not None:
            grad_hidden_TD = grad_hidden_TD.to(hidden_TD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (fp32) += left @ right."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, in out's dtype."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def scan(chunks: Chunks, targets_T: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Once over the vocabulary. -> fp32 [T]: logit of the target (0 where no chunk holds it), lse, entropy."""
    target_T = chunks.hidden_TD.new_zeros(len(chunks.hidden_TD), dtype=torch.float32)
    lse_QT = target_T.new_zeros(len(chunks.starts), len(target_T))
    entropy_QT = torch.zeros_like(lse_QT) if entropy else None
    for i, start in enumerate(chunks.starts):
        z_TC = chunks.logits(start)
        inside_T, column_T = chunks.columns(targets_T, start, z_TC.shape[1])
        target_T += z_TC.gather(1, column_T[:, None]).squeeze(1).mul_(inside_T)
        _logsumexp(z_TC, chunks.scratch(z_TC.shape[1]), lse_QT[i])
        if entropy_QT is not None:
            logp_TC = z_TC.sub_(lse_QT[i, :, None])
            p_TC = torch.exp(logp_TC, out=chunks.scratch(z_TC.shape[1]))
            entropy_QT[i] = p_TC.mul_(logp_TC).sum(1).neg_()
    return target_T, *merge(lse_QT, entropy_QT)


def merge(lse_QT: Tensor, entropy_QT: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of Q parts of the vocabulary -> of the whole."""
    lse_T = torch.logsumexp(lse_QT, 0)
    if entropy_QT is None:
        return lse_T, None
    gap_QT = lse_T - lse_QT
    return lse_T, ((-gap_QT).exp_() * (entropy_QT + gap_QT)).sum(0)


def _logsumexp(z_TC: Tensor, scratch_TC: Tensor, out_T: Tensor) -> None:
    """Log of the sum of exp over the chunk, into out_T. A row of -inf alone gives -inf."""
    most_T = z_TC.amax(1).clamp_(min=torch.finfo(torch.float32).min)
    torch.sub(z_TC, most_T[:, None], out=scratch_TC).exp_()
    torch.sum(scratch_TC, 1, out=out_T)
    out_T.log_().add_(most_T)
