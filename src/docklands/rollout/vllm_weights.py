"""New weights into a running vLLM model, in place: our fused parameters are copied to where vLLM keeps the same ones.

Both sides stack q, k, v and gate, up by rows in the same order, so a parameter of ours is one tensor of vLLM's, and its
name follows from the Hugging Face names of our parameter table and from the fusions that the vLLM model declares
(`packed_modules_mapping`).

On a CPU vLLM packs each matrix for its kernels and forgets the plain one. There the plain matrix is given back to the
layer and packed again by the layer's own method. The output head has a packed copy of its own, also where it is tied to
the embedding: it is packed again too, or it would go on multiplying with the old embedding. Experts are packed by their
kernel once both of a layer's matrices have come.

Packing a matrix is a fifth of a millisecond of set-up and a reorder that two threads hardly make faster together. So
there each thread packs matrices of its own, alone.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from docklands.errors import MissingWeight, ShapeMismatch
from docklands.models.params import ParamSpec, ParamTable

EXPERTS = {("gate_proj", "up_proj"): "w13_weight", ("down_proj",): "w2_weight"}
"""What vLLM calls the stacked matrices of all experts, by the projections of one."""
WAIT_S = 600.0
"""For one matrix to be packed."""


def vllm_name(spec: ParamSpec, fused: Mapping[str, list[str]]) -> str:
    """vLLM's name of a parameter. MissingWeight when its parts are not one of the model's fusions.

    fused  vLLM's module -> the Hugging Face modules that it stacks, as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    """
    if spec.experts:
        parents, modules, _ = zip(*(part.name.rsplit(".", 2) for part in spec.hf[: len(spec.parts)]))
        return f"{parents[0].rpartition('.')[0]}.routed_experts.{EXPERTS[modules]}"
    if len(spec.hf) == 1:
        return spec.hf[0].name
    parents, modules, kinds = zip(*(part.name.rsplit(".", 2) for part in spec.hf))
    for name, parts in fused.items():
        if list(modules) == list(parts) and len(set(parents)) == len(set(kinds)) == 1:
            return f"{parents[0]}.{name}.{kinds[0]}"
    raise MissingWeight(f"weight {spec.name!r} is {', '.join(modules)} in one, which this vLLM model does not fuse")


