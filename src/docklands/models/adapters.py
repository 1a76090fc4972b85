"""What low-rank adapters a model has (LoRA, arXiv 2106.09685): which projections, which rank. No torch.

Legend: R rank, I inputs, O outputs of a projection, E experts.

An adapted projection computes x W^T + s (x A^T) B^T with A [R, I] and B [O, R] (of experts [E, R, I] and [E, O, R]); W
rests. A fused product of ours (q, k, v in one) has a pair for each projection that users know by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from docklands.errors import ConfigError
from docklands.registry import nearest

if TYPE_CHECKING:
    from docklands.config.lora import LoraSection
    from docklands.models.config import ModelConfig
    from docklands.models.params import ParamSpec

ALL_LINEAR = "all-linear"
MARK = ".lora."
"""In the name of every adapter tensor: <module>.lora.<projection>.a or .b"""


@dataclass(frozen=True)
class LoraConfig:
    """targets: projections by their Hugging Face names; experts: those of routed experts too."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    experts: bool = False

    @property
    def scale(self) -> float:
        """alpha / R, or alpha / sqrt(R) (rank-stabilised, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return MARK in name


def adaptable(model: ModelConfig) -> tuple[list[str], list[str]]:
    """Projections of a model that may have adapters: (those outside of routed experts, those of routed experts)."""
    from docklands.models.params import table_for

    found: tuple[list[str], list[str]] = ([], [])
    for spec in table_for(model):
        if len(spec.shape) >= 2 and spec.layer is not None:
            names = (part.name.rsplit(".", 2)[-2] for part in spec.hf)
            found[spec.experts > 0].extend(name for name in names if name != "gate")  # the router
    return list(dict.fromkeys(found[0])), list(dict.fromkeys(found[1]))


def with_lora(model: ModelConfig, section: LoraSection) -> ModelConfig:
    """The model with the adapters that the section asks for; rank 0: the model itself.

    ConfigError for a projection that the model does not have, or has in its routed experts only.
    """
    if not section.rank:
        return model
    dense, expert = adaptable(model)
    known = [*dense, *(name for name in expert if name not in dense)]
    targets: list[str] = []
    for name in section.targets:
        if name == ALL_LINEAR:
            targets += known if section.experts else dense
        elif name not in known:
            raise ConfigError(f"lora.targets: this model has no projection {name!r}", _like(name, known))
        elif name not in dense and not section.experts:
            raise ConfigError(
                f"lora.targets: {name!r} is in this model's routed experts only", "set lora.experts: true, or leave it"
            )
        else:
            targets.append(name)
    if section.experts and not set(targets) & set(expert):
        raise ConfigError(
            "lora.experts is set, but " + ("lora.targets names none of theirs" if expert else "this model has none"),
            f"add {', '.join(expert)}" if expert else "remove it",
        )
    chosen = tuple(name for name in known if name in targets)
    return replace(model, lora=LoraConfig(section.rank, section.alpha, chosen, section.rslora, section.experts))


def _like(name: str, known: list[str]) -> str:
    hint = nearest(name, [*known, ALL_LINEAR])
    return hint if hint.startswith("known") else f"{hint} known: {', '.join([*known, ALL_LINEAR])}"


def adapter_specs(spec: ParamSpec, lora: LoraConfig) -> Iterator[ParamSpec]:
    """Entries of the pairs of one matrix of the table.

    Split as the matrix is: by columns (rows of W), B is split and A whole; by rows, A is split and B whole. The whole
    one's gradient is then a part of the sum on each rank.
    """
    from docklands.models.params import HfPart

    if len(spec.shape) < 2 or spec.layer is None or (spec.experts and not lora.experts):
        return
    count = spec.experts or 1
    lead, inputs = spec.shape[:-2], spec.shape[-1]
    own = spec.hf[: len(spec.hf) // count]
    for index, (part, rows) in enumerate(zip(own, rows_of(spec))):
        target = part.name.rsplit(".", 2)[-2]
        if target not in lora.targets:
            continue
        holder = spec.name if not spec.experts else spec.name.rpartition(".")[0]
        holder = holder.removesuffix(".weight")
        for kind, shape in (("a", (*lead, lora.rank, inputs)), ("b", (*lead, rows, lora.rank))):
            names = [each.name.removesuffix(".weight") for each in spec.hf[index :: len(own)]]
            hf = tuple(HfPart(f"{name}.lora_{kind.upper()}.weight", shape[-2]) for name in names)
            split = spec.split if (spec.split, kind) in (("column", "b"), ("row", "a")) else "none"
            yield replace(
                spec,
                name=f"{holder}{MARK}{target}.{kind}",
                shape=shape,
                hf=hf,
                split=split,
                adapts=spec.name,
                partial=spec.split != "none" and split == "none",
            )


def rows_of(spec: ParamSpec) -> Sequence[int]:
    """Rows (of one expert) of each projection that a matrix is made of."""
    return [part or spec.shape[-2] for part in (each.rows for each in spec.hf[: len(spec.hf) // (spec.experts or 1)])]


def interleaved(specs: Sequence[ParamSpec], lora: LoraConfig | None) -> list[ParamSpec]:
    """The table with each module's adapters after the module's own parameters, as named_parameters() has them."""
    if lora is None:
        return list(specs)
    found: list[ParamSpec] = []
    waiting: list[ParamSpec] = []
    for spec, following in zip(specs, [*specs[1:], None]):
        found.append(spec)
        waiting += adapter_specs(spec, lora)
        if following is None or following.name.rpartition(".")[0] != spec.name.rpartition(".")[0]:
            found += waiting
            waiting = []
    return found
