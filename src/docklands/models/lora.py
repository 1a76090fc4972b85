"""Low-rank adapters in a model: made, switched off, merged into weights that leave, trained alone.

Legend: T tokens (or rows sorted by expert), R rank, I inputs, O outputs, E experts.

The base is never written to: what is published or exported merged is a new tensor, W + s B A, made for that purpose.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from docklands import kernels
from docklands.models.adapters import MARK, is_adapter, rows_of
from docklands.models.params import ParamSpec, ParamTable

Window = tuple[int, int, int]
"""(dimension, first index, last + 1) of a tensor: what FSDP leaves on a rank."""


class Pair(nn.Module):
    """a [R, I] and b [O, R]; of experts [E, R, I] and [E, O, R]."""

    def __init__(self, a: ParamSpec, b: ParamSpec) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(a.shape))
        self.b = nn.Parameter(torch.empty(b.shape))


class Adapters(nn.ModuleDict):
    """The pairs of one module, by projection.

    places  of each pair: (matrix that it is added to, its position among that matrix's projections)
    rows    rows here of each projection of a matrix
    active  False: the module computes what its base does
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.active = scale, True
        self.places: dict[str, tuple[str, int]] = {}
        self.rows: dict[str, list[int]] = {}

    def forward(self, x: Tensor, out: Tensor, matrix: str = "weight", ends_E: Tensor | None = None) -> Tensor:
        """out + s (x A^T) B^T, each projection in its own columns. `ends_E`: rows are sorted by expert."""
        if not self.active:
            return out
        more = {at: self._low(x, self[name], ends_E) for name, at in self._of(matrix)}
        if not more:
            return out
        if len(self.rows[matrix]) == 1:
            return torch.add(out, more[0], alpha=self.scale)
        pieces = out.split(self.rows[matrix], -1)
        added = [torch.add(p, more[i], alpha=self.scale) if i in more else p for i, p in enumerate(pieces)]
        return torch.cat(added, -1)

    def _of(self, matrix: str) -> Iterator[tuple[str, int]]:
        return ((name, at) for name, (where, at) in self.places.items() if where == matrix)

    @staticmethod
    def _low(x: Tensor, pair: nn.Module, ends_E: Tensor | None) -> Tensor:
        assert isinstance(pair, Pair)
        if ends_E is None:
            return kernels.linear(kernels.linear(x, pair.a), pair.b)
        return kernels.grouped_linear(kernels.grouped_linear(x, pair.a, ends_E), pair.b, ends_E)


def attach(model: nn.Module, table: ParamTable, scale: float) -> None:
    """Give the modules of a model the pairs that its table lists, without values."""
    pairs: dict[str, list[ParamSpec]] = {}
    for spec in table:
        if spec.adapts:
            pairs.setdefault(spec.name.rpartition(".")[0], []).append(spec)
    for name, (a, b) in pairs.items():
        path, target = name.split(MARK)
        holder = model.get_submodule(path)
        if getattr(holder, "lora", None) is None:
            holder.lora = Adapters(scale)
        adapters, base = holder.lora, table.by_name(a.adapts)
        assert isinstance(adapters, Adapters)
        adapters[target] = Pair(a, b)
        matrix = base.name.rpartition(".")[2]
        adapters.places[target] = matrix, projections(base).index(target)
        adapters.rows[matrix] = list(rows_of(base))


def projections(spec: ParamSpec) -> list[str]:
    """Hugging Face names of what a matrix of the table is made of."""
    return [part.name.rsplit(".", 2)[-2] for part in spec.hf[: len(spec.hf) // (spec.experts or 1)]]


def first_values(spec: ParamSpec, seed: int) -> Tensor:
    """A uniform in +-1 / sqrt(I) (Kaiming, gain of a linear layer), B zero: the model begins as its base. fp32.

    Keyed by the name: independent of the layout, and of what else is drawn.
    """
    if spec.name.endswith(".b"):
        return torch.zeros(spec.shape)
    key = zlib.crc32(f"{seed} {spec.name}".encode())  # 32 bits: of a seed, torch's generator on the CPU uses no more
    generator = torch.Generator().manual_seed(key)
    bound = 1.0 / math.sqrt(spec.shape[-1])
    return torch.empty(spec.shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def init_adapters(model: nn.Module, table: ParamTable, seed: int) -> None:
    """`first_values` of a whole model's adapters."""
    parameters = dict(model.named_parameters())
    for spec in table:
        if spec.adapts:
            parameters[spec.name].copy_(first_values(spec, seed))


@contextmanager
def adapters_off(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these models compute what their bases do."""
    found = [module for model in models for module in model.modules() if isinstance(module, Adapters)]
    for module in found:
        module.active = False
    try:
        yield
    finally:
        for module in found:
            module.active = True


def freeze_base(named: Mapping[str, nn.Parameter], dtype: torch.dtype | None) -> dict[str, nn.Parameter]:
    """What is trained: the adapters where there are any, and their base rests from then on, its matrices in `dtype`
    (None: as they are); else all.
    """
    trained = trained_of(named)
    for name, parameter in named.items():
        if name not in trained:
            parameter.requires_grad_(False)
            if dtype is not None and parameter.dim() >= 2:
                parameter.data = parameter.data.to(dtype)
    return trained


def trained_of(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The adapters where there are any, else all."""
    return {name: parameter for name, parameter in named.items() if is_adapter(name)} or dict(named)


def merged_weight(module: nn.Module) -> Tensor:
    """A linear module's matrix with its adapters: a new tensor where they are at work, else the weight itself."""
    adapters, weight = module.lora, module.weight
    assert isinstance(weight, Tensor)
    if not isinstance(adapters, Adapters) or not adapters.active:
        return weight
    parts = [weight.new_zeros(rows, weight.shape[1]) for rows in adapters.rows["weight"]]
    for name, (_, at) in adapters.places.items():
        pair = adapters[name]
        assert isinstance(pair, Pair)
        parts[at] = pair.b @ pair.a
    return torch.add(weight, torch.cat(parts) if len(parts) > 1 else parts[0], alpha=adapters.scale)


# --- merging ----------------------------------------------------------------------------------------------------


class Merge:
    """How one matrix is merged: rows of its projections here, and the scale."""

    def __init__(self, spec: ParamSpec, scale: float, rows: Sequence[int] | None = None) -> None:
        self.rows = list(rows_of(spec) if rows is None else rows)
        self.scale, self.names = scale, projections(spec)

    @torch.no_grad()
    def __call__(
        self, weight: Tensor, pairs: Mapping[str, tuple[Tensor, Tensor]], window: Window | None = None
    ) -> Tensor:
        """W + s B A, a new tensor in W's dtype, by way of fp32. `pairs` by projection, whole in what `window` cuts."""
        out = weight.to(torch.float32, copy=True)
        first, last, experts = 0, sum(self.rows), slice(None)
        if window is not None and window[0] == weight.dim() - 2:
            first, last = window[1:]
        elif window is not None:
            experts = slice(*window[1:])
        at = 0
        for name, rows in zip(self.names, self.rows):
            low, high = max(at, first), min(at + rows, last)
            if name in pairs and low < high:
                a, b = (tensor.float() if tensor.dim() == 2 else tensor[experts].float() for tensor in pairs[name])
                out[..., low - first : high - first, :].add_(b[..., low - at : high - at, :] @ a, alpha=self.scale)
            at += rows
        return out.to(weight.dtype)


def merges(table: ParamTable, scale: float) -> dict[str, Merge]:
    """By the name of each adapted matrix, for whole tensors."""
    return {spec.adapts: Merge(table.by_name(spec.adapts), scale) for spec in table if spec.adapts}


def merged(named: Iterable[tuple[str, Tensor]], table: ParamTable, scale: float) -> Iterator[tuple[str, Tensor]]:
    """The whole weights of a model without adapters, from those of one with: a stream in the table's order."""
    how = merges(table, scale)
    waiting: dict[str, Tensor] = {}
    pairs: dict[str, dict[str, list[Tensor]]] = {}

    def done() -> Iterator[tuple[str, Tensor]]:
        for name, weight in waiting.items():
            found = {target: (a, b) for target, (a, b) in pairs.get(name, {}).items()}
            yield name, how[name](weight, found) if found else weight
        waiting.clear()
        pairs.clear()

    for name, tensor in named:
        if is_adapter(name):
            spec = table.by_name(name)
            pairs.setdefault(spec.adapts, {}).setdefault(name.split(".")[-2], []).append(tensor)
            continue
        if waiting and next(iter(waiting)).rpartition(".")[0] != name.rpartition(".")[0]:
            yield from done()
        waiting[name] = tensor
    yield from done()


def adapters_of(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The adapters alone."""
    return ((name, tensor) for name, tensor in named if is_adapter(name))