class InPlace:
    """Copies weights into one vLLM model; made once, used at every update.

    shapes  of our parameters as they come, by stored name: whole, or this rank's shards
    repack  the layers keep their matrices packed (CPU)
    """

    def __init__(self, model: Any, table: ParamTable, shapes: Mapping[str, tuple[int, ...]], repack: bool) -> None:
        self._table, self._shapes, self._repack = table, shapes, repack
        named = model.named_modules(remove_duplicate=False)
        modules = {name: getattr(module, "base_layer", module) for name, module in named}  # what is under an adapter
        fused = getattr(model, "packed_modules_mapping", {})
        self._places: dict[str, tuple[Any, str]] = {}
        for spec in table.stored():
            module, _, kind = vllm_name(spec, fused).rpartition(".")
            if not isinstance(getattr(modules.get(module), kind, None), Tensor):
                raise MissingWeight(f"weight {spec.name!r}: this vLLM model has no {module}.{kind}")
            self._places[spec.name] = modules[module], kind
        self._head = modules.get("lm_head")
        self._looked_up = {spec.name for spec in table.stored() if spec.split == "vocab"} - {"head.weight"}
        self._tied = {spec.name: spec.tied_to for spec in table if spec.tied_to is not None}
        self._scratch = threading.local()
        self._came: dict[int, dict[str, Tensor]] = {}
        self._lock = threading.Lock()

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a complete set. MissingWeight names a parameter that did not come, or that the model does not have;
        ShapeMismatch both shapes. After an error the model holds a mixture.
        """
        wanted, late = dict(self._places), []
        self._came = {}
        with _Apart(torch.get_num_threads() if self._repack else 1) as apart:
            for name, tensor in weights:
                if name in self._tied:
                    continue
                place = wanted.pop(name, None)
                if place is None:
                    raise MissingWeight(f"weight {name!r} came twice, or the generator does not have it")
                shape = self._shapes[name]
                if tuple(tensor.shape) != shape:
                    raise ShapeMismatch(f"weight {name!r} came as {tuple(tensor.shape)}, the generator holds {shape}")
                if tensor.ndim < 2 or place[0] is self._head:
                    late.append((name, *place, tensor))
                else:
                    apart.run(self._put, name, *place, tensor)
        if wanted:
            raise MissingWeight(f"{len(wanted)} weights did not come, first {next(iter(wanted))!r}")
        for each in late:  # a bias after its matrix, whose packing may replace it; the head by all threads together
            self._put(*each)

    @torch.no_grad()
    def _put(self, name: str, module: Any, kind: str, tensor: Tensor) -> None:
        held: Tensor = getattr(module, kind)
        if self._table.by_name(name).experts and self._repack:
            self._put_experts(module, kind, tensor)
        elif held.numel():  # rows beyond ours are vLLM's padding of the vocabulary
            held.data[: len(tensor)].copy_(tensor)
        else:
            plain = tensor if self._as_is(held, tensor) else self._room(held, tensor).copy_(tensor)
            setattr(module, kind, nn.Parameter(plain, requires_grad=False))
        if self._repack and kind == "weight" and tensor.ndim == 2 and name not in self._looked_up:
            _pack(module)
        elif self._repack and self._head is not None and name in self._tied.values():
            _pack(self._head)  # the largest matrix, and the first to come: it is packed beside all others

    def _put_experts(self, module: Any, kind: str, tensor: Tensor) -> None:
        """One of the two stacked matrices of a layer; with the second the kernel packs both (and pads them first)."""
        plain = torch.empty(tensor.shape, dtype=getattr(module, kind).dtype).copy_(tensor)
        with self._lock:
            came = self._came.setdefault(id(module), {})
            came[kind] = plain
            if len(came) < len(EXPERTS):
                return
            del self._came[id(module)]
        for each, matrix in came.items():
            setattr(module, each, nn.Parameter(matrix, requires_grad=False))
        module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    def _as_is(self, held: Tensor, tensor: Tensor) -> bool:
        """Whether a matrix can be packed from where it lies, as one in a planned buffer of the dtype can."""
        return self._repack and tensor.dtype == held.dtype and tensor.is_contiguous() and not tensor.requires_grad

    def _room(self, held: Tensor, tensor: Tensor) -> Tensor:
        """This thread's memory for a plain matrix until it is packed: fresh memory costs more than the copy."""
        plain: Tensor | None = getattr(self._scratch, "plain", None)
        if plain is None or plain.numel() < tensor.numel() or plain.dtype != held.dtype:
            plain = self._scratch.plain = torch.empty(tensor.numel(), dtype=held.dtype, device=held.device)
        return plain[: tensor.numel()].view(tensor.shape)


class _Apart:
    """Calls on as many threads as this one computes with, each computing alone; all have ended at the end of `with`.

    At most two for each thread are waited for at once, so that a stream of tensors need not be in memory together. The
    first error is raised.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._begun = threads, deque[Future[None]]()

    def __enter__(self) -> _Apart:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        wait(self._begun, WAIT_S)
        while kind is None and self._begun:
            self._begun.popleft().result(0)

    def run(self, call: Any, *args: Any) -> None:
        if self._threads == 1:
            call(*args)
            return
        if len(self._begun) >= 2 * self._threads:
            self._begun.popleft().result(WAIT_S)
        self._begun.append(_workers(self._threads).submit(call, *args))


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    """Threads with one thread of OpenMP's each."""

    def alone() -> None:
        torch.get_num_threads()  # torch gives a thread its number when it first asks
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(threads, "vllm-pack", initializer=alone)
    here = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(here.wait, WAIT_S)
    here.wait(WAIT_S)
    torch.set_num_threads(threads)  # other threads that begin later take the number that was set last
    return pool


os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has the pool, but not its threads


def _pack(module: Any) -> None:
    module.quant_method.process_weights_after_loading(module)
